"""Every key of the configuration, with its type and default.

Plain dataclasses: OmegaConf checks the command line against them, and past `compose.py` they are
all that the rest of the project sees. Enum members carry the name that is typed on the command line.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import List, Optional  # OmegaConf reads these on every Python this project supports


class Granularity(Enum):
    ddp = "ddp"
    root = "root"
    per_block = "per_block"
    per_layer = "per_layer"
    size_based = "size_based"


class Dtype(Enum):
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


class OffloadTarget(Enum):
    none = "none"
    cpu = "cpu"
    cpu_unpinned = "cpu_unpinned"


class ReshardPolicy(Enum):
    always = "always"
    never = "never"
    default = "default"
    to_size = "to_size"


class OptimizerName(Enum):
    adam = "adam"
    adamw = "adamw"
    sgd = "sgd"


class OptimizerImplementation(Enum):
    auto = "auto"
    fused = "fused"
    foreach = "foreach"
    for_loop = "for_loop"


class LrScheduleName(Enum):
    constant = "constant"
    cosine = "cosine"
    step = "step"


class ActivationCheckpointing(Enum):
    none = "none"
    full = "full"


class Init(Enum):
    rank0 = "rank0"
    meta = "meta"


# `async` is a keyword of Python, so this one takes the functional form.
CheckpointMode = Enum("CheckpointMode", {"off": "off", "sync": "sync", "async": "async"})


class MemoryProfile(Enum):
    off = "off"
    peaks = "peaks"
    timeline = "timeline"


@dataclass
class ModelConfig:
    """An image classifier. `family` is a name of the registry; `patch_size`, `num_heads` and `mlp_dim` belong to the
    ViT family only."""

    family: str = "vit"
    image_size: int = 28
    num_channels: int = 1
    patch_size: Optional[int] = 7
    num_layers: int = 4
    num_heads: Optional[int] = 2
    hidden_dim: int = 64
    mlp_dim: Optional[int] = 128
    num_classes: int = 10


@dataclass
class DataConfig:
    """`name` is one of the registry. `num_train`/`num_val`: use only the first so many samples; null takes all there
    are. `loader_workers` null: 0 on a CPU; on a GPU one for each core of the worker but one, 4 at most.
    """

    name: str = "digits"
    root: str = "outputs/data"
    download: bool = True
    num_train: Optional[int] = None
    num_val: Optional[int] = None
    loader_workers: Optional[int] = None


@dataclass
class TrainingConfig:
    """`timing_warmup_steps` optimizer steps at the start of a run stay out of the speed figures."""

    epochs: int = 2
    max_steps: Optional[int] = None
    global_batch_size: int = 64
    grad_accum_steps: int = 1
    seed: int = 0
    max_grad_norm: Optional[float] = None
    timing_warmup_steps: int = 3


@dataclass
class OptimizerConfig:
    """`scale_lr` multiplies `lr` by the number of workers."""

    name: OptimizerName = OptimizerName.adam
    lr: float = 1e-3
    weight_decay: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.999
    momentum: float = 0.0
    implementation: OptimizerImplementation = OptimizerImplementation.auto
    scale_lr: bool = False


@dataclass
class LrScheduleConfig:
    """`step` multiplies by `gamma` every `step_epochs` epochs; `cosine` ends at `min_lr_ratio * lr`."""

    name: LrScheduleName = LrScheduleName.constant
    warmup_steps: int = 0
    min_lr_ratio: float = 0.0
    step_epochs: int = 1
    gamma: float = 0.7


@dataclass
class ShardingConfig:
    """`forward_prefetch`/`backward_prefetch`: how many blocks ahead to gather; null leaves it to FSDP2."""

    granularity: Granularity = Granularity.per_block
    dp_replicate: int = 1
    min_num_params: Optional[int] = None
    forward_prefetch: Optional[int] = None
    backward_prefetch: Optional[int] = None


@dataclass
class PrecisionConfig:
    """`param_dtype` computes, `reduce_dtype` adds gradients up; the sharded originals stay float32."""

    param_dtype: Dtype = Dtype.float32
    reduce_dtype: Dtype = Dtype.float32
    loss_scaling: bool = False
    init_scale: float = 65536.0
    growth_interval: int = 2000


@dataclass
class OffloadConfig:
    target: OffloadTarget = OffloadTarget.none


@dataclass
class ReshardConfig:
    """`size` is the mesh that `to_size` reshards to; it divides the sharding degree."""

    policy: ReshardPolicy = ReshardPolicy.default
    size: Optional[int] = None


class ForecastDevice(Enum):
    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


@dataclass
class ForecastConfig:
    """`capacity_gib`: of one device; null: this machine's GPU, or no limit. `device`: for `fsdp_lab.forecast`; auto:
    GPUs where there are any. A sweep forecasts for the machine that it runs on.

    `prune` never starts a trial that cannot fit. `folder`: where `fsdp_lab.forecast` writes; null: outputs/forecast.
    """

    enabled: bool = True
    device: ForecastDevice = ForecastDevice.auto
    capacity_gib: Optional[float] = None
    prune: bool = False
    largest_microbatch: bool = False
    folder: Optional[str] = None


@dataclass
class CheckpointConfig:
    """`resume_from`: a checkpoint, or a folder of them, that another run left; null starts anew."""

    mode: CheckpointMode = CheckpointMode.sync  # type: ignore[valid-type]
    every_epochs: int = 1
    keep_last: int = 1
    keep_best: bool = True
    resume_from: Optional[str] = None
    any_torch_version: bool = False


class Engine(Enum):
    ray = "ray"
    inline = "inline"


class SearchName(Enum):
    grid = "grid"
    random = "random"
    optuna = "optuna"


class SchedulerName(Enum):
    fifo = "fifo"
    asha = "asha"
    median = "median"


@dataclass
class SearchConfig:
    """How a sweep finds its trials. `num_trials` and `seed` are for `random` and `optuna`; a grid has all its cells."""

    name: SearchName = SearchName.grid
    num_trials: int = 20
    seed: int = 0


@dataclass
class SchedulerConfig:
    """When a trial is stopped early: `asha` keeps one in `reduction_factor` at each rung, `median` those better than
    the median of the others; neither before `grace_epochs`. `metric`: as in `objective`; null: its first.
    """

    name: SchedulerName = SchedulerName.fifo
    metric: Optional[str] = None
    grace_epochs: int = 1
    reduction_factor: int = 3


@dataclass
class ClusterConfig:
    """`num_workers` null: the node's GPUs, or 2 on a CPU. `cpus_per_worker` null: 1 on a CPU; on GPU nodes the node's
    cores divided by its GPUs, 1 to 16. `address` null: Ray is started here.
    """

    num_workers: Optional[int] = None
    cpus_per_worker: Optional[float] = None
    address: Optional[str] = None
    storage_path: Optional[str] = None
    max_failures: int = 1
    wait_timeout_s: float = 600.0


@dataclass
class TrackingConfig:
    """`patience_s`: how long the end of a sweep waits for a store that went away. `ui`: the address of an MLflow UI on
    the store, for the links in reports; null: `uri` where that is a server.
    """

    uri: str = "sqlite:///outputs/mlflow.db"
    experiment: str = "fsdp_lab"
    patience_s: float = 60.0
    ui: Optional[str] = None


@dataclass
class ReportConfig:
    """What the recommended setting may lose: ratios to the best loss, and to the highest samples/s."""

    loss_tolerance: float = 0.02
    speed_tolerance: float = 0.03


@dataclass
class ToleranceConfig:
    """What a night may lose against the baseline before it is a regression: ratios to the baseline's value, and for
    `forecast_error` the difference of two errors."""

    peak_memory: float = 0.01
    samples_per_s: float = 0.15
    loss: float = 0.02
    forecast_error: float = 0.01


@dataclass
class NotifyConfig:
    """`url` gets each night's verdict as JSON."""

    url: Optional[str] = None
    timeout_s: float = 10.0


