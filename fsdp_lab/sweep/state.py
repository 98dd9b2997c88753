"""The state of a sweep: each trial, its status and its figures. Pure: reads no file, publishes nothing."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from fsdp_lab.compose import Trial
from fsdp_lab.forecast.fits import Forecast
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
    """A trial and how it stands.

    Attributes:
        metrics: the latest value of each metric that it reported.
        begun: when it began to run, in seconds since 1970.
        seconds: from its begin to its end.
        goes_on: an earlier start has left something of it.
        epochs_before: the epochs that an earlier start has trained.
        forecast_before: the figures of a forecast that an earlier start has made.
        words_before: its `FORECAST_WORDS`.
        place_free_since: when the trial before it on its place reported for the last time, in seconds since 1970.
        turnaround_s: from then to its first step.
    """

    trial: Trial
    status: TrialStatus = TrialStatus.waiting
    metrics: dict[str, float] = field(default_factory=dict)
    error: str | None = None
    begun: float | None = None
    seconds: float | None = None
    goes_on: bool = False
    epochs_before: int = 0
    forecast: Forecast | None = None
    forecast_before: dict[str, float] = field(default_factory=dict)
    words_before: dict[str, str] = field(default_factory=dict)
    place_free_since: float | None = None
    turnaround_s: float | None = None

    @property
    def ended(self) -> bool:
        return self.status.ended

    @property
    def predicted_by(self) -> str:
        """The basis of the predicted speed (`fsdp_lab.speed.device.Basis`); "" without one."""
        return self.forecast_words.get(PREDICTED_BY, "")

    @property
    def forecast_words(self) -> dict[str, str]:
        """By what its speed was predicted, and in which group its ratios are known; empty without a speed."""
        found = self.forecast
        if found is None or found.error:
            return self.words_before
        if found.speed is None:
            return {}
        return {PREDICTED_BY: found.speed.basis.value, RATIO_GROUP: found.speed.group}

    @property
    def forecast_figures(self) -> dict[str, float]:
        """What was forecast, in bytes, seconds and samples/s; empty without a forecast."""
        found = self.forecast
        if found is None or found.error:
            return self.forecast_before
        figures: dict[str, float] = {
            "forecast/peak_bytes": found.peak_bytes,
            "forecast/needed_bytes": found.needed_bytes,
        }
        figures |= {"forecast/reserved_bytes": found.reserved_bytes} if found.reserved_bytes is not None else {}
        figures |= {"forecast/host_bytes": found.host_bytes} if found.host_bytes else {}
        figures |= {"forecast/capacity_bytes": found.capacity_bytes} if found.capacity_bytes is not None else {}
        if found.largest_microbatch is not None:
            figures["forecast/largest_microbatch"] = found.largest_microbatch
        if found.speed is not None:
            figures["forecast/step_s"] = found.speed.step_s
            figures[PREDICTED_SPEED] = found.speed.samples_per_s
            figures["forecast/samples_per_s_low"] = found.speed.samples / found.speed.high_s
            figures["forecast/samples_per_s_high"] = found.speed.samples / found.speed.low_s
            figures |= {RATIO_ERROR: found.speed.relative} if found.speed.relative is not None else {}
        return {key: float(value) for key, value in figures.items()}

    def figures(self, metrics: dict[str, float] | None = None) -> dict[str, float]:
        """The metrics of an epoch, the last by default, with what was forecast beside what was measured."""
        metrics = self.metrics if metrics is None else metrics
        figures = {**metrics, **self.forecast_figures}
        measured = metrics.get(MEMORY)
        if measured and "forecast/peak_bytes" in figures:
            figures[FORECAST_ERROR] = (figures["forecast/peak_bytes"] + self._workspaces(metrics)) / measured - 1
        if (speed := metrics.get(SPEED)) and PREDICTED_SPEED in figures:
            figures["perf/forecast_error"] = speed / figures[PREDICTED_SPEED] - 1  # of the seconds of a step
        return figures

    def _workspaces(self, metrics: dict[str, float]) -> int:
        """The bytes of cuBLAS's workspaces in the measured peak, where they could not be told from tensors."""
        on_gpu = "memory/reserved_bytes" in metrics
        if not on_gpu or "memory/workspace_bytes" in metrics or self.forecast is None:
            return 0
        return self.forecast.allowances.get("kernel workspaces", 0)

    def move(self, status: TrialStatus) -> None:
        """
        Raises:
            IllegalTransition: the status does not follow the trial's own.
        """
        if status not in TRANSITIONS.get(self.status, ()):
            raise IllegalTransition(f"a trial that is {self.status} cannot become {status}")
        self.status = status

    def begin(self, now: float) -> None:
        """The trial runs; again, where its process was killed."""
        self.move(TrialStatus.running)
        self.begun = self.begun or now

    def report(self, metrics: dict[str, float]) -> bool:
        """Take the metrics of an epoch; False for one that is known. What the epoch lacks keeps its latest value."""
        if metrics["epoch"] <= self.metrics.get("epoch", 0):
            return False
        self.metrics = {**self.metrics, **metrics}
        return True

    def end(self, status: TrialStatus, error: str | None, now: float) -> None:
        self.move(status)
        self.error = error
        self.seconds = now - self.begun if self.begun else self.seconds


def _in_rounds(trials: Sequence[TrialState]) -> list[int]:
    """The trials in the order in which they begin: repeats go round by round, every second one backwards, whatever the
    order of the axes. What drifts, as a machine does that gets warm, then meets all settings alike."""
    rounds: dict[tuple[int, int], list[int]] = {}
    for number, state in enumerate(trials):
        config = state.trial.config
        rounds.setdefault((config.repeat, config.training.seed), []).append(number)
    return [number for i, mine in enumerate(rounds.values()) for number in (mine[::-1] if i % 2 else mine)]


class SweepState:
    """The trials of a sweep in their order.

    Args:
        objectives: `(metric, "min" or "max")` of each.
    """

    def __init__(self, trials: Sequence[TrialState], objectives: Sequence[tuple[str, str]]) -> None:
        self.trials = list(trials)
        self.objectives = list(objectives)
        self._queue = deque(_in_rounds(self.trials))

    def add(self, trial: Trial) -> int:
        """Append a trial; returns its number."""
        self.trials.append(TrialState(trial))
        self._queue.append(len(self.trials) - 1)
        return len(self.trials) - 1

    def next_waiting(self) -> int | None:
        """The trial to begin next."""
        while self._queue and self.trials[self._queue[0]].status is not TrialStatus.waiting:
            self._queue.popleft()
        return self._queue[0] if self._queue else None

    @property
    def open(self) -> bool:
        """Whether a trial is still to get its result."""
        return any(not state.ended for state in self.trials)

    def front(self) -> set[int]:
        """The trials that no other beats in every objective; empty with a single objective."""
        if len(self.objectives) < 2:
            return set()
        finished = [i for i, state in enumerate(self.trials) if state.status is TrialStatus.finished]
        return {finished[i] for i in pareto_front([self.trials[i].metrics for i in finished], self.objectives)}

    def exit_code(self, interrupted: bool, error: BaseException | None) -> ExitCode:
        """How the sweep ends: finished when every trial has a result, failed when one failed.

        Args:
            error: what ended the sweep before its time, other than an interrupt.
        """
        if interrupted or (self.open and error is None):
            return ExitCode.interrupted
        failed = error is not None or any(state.status is TrialStatus.failed for state in self.trials)
        return ExitCode.failed if failed else ExitCode.finished
