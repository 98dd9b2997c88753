"""The state of a sweep: each trial, its status and its figures. Pure: reads no file, publishes nothing."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from fsdp_lab.compose import Trial
from fsdp_lab.forecast.capacity import Forecast
from fsdp_lab.metrics import FORECAST_ERROR, MEMORY, PREDICTED_BY, PREDICTED_SPEED, RATIO_ERROR, RATIO_GROUP, SPEED
from fsdp_lab.report.choice import pareto_front
from fsdp_lab.status import ExitCode, TrialStatus

S = TrialStatus
# A trial whose own process was killed runs again without an end in between.
TRANSITIONS: dict[TrialStatus, frozenset[TrialStatus]] = {
    S.waiting: frozenset({S.starting, S.skipped}),
    S.starting: frozenset({S.running, S.failed, S.skipped}),
    S.running: frozenset({S.running, S.finished, S.failed, S.oom, S.diverged, S.stopped, S.interrupted}),
}


class IllegalTransition(RuntimeError):
    """A trial was moved to a status that does not follow its own: a bug, not a mistake of the user."""


@dataclass
class TrialState:
    """A trial and its status.

    Attributes:
        trial: as composed.
        status: of the trial.
        metrics: the latest value of each metric that it reported.
        error: why it failed; None: it did not.
        begun: when it began to run, in seconds since 1970.
        seconds: from its begin to its end.
        resuming: an earlier start has left files of it.
        again: it has a result, and is measured again because its speed does not count (`resume_disturbed`).
        epochs_before: the epochs that an earlier start has trained.
        forecast: of this start; None: none yet.
        forecast_before: the figures of a forecast that an earlier start has made.
        words_before: its `FORECAST_WORDS`.
        slot_freed_at: when the trial before it in its slot reported for the last time, in seconds since 1970.
        turnaround_s: from then to its first step.
    """

    trial: Trial
    status: TrialStatus = TrialStatus.waiting
    metrics: dict[str, float] = field(default_factory=dict)
    error: str | None = None
    begun: float | None = None
    seconds: float | None = None
    resuming: bool = False
    again: bool = False
    epochs_before: int = 0
    forecast: Forecast | None = None
    forecast_before: dict[str, float] = field(default_factory=dict)
    words_before: dict[str, str] = field(default_factory=dict)
    slot_freed_at: float | None = None
    turnaround_s: float | None = None
    _known: tuple[Any, Any, Any, dict[str, float]] | None = field(default=None, repr=False, compare=False)

    @property
    def ended(self) -> bool:
        """Whether it has a result."""
        return self.status.ended

    @property
    def predicted_by(self) -> str:
        """The basis of the predicted speed (`fsdp_lab.speed.device.Basis`); "" without one."""
        return self.forecast_words.get(PREDICTED_BY, "")

    @property
    def forecast_words(self) -> dict[str, str]:
        """The basis of its predicted speed, and the group in which its ratios are known; empty without a speed."""
        forecast = self.forecast
        if forecast is None or forecast.error:
            return self.words_before
        if forecast.speed is None:
            return {}
        return {PREDICTED_BY: forecast.speed.basis.value, RATIO_GROUP: forecast.speed.group}

    @property
    def forecast_figures(self) -> dict[str, float]:
        """Its forecast in bytes, seconds and samples/s; empty without one."""
        forecast = self.forecast
        if forecast is None or forecast.error:
            return self.forecast_before
        figures: dict[str, float] = {"forecast/peak_bytes": forecast.peak_bytes}
        if not forecast.may_fit:  # else a search would avoid what only an upper bound keeps from fitting
            figures["forecast/needed_bytes"] = forecast.needed_bytes
        figures |= {"forecast/reserved_bytes": forecast.reserved_bytes} if forecast.reserved_bytes is not None else {}
        figures |= {"forecast/host_bytes": forecast.host_bytes} if forecast.host_bytes else {}
        figures |= {"forecast/capacity_bytes": forecast.capacity_bytes} if forecast.capacity_bytes is not None else {}
        if forecast.largest_microbatch is not None:
            figures["forecast/largest_microbatch"] = forecast.largest_microbatch
        if forecast.speed is not None:
            figures["forecast/step_s"] = forecast.speed.step_s
            figures[PREDICTED_SPEED] = forecast.speed.samples_per_s
            figures["forecast/samples_per_s_low"] = forecast.speed.samples / forecast.speed.high_s
            figures["forecast/samples_per_s_high"] = forecast.speed.samples / forecast.speed.low_s
            figures |= {RATIO_ERROR: forecast.speed.relative} if forecast.speed.relative is not None else {}
        return {key: float(value) for key, value in figures.items()}

    def figures(self, metrics: dict[str, float] | None = None) -> dict[str, float]:
        """Return the metrics of an epoch, the last by default, with the forecast beside the measurements.

        For a trial that has ended they are computed once: tables read those of thousands again and again.
        """
        if metrics is not None or not self.ended:
            return self._figures(self.metrics if metrics is None else metrics)
        of = (self.metrics, self.forecast, self.forecast_before)
        if self._known is None or any(now is not before for now, before in zip(of, self._known, strict=False)):
            self._known = (*of, self._figures(self.metrics))
        return dict(self._known[3])

    def _figures(self, metrics: dict[str, float]) -> dict[str, float]:
        figures = {**metrics, **self.forecast_figures}
        measured = metrics.get(MEMORY)
        if measured and "forecast/peak_bytes" in figures:
            figures[FORECAST_ERROR] = (figures["forecast/peak_bytes"] + self._workspaces(metrics)) / measured - 1
        if (speed := metrics.get(SPEED)) and PREDICTED_SPEED in figures:
            figures["perf/forecast_error"] = speed / figures[PREDICTED_SPEED] - 1  # of the seconds of a step
        return figures

    def _workspaces(self, metrics: dict[str, float]) -> int:
        """Return the bytes of cuBLAS's workspaces in the measured peak, if they could not be separated from tensors."""
        on_gpu = "memory/reserved_bytes" in metrics
        if not on_gpu or "memory/workspace_bytes" in metrics or self.forecast is None:
            return 0
        return self.forecast.allowances.get("kernel workspaces", 0)

    def move(self, status: TrialStatus) -> None:
        """Change the status.

        Raises:
            IllegalTransition: the status does not follow the trial's own.
        """
        if status not in TRANSITIONS.get(self.status, ()):
            raise IllegalTransition(f"a trial that is {self.status} cannot become {status}")
        self.status = status

    def begin(self, now: float) -> None:
        """Record that the trial runs; again after its process was killed."""
        self.move(TrialStatus.running)
        self.begun = self.begun or now

    def record_epoch(self, metrics: dict[str, float]) -> bool:
        """Take the metrics of an epoch; return False for a known one. Metrics that the epoch lacks keep their value."""
        if metrics["epoch"] <= self.metrics.get("epoch", 0):
            return False
        self.metrics = {**self.metrics, **metrics}
        return True

    def end(self, status: TrialStatus, error: str | None, now: float) -> None:
        """Record the end of the trial.

        Args:
            status: its last one.
            error: why it failed; None: it did not.
            now: in seconds since 1970.
        """
        self.move(status)
        self.error = error
        self.seconds = now - self.begun if self.begun else self.seconds


