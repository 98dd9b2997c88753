"""Notes, each a sentence, about settings that do not do what one may expect."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fsdp_lab.config.parallel import Api, Dtype, Granularity, OffloadTarget, ReshardPolicy, ShardingConfig
from fsdp_lab.config.training import MemoryProfile
from fsdp_lab.config.trial import TrialConfig


def cpu_notes(config: TrialConfig) -> Iterator[str]:
    """Yield a sentence for each setting that changes nothing without a GPU."""
    if config.offload.target is not OffloadTarget.none:
        yield (
            f"offload={config.offload.target.name} has no effect on a CPU: parameters are in host memory "
            "already, and nothing is pinned."
        )
    if config.precision.tf32:
        yield "precision=tf32 has no effect on a CPU: it computes as with precision=fp32."


def gpu_notes(config: TrialConfig, has_tf32: bool) -> Iterator[str]:
    """Yield a sentence about the rate of float32 products on a GPU."""
    precision = config.precision
    if precision.tf32 and not has_tf32:
        yield "precision=tf32 has no effect on this GPU: TF32 needs compute capability 8.0 (Ampere) or newer."
    elif precision.param_dtype is Dtype.float32 and not precision.tf32 and has_tf32:
        yield (
            "precision.param_dtype=float32 multiplies matrices in full precision, as PyTorch does by default (its "
            "convolutions use TF32). precision=tf32 multiplies them in TF32, which is several times as fast."
        )


def memory_notes(config: TrialConfig) -> Iterator[str]:
    """Yield a sentence for each setting that limits what the memory profile shows."""
    if config.compile and config.memory_profile is not MemoryProfile.off:
        yield (
            "compile=true: the memory profile has what the allocators report. What the step allocates counts as "
            "`other`, since they do not report what it is for."
        )


def sharding_notes(config: TrialConfig, groups_compared: bool = False) -> Iterator[str]:
    """Yield a sentence about the cost of sharding only the root, and for each setting that DDP ignores.

    Args:
        groups_compared: an own optimizer gives sharded parameters the groups of whole ones.
    """
    sharding, reshard = config.sharding.granularity, config.reshard_after_forward.policy
    if sharding is Granularity.ddp and reshard is not ReshardPolicy.default:
        yield "reshard_after_forward has no effect with sharding=ddp: nothing is sharded."
    if config.sharding.api is Api.fsdp1:
        yield from _fsdp1_notes(config, groups_compared)
    if config.sharding.granularity is Granularity.root:
        yield (
            "sharding=root makes the whole model one unit. All parameters are gathered at once: the peak holds the "
            "full model, and communication does not overlap with computation. sharding=per_block gathers block by "
            "block."
        )


def _fsdp1_notes(config: TrialConfig, groups_compared: bool) -> Iterator[str]:
    """Yield a sentence for each setting that FSDP1 treats unlike FSDP2."""
    training, precision = config.training, config.precision
    if config.reshard_after_forward.policy is ReshardPolicy.always:
        yield (
            "sharding.api=fsdp1 with reshard_after_forward=always: FSDP1 keeps the root's parameters after the "
            "forward pass (FULL_SHARD)."
        )
    adds_up = training.grad_accum_steps > 1 and not training.sync_each_microbatch
    if adds_up and precision.param_dtype is not precision.reduce_dtype:
        yield (
            f"sharding.api=fsdp1 adds up the gradients of microbatches in {precision.param_dtype.value}, FSDP2 in "
            f"{precision.reduce_dtype.value}. training.sync_each_microbatch=true adds them up in float32."
        )
    if config.optimizer.target is not None and not groups_compared:
        yield (
            "sharding.api=fsdp1 gives the optimizer flat parts of parameters, of which a rank may have none: one that "
            "looks at a parameter's shape, or computes over all of it, does something else than with FSDP2."
        )


def node_notes(sharding: ShardingConfig, nodes: Sequence[str]) -> Iterator[str]:
    """Yield a sentence if a replica of hybrid sharding is on several nodes.

    Args:
        nodes: that of each rank.
    """
    size = len(nodes) // sharding.dp_replicate
    groups = [nodes[first : first + size] for first in range(0, len(nodes), size)]
    if split := sum(len(set(group)) > 1 for group in groups):
        yield (
            f"sharding.dp_replicate={sharding.dp_replicate}: {split} of {len(groups)} replicas, each of {size} "
            f"ranks, are on more than one node: their parameters cross the network. On each node use a multiple of "
            f"{size} workers."
        )
