"""Notes, each a sentence, about settings that do not do what one may expect."""

from __future__ import annotations

from collections.abc import Iterator

from fsdp_lab.config.parallel import Granularity, OffloadTarget, ReshardPolicy
from fsdp_lab.config.training import MemoryProfile
from fsdp_lab.config.trial import TrialConfig


def cpu_notes(config: TrialConfig) -> Iterator[str]:
    """Yield a sentence for each setting that changes nothing without a GPU."""
    if config.offload.target is not OffloadTarget.none:
        yield (
            f"offload={config.offload.target.name} has no effect on a CPU: parameters are in host memory "
            "already, and nothing is pinned."
        )


def memory_notes(config: TrialConfig) -> Iterator[str]:
    """Yield a sentence for each setting that makes the memory profile differ from the training."""
    if config.compile and config.memory_profile is not MemoryProfile.off:
        yield (
            "compile=true: the memory profile and the forecast follow an eager step. They include tensors that the "
            "compiler fuses away."
        )
    if config.precision.float8:
        yield (
            "precision=float8 is forecast as bf16_mixed: both keep bfloat16 tensors for the backward pass. The float8 "
            "copies of a product are not counted."
        )
    if config.compile_memory_budget is not None and config.memory_profile is not MemoryProfile.off:
        yield (
            f"compile_memory_budget={config.compile_memory_budget}: the forecast and the breakdown do not include the "
            "effect of this budget. On a GPU the measured peak does."
        )


def sharding_notes(config: TrialConfig) -> Iterator[str]:
    """Yield a sentence about the cost of sharding only the root, and for each setting that DDP ignores."""
    sharding, reshard = config.sharding.granularity, config.reshard_after_forward.policy
    if sharding is Granularity.ddp and reshard is not ReshardPolicy.default:
        yield f"reshard_after_forward={reshard.name} has no effect with sharding=ddp: nothing is sharded."
    if config.sharding.granularity is Granularity.root:
        yield (
            "sharding=root makes the whole model one unit. All parameters are gathered at once: the peak holds the "
            "full model, and communication does not overlap with computation. sharding=per_block gathers block by "
            "block."
        )
