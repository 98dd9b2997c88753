"""What determines the training of a trial, and nothing else."""

from __future__ import annotations

from dataclasses import dataclass, field

from fsdp_lab.config.axes.activation_offload import ActivationOffloadKeys
from fsdp_lab.config.axes.api import ApiKeys, kind_of
from fsdp_lab.config.axes.checkpointing import CheckpointingKeys
from fsdp_lab.config.axes.compile import CompileKeys
from fsdp_lab.config.axes.embeddings import EmbeddingsKeys
from fsdp_lab.config.axes.offload import OffloadConfig
from fsdp_lab.config.axes.precision import PrecisionConfig
from fsdp_lab.config.axes.prefetch import PrefetchKeys
from fsdp_lab.config.axes.reshard import ReshardConfig
from fsdp_lab.config.axes.sharding import GranularityKeys
from fsdp_lab.config.axes.tensor_parallel import TensorParallelKeys
from fsdp_lab.config.key import key, not_negative
from fsdp_lab.config.target import given_to, import_callable
from fsdp_lab.config.training import (
    CheckConfig,
    CheckpointConfig,
    Init,
    LrScheduleConfig,
    MemoryProfile,
    OptimizerConfig,
    TrainingConfig,
)
from fsdp_lab.config.workload import DataConfig, ModelConfig, TaskConfig


@dataclass
class ShardingConfig(PrefetchKeys, EmbeddingsKeys, TensorParallelKeys, GranularityKeys, ApiKeys):
    """How the model is divided among workers."""

    @property
    def kind(self) -> str:
        """The name of the file in `fsdp_lab/training/parallel` that trains this way."""
        return kind_of(self.granularity, self.api, self.tp)


@dataclass
class _Groups:
    sharding: ShardingConfig = field(default_factory=ShardingConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    offload: OffloadConfig = field(default_factory=OffloadConfig)
    reshard_after_forward: ReshardConfig = field(default_factory=ReshardConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    task: TaskConfig = field(default_factory=TaskConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    lr_schedule: LrScheduleConfig = field(default_factory=LrScheduleConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)


@dataclass
class TrialConfig(CompileKeys, ActivationOffloadKeys, CheckpointingKeys, _Groups):
    """Everything that determines the training of one setting."""

    repeat: int = key(0, not_negative)
    """Number of this run of a setting; `-m repeats=3` sets it."""
    init: Init = key(Init.plain)
    """Who calls the model's constructor: each rank (`plain`), or `rank0`, which sends the values. With `meta` no rank
    has the whole model, and modules draw other numbers by `reset_parameters` or `init_weights`."""
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    check: CheckConfig = field(default_factory=CheckConfig)
    export: bool = key(True)
    """Export the trained model as model.pt, or as a folder for from_pretrained."""
    profile_trace: bool = key(False)
    """Record three steps of rank 0 with torch.profiler, as a Chrome trace. They are not timed."""
    memory_profile: MemoryProfile = key(MemoryProfile.peaks)
    """Record the memory of one step: not at all, its peak by category, or also a page that draws it."""

    def calls(self) -> dict[str, list[str]]:
        """Return the names of the arguments that the user's optimizer and schedule get."""
        calls = {}
        if self.optimizer.target is not None:
            calls["optimizer"] = [given_to(import_callable(self.optimizer.target, "optimizer._target_"))]
        if self.lr_schedule.target is not None:
            calls["lr_schedule"] = self.lr_schedule.takes_steps()
        return calls

    def code(self) -> list[str]:
        """Return the dotted paths to the user's code that this trial calls."""
        groups = (self.model, self.data, self.task, self.optimizer, self.lr_schedule)
        paths = (path for group in groups for path in group.paths())
        return [path for path in paths if not path.startswith("fsdp_lab.")]
