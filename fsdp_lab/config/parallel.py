"""The axes of a sweep: how a model is sharded among workers, its precision, and where its parameters are kept."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Optional  # OmegaConf reads this on every Python that this project supports

from fsdp_lab.config.errors import CombinationError, ConfigError
from fsdp_lab.config.key import at_least_one, divisors, key, not_negative, positive


class Granularity(Enum):
    """Which modules become FSDP units; see `ShardingConfig.granularity`."""

    ddp = "ddp"
    root = "root"
    per_block = "per_block"
    per_layer = "per_layer"
    size_based = "size_based"


class Dtype(Enum):
    """A floating-point type by its PyTorch name."""

    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


class OffloadTarget(Enum):
    """Where sharded parameters are kept: on the device, or in pinned or pageable host memory."""

    none = "none"
    cpu = "cpu"
    cpu_unpinned = "cpu_unpinned"


class ReshardPolicy(Enum):
    """When gathered parameters are freed after the forward pass; see `ReshardConfig.policy`."""

    always = "always"
    never = "never"
    default = "default"
    to_size = "to_size"


@dataclass
class ShardingConfig:
    """How the model is divided among workers."""

    granularity: Granularity = key(Granularity.per_block, named_by_option=True)
    """What becomes an FSDP unit: none (`ddp`), the whole model, each block, each layer, or each module above a size."""
    dp_replicate: int = key(1, at_least_one)
    """Replicas of the sharded model; above 1 sharding is hybrid, over workers / dp_replicate ranks."""
    min_num_params: Optional[int] = key(None, at_least_one)
    """Smallest number of parameters of a unit; `size_based` requires it."""
    blocks_per_unit: int = key(1, at_least_one)
    """Consecutive blocks that share one unit of `per_block`."""
    separate_reduce_scatter_group: bool = key(False)
    """Reduce gradients on a separate communicator, in parallel with the all-gathers."""
    forward_prefetch: Optional[int] = key(None, not_negative)
    """Units to gather ahead in the forward pass; null: FSDP2's default."""
    backward_prefetch: Optional[int] = key(None, not_negative)
    """Units to gather ahead in the backward pass; null: FSDP2's default."""

    def check(self, num_workers: int) -> None:
        """Check the combination of sharding settings.

        Raises:
            ConfigError: `size_based` has no size.
            CombinationError: DDP has a setting that needs sharding, `blocks_per_unit` is set without `per_block`, or
                the replicas do not divide the workers.
        """
        if self.granularity is Granularity.ddp:
            self._check_ddp()
        if self.blocks_per_unit > 1 and self.granularity is not Granularity.per_block:
            raise CombinationError(
                f"sharding.blocks_per_unit={self.blocks_per_unit} with sharding={self.granularity.name}: only "
                "sharding=per_block makes units of blocks; use sharding.blocks_per_unit=1 or sharding=per_block.",
            )
        if num_workers % self.dp_replicate:
            raise CombinationError(
                f"sharding.dp_replicate={self.dp_replicate} does not divide "
                f"cluster.num_workers={num_workers}; use one of {divisors(num_workers)}.",
            )
        if self.granularity is Granularity.size_based and self.min_num_params is None:
            raise ConfigError(
                "sharding.min_num_params=null: sharding=size_based needs the smallest number of parameters of a unit; "
                "set for example sharding.min_num_params=20000."
            )

    def _check_ddp(self) -> None:
        if self.dp_replicate > 1:
            raise CombinationError(
                f"sharding=ddp with sharding.dp_replicate={self.dp_replicate}: DDP replicates over all "
                "workers already; use sharding.dp_replicate=1 or a sharded setting.",
            )
        if self.separate_reduce_scatter_group:
            raise CombinationError(
                "sharding=ddp with sharding.separate_reduce_scatter_group=true: DDP has no reduce-scatter; use "
                "sharding.separate_reduce_scatter_group=false or a sharded setting.",
            )
        for name in ("forward_prefetch", "backward_prefetch"):
            if getattr(self, name) is not None:
                raise CombinationError(
                    f"sharding=ddp with sharding.{name}={getattr(self, name)}: DDP gathers no parameters, so it "
                    f"cannot prefetch them; use sharding.{name}=null.",
                )


