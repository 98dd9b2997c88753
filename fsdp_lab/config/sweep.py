"""What a sweep adds to a trial: its search, its cluster, its early stopping, its tracking and its report."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import List, Optional  # OmegaConf reads these on every Python that this project supports

from fsdp_lab.config.errors import ConfigError
from fsdp_lab.config.key import (
    at_least_one,
    below_one,
    key,
    not_negative,
    positive,
)
from fsdp_lab.config.metrics import can_be_objective, objective_keys
from fsdp_lab.config.options import is_device
from fsdp_lab.config.suggest import did_you_mean
from fsdp_lab.config.trial import TrialConfig


class Engine(Enum):
    """What runs a trial: Ray, or this process."""

    ray = "ray"
    inline = "inline"


def _is_count_or_share(value: str) -> str | None:
    """Take a whole number of 1 or more, or a share such as `20%`."""
    number = value.removesuffix("%")
    try:
        good = 0 < float(number) <= 100 if value.endswith("%") else int(number) >= 1
    except ValueError:
        good = False
    return None if good else "is not a number of settings; use a whole number of 1 or more, or a share such as 20%"


class Solve(Enum):
    """What a forecast looks for."""

    batch = "batch"
    gpus = "gpus"
    capacity = "capacity"


@dataclass
class ForecastConfig:
    """What is predicted about a trial before it runs."""

    enabled: bool = key(True)
    """Forecast each trial's memory while Ray starts."""
    device: str = key("auto", is_device)
    """Device to forecast for: `auto` (GPUs if there are any), `cpu`, `cuda`, or a data sheet by name or path,
    which adds the speed."""
    capacity_gib: Optional[float] = key(None, positive, example=24)
    """Memory of one device; null: this machine's GPU or the data sheet's, else no limit."""
    network_gbit: Optional[float] = key(None, positive, example=400)
    """Gbit/s that a node sends to others, all its adapters together, for forecasts over several nodes; null: assumed,
    as in the data sheet."""
    prune: bool = key(False)
    """Skip trials that cannot fit."""
    keep: Optional[str] = key(None, _is_count_or_share, example="5")
    """Number of settings of a grid to run, the predicted fastest for each number of workers: 5 or `20%`; null: all."""
    solve: Optional[Solve] = key(None)
    """Find the largest microbatch (`batch`), the fewest workers (`gpus`), or the least memory of a device (`capacity`)
    with which a setting fits."""
    usd_per_gpu_hour: Optional[float] = key(None, positive, example=2.5)
    """Dollars for an hour of one device: adds what a million tokens, or samples, costs."""
    tokens: Optional[float] = key(None, positive, example=1e12)
    """Tokens to train on: adds the hours that they take, and with a price their cost."""
    lengths: Optional[str] = key(None)
    """File of a histogram, with a line `length count` for each length of a row: forecast some of these lengths."""
    folder: Optional[str] = key(None)
    """Folder of `fsdp_lab.forecast`'s files; null: outputs/forecast/<date>/<time>."""


@dataclass
class SearchConfig:
    """How a sweep finds its trials."""

    name: str = key("grid", named_by_option=True)
    """All combinations (`grid`), random ones, or Optuna's suggestions."""
    num_trials: int = key(20, at_least_one)
    """Trials of a search; a grid runs all its combinations."""
    seed: int = key(0, not_negative)
    """Seed of a search."""

    @property
    def samples(self) -> bool:
        """Whether trials are suggested one by one, not all listed as in a grid."""
        return self.name != "grid"


def _reduces(value: int) -> str | None:
    """Take 2 or more."""
    return None if value >= 2 else "is below 2: asha keeps one of so many trials; use 2 or more"


@dataclass
class SchedulerConfig:
    """When a trial is stopped early."""

    name: str = key("fifo", named_by_option=True)
    """Never (`fifo`), below the best at each rung (`asha`), or below the median of the others."""
    metric: Optional[str] = key(None)
    """Metric to compare, as `<metric>:min` or `:max`; null: the first of `objective`."""
    grace_epochs: int = key(1, at_least_one)
    """Epochs before which no trial is stopped."""
    reduction_factor: int = key(3, _reduces)
    """`asha` keeps one of so many trials at each rung."""

    @property
    def stops_early(self) -> bool:
        """Whether trials may be stopped before their last epoch."""
        return self.name != "fifo"


class Placement(Enum):
    """On which nodes the workers of a trial are placed: few nodes if possible, many, or exactly one."""

    pack = "PACK"
    spread = "SPREAD"
    strict_pack = "STRICT_PACK"