def _in_rounds(trials: Sequence[TrialState]) -> list[int]:
    """Return the trials in the order in which they begin.

    Repeats run round by round, every second one backwards, whatever the order of the axes. A drift, as of a machine
    that gets warm, then affects all settings alike.
    """
    rounds: dict[tuple[int, int], list[int]] = {}
    for number, state in enumerate(trials):
        config = state.trial.config
        rounds.setdefault((config.repeat, config.training.seed), []).append(number)
    return [number for i, mine in enumerate(rounds.values()) for number in (mine[::-1] if i % 2 else mine)]


class SweepState:
    """The trials of a sweep in their order.

    Args:
        trials: the known ones.
        objectives: `(metric, "min" or "max")` of each.
    """

    def __init__(self, trials: Sequence[TrialState], objectives: Sequence[tuple[str, str]]) -> None:
        self.trials = list(trials)
        self.objectives = list(objectives)
        self._queue = deque(_in_rounds(self.trials))

    def add(self, trial: Trial) -> int:
        """Append a trial and return its number."""
        self.trials.append(TrialState(trial))
        self._queue.append(len(self.trials) - 1)
        return len(self.trials) - 1

    def next_waiting(self) -> int | None:
        """Return the trial to begin next; None without one."""
        while self._queue and self.trials[self._queue[0]].status is not TrialStatus.waiting:
            self._queue.popleft()
        return self._queue[0] if self._queue else None

    @property
    def open(self) -> bool:
        """Whether a trial is still to get its result."""
        return any(not state.ended for state in self.trials)

    def front(self) -> set[int]:
        """Return the trials that no other beats in every objective; empty with a single objective."""
        if len(self.objectives) < 2:
            return set()
        finished = [i for i, state in enumerate(self.trials) if state.status is TrialStatus.finished]
        return {finished[i] for i in pareto_front([self.trials[i].metrics for i in finished], self.objectives)}

    def exit_code(self, interrupted: bool, error: BaseException | None) -> ExitCode:
        """Return how the sweep ends: finished if every trial has a result, failed if one failed.

        Args:
            interrupted: whether the user ended it.
            error: that ended the sweep early, other than an interrupt; None: none did.
        """
        if interrupted or (self.open and error is None):
            return ExitCode.interrupted
        failed = error is not None or any(state.status is TrialStatus.failed for state in self.trials)
        return ExitCode.failed if failed else ExitCode.finished