@dataclass
class PrecisionConfig:
    """The types of computation and communication; sharded parameters stay float32."""

    param_dtype: Dtype = key(Dtype.float32, named_by_option=True)
    """Type of gathered parameters and of computation."""
    reduce_dtype: Dtype = key(Dtype.float32, named_by_option=True)
    """Type in which gradients are reduced."""
    loss_scaling: bool = key(False, named_by_option=True)
    """Scale the loss dynamically, as float16 needs."""
    float8: bool = key(False, named_by_option=True)
    """Multiply in float8, scaled by rows, in the linear layers of blocks; needs torchao."""
    tf32: bool = key(False, named_by_option=True)
    """Multiply float32 matrices in TF32 on GPUs since Ampere, by `torch.set_float32_matmul_precision("high")`."""
    init_scale: float = key(65536.0, positive)
    """First scale of the loss."""
    growth_interval: int = key(2000, at_least_one)
    """Steps without an overflow after which the scale doubles."""

    @property
    def multiplied_in(self) -> str:
        """The type in which a GPU multiplies matrices, as data sheets name it."""
        return "tfloat32" if self.tf32 else self.param_dtype.value

    def check(self) -> None:
        """Check that loss scaling, TF32 and float8 fit the computation type.

        Raises:
            CombinationError: loss scaling with bfloat16, TF32 without float32, or float8 without bfloat16.
        """
        if self.tf32 and self.param_dtype is not Dtype.float32:
            raise CombinationError(
                f"precision.tf32=true with precision.param_dtype={self.param_dtype.name}: TF32 multiplies float32 "
                "matrices; use precision=tf32, or precision.tf32=false.",
            )
        if self.float8 and self.param_dtype is not Dtype.bfloat16:
            raise CombinationError(
                f"precision.float8=true with precision.param_dtype={self.param_dtype.name}: float8 products have "
                "bfloat16 results; use precision=float8, or precision.param_dtype=bfloat16.",
            )
        if self.loss_scaling and self.param_dtype is Dtype.bfloat16:
            raise CombinationError(
                "precision.loss_scaling=true with precision.param_dtype=bfloat16: bfloat16 has float32's range and "
                "needs no scaling; use precision.loss_scaling=false or precision=fp16.",
            )


@dataclass
class OffloadConfig:
    """Where sharded parameters, gradients and optimizer state are kept."""

    target: OffloadTarget = key(OffloadTarget.none, named_by_option=True)
    """Keep sharded parameters on the device, in pinned host memory (`cpu`), or in pageable host memory."""

    def backend(self, cuda: bool) -> str:
        """Return the backend of a trial's process group.

        On GPUs gloo joins NCCL only for offloaded gradients, whose norm is reduced on the host: gloo connects each rank
        with every other. An asynchronous checkpoint has a group of its own.
        """
        if not cuda:
            return "gloo"
        return "nccl" if self.target is OffloadTarget.none else "cpu:gloo,cuda:nccl"

    def check(self, sharding: ShardingConfig) -> None:
        """Check that there are sharded parameters to offload.

        Raises:
            CombinationError: an offload target with DDP.
        """
        if sharding.granularity is Granularity.ddp and self.target is not OffloadTarget.none:
            raise CombinationError(
                f"sharding=ddp with offload={self.target.name}: DDP keeps every parameter on its "
                "device, so there is nothing to offload; use offload=none or a sharded setting.",
            )


@dataclass
class ReshardConfig:
    """What happens to gathered parameters after the forward pass."""

    policy: ReshardPolicy = key(ReshardPolicy.default, named_by_option=True)
    """Free gathered parameters (`always`, ZeRO-3), keep them (`never`, ZeRO-2), keep only the root's (`default`), or
    reshard to a smaller mesh (`to_size`)."""
    size: Optional[int] = key(None, at_least_one)
    """Ranks of the smaller mesh of `to_size`; it divides the sharding degree."""

    def check(self, sharding: ShardingConfig, num_workers: int) -> None:
        """Check the size of `to_size`.

        Raises:
            ConfigError: `to_size` has no size.
            CombinationError: the size does not divide the sharding degree.
        """
        if self.policy is not ReshardPolicy.to_size or sharding.granularity is Granularity.ddp:
            return
        dp_shard = num_workers // sharding.dp_replicate
        if self.size is None:
            raise ConfigError(
                "reshard_after_forward.size=null: reshard_after_forward=to_size needs the size of the smaller mesh; "
                f"set reshard_after_forward.size to one of {divisors(dp_shard)}."
            )
        if dp_shard % self.size:
            raise CombinationError(
                f"reshard_after_forward.size={self.size} does not divide the sharding degree {dp_shard} "
                f"(cluster.num_workers={num_workers} / sharding.dp_replicate={sharding.dp_replicate}); "
                f"use one of {divisors(dp_shard)}.",
            )

    def effective(self, sharding: ShardingConfig, num_workers: int) -> tuple[str, int | None]:
        """Return the policy and size that these settings resolve to, equal for all settings that reshard alike.

        DDP reshards nothing: `("none", None)`. `default` keeps the root's parameters, so for `root` it is `never`. A
        mesh of one worker is `never` and a mesh of all workers is `always`, as FSDP2 itself reads it.
        """
        if sharding.granularity is Granularity.ddp:
            return "none", None
        if self.policy is ReshardPolicy.to_size and self.size in (1, num_workers // sharding.dp_replicate):
            return ("never" if self.size == 1 else "always"), None
        if self.policy is ReshardPolicy.default and sharding.granularity is Granularity.root:
            return "never", None
        return self.policy.name, self.size if self.policy is ReshardPolicy.to_size else None
