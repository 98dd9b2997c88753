"""Why something is so, as codes. Their text is made where they are shown."""

from __future__ import annotations

from enum import StrEnum


class TimingExcluded(StrEnum):
    """Why the speed of a trial may not be used. Files and MLflow have its name."""

    others_cpu = "others_cpu"
    """On a CPU, other processes used more of the cores than `report.others_cpu` allows."""
