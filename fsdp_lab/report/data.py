"""A sweep with what its report makes of it: the rules that it is judged by, its answer, and its main chart."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from fsdp_lab.record.sweep import SweepRecord
from fsdp_lab.report.answer import Answer, answer, plain_text, rules_of
from fsdp_lab.report.plots import main_chart
from fsdp_lab.report.settings import Rules

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class SweepData(SweepRecord):
    @property
    def rules(self) -> Rules:
        return rules_of(self)

    @cached_property
    def recommendation(self) -> Answer:
        return answer(self)


@dataclass(frozen=True, repr=False)
class SweepResult:
    """A sweep with what its report makes of it. It is shown as the lines that the sweep's command ends with.

    Attributes:
        record: of the sweep, with its trials.
    """

    record: SweepData

    def frame(self) -> pd.DataFrame:
        """Return the frame of the record, with axes of numbers as numbers."""
        import pandas as pd

        frame = self.record.frame()
        for axis in self.record.axes:
            with suppress(ValueError):
                frame[axis] = pd.to_numeric(frame[axis])
        return frame

    @property
    def recommendation(self) -> Answer:
        return self.record.recommendation

    def plot(self) -> Any:
        """Return the report's main chart, speed against peak memory, as a Plotly figure; None without such figures."""
        main = main_chart(self.record, self.recommendation)
        return main.figure if main else None

    def __repr__(self) -> str:
        return "\n".join(plain_text(self.recommendation))
