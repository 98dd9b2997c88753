"""A sweep with what its report makes of it: its answer, and its main chart."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from fsdp_lab.record.sweep import SweepRecord
from fsdp_lab.report.answer import Answer, answer, plain_text
from fsdp_lab.report.plots import main_chart

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True, repr=False)
class SweepData(SweepRecord):
    """A sweep, also for the Python API. It is shown as the lines that its command ends with."""

    @cached_property
    def recommendation(self) -> Answer:
        return answer(self)

    def frame(self) -> pd.DataFrame:
        """Return the frame of the record, with axes of numbers as numbers."""
        import pandas as pd

        frame = super().frame()
        for axis in self.axes:
            with suppress(ValueError):
                frame[axis] = pd.to_numeric(frame[axis])
        return frame

    def plot(self) -> Any:
        """Return the report's main chart, speed against peak memory, as a Plotly figure; None without such figures."""
        main = main_chart(self, self.recommendation)
        return main.figure if main else None

    def __repr__(self) -> str:
        return "\n".join(plain_text(self.recommendation))
