"""What determines the training of a trial, and nothing else."""

from __future__ import annotations

from dataclasses import dataclass, field

from fsdp_lab.config.key import at_least_one, key, not_negative
from fsdp_lab.config.parallel import OffloadConfig, PrecisionConfig, ReshardConfig, ReshardPolicy, ShardingConfig
from fsdp_lab.config.training import (
    ActivationCheckpointing,
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
class TrialConfig:
    """Everything that determines the training of one setting."""

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
    repeat: int = key(0, not_negative)
    """Number of this run of a setting; `-m repeats=3` sets it."""
    init: Init = key(Init.plain)
    """Who calls the model's constructor: each rank (`plain`), or `rank0`, which sends the values. With `meta` no rank
    has the whole model, and modules draw other numbers by `reset_parameters` or `init_weights`."""
    activation_checkpointing: ActivationCheckpointing = key(ActivationCheckpointing.none)
    """Blocks to recompute in the backward pass: none, all (`full`), every n-th, or all but the outputs of some
    operators (`selective`)."""
    activation_checkpointing_every: int = key(2, at_least_one)
    """The n of `activation_checkpointing=every_n`."""
    compile: bool = key(False)
    """Compile each block with torch.compile."""
    compile_loss: bool = key(True)
    """With `compile`, also compile the loss of `language` and `seq2seq`, which then copies no logits to float32."""
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    check: CheckConfig = field(default_factory=CheckConfig)
    export: bool = key(True)
    """Export the trained model as model.pt, or as a folder for from_pretrained."""
    profile_trace: bool = key(False)
    """Record three steps of rank 0 with torch.profiler, as a Chrome trace. They are not timed."""
    memory_profile: MemoryProfile = key(MemoryProfile.peaks)
    """Record the memory of one step: not at all, its peak by category, or also a page that draws it."""

    @property
    def compiles_loss(self) -> bool:
        """Return whether the loss is compiled: that of tokens, from all logits at once."""
        of_logits = self.task.name in ("language", "seq2seq") and self.task.loss_chunks == 1
        return self.compile and self.compile_loss and of_logits

    @property
    def fsdp1_strategy(self) -> str:
        """Return FSDP1's word for `reshard_after_forward` and `sharding.dp_replicate`, a name of `ShardingStrategy`."""
        keeps = self.reshard_after_forward.policy is ReshardPolicy.never
        if self.sharding.dp_replicate > 1:
            return "_HYBRID_SHARD_ZERO2" if keeps else "HYBRID_SHARD"
        return "SHARD_GRAD_OP" if keeps else "FULL_SHARD"

    def code(self) -> list[str]:
        """Return the dotted paths to the user's code that this trial calls."""
        paths = (*self.model.paths(), *self.data.paths(), *self.task.paths(), *self.optimizer.paths())
        return [path for path in paths if not path.startswith("fsdp_lab.")]