@dataclass
class ClusterConfig:
    """Where workers run."""

    num_workers: Optional[int] = key(None, at_least_one)
    """Workers (ranks) of a trial; null: the node's GPUs, or 2 on a CPU."""
    cpus_per_worker: Optional[float] = key(None, positive, example=1)
    """Cores of a worker; null: 1 on a CPU, on GPU nodes the node's cores / its GPUs, 1 to 16."""
    gpus_per_node: Optional[int] = key(None, at_least_one, example=8)
    """GPUs of a node, for forecasts; null: what the device's file says."""
    placement: Placement = key(Placement.pack)
    """Put workers on few nodes, on many, or on one node only."""
    address: Optional[str] = key(None)
    """Address of a running Ray cluster; null: start Ray on this machine."""
    storage_path: Optional[str] = key(None)
    """Where workers write: a folder that every node mounts, or s3://bucket/prefix; null: the sweep's folder."""
    max_failures: int = key(1, not_negative)
    """Restarts of a failed trial from its last checkpoint."""
    wait_timeout_s: float = key(600.0, positive)
    """Seconds that a trial waits for free resources before it fails."""

    @property
    def is_here(self) -> bool:
        """Whether Ray is started on this machine, so that trials use its cores and GPUs."""
        return self.address is None


@dataclass
class TrackingConfig:
    """Where MLflow writes."""

    uri: str = key("sqlite:///outputs/mlflow.db")
    """MLflow's tracking store: sqlite:///<file>, or a server's address. Default: MLFLOW_TRACKING_URI, if it is set."""
    experiment: str = key("fsdp_lab")
    """Name of the MLflow experiment. Default: MLFLOW_EXPERIMENT_NAME, if it is set."""
    patience_s: float = key(60.0, not_negative)
    """Seconds that the end of a sweep waits for an unreachable store."""
    ui: Optional[str] = key(None)
    """Address of an MLflow UI on the store, for links in reports; null: `uri` if that is a server."""


@dataclass
class ReportConfig:
    """What the recommended setting may lose."""

    loss_tolerance: float = key(0.02, not_negative)
    """A setting qualifies if its loss is within this ratio of the best."""
    speed_tolerance: float = key(0.03, below_one)
    """Settings within this ratio of the fastest tie; the simplest wins."""


@dataclass
class SweepConfig(TrialConfig):
    """A trial, and the sweep around it."""

    forecast: ForecastConfig = field(default_factory=ForecastConfig)
    engine: Engine = key(Engine.ray)
    """Train with Ray, or `inline`: in this process, with one worker, for a debugger."""
    search: SearchConfig = field(default_factory=SearchConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    repeats: int = key(1, at_least_one)
    """Runs of each setting of a grid, round by round."""
    objective: List[str] = key(lambda: ["val/loss:min"])
    """Goals of a search, each `<metric>:min` or `<metric>:max`."""
    trial_timeout_s: Optional[float] = key(1800.0, positive)
    """Seconds without progress after which a trial is ended; null: never."""
    dry_run: bool = key(False)
    """List the trials and end; nothing is started or written."""
    resume: Optional[str] = key(None)
    """Sweep to continue: its folder, or `last`."""
    resume_failed: bool = key(False)
    """Also rerun failed trials."""
    resume_anyway: bool = key(False)
    """Resume although configuration, code or data changed."""
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    report: ReportConfig = field(default_factory=ReportConfig)


def objectives(words: List[str]) -> list[tuple[str, str]]:
    """Return `(metric, "min" or "max")` for each `<metric>:<direction>`.

    Raises:
        ConfigError: an objective is no metric of a trial, or has no direction.
    """
    if not words:
        raise ConfigError("objective=[] is empty; use for example objective=[val/loss:min].")
    return [_objective(word, "objective") for word in words]


def stops_on(config: SweepConfig) -> tuple[str, str]:
    """Return `(metric, "min" or "max")` that the scheduler compares.

    Raises:
        ConfigError: it is no metric of a trial, or has no direction.
    """
    word = config.scheduler.metric
    return _objective(word, "scheduler.metric") if word else objectives(config.objective)[0]


def _objective(word: str, name: str) -> tuple[str, str]:
    metric, _, direction = word.rpartition(":")
    if direction not in ("min", "max"):
        named = metric if can_be_objective(metric) else word
        raise ConfigError(f"{name}={word} has no direction; use {named}:min or {named}:max.")
    if not can_be_objective(metric):
        known = objective_keys()
        meant = did_you_mean(metric, known)
        raise ConfigError(f"{name}={word} is not a metric of a trial. {meant}The metrics are: {', '.join(known)}.")
    return metric, direction