@dataclass
class NightlyConfig:
    """For `fsdp_lab.nightly`. `cron`: minute hour day month weekday, in `timezone`; null: this machine's.

    `jitter_s`: start up to so many seconds late, at random. `late_s`: how late a missed night may still start; null:
    until the next. `repeats`: trials of each setting. `significance`: the probability with which noise may look like a
    regression of one setting and metric. `others_cpu`: on a CPU no speed is judged in a night in which others had
    more than this share of all cores. `baseline`: a night of the folder; null: the last good one. `keep`: nights
    whose checkpoints and models stay; metrics always do.
    """

    cron: str = "0 2 * * *"
    timezone: Optional[str] = None
    jitter_s: float = 0.0
    late_s: Optional[float] = None
    repeats: int = 3
    significance: float = 0.005
    tolerance: ToleranceConfig = field(default_factory=ToleranceConfig)
    others_cpu: float = 0.25
    baseline: Optional[str] = None
    folder: str = "outputs/nightly"
    keep: int = 3
    notify: NotifyConfig = field(default_factory=NotifyConfig)


@dataclass
class TrialConfig:
    """One trial: everything that is needed to train it once, and how the sweep around it goes.

    `repeat`: which attempt at a setting it is; changes nothing else, and `-m repeat=0,1,2` trains each setting thrice.
    `engine`: `ray`, or `inline`: in this very process, for a debugger. `objective`: what a search is after, each
    `<metric>:min` or `:max`. `trial_timeout_s`: a trial that does not get on for so long is ended; null: never.
    `resume`: a sweep's folder, the id of its parent run, or `last`; `resume_failed` tries its failed trials again,
    `resume_anyway` goes on though configuration, code or data are others now.
    """

    sharding: ShardingConfig = field(default_factory=ShardingConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    offload: OffloadConfig = field(default_factory=OffloadConfig)
    reshard_after_forward: ReshardConfig = field(default_factory=ReshardConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    lr_schedule: LrScheduleConfig = field(default_factory=LrScheduleConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    repeat: int = 0
    init: Init = Init.rank0
    activation_checkpointing: ActivationCheckpointing = ActivationCheckpointing.none
    compile: bool = False
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    export: bool = True
    memory_profile: MemoryProfile = MemoryProfile.peaks
    forecast: ForecastConfig = field(default_factory=ForecastConfig)
    engine: Engine = Engine.ray
    search: SearchConfig = field(default_factory=SearchConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    objective: List[str] = field(default_factory=lambda: ["val/loss:min"])
    trial_timeout_s: Optional[float] = 1800.0
    resume: Optional[str] = None
    resume_failed: bool = False
    resume_anyway: bool = False
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    report: ReportConfig = field(default_factory=ReportConfig)
    nightly: NightlyConfig = field(default_factory=NightlyConfig)


# They say how a start goes on, not what a trial is.
RESUME_KEYS = ("resume", "resume_failed", "resume_anyway")
# They say what is done with results.
AFTERWARDS = ("report", "nightly")
