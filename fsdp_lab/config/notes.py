"""Settings that do not do what one may expect of them, each as a sentence."""

from __future__ import annotations

from collections.abc import Iterator

from fsdp_lab.config.parallel import Granularity, OffloadTarget, ReshardPolicy
from fsdp_lab.config.training import MemoryProfile
from fsdp_lab.config.trial import TrialConfig


def cpu_notes(config: TrialConfig) -> Iterator[str]:
    """Settings that change nothing where there is no GPU, each as a sentence."""
    if config.offload.target is not OffloadTarget.none:
        yield (
            f"offload={config.offload.target.name} has no effect on a CPU: parameters are in host memory "
            "already, and nothing is pinned."
        )


def memory_notes(config: TrialConfig) -> Iterator[str]:
    """Where a profile is of something else than what trains."""
    if config.compile and config.memory_profile is not MemoryProfile.off:
        yield (
            "compile=true: the step that is followed for the memory profile runs eagerly, so its breakdown and the "
            "forecast are those of the model without compile; what the compiler fuses is never held."
        )
    if config.precision.float8:
        yield (
            "precision=float8 is forecast as bf16_mixed: what is kept for the backward pass is bfloat16 in both, and "
            "the float8 copies of a product are not counted."
        )
    if config.compile_memory_budget is not None and config.memory_profile is not MemoryProfile.off:
        yield (
            f"compile_memory_budget={config.compile_memory_budget} is the compiler's: the forecast and the breakdown "
            "do not know it. On a GPU the peak is the allocator's, and shows it."
        )


def sharding_notes(config: TrialConfig) -> Iterator[str]:
    """What sharding only the root costs, and what does nothing under DDP, for those who did not know."""
    sharding, reshard = config.sharding.granularity, config.reshard_after_forward.policy
    if sharding is Granularity.ddp and reshard is not ReshardPolicy.default:
        yield f"reshard_after_forward={reshard.name} has no effect with sharding=ddp: nothing is sharded."
    if config.sharding.granularity is Granularity.root:
        yield (
            "sharding=root makes one unit of the whole model: all parameters are gathered at once, so the peak "
            "holds the full model and no communication overlaps with computation; sharding=per_block gathers block by "
            "block."
        )
