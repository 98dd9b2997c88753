"""How a model is divided among workers, what it computes in and where it lies: the axes of a sweep."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Optional  # OmegaConf reads this on every Python that this project supports

from fsdp_lab.config.errors import CombinationError, ConfigError
from fsdp_lab.config.key import Memory, at_least_one, divisors, key, not_negative, positive


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


@dataclass
class ShardingConfig:
    """`separate_reduce_scatter_group`: gradients are reduced by a communicator of their own, beside the gathering.
    `blocks_per_unit`: how many consecutive blocks share one unit of `per_block`.
    `forward_prefetch`/`backward_prefetch`: how many units ahead to gather; null leaves it to FSDP2."""

    granularity: Granularity = key(Granularity.per_block, named_by_option=True)
    dp_replicate: int = key(1, at_least_one)
    min_num_params: Optional[int] = key(None, at_least_one)
    blocks_per_unit: int = key(1, at_least_one)
    separate_reduce_scatter_group: bool = key(False)
    forward_prefetch: Optional[int] = key(None, not_negative)
    backward_prefetch: Optional[int] = key(None, not_negative)

    def check(self, num_workers: int) -> None:
        """
        Raises:
            ConfigError: `size_based` without a size.
            CombinationError: what DDP does not do, blocks in one unit where units are no blocks, or replicas that do
                not divide the workers.
        """
        if self.granularity is Granularity.ddp:
            self._check_ddp()
        if self.blocks_per_unit > 1 and self.granularity is not Granularity.per_block:
            raise CombinationError(
                f"sharding.blocks_per_unit={self.blocks_per_unit} with sharding={self.granularity.name}: only "
                "sharding=per_block makes units of blocks; use sharding.blocks_per_unit=1 or sharding=per_block.",
                keys=("sharding", "sharding.blocks_per_unit"),
            )
        if num_workers % self.dp_replicate:
            raise CombinationError(
                f"sharding.dp_replicate={self.dp_replicate} does not divide "
                f"cluster.num_workers={num_workers}; use one of {divisors(num_workers)}.",
                keys=("sharding.dp_replicate", "cluster.num_workers"),
            )
        if self.granularity is Granularity.size_based and self.min_num_params is None:
            raise ConfigError(
                "sharding.min_num_params=null: sharding=size_based needs the smallest number of parameters that "
                "makes a unit of its own; set for example sharding.min_num_params=20000."
            )

    def _check_ddp(self) -> None:
        if self.dp_replicate > 1:
            raise CombinationError(
                f"sharding=ddp with sharding.dp_replicate={self.dp_replicate}: DDP replicates over all "
                "workers already; use sharding.dp_replicate=1 or a sharded setting.",
                keys=("sharding", "sharding.dp_replicate"),
            )
        if self.separate_reduce_scatter_group:
            raise CombinationError(
                "sharding=ddp with sharding.separate_reduce_scatter_group=true: DDP scatters nothing; use "
                "sharding.separate_reduce_scatter_group=false or a sharded setting.",
                keys=("sharding", "sharding.separate_reduce_scatter_group"),
            )
        for name in ("forward_prefetch", "backward_prefetch"):
            if getattr(self, name) is not None:
                raise CombinationError(
                    f"sharding=ddp with sharding.{name}={getattr(self, name)}: DDP gathers nothing that could "
                    f"be fetched early; use sharding.{name}=null.",
                    keys=("sharding", f"sharding.{name}"),
                )


@dataclass
class PrecisionConfig:
    """`param_dtype` computes, `reduce_dtype` adds gradients up; the sharded originals stay float32. `float8`: the
    linear layers of the blocks multiply in float8, scaled by rows."""

    param_dtype: Dtype = key(Dtype.float32, named_by_option=True, memory=Memory.VALUE)
    reduce_dtype: Dtype = key(Dtype.float32, named_by_option=True, memory=Memory.VALUE)
    loss_scaling: bool = key(False, named_by_option=True, memory=Memory.VALUE)
    float8: bool = key(False, named_by_option=True)
    init_scale: float = key(65536.0, positive)
    growth_interval: int = key(2000, at_least_one)

    def check(self) -> None:
        """
        Raises:
            CombinationError: loss scaling for a type that needs none, or float8 within another type than bfloat16.
        """
        if self.float8 and self.param_dtype is not Dtype.bfloat16:
            raise CombinationError(
                f"precision.float8=true with precision.param_dtype={self.param_dtype.name}: float8 products have "
                "bfloat16 results; use precision=float8, or precision.param_dtype=bfloat16.",
                keys=("precision.float8", "precision.param_dtype"),
            )
        if self.loss_scaling and self.param_dtype is Dtype.bfloat16:
            raise CombinationError(
                "precision.loss_scaling=true with precision.param_dtype=bfloat16: bfloat16 has float32's range and "
                "needs no scaling; use precision.loss_scaling=false or precision=fp16.",
                keys=("precision.loss_scaling", "precision.param_dtype"),
            )


@dataclass
class OffloadConfig:
    target: OffloadTarget = key(OffloadTarget.none, named_by_option=True)

    def check(self, sharding: ShardingConfig) -> None:
        """
        Raises:
            CombinationError: there is nothing to offload.
        """
        if sharding.granularity is Granularity.ddp and self.target is not OffloadTarget.none:
            raise CombinationError(
                f"sharding=ddp with offload={self.target.name}: DDP keeps every parameter on its "
                "device, there is nothing to offload; use offload=none or a sharded setting.",
                keys=("sharding", "offload"),
            )


@dataclass
class ReshardConfig:
    """`size` is the mesh that `to_size` reshards to; it divides the sharding degree."""

    policy: ReshardPolicy = key(ReshardPolicy.default, named_by_option=True)
    size: Optional[int] = key(None, at_least_one)

    def check(self, sharding: ShardingConfig, num_workers: int) -> None:
        """
        Raises:
            ConfigError: `to_size` without a size.
            CombinationError: a size that does not divide the sharding degree.
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
                keys=("reshard_after_forward.size", "cluster.num_workers", "sharding.dp_replicate"),
            )

    def effective(self, sharding: ShardingConfig, num_workers: int) -> tuple[str, int | None]:
        """Return the policy and size that these settings come to, the same for all that reshard alike.

        DDP reshards nothing. `default` keeps the root's parameters, so for `root` it is `never`; and a mesh of one
        worker, or of all, is `never` or `always` by another name (as FSDP2 itself reads it).
        """
        if sharding.granularity is Granularity.ddp:
            return "none", None
        if self.policy is ReshardPolicy.to_size and self.size in (1, num_workers // sharding.dp_replicate):
            return ("never" if self.size == 1 else "always"), None
        if self.policy is ReshardPolicy.default and sharding.granularity is Granularity.root:
            return "never", None
        return self.policy.name, self.size if self.policy is ReshardPolicy.to_size else None
