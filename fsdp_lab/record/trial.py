"""A trial as it was recorded: its setting, its end, its metrics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fsdp_lab.config import SweepConfig
from fsdp_lab.config.metrics import FORECAST_ERROR, MEMORY, PREDICTED_BY, PREDICTED_SPEED, SPEED
from fsdp_lab.config.status import TrialStatus
from fsdp_lab.record.reasons import Reason

EXPLAINED = "out_of_memory.txt"  # in a trial's folder


@dataclass
class TrialRecord:
    """A trial as recorded. The driver's `fsdp_lab.sweep.trial.TrialState` changes until the trial has ended.

    Attributes:
        number: of the trial in its sweep, from 0.
        setting: its value for each axis of the sweep, as typed.
        figures: metric key -> its latest value, with the forecast's figures; bytes, samples/s, seconds.
        epochs: the metrics of each epoch, in order; `epoch` is one of the keys.
        overrides: the command line that trains only this trial again.
        reason: why it did not finish; None: it finished, or the scheduler stopped it.
        run_id: of its MLflow run; "": it has none.
        seconds: its duration; None: not known.
        span: when it started and ended, in seconds since 1970; None: not known.
        facts: what rank 0 reported before its first step: its device, data and layout.
        forecast_words: the values of its forecast that are text (`fsdp_lab.config.metrics.FORECAST_WORDS`).
        config: typed; None: it cannot be read, because another version wrote it.
        folder: where the trial's processes wrote.
    """

    number: int
    setting: dict[str, str]
    status: TrialStatus
    figures: dict[str, float] = field(default_factory=dict)
    epochs: list[dict[str, float]] = field(default_factory=list)
    overrides: Sequence[str] = ()
    reason: Reason | None = None
    run_id: str = ""
    seconds: float | None = None
    span: tuple[float, float] | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)
    forecast_words: dict[str, str] = field(default_factory=dict)
    config: SweepConfig | None = None
    folder: Path | None = None

    @property
    def ended(self) -> bool:
        return self.status.ended

    @property
    def name(self) -> str:
        return f"trial {self.number}: {words(self.setting)}"

    @property
    def notes(self) -> list[str]:
        """What its ranks noted, one sentence per note."""
        return list(self.facts.get("notes") or ())

    @property
    def explained(self) -> list[str]:
        """Lines on why a GPU's memory ran out and what would fit; empty without an explanation."""
        with suppress(OSError, TypeError):
            return (self.folder / EXPLAINED).read_text(encoding="utf-8").splitlines()  # type: ignore[operator]
        return []

    @property
    def device(self) -> str:
        """`cpu` or the name of the GPU; "": it ended before that was known."""
        return str(self.facts.get("device", ""))

    @property
    def predicted_by(self) -> str:
        """The basis of the predicted speed (`fsdp_lab.forecast.speed.device.Basis`); "" without one."""
        return self.forecast_words.get(PREDICTED_BY, "")


def with_forecast(
    measured: Mapping[str, float], forecast: Mapping[str, float], workspace_bytes: int = 0
) -> dict[str, float]:
    """Return the metrics of an epoch, with the forecast and its errors added.

    Args:
        forecast: its figures; empty without one.
        workspace_bytes: of cuBLAS; the forecast has them separately from its peak.
    """
    figures = {**measured, **forecast}
    peak, speed = measured.get(MEMORY), measured.get(SPEED)
    if peak and "forecast/peak_bytes" in figures:
        # workspaces that are not measured separately are part of the measured peak
        apart = workspace_bytes if "memory/reserved_bytes" in measured else 0
        apart = 0 if "memory/workspace_bytes" in measured else apart
        figures[FORECAST_ERROR] = (figures["forecast/peak_bytes"] + apart) / peak - 1
    if speed and PREDICTED_SPEED in figures:
        figures["perf/forecast_error"] = speed / figures[PREDICTED_SPEED] - 1  # of the seconds of a step
    return figures


def words(values: Mapping[str, str]) -> str:
    """Return text such as `sharding=per_block precision=fp16`, as it is typed."""
    return " ".join(f"{key}={value}" for key, value in values.items()) or "the only setting"
