"""What a sweep adds to a trial: where its trials come from, where they run, when they stop, and who hears of them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import List, Optional  # OmegaConf reads these on every Python that this project supports

from fsdp_lab.config.address import check_address, is_address
from fsdp_lab.config.conf import calibrations, device_file, is_device, known_devices
from fsdp_lab.config.errors import CombinationError, ConfigError
from fsdp_lab.config.key import (
    EVERYWHERE,
    Between,
    Secret,
    at_least_one,
    below_one,
    group,
    key,
    not_negative,
    positive,
)
from fsdp_lab.config.registry import module_of
from fsdp_lab.config.suggest import closest
from fsdp_lab.config.trial import TrialConfig
from fsdp_lab.metrics import can_be_objective, objective_keys
from fsdp_lab.redact import redact


class Engine(Enum):
    ray = "ray"
    inline = "inline"


def _is_count_or_share(value: str) -> str | None:
    number = value.removesuffix("%")
    try:
        good = 0 < float(number) <= 100 if value.endswith("%") else int(number) >= 1
    except ValueError:
        good = False
    return None if good else "is not a number of settings; use a whole number of 1 or more, or a share such as 20%"


@dataclass
class ForecastConfig:
    """`capacity_gib`: of one device; null: this machine's GPU, or no limit. `device`: auto (GPUs
    where there are any), cpu, cuda, or a data sheet: its name in `conf/device`, or its path. With a data sheet the
    speed is forecast, too. A sweep forecasts memory for the machine that it runs on, whatever the device.

    `prune` never starts a trial that cannot fit, and says which ones are tight. `keep`: how many settings of a grid are
    measured, the fastest by their predictions, as a number or a share of those that fit (`20%`); null: all. `folder`:
    where `fsdp_lab.forecast` writes; null: outputs/forecast.
    """

    enabled: bool = key(True)
    device: str = key("auto", is_device)
    capacity_gib: Optional[float] = key(None, positive, example=24)
    prune: bool = key(False)
    keep: Optional[str] = key(None, _is_count_or_share, example="5")
    largest_microbatch: bool = key(False)
    folder: Optional[str] = key(None)

    def check(self, has_gpu: bool) -> None:
        """
        Args:
            has_gpu: this machine has one, whose memory is the capacity.

        Raises:
            ConfigError: no capacity is known, or there is to be no forecast.
        """
        for name in ("prune", "largest_microbatch"):
            known = has_gpu or self.capacity_gib is not None or device_file(self.device) is not None
            if getattr(self, name) and not known:
                raise ConfigError(
                    f"forecast.{name}=true needs to know how much fits, and there is no GPU here to ask; set "
                    "forecast.capacity_gib, for example forecast.capacity_gib=24."
                )
        for name, value in (("prune", "true" if self.prune else None), ("keep", self.keep)):
            if value is not None and not self.enabled:
                raise ConfigError(
                    f"forecast.{name}={value} with forecast.enabled=false: nothing is known before a trial starts; use "
                    "forecast.enabled=true."
                )
        has_speeds = device_file(self.device) is not None or (self.device == "auto" and has_gpu) or bool(calibrations())
        if self.keep is not None and not has_speeds:
            raise ConfigError(
                f"forecast.keep={self.keep} needs predicted speeds, and there are none for these CPUs yet; measure "
                "them by python -m fsdp_lab.calibrate, or on GPUs name them: "
                f"forecast.device=<{'|'.join(known_devices())}>, or the path of a data sheet."
            )


@dataclass
class SearchConfig:
    """How a sweep finds its trials. `name` is one of the registry. `num_trials` and `seed` are for samplers; a grid has
    all its cells."""

    name: str = key("grid", named_by_option=True)
    num_trials: int = key(20, at_least_one, may_differ=Between.STARTS)
    seed: int = key(0, not_negative)

    def check(self) -> None:
        """
        Raises:
            ConfigError: the name is not registered.
        """
        module_of("search.name", self.name)

    @property
    def samples(self) -> bool:
        """Whether trials are suggested one by one."""
        return self.name != "grid"


def _reduces(value: int) -> str | None:
    return None if value >= 2 else "is below 2: asha keeps one trial in so many; use 2 or more"


@dataclass
class SchedulerConfig:
    """When a trial is stopped early. `name` is one of the registry. `asha` keeps one in `reduction_factor` a rung,
    `median` those better than the median of the others; neither before `grace_epochs`. `metric`: as in `objective`;
    null: its first.
    """

    name: str = key("fifo", named_by_option=True)
    metric: Optional[str] = key(None)
    grace_epochs: int = key(1, at_least_one)
    reduction_factor: int = key(3, _reduces)

    def check(self) -> None:
        """
        Raises:
            ConfigError: the name is not registered.
        """
        module_of("scheduler.name", self.name)

    @property
    def stops_early(self) -> bool:
        return self.name != "fifo"


class Placement(Enum):
    """Workers on few nodes where they fit, on as many as there are, or on one node or none."""

    pack = "PACK"
    spread = "SPREAD"
    strict_pack = "STRICT_PACK"


@dataclass
class ClusterConfig:
    """`num_workers` null: the node's GPUs, or 2 on a CPU. `cpus_per_worker` null: 1 on a CPU; on GPU nodes the node's
    cores divided by its GPUs, 1 to 16. `placement`: of a trial's workers on nodes; with hybrid sharding, of its shard
    groups, each of which is on one node where it fits. `address` null: Ray is started here. `storage_path`: a folder
    that every node mounts, or the address of a bucket's prefix; null: the sweep's own folder.
    """

    num_workers: Optional[int] = key(None, at_least_one)
    cpus_per_worker: Optional[float] = key(None, positive, before_null=1.0, example=1)
    placement: Placement = key(Placement.pack)
    address: Optional[str] = key(None, may_differ=Between.STARTS)
    storage_path: Optional[str] = key(None)
    max_failures: int = key(1, not_negative, may_differ=Between.STARTS)
    wait_timeout_s: float = key(600.0, positive, may_differ=Between.STARTS)

    def check(self) -> None:
        """
        Raises:
            ConfigError: an address of Ray Client or of Ray's job server; or of no object storage.
        """
        if self.address is not None and self.address.startswith(("ray://", "http://", "https://")):
            raise ConfigError(
                f"cluster.address={redact(self.address)}: Ray Tune and Ray Train do not run through Ray Client or the "
                "job server. Type the command on a node of the cluster with cluster.address=<head>:6379, or send it "
                "there: `ray job submit --address=http://<head>:8265 --working-dir=. -- python -m fsdp_lab ... "
                "cluster.address=auto`."
            )
        if self.storage_path is not None and is_address(self.storage_path):
            check_address("cluster.storage_path", self.storage_path)


@dataclass
class TrackingConfig:
    """`patience_s`: how long the end of a sweep waits for a store that went away. `ui`: the address of an MLflow UI on
    the store, for the links in reports; null: `uri` where that is a server.
    """

    uri: str = key("sqlite:///outputs/mlflow.db", secret=Secret.CREDENTIALS)
    experiment: str = key("fsdp_lab")
    patience_s: float = key(60.0, not_negative, may_differ=Between.STARTS)
    ui: Optional[str] = key(None, may_differ=Between.STARTS, secret=Secret.CREDENTIALS)


@dataclass
class ReportConfig:
    """What the recommended setting may lose: ratios to the best loss, and to the highest samples/s. `others_cpu`: on a
    CPU the speed of a run decides nothing in which others had more than this share of all cores."""

    loss_tolerance: float = key(0.02, not_negative)
    speed_tolerance: float = key(0.03, below_one)
    others_cpu: float = key(0.25, not_negative)


# How trials are found and run changes none of them, but another search is another sweep and another study.
_FINDS_TRIALS = Between.CELLS | Between.CHECKPOINT
# Where trials run and are logged is no difference between nights.
_IS_WHERE = Between.CHECKPOINT | Between.NIGHTS


@dataclass
class SweepConfig(TrialConfig):
    """A trial, and how the sweep around it goes.

    `engine`: `ray`, or `inline`: in this very process, for a debugger. `repeat_max`: how often `repeat=auto` runs a
    setting at most. `objective`: what a search is after, each `<metric>:min` or `:max`. `trial_timeout_s`: a trial that
    makes no progress for so long is ended; null: never. `resume`: a sweep's folder, the id of its parent run, or
    `last`; `resume_failed` runs its failed trials again, `resume_anyway` resumes although configuration, code or data
    changed.
    """

    forecast: ForecastConfig = group(ForecastConfig, may_differ=_FINDS_TRIALS | Between.NIGHTS)
    engine: Engine = key(Engine.ray, may_differ=_FINDS_TRIALS)
    search: SearchConfig = group(SearchConfig, may_differ=_FINDS_TRIALS)
    scheduler: SchedulerConfig = group(SchedulerConfig, may_differ=_FINDS_TRIALS)
    repeat_max: int = key(4, at_least_one, may_differ=EVERYWHERE, is_param=False)
    objective: List[str] = key(lambda: ["val/loss:min"], may_differ=_FINDS_TRIALS)
    trial_timeout_s: Optional[float] = key(1800.0, positive, may_differ=EVERYWHERE)
    resume: Optional[str] = key(None, may_differ=EVERYWHERE, is_param=False)
    resume_failed: bool = key(False, may_differ=EVERYWHERE, is_param=False)
    resume_anyway: bool = key(False, may_differ=EVERYWHERE, is_param=False)
    cluster: ClusterConfig = group(ClusterConfig, may_differ=_IS_WHERE)
    tracking: TrackingConfig = group(TrackingConfig, may_differ=_IS_WHERE)
    report: ReportConfig = group(ReportConfig, may_differ=EVERYWHERE, is_param=False)

    def check(self, num_workers: int) -> None:
        """Refuse a trial that cannot run, or a sweep of it.

        Args:
            num_workers: the number of ranks that `cluster.num_workers` stands for.

        Raises:
            ConfigError: a value that is wrong alone.
            CombinationError: values that have no meaning together.
        """
        super().check(num_workers)
        self.search.check()
        self.scheduler.check()
        objectives(self)
        stops_on(self)
        if self.forecast.keep is not None and self.search.samples:
            raise CombinationError(
                f"search={self.search.name} with forecast.keep={self.forecast.keep}: a search suggests its trials one "
                "by one, so none is the fastest of all; use forecast.keep=null, or search=grid.",
                keys=("search.name", "forecast.keep"),
            )
        if self.engine is Engine.inline:
            self._check_inline(num_workers)
        self.cluster.check()

    def _check_inline(self, num_workers: int) -> None:
        if num_workers != 1:
            raise CombinationError(
                f"engine=inline with cluster.num_workers={num_workers}: a trial in this very process has one worker; "
                "use cluster.num_workers=1, or engine=ray.",
                keys=("engine", "cluster.num_workers"),
            )
        for name, value in (("prune", "true" if self.forecast.prune else None), ("keep", self.forecast.keep)):
            if value is not None:
                raise CombinationError(
                    f"engine=inline with forecast.{name}={value}: nothing is forecast of a trial in this process; use "
                    f"forecast.{name}={'false' if name == 'prune' else 'null'}, or engine=ray.",
                    keys=("engine", f"forecast.{name}"),
                )
        if self.scheduler.stops_early:
            raise CombinationError(
                f"engine=inline with scheduler={self.scheduler.name}: one trial runs after the other in this "
                "process, and nobody stops it; use scheduler=fifo, or engine=ray.",
                keys=("engine", "scheduler"),
            )


def objectives(config: SweepConfig) -> list[tuple[str, str]]:
    """Return `(metric, "min" or "max")` of each objective.

    Raises:
        ConfigError: one that is no metric of a trial, or says no direction.
    """
    return objectives_in(config.objective)


def objectives_in(words: List[str]) -> list[tuple[str, str]]:
    """As `objectives`, of the words alone."""
    if not words:
        raise ConfigError("objective=[] names nothing; use for example objective=[val/loss:min].")
    return [_objective(word, "objective") for word in words]


def stops_on(config: SweepConfig) -> tuple[str, str]:
    """Return `(metric, "min" or "max")` that the scheduler looks at."""
    return _objective(config.scheduler.metric, "scheduler.metric") if config.scheduler.metric else objectives(config)[0]


def _objective(word: str, name: str) -> tuple[str, str]:
    metric, _, direction = word.rpartition(":")
    if direction not in ("min", "max"):
        named = metric if can_be_objective(metric) else word
        raise ConfigError(f"{name}={word} says no direction; use {named}:min or {named}:max.")
    if not can_be_objective(metric):
        known = objective_keys()
        close = closest(metric, known)
        meant = f"did you mean {close}? " if close else ""
        raise ConfigError(f"{name}={word} is not a metric of a trial; {meant}the metrics are: {', '.join(known)}.")
    return metric, direction
