"""From a forecast peak to whether it fits: what a device holds besides, and how much there is."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cache

from fsdp_lab.config import ConfigError, SweepConfig, TrialConfig, workers_of
from fsdp_lab.config.conf import DEVICE_KINDS, device_file, known_devices
from fsdp_lab.config.parallel import Granularity, ReshardPolicy
from fsdp_lab.config.sweep import Engine
from fsdp_lab.hardware import gpus, num_gpus
from fsdp_lab.metrics import mib
from fsdp_lab.speed.device import Device, load_device
from fsdp_lab.speed.fitted import believed
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


def for_cuda(config: SweepConfig) -> bool:
    """Whether the forecast is for GPUs: as `forecast.device` says, or where this machine has one."""
    device = config.forecast.device
    if device not in DEVICE_KINDS and (sheet := data_sheet(config)) is not None:
        return sheet.kind == "cuda"
    return device == "cuda" or (device == "auto" and num_gpus() > 0)


def data_sheet(config: SweepConfig) -> Device | None:
    """The device that `forecast.device` names, or with `auto` the GPU of this machine, where it has a data sheet; else
    None.

    Raises:
        ConfigError: its file is no data sheet.
    """
    claimed = _claimed(config)
    return None if claimed is None else believed(claimed)


def device_note(config: SweepConfig) -> str | None:
    """Return what to say of the device's file: that it claims an error which its figures do not have."""
    claimed = _claimed(config)
    if claimed is None or (taken := believed(claimed)) == claimed:
        return None
    return (
        f"the file of forecast.device={config.forecast.device} says `basis: {claimed.basis}`, and its figures are not "
        f"those that were fitted: it counts as `{taken.basis}` with error_elsewhere ({taken.error.p90 * 100:.2g} % for "
        "nine of ten); write `basis: data sheet` and its error."
    )


def _claimed(config: SweepConfig) -> Device | None:
    """The device as its file has it."""
    file = device_file(config.forecast.device)
    if file is not None:
        return load_device(file)
    names = {gpu.name for gpu in gpus()} if config.forecast.device == "auto" else set()
    return sheet_of(names.pop()) if len(names) == 1 else None


@cache
def sheet_of(gpu: str) -> Device | None:
    """The data sheet of a GPU, by the name that its driver tells."""
    sheets = (load_device(file) for name in known_devices() if (file := device_file(name)) is not None)
    return next((sheet for sheet in sheets if sheet.name == gpu), None)


def check_device(config: SweepConfig, num_workers: int) -> None:
    """
    Raises:
        ConfigError: the device's file is no data sheet, or nodes of its size do not make up the workers.
    """
    sheet = data_sheet(config)
    if sheet is not None and num_workers > sheet.node_size and num_workers % sheet.node_size:
        raise ConfigError(
            f"cluster.num_workers={num_workers} with forecast.device={config.forecast.device}: its nodes have "
            f"{sheet.node_size} devices, and {num_workers} are no whole number of nodes; use a multiple of "
            f"{sheet.node_size}, or fewer."
        )


def check_sweep(config: SweepConfig) -> None:
    """`check_here` for trials that Ray is to run on this machine; those of a cluster elsewhere are not known yet.

    Raises:
        ConfigError: see `check_here`.
    """
    if config.engine is Engine.ray and config.cluster.address is None:
        check_here(config, workers_of(config), num_gpus() > 0)


def check_here(config: SweepConfig, num_workers: int, cuda: bool) -> None:
    """
    Raises:
        ConfigError: see `check_device`; or trials are to be chosen by what is predicted for a device that is not here.
    """
    check_device(config, num_workers)
    asked = config.forecast
    if asked.device in DEVICE_KINDS or data_sheet_here(config, cuda) is not None:
        return
    here = ", ".join(sorted({gpu.name for gpu in gpus()})) or "CPUs"
    for name, value in (("keep", asked.keep), ("prune", "true" if asked.prune else None)):
        if value is not None and (name == "keep" or capacity_here(config, cuda) is None):
            raise ConfigError(
                f"forecast.{name}={value} with forecast.device={asked.device}: these trials run on {here}, and "
                f"what is predicted for another device says nothing of them; leave forecast.{name} out, or rank the "
                "settings for that device by python -m fsdp_lab.forecast -m."
            )


def data_sheet_here(config: SweepConfig, cuda: bool) -> Device | None:
    """The device that `forecast.device` names, where trials run on it, as far as this machine can tell: the GPUs of a
    cluster elsewhere are not seen."""
    sheet = data_sheet(config)
    if sheet is None or (sheet.kind == "cuda") is not cuda:
        return None
    return sheet if not cuda or {gpu.name for gpu in gpus()} <= {sheet.name} else None


def capacity_bytes(config: SweepConfig, cuda: bool) -> int | None:
    """`forecast.capacity_gib`, or the memory of the device that is named, or of the smallest GPU here when the forecast
    is for GPUs."""
    if config.forecast.capacity_gib is None and config.forecast.device not in DEVICE_KINDS:
        sheet = data_sheet(config)
        return None if sheet is None else int(sheet.memory_gib * GIB)
    return capacity_here(config, cuda)


def capacity_here(config: SweepConfig, cuda: bool) -> int | None:
    """The same for trials that run: a named device's memory is not that of the GPUs here."""
    if config.forecast.capacity_gib is not None:
        return int(config.forecast.capacity_gib * GIB)
    if cuda and num_gpus():
        return gpu_memory()
    sheet = data_sheet_here(config, cuda)
    return None if sheet is None else int(sheet.memory_gib * GIB)


def gpu_memory() -> int | None:
    """Bytes of the smallest GPU, or None. The driver is asked: PyTorch would take a context on the GPU."""
    return min((gpu.memory_bytes for gpu in gpus() if gpu.memory_bytes), default=None)
