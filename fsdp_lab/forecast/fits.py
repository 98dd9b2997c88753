"""From a forecast peak to whether it fits: what a device holds besides."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from fsdp_lab.config import TrialConfig
from fsdp_lab.config.parallel import Granularity, ReshardPolicy
from fsdp_lab.metrics import mib
from fsdp_lab.speed.predict import Speed

GIB = 2**30

# What no tensor shows, on CUDA. Assumptions, on the high side: no GPU has confirmed them yet.
CONTEXT_BYTES = 600 * 2**20
NCCL_BYTES = 512 * 2**20  # buffers of the channels of one communicator; none for a single worker
WORKSPACE_BYTES = 64 * 2**20  # cuBLAS and cuBLASLt, 32 MiB each on Hopper


@dataclass(frozen=True)
class Forecast:
    """What one worker will hold, in bytes.

    `peaks`: place -> category -> bytes, with `total`, as in `fsdp_lab.profile`. `active_bytes`: what tensors occupy of
    a GPU at once, in the allocator's blocks; `reserved_bytes`: what the allocator takes from it; both None for a CPU.
    `allowances`: what no tensor shows, by name, on the device; `host_allowances`
    likewise. `capacity_bytes` None: not known.
    `largest_microbatch`: images a worker takes at once, 0 where not even one fits; None: not asked.
    `data_sheet`: the name of the device that is forecast, where it has one. `speed`: of the step on it; None: no device
    with a data sheet was named, or `no_speed` says why there is none.
    `error`: why there is no forecast; then there are no peaks. `fails`: training would end with the same error.
    """

    cuda: bool
    num_workers: int
    peaks: dict[str, dict[str, int]] = field(default_factory=dict)
    allowances: dict[str, int] = field(default_factory=dict)
    host_allowances: dict[str, int] = field(default_factory=dict)
    capacity_bytes: int | None = None
    largest_microbatch: int | None = None
    active_bytes: int | None = None
    reserved_bytes: int | None = None
    data_sheet: str | None = None
    speed: Speed | None = None
    no_speed: str | None = None
    error: str | None = None
    fails: bool = False

    @property
    def peak_bytes(self) -> int:
        return self.peaks["device"]["total"]

    def of(self, categories: Iterable[str]) -> int:
        """The bytes of these categories in the peak of the device."""
        return sum(self.peaks["device"].get(category, 0) for category in categories)

    @property
    def host_bytes(self) -> int:
        """Of the tensors that live on the host while a GPU computes; 0 on a CPU, whose memory is the device's."""
        return self.peaks.get("host", {}).get("total", 0) + sum(self.host_allowances.values())

    @property
    def needed_bytes(self) -> int:
        """The peak with what is allowed for besides."""
        return self.peak_bytes + sum(self.allowances.values())

    @property
    def fits(self) -> bool | None:
        """None where the capacity is not known, or there is no forecast."""
        if self.capacity_bytes is None or self.error:
            return None
        return self.needed_bytes <= self.capacity_bytes

    @property
    def tight(self) -> bool:
        """It does not fit, but would if the allocator gave back to the device what it only caches. It does that when
        the device is full: such a setting may run, slower, or run out of memory all the same."""
        if self.fits is not False or self.active_bytes is None or self.reserved_bytes is None:
            return False
        assert self.capacity_bytes is not None
        return self.needed_bytes - self.reserved_bytes + self.active_bytes <= self.capacity_bytes

    @property
    def shortage(self) -> str:
        """Why it does not fit, where the capacity is known: `needs 12.00 MiB of 8.00 MiB a device by the forecast`."""
        assert self.capacity_bytes is not None
        return (
            f"needs {mib(self.needed_bytes)} MiB of {mib(self.capacity_bytes)} MiB a device by the forecast "
            f"(peak {mib(self.peak_bytes)}, the rest allowed for)"
        )


def allowances(peak_bytes: int, reserved_bytes: int, num_communicators: int) -> dict[str, int]:
    """What a GPU holds besides the tensors of the peak.

    Args:
        reserved_bytes: what the allocator is forecast to take from the GPU, `WORKSPACE_BYTES` among it.
        num_communicators: see `communicators`.
    """
    return {
        "CUDA context": CONTEXT_BYTES,
        "NCCL buffers": NCCL_BYTES * num_communicators,
        "kernel workspaces": WORKSPACE_BYTES,
        "fragmentation": reserved_bytes - peak_bytes - WORKSPACE_BYTES,
    }


def communicators(config: TrialConfig, num_workers: int) -> int:
    """The NCCL communicators of one worker: one for the world, two for the mesh of hybrid sharding, one for the smaller
    mesh of `reshard_after_forward=to_size`, and one of `sharding.separate_reduce_scatter_group`. None for a single
    worker."""
    if num_workers == 1:
        return 0
    sharding, reshard = config.sharding, config.reshard_after_forward
    if sharding.granularity is Granularity.ddp:
        return 1
    dp_shard = num_workers // sharding.dp_replicate
    smaller = reshard.policy is ReshardPolicy.to_size and reshard.size not in (1, dp_shard)
    return 1 + (2 if sharding.dp_replicate > 1 else 0) + smaller + sharding.separate_reduce_scatter_group
