"""The state of a trial, its status and its figures; how a sweep ends, and who receives its events. Reads no file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from fsdp_lab.config import workers_of
from fsdp_lab.config.compose import Trial, variables_in
from fsdp_lab.config.metrics import PREDICTED_BY, PREDICTED_SPEED, RATIO_ERROR, RATIO_GROUP, SPEED, USD
from fsdp_lab.config.status import TrialStatus
from fsdp_lab.forecast.capacity import Forecast
from fsdp_lab.forecast.cost import hours_per_million
from fsdp_lab.record.trial import TrialRecord, with_forecast


class TrialState(TrialRecord):
    """A trial of this driver: its record while it grows.

    Attributes:
        variables: dotted key -> its value as typed, if that names a variable of the environment.
        begun: when it began to run, in seconds since 1970.
        resuming: an earlier start has left files of it.
        epochs_before: the epochs that an earlier start has trained.
        forecast: of this start; None: none yet.
        forecast_figures: of this start or an earlier one, in bytes, seconds and samples/s; empty without a forecast.
    """

    def __init__(self, trial: Trial, status: TrialStatus = TrialStatus.waiting) -> None:
        super().__init__(trial.index or 0, {}, status, config=trial.config)
        self.variables = variables_in(trial.composed)
        self.trial = trial
        self.forecast: Forecast | None = None
        self.forecast_figures: dict[str, float] = {}
        self.begun: float | None = None
        self.resuming = False
        self.epochs_before = 0

    def recorded(self, epochs: list[dict[str, float]], forecast: dict[str, float], words: dict[str, str]) -> None:
        """Set what is known of the trial: the metrics of its epochs, and its forecast."""
        self.epochs, self.forecast_figures, self.forecast_words = epochs, forecast, words
        self.figures = self.figures_at({key: value for epoch in epochs for key, value in epoch.items()})

    def take_forecast(self, forecast: Forecast) -> None:
        """Set the forecast of this start; if it failed, that of an earlier start stays."""
        self.forecast = forecast
        if not forecast.error:
            speed = forecast.speed
            words = {PREDICTED_BY: speed.basis.value, RATIO_GROUP: speed.group} if speed else {}
            self.recorded(self.epochs, figures_of(forecast), words)

    def record_epoch(self, metrics: dict[str, float]) -> bool:
        """Add an epoch's metrics; return False for a known one. Metrics that the epoch lacks keep their value."""
        if self.epochs and metrics["epoch"] <= self.epochs[-1]["epoch"]:
            return False
        self.epochs.append(dict(metrics))
        self.figures = self.figures_at({**self.figures, **metrics})
        return True

    def figures_at(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Return the metrics of an epoch and the forecast."""
        workspaces = self.forecast.allowances.get("kernel workspaces", 0) if self.forecast else 0
        figures, asked = with_forecast(metrics, self.forecast_figures, workspaces), self.trial.config
        rate = figures.get("perf/tokens_per_s") or figures.get(SPEED)
        if rate and (hourly := asked.forecast.usd_per_gpu_hour) is not None:
            figures[USD] = hourly * hours_per_million(workers_of(asked), rate)
        return figures

    @property
    def share_done(self) -> float:
        """The share of its epochs that it has trained; 1 once it has ended."""
        trained = self.epochs[-1]["epoch"] if self.epochs else 0
        return 1.0 if self.ended else min(1.0, trained / self.trial.config.training.epochs)


def figures_of(forecast: Forecast) -> dict[str, float]:
    """Return a forecast in bytes, seconds and samples/s, by the keys of metrics."""
    figures: dict[str, float | None] = {
        "forecast/peak_bytes": forecast.peak_bytes,
        "forecast/needed_bytes": forecast.needed_bytes,
        "forecast/reserved_bytes": forecast.reserved_bytes,
        "forecast/host_bytes": forecast.host_bytes or None,
        "forecast/capacity_bytes": forecast.capacity_bytes,
        "forecast/largest_microbatch": forecast.solved.value if forecast.solved else None,
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


def in_rounds(trials: Sequence[TrialState]) -> list[int]:
    """Return the trials in the order in which they start.

    Repeats run round by round, every second one backwards, whatever the order of the axes. A drift, as of a machine
    that gets warm, then affects all settings alike.
    """
    rounds: dict[tuple[int, int], list[int]] = {}
    for number, state in enumerate(trials):
        config = state.trial.config
        rounds.setdefault((config.repeat, config.training.seed), []).append(number)
    return [number for i, mine in enumerate(rounds.values()) for number in (mine[::-1] if i % 2 else mine)]


class Events(Protocol):
    """The events of a sweep; see `outputs.Outputs`. Each is called after the sweep's state and folder have it."""

    def log(self, text: str) -> None: ...
    def opened(self) -> None: ...
    def ready(self) -> None: ...
    def added(self, number: int) -> None: ...
    def began(self, number: int) -> None: ...
    def facts(self, number: int) -> None: ...
    def epoch(self, number: int, metrics: dict[str, float]) -> None: ...
    def changed(self, number: int) -> None: ...
    def ended(self, number: int) -> None: ...
    def tick(self) -> None: ...
    def closing(self) -> None: ...
    def closed(self) -> None: ...
