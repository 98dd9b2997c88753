"""A sweep with what its report makes of it: its settings by the rules that judge them, its answer, its main chart."""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from fsdp_lab.config import SweepConfig
from fsdp_lab.record.sweep import SweepRecord
from fsdp_lab.report.answer import Answer, answer, plain_text
from fsdp_lab.report.plots import main_chart
from fsdp_lab.report.self_check import check_itself
from fsdp_lab.report.settings import Rules, Settings

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True, repr=False)
class SweepData(SweepRecord):
    """A sweep, also for the Python API. It is shown as the lines that its command ends with."""

    @property
    def rules(self) -> Rules:
        trivial = {_guessing_loss(trial.config) for trial in self.trials if trial.config is not None}
        return Rules(
            tuple(self.axes),
            self.loss_tolerance,
            self.speed_tolerance,
            tuple(self.objectives),
            trivial.pop() if len(trivial) == 1 else None,
        )

    @cached_property
    def settings(self) -> Settings:
        return Settings(SweepRecord.frame(self), self.rules, check_itself(self.trials, self.axes))

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


def _guessing_loss(config: SweepConfig) -> float | None:
    """Return the cross entropy of guessing, of our image classifiers; read as data: nothing is imported."""
    classes = config.model.arguments.get("num_classes")
    is_known = config.task.name == "classification" and config.model.is_image_classifier
    return math.log(classes) if is_known and isinstance(classes, int) and classes > 1 else None
