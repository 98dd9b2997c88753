"""A sweep as it was recorded: its settings, and its trials."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fsdp_lab.config.status import TrialStatus
from fsdp_lab.record.plain_loops import PlainLoop
from fsdp_lab.record.trial import TrialRecord

if TYPE_CHECKING:
    import pandas as pd

_CLOCKS_S = 1.0  # seconds by which the clocks of nodes may differ


@dataclass(frozen=True)
class SweepRecord:
    """A sweep and its trials. Everything that shows or judges results reads this.

    Attributes:
        axes: the keys that differ between its trials, in the order of the command line.
        trials: in the order of their numbers.
        loss_tolerance: a setting qualifies if its loss is within this ratio of the best.
        speed_tolerance: settings within this ratio of the fastest tie.
        runs_url: address of an MLflow UI's runs, without `/<run id>`; None: no server is known.
        about: more lines for the head of the report, as (name, text).
        objectives: `(metric, "min" or "max")` of each objective, the most important first; empty: the fastest setting
            that qualifies is recommended.
        study: the name of the study, such as the preset's; "" for a sweep without one.
        plain_loops: its trials are compared with these.
    """

    name: str
    command: str
    axes: list[str]
    trials: list[TrialRecord]
    loss_tolerance: float
    speed_tolerance: float
    runs_url: str | None = None
    about: Sequence[tuple[str, str]] = ()
    objectives: Sequence[tuple[str, str]] = ()
    study: str = ""
    plain_loops: Sequence[PlainLoop] = ()

    @property
    def statuses(self) -> list[TrialStatus]:
        return [trial.status for trial in self.trials]

    def frame(self, as_typed: bool = False) -> pd.DataFrame:
        """Return one row per trial, indexed by its number: its setting, its end, its latest metrics.

        The columns are `status`, `reason` (its code), `run_id`, `seconds`, `device`, `predicted_by` and `beside` (how
        many other trials ran at the same time), then the axes, then the metrics under their keys, as float64; NaN where
        a trial has none.

        Args:
            as_typed: axes of numbers are text, too.
        """
        import pandas as pd

        head = ("status", "reason", "run_id", "seconds", "device", "predicted_by")
        rows = [
            {
                "trial": trial.number,
                **{name: getattr(trial, name) for name in head},
                "reason": trial.reason.code if trial.reason else None,
                "beside": others,
                **{axis: trial.setting.get(axis, "") for axis in self.axes},
                **trial.figures,
            }
            for trial, others in zip(self.trials, _beside([trial.span for trial in self.trials]), strict=True)
        ]
        metrics = sorted({key for trial in self.trials for key in trial.figures})
        frame = pd.DataFrame(rows, columns=["trial", *head, "beside", *self.axes, *metrics])
        for axis in self.axes if not as_typed else ():
            with suppress(ValueError):
                frame[axis] = pd.to_numeric(frame[axis])
        return frame.astype(dict.fromkeys(["seconds", *metrics], "float64")).set_index("trial")

    def slow_ranks(self) -> dict[int, str]:
        """Return trial number -> sentence, one per slow rank or node and part of a step; the first trial reports it."""
        found: dict[tuple[str, str], tuple[int, str]] = {}
        for trial in self.trials:
            if slow := trial.facts.get("slow_rank"):
                found.setdefault((slow["who"], slow["part"]), (trial.number, f"Trial {trial.number}: {slow['text']}"))
        return dict(found.values())


def _beside(spans: Sequence[tuple[float, float] | None]) -> list[int]:
    """Return how many other spans overlap with each one. Each is shortened first, because nodes' clocks differ."""
    inner = [(span[0] + _CLOCKS_S, span[1] - _CLOCKS_S) if span else (0.0, 0.0) for span in spans]
    known = [(begin, end) for begin, end in inner if begin < end]
    begins, ends = sorted(begin for begin, _ in known), sorted(end for _, end in known)
    return [bisect_left(begins, end) - bisect_right(ends, begin) - 1 if begin < end else 0 for begin, end in inner]
