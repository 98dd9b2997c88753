"""The state of a sweep: each trial, its status and its figures. Pure: reads no file, publishes nothing."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

from fsdp_lab.config.compose import Trial, variables_in
from fsdp_lab.config.metrics import PREDICTED_BY, PREDICTED_SPEED, RATIO_ERROR, RATIO_GROUP
from fsdp_lab.config.status import ExitCode, TrialStatus
from fsdp_lab.forecast.capacity import Forecast
from fsdp_lab.record.trial import TrialRecord, with_forecast
from fsdp_lab.record.trial_json import Outcome
from fsdp_lab.report.choice import pareto_front


class TrialState(TrialRecord):
    """A trial of this driver: its record while it grows.

    Attributes:
        variables: dotted key -> its value as typed, if that names a variable of the environment.
        begun: when it began to run, in seconds since 1970.
        resuming: an earlier start has left files of it.
        epochs_before: the epochs that an earlier start has trained.
        forecast: of this start; None: none yet.
    """

    def __init__(
        self,
        trial: Trial,
        status: TrialStatus = TrialStatus.waiting,
        metrics: Mapping[str, float] | None = None,
        forecast: Forecast | None = None,
    ) -> None:
        super().__init__(trial.index or 0, {}, status, config=trial.config)
        self.variables = variables_in(trial.composed)
        self.trial = trial
        self.forecast: Forecast | None = None
        self._metrics, self._forecast_figures = dict(metrics or {}), dict[str, float]()
        self._update()
        self.begun: float | None = None
        self.resuming = False
        self.epochs_before = 0
        if forecast is not None:
            self.take_forecast(forecast)

    @property
    def metrics(self) -> dict[str, float]:
        """The latest value of each metric that it reported."""
        return self._metrics

    @metrics.setter
    def metrics(self, metrics: dict[str, float]) -> None:
        self._metrics = metrics
        self._update()

    @property
    def forecast_figures(self) -> dict[str, float]:
        """Its forecast, of this start or an earlier one, in bytes, seconds and samples/s; empty without one."""
        return self._forecast_figures

    @forecast_figures.setter
    def forecast_figures(self, figures: dict[str, float]) -> None:
        self._forecast_figures = figures
        self._update()

    def _update(self) -> None:
        self.figures = self.figures_at(self._metrics)

    def take_forecast(self, forecast: Forecast) -> None:
        """Take a forecast of this start; one that failed leaves that of an earlier start."""
        self.forecast = forecast
        if not forecast.error:
            speed = forecast.speed
            self.forecast_words = {PREDICTED_BY: speed.basis.value, RATIO_GROUP: speed.group} if speed else {}
            self.forecast_figures = figures_of(forecast)

    def figures_at(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Return the metrics of an epoch, with the forecast beside them."""
        workspaces = self.forecast.allowances.get("kernel workspaces", 0) if self.forecast else 0
        return with_forecast(metrics, self.forecast_figures, workspaces)

    def begin(self, now: float) -> None:
        """Record that the trial runs; again after its process was killed."""
        self.status = TrialStatus.running
        self.begun = self.begun or now

    def record_epoch(self, metrics: dict[str, float]) -> bool:
        """Take the metrics of an epoch; return False for a known one. Metrics that the epoch lacks keep their value."""
        if metrics["epoch"] <= self.metrics.get("epoch", 0):
            return False
        self.metrics = {**self.metrics, **metrics}
        self.epochs.append(dict(metrics))
        return True

    def end(self, outcome: Outcome, now: float) -> None:
        """Record the end of the trial, by its status and its reason. `now`: in seconds since 1970."""
        self.status, self.reason = outcome.status, outcome.reason
        if self.begun:
            self.seconds, self.span = now - self.begun, (self.begun, now)


def figures_of(forecast: Forecast) -> dict[str, float]:
    """Return a forecast in bytes, seconds and samples/s, by the keys of metrics."""
    figures: dict[str, float | None] = {
        "forecast/peak_bytes": forecast.peak_bytes,
        "forecast/needed_bytes": forecast.needed_bytes,
        "forecast/reserved_bytes": forecast.reserved_bytes,
        "forecast/host_bytes": forecast.host_bytes or None,
        "forecast/capacity_bytes": forecast.capacity_bytes,
        "forecast/largest_microbatch": forecast.largest_microbatch,
    }
    if (speed := forecast.speed) is not None:
        figures |= {
            "forecast/step_s": speed.step_s,
            PREDICTED_SPEED: speed.samples_per_s,
            "forecast/samples_per_s_low": speed.samples / speed.high_s,
            "forecast/samples_per_s_high": speed.samples / speed.low_s,
            RATIO_ERROR: speed.relative,
        }
    return {key: float(value) for key, value in figures.items() if value is not None}


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
        objectives: `(metric, "min" or "max")` of each.
    """

    def __init__(self, trials: Sequence[TrialState], objectives: Sequence[tuple[str, str]]) -> None:
        self.trials = list(trials)
        self.objectives = list(objectives)
        self._queue = deque(_in_rounds(self.trials))

    def add(self, trial: Trial) -> int:
        self.trials.append(TrialState(trial))
        self._queue.append(len(self.trials) - 1)
        return len(self.trials) - 1

    def next_waiting(self) -> int | None:
        """Return the trial to begin next; None without one."""
        while self._queue and self.trials[self._queue[0]].status is not TrialStatus.waiting:
            self._queue.popleft()
        return self._queue[0] if self._queue else None

    def put_back(self, number: int) -> None:
        """Let a trial begin next that was given to the executor, and has not ended."""
        self.trials[number].status = TrialStatus.waiting
        self._queue.appendleft(number)

    def running(self) -> list[int]:
        """Return the trials that were given to the executor and have not ended; the last one first."""
        begun = (TrialStatus.starting, TrialStatus.running)
        return [number for number, state in enumerate(self.trials) if state.status in begun][::-1]

    @property
    def open(self) -> bool:
        return any(not state.ended for state in self.trials)

    def front(self) -> set[int]:
        """Return the trials that no other beats in every objective; empty with a single objective."""
        if len(self.objectives) < 2:
            return set()
        finished = [i for i, state in enumerate(self.trials) if state.status is TrialStatus.finished]
        return {finished[i] for i in pareto_front([self.trials[i].figures for i in finished], self.objectives)}

    def exit_code(self, interrupted: bool, error: BaseException | None) -> ExitCode:
        """Return how the sweep ends: finished if every trial has a result, failed if one failed.

        Args:
            error: that ended the sweep early, other than an interrupt; None: none did.
        """
        if interrupted or (self.open and error is None):
            return ExitCode.interrupted
        failed = error is not None or any(state.status is TrialStatus.failed for state in self.trials)
        return ExitCode.failed if failed else ExitCode.finished
