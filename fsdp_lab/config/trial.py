"""What determines the training of a trial, and nothing else."""

from __future__ import annotations

from dataclasses import dataclass, field

from fsdp_lab.config.errors import CombinationError
from fsdp_lab.config.key import at_least_one, check_ranges, key, not_negative
from fsdp_lab.config.parallel import Granularity, OffloadConfig, PrecisionConfig, ReshardConfig, ShardingConfig
from fsdp_lab.config.parts import check_classes, check_parts, check_rows, check_vocab_size
from fsdp_lab.config.training import (
    ActivationCheckpointing,
    CheckpointConfig,
    Init,
    LrScheduleConfig,
    MemoryProfile,
    OptimizerConfig,
    OptimizerImplementation,
    OptimizerName,
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
    init: Init = key(Init.rank0)
    """Where first weights are built: on rank 0, and broadcast, or each rank's shard by itself, on the host (`meta`,
    same bits) or on the `device`, which is faster and draws other numbers on a GPU."""
    activation_checkpointing: ActivationCheckpointing = key(ActivationCheckpointing.none)
    """Blocks to recompute in the backward pass: none, all (`full`), every n-th, or all but the outputs of some
    operators (`selective`)."""
    activation_checkpointing_every: int = key(2, at_least_one)
    """The n of `activation_checkpointing=every_n`."""
    compile: bool = key(False)
    """Compile each block with torch.compile."""
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    export: bool = key(True)
    """Export the trained model as model.pt, or as a folder for from_pretrained."""
    profile_trace: bool = key(False)
    """Record three steps of rank 0 with torch.profiler, as a Chrome trace. They are not timed."""
    memory_profile: MemoryProfile = key(MemoryProfile.peaks)
    """Record the memory of one step: not at all, its peak by category, or also a page that draws it."""

    def check(self, num_workers: int) -> None:
        """Check every value and combination that determines the training.

        Raises:
            ConfigError: a value that is wrong alone.
            CombinationError: values that are invalid together.
        """
        check_ranges(self)
        self.model.check()
        self.data.check()
        self.task.check()
        self.offload.check(self.sharding)
        self.sharding.check(num_workers)
        self.training.check(num_workers)
        self.reshard_after_forward.check(self.sharding, num_workers)
        self.optimizer.check()
        self.precision.check()
        self.checkpoint.check()
        self._check_fused()
        self._check_selective()
        check_parts(self.model, self.data, self.task)

    def check_files(self) -> None:
        """Check that data and weights are on this machine and fit each other.

        Raises:
            UserError: a file is missing.
            CombinationError: the data do not fit the model, or a checkpoint leaves nothing to train.
        """
        self.checkpoint.check_files(self.training)
        check_rows(self.model, self.data)
        self.model.check_files()
        self.data.check_files()
        check_classes(self.model, self.data)
        check_vocab_size(self.model, self.data, self.data.ask("least_vocab_size"))

    def code(self) -> list[str]:
        """Return the dotted paths to the user's code that this trial calls."""
        paths = (*self.model.paths(), *self.data.paths(), *self.task.paths(), *self.optimizer.paths())
        return [path for path in paths if not path.startswith("fsdp_lab.")]

    def _check_selective(self) -> None:
        """Refuse selective checkpointing of blocks with sharding units inside.

        PyTorch counts a block's operators in the forward pass and in its recomputation. A unit inside the block gathers
        only in the first.
        """
        granularity = self.sharding.granularity
        inside = granularity in (Granularity.per_layer, Granularity.size_based)
        if inside and self.activation_checkpointing is ActivationCheckpointing.selective:
            raise CombinationError(
                f"sharding={granularity.name} with activation_checkpointing=selective: it cannot recompute a block "
                "that contains sharding units; use sharding=per_block, root or ddp, or activation_checkpointing=full.",
            )

    def _check_fused(self) -> None:
        optimizer = self.optimizer
        if optimizer.implementation is not OptimizerImplementation.fused:
            return
        if optimizer.name is OptimizerName.sgd and self.sharding.granularity is not Granularity.ddp:
            raise CombinationError(
                "optimizer.implementation=fused with optimizer=sgd: PyTorch has no fused SGD for sharded parameters; "
                "use optimizer.implementation=auto or foreach.",
            )
        if self.precision.loss_scaling:
            raise CombinationError(
                "optimizer.implementation=fused with precision.loss_scaling=true: fused optimizers cannot unscale "
                "sharded gradients; use optimizer.implementation=auto or foreach.",
            )
