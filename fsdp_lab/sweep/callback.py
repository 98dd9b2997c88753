"""Ray Tune's events, passed on to the driver's view of the sweep."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from ray.tune import Callback
from ray.tune.progress_reporter import TrialProgressCallback

from fsdp_lab.engine.cluster import Resources, free_resources, unmet_request
from fsdp_lab.engine.files import read_outcome, why_unwritten

if TYPE_CHECKING:
    from fsdp_lab.sweep.run import Sweep

_QUIET_S = 20.0  # a start takes about ten seconds; who waits longer is told what for
_REPEAT_S = 60.0


class NoTuneLines(TrialProgressCallback):
    """In the place of Tune's own, which prints a line for a trial that ended without a report."""

    def _print(self, msg: str) -> None:
        pass


class DriverCallback(Callback):
    """Runs in the driver, between Tune's own steps."""

    def __init__(self, sweep: Sweep, places: dict[int, Resources]) -> None:
        self.sweep, self.places = sweep, places
        self._speak_at: dict[int, float] = {}

    def __getstate__(self) -> dict[str, Any]:
        """Tune keeps a copy of its callbacks on disk; this one's state is the driver's, and files."""
        return {}

    def on_trial_start(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        number = trial.config["number"]
        self.sweep.begin(number)
        self._speak_at[number] = time.monotonic() + _QUIET_S

    def on_trial_result(
        self, iteration: int, trials: list[Any], trial: Any, result: dict[str, Any], **info: Any
    ) -> None:
        self.sweep.take_reports(trial.config["number"])

    def on_trial_complete(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        self._end(trial)

    def on_trial_error(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        self._end(trial)

    def on_step_end(self, iteration: int, trials: list[Any], **info: Any) -> None:
        """Tell what a trial that has not begun to train is waiting for."""
        for number, speak_at in list(self._speak_at.items()):
            if self.sweep.is_training(number):
                del self._speak_at[number]
                self.sweep.take_reports(number)
            elif time.monotonic() > speak_at:
                self._speak_at[number] = time.monotonic() + _REPEAT_S
                if unmet_request():
                    needed, total = self.places[number].needed, self.places[number].total
                    self.sweep.waits(number, needed, free_resources(), total)
                else:
                    self.sweep.starts(number)

    def _end(self, trial: Any) -> None:
        number = trial.config["number"]
        self._speak_at.pop(number, None)
        folder = self.sweep.folder_of(number)
        outcome = read_outcome(folder)
        if outcome is None:
            self.sweep.end(number, "failed", why_unwritten(folder))
        else:
            self.sweep.end(number, outcome.status, outcome.error)
