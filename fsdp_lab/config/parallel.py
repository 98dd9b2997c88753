"""The axes of a sweep: how a model is sharded among workers, its precision, and where its parameters are kept."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Optional  # OmegaConf reads this on every Python that this project supports

from fsdp_lab.config.key import at_least_one, key, not_negative, positive


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


class Api(Enum):
    """PyTorch's implementation of sharding: `fully_shard`, or the older `FullyShardedDataParallel`."""

    fsdp2 = "fsdp2"
    fsdp1 = "fsdp1"


class Embeddings(Enum):
    """Where `per_block` puts what is outside of the blocks; see `ShardingConfig.embeddings`."""

    root = "root"
    own = "own"


@dataclass
class ShardingConfig:
    """How the model is divided among workers."""

    api: Api = key(Api.fsdp2)
    """`fsdp2` (`fully_shard`) or `fsdp1` (`FullyShardedDataParallel`)."""
    granularity: Granularity = key(Granularity.per_block, named_by_option=True)
    """What becomes an FSDP unit: none (`ddp`), the whole model, each block, each layer, or each module above a size."""
    dp_replicate: int = key(1, at_least_one)
    """Replicas of the sharded model; above 1 sharding is hybrid, over workers / (dp_replicate * tp) ranks."""
    tp: int = key(1, at_least_one)
    """Tensor-parallel ranks, which share each layer and the samples of a microbatch."""
    min_num_params: Optional[int] = key(None, at_least_one)
    """Smallest number of parameters of a unit; `size_based` requires it."""
    blocks_per_unit: int = key(1, at_least_one)
    """Consecutive blocks that share one unit of `per_block`."""
    embeddings: Embeddings = key(Embeddings.root)
    """Embeddings, last norm and head are part of the root's unit (`root`), or units of their own (`own`)."""
    separate_reduce_scatter_group: bool = key(False)
    """Reduce gradients on a separate communicator, in parallel with the all-gathers."""
    forward_prefetch: Optional[int] = key(None, not_negative)
    """Units to gather ahead in the forward pass; null: PyTorch's default."""
    backward_prefetch: Optional[int] = key(None, not_negative)
    """Units to gather ahead in the backward pass; null: PyTorch's default."""
    limit_all_gathers: bool = key(True)
    """FSDP1's option of that name: at most two gathered units at once. FSDP2 always limits them."""
    find_unused_parameters: bool = key(False)
    """For ranks that leave out other parameters: DDP looks for them in every step, FSDP2 reduces zeros for them."""

    @property
    def api_name(self) -> str:
        return self.api.name.upper()

    def dp_degree(self, num_workers: int) -> int:
        """Return how many parts a batch has: tensor-parallel ranks share one."""
        return num_workers // self.tp

    def dp_shard(self, num_workers: int) -> int:
        """Return over how many ranks a parameter is sharded."""
        return num_workers // (self.dp_replicate * self.tp)


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


@dataclass
class ReshardConfig:
    """What happens to gathered parameters after the forward pass."""

    policy: ReshardPolicy = key(ReshardPolicy.default, named_by_option=True)
    """Free gathered parameters (`always`, ZeRO-3), keep them (`never`, ZeRO-2), keep only the root's (`default`), or
    reshard to a smaller mesh (`to_size`)."""
    size: Optional[int] = key(None, at_least_one)
    """Ranks of the smaller mesh of `to_size`; it divides the sharding degree."""

    def effective(self, sharding: ShardingConfig, num_workers: int) -> tuple[str, int | None]:
        """Return the policy and size that these settings resolve to, equal for all settings that reshard alike.

        DDP reshards nothing: `("none", None)`. `default` keeps the root's parameters, so for `root` it is `never`. A
        mesh of one worker is `never` and a mesh of all workers is `always`, as FSDP2 itself reads it. FSDP1 keeps the
        root's in any case, so its `always` is `default`, and shards nothing on one worker.
        """
        if sharding.granularity is Granularity.ddp:
            return "none", None
        if sharding.api is Api.fsdp1:
            keeps = self.policy is ReshardPolicy.never or sharding.dp_shard(num_workers) == 1
            return ("never" if keeps else "default"), None
        if self.policy is ReshardPolicy.to_size and self.size in (1, sharding.dp_shard(num_workers)):
            return ("never" if self.size == 1 else "always"), None
        if self.policy is ReshardPolicy.default and sharding.granularity is Granularity.root:
            return "never", None
        return self.policy.name, self.size if self.policy is ReshardPolicy.to_size else None
