"""A sweep with its answer and its main chart, for the Python API."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

from fsdp_lab.report.answer import Answer, answer
from fsdp_lab.report.data import SweepData
from fsdp_lab.report.plots import main_chart


@dataclass(frozen=True)
class SweepResult(SweepData):
    """The record of a sweep, with what its report makes of it."""

    @classmethod
    def of(cls, sweep: SweepData) -> SweepResult:
        """Return the same sweep with its answer."""
        return cls(**{field.name: getattr(sweep, field.name) for field in fields(sweep)})

    @cached_property
    def recommendation(self) -> Answer:
        """The answer of the report."""
        return answer(self)

    def plot(self) -> Any:
        """Return the report's main chart, speed against peak memory, as a Plotly figure; None without such figures."""
        main = main_chart(self, self.recommendation)
        return main.figure if main else None
