"""What a device holds in addition to tensors, and whether that fits. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from fsdp_lab.config import TrialConfig
from fsdp_lab.config.axes.activation_offload import ActivationOffload
from fsdp_lab.config.axes.offload import OffloadTarget
from fsdp_lab.config.axes.precision import Dtype
from fsdp_lab.config.axes.reshard import ReshardPolicy
from fsdp_lab.config.ranks import Ranks
from fsdp_lab.config.training import CheckpointMode
from fsdp_lab.forecast.allocator import FLAT_STREAMS, STREAMS, allocator_peaks, expands
from fsdp_lab.forecast.speed.predict import Speed
from fsdp_lab.memory.profile import Profile
from fsdp_lab.training.layout import Layout

GIB = 2**30
_EXPORTED = {True: 2, False: 4}  # bytes per parameter: rank 0 gathers the whole model in its storage type

# CUDA memory outside of tensors. On an H200 the context and NCCL of one worker took 1.3 GiB together, and the
# workspaces 64 to 66 MiB (experiments/gpu).
CONTEXT_BYTES = 820 * 2**20
NCCL_BYTES = 512 * 2**20  # of one communicator
COMPRESSED = "compressed gradients"
WORKSPACE_BYTES = 64 * 2**20  # cuBLAS and cuBLASLt, 32 MiB each on Hopper

# The share of a GPU up to which a forecast fits for sure, not counting what the allocator could return. On an H200
# (experiments/gpu) 11 of 12 settings reserved more than forecast, by up to 8.4 %. Of 201 published steps
# (experiments/published) 55 were forecast to need more than this share, and ran; 46 of these are of one publisher, and
# six of them took 20 to 39 % longer than predicted.
SURE = 0.9
FULL_ERROR = 0.18  # nine of ten of the 46 predictions were off by less


@dataclass(frozen=True)
class NoForecast:
    """Why there is no forecast, as a code with values.

    Attributes:
        code: `model_error`: training would fail with the same error on any machine; `user_error`: it would fail on this
            one, which may lack files; `not_followed`: training works, but a forecast cannot follow it; `error`: any
            other exception; `lost`: its process ended or was late; `cancelled`: an interrupt came first.
        text: the error's message; for `lost`, what happened to the process.
        error: the class of the error.
        at: the line that raised it: of the user's code if there is one.
    """

    code: Literal["model_error", "user_error", "not_followed", "error", "lost", "late", "cancelled"]
    text: str = ""
    error: str = ""
    at: str = ""


@dataclass(frozen=True)
class Host:
    """The host of some GPUs.

    Attributes:
        memory_bytes: None: not known.
        num_workers: the workers that share it.
    """

    memory_bytes: int | None = None
    num_workers: int = 1


@dataclass(frozen=True)
class Solved:
    """What `forecast.solve` found.

    Attributes:
        name: `batch`, `gpus` or `capacity`.
        value: the samples of a microbatch, the workers, or the bytes of a device; 0: nothing fits.
        forecast: with this value; if nothing fits, with the nearest one: one sample, or the most workers.
        samples_per_worker: of that forecast.
    """

    name: str
    value: int
    forecast: Forecast
    samples_per_worker: int


@dataclass(frozen=True)
class Forecast:
    """The memory of one worker, in bytes, and its speed.

    Attributes:
        peaks: place -> category -> bytes, with `total`, as in `fsdp_lab.memory.profile`.
        active_bytes: the peak in the allocator's blocks on a GPU; None for a CPU.
        reserved_bytes: what the allocator takes from the GPU; None for a CPU.
        expandable: whether its segments are expandable.
        allowances: what the device holds outside of tensors, by name.
        host_allowances: the same for the host.
        host_once: what only one worker holds on its host at the end, by name: the model that it exports.
        capacity_bytes: of the device; None: not known.
        solved: the answer to `forecast.solve`; None: not asked.
        data_sheet: the name of the device that is forecast; None: it has no data sheet.
        speed: of the step on that device; None: it has no data sheet, or see `no_speed`.
        no_speed: why there is no speed.
        error: why there is no forecast, and no peaks.
        traceback: of that error, if it was raised from another error, such as one in the user's code; else "".
        num_params: of the whole model, and of the worker's part.
        host: of the worker.
        layout: how the model was divided; None without a forecast.
    """

    cuda: bool
    num_workers: int
    peaks: dict[str, dict[str, int]] = field(default_factory=dict)
    allowances: dict[str, int] = field(default_factory=dict)
    host_allowances: dict[str, int] = field(default_factory=dict)
    capacity_bytes: int | None = None
    solved: Solved | None = None
    active_bytes: int | None = None
    reserved_bytes: int | None = None
    data_sheet: str | None = None
    speed: Speed | None = None
    no_speed: str | None = None
    error: NoForecast | None = None
    traceback: str = ""
    num_params: tuple[int, int] = (0, 0)
    host: Host = field(default_factory=Host)
    layout: Layout | None = None
    host_once: dict[str, int] = field(default_factory=dict)
    expandable: bool = False

    @property
    def peak_bytes(self) -> int:
        return self.peaks["device"]["total"]

    @property
    def host_bytes(self) -> int:
        """Of the tensors on the host while a GPU computes; 0 on a CPU, where the host is the device."""
        return self.peaks.get("host", {}).get("total", 0) + sum(self.host_allowances.values())

    @property
    def host_needed_bytes(self) -> int:
        """The same for all workers of a host, with what only one of them holds."""
        return self.host_bytes * self.host.num_workers + sum(self.host_once.values())

    @property
    def is_offloaded(self) -> bool:
        """Whether the host holds parameters or what blocks save."""
        held = self.peaks.get("host", {})
        return bool(held.get("param")) or held.get("activation", 0) >= 2**20  # less is of a loss

    @property
    def host_is_short(self) -> bool:
        """Whether the workers of a host need more memory than it has."""
        capacity = self.host.memory_bytes
        return self.error is None and capacity is not None and self.host_needed_bytes > capacity

    @property
    def needed_bytes(self) -> int:
        """The peak with all allowances."""
        return self.peak_bytes + sum(self.allowances.values())

    @property
    def least_bytes(self) -> int:
        """The peak with all allowances if the allocator caches nothing.

        Training cannot run with less: on a full device the allocator returns its cache. With `needed_bytes` it need
        not.
        """
        if self.active_bytes is None or self.reserved_bytes is None:
            return self.needed_bytes
        waiting = self.allowances.get(COMPRESSED, 0)  # for NCCL, which frees them soon
        return self.needed_bytes - waiting - self.reserved_bytes + self.active_bytes

    @property
    def sure_bytes(self) -> int:
        """The smallest memory of a device that it fits for sure."""
        return max(self.needed_bytes, math.ceil(self.least_bytes / SURE)) if self.cuda else self.needed_bytes

    @property
    def fits(self) -> bool | None:
        """Whether it fits its device and its host for sure; None without a forecast or a capacity."""
        if self.host_is_short:
            return False
        if self.capacity_bytes is None or self.error:
            return None
        return self.sure_bytes <= self.capacity_bytes

    @property
    def unsure(self) -> bool:
        """Whether it may fit: within the error of forecasts, or if the allocator returns its cache.

        Such a setting may run slower, or run out of memory.
        """
        if self.fits is not False or self.host_is_short or self.capacity_bytes is None:
            return False
        return self.least_bytes <= self.capacity_bytes

    @property
    def nearly_full(self) -> bool:
        """Whether the allocator may have to free and retry, which makes a step slower than predicted."""
        if not self.cuda or self.error or self.capacity_bytes is None:
            return False
        return self.needed_bytes > SURE * self.capacity_bytes

    @property
    def shortage(self) -> dict[str, int]:
        """The values of `Code.does_not_fit` for the device, or for a host that is short; the capacity must be known."""
        needed, capacity, peak = self.needed_bytes, self.capacity_bytes, self.peak_bytes
        if self.host_is_short:
            needed, capacity, peak = self.host_needed_bytes, self.host.memory_bytes, self.host_bytes
        assert capacity is not None
        workers = {"workers": self.host.num_workers} if self.host_is_short else {}
        return {"needed_bytes": needed, "capacity_bytes": capacity, "peak_bytes": peak, **workers}


def on_capacity(forecast: Forecast, capacity_bytes: int | None, host: Host = Host()) -> Forecast:
    """Return the forecast for a device of this capacity.

    If it nearly fills a GPU, its speed has a wider range, and the error of ratios to other settings is not known.

    Args:
        forecast: with the range of its speed as `predict` returns it.
        capacity_bytes: None: not known.
        host: of the device.
    """
    forecast = replace(forecast, capacity_bytes=capacity_bytes, host=host)
    if forecast.speed is None or not forecast.nearly_full:
        return forecast
    slowest = forecast.speed.step_s / (1 - FULL_ERROR)
    return replace(forecast, speed=replace(forecast.speed, high_s=max(forecast.speed.high_s, slowest), relative=None))


def on_host(forecast: Forecast, config: TrialConfig) -> Forecast:
    """Return a forecast for a GPU with what a trial holds on the host outside of its steps; others unchanged."""
    if not forecast.cuda or forecast.error:
        return forecast
    held, allowances = forecast.peaks, dict(forecast.host_allowances)
    if config.data.loader_workers:  # PyTorch's loader keeps two batches per process ready
        allowances["prefetched batches"] = 2 * config.data.loader_workers * held.get("host", {}).get("input", 0)
    if config.checkpoint.mode is CheckpointMode["async"]:
        allowances["staged checkpoint"] = sum(
            of.get(name, 0) for of in held.values() for name in ("param", "optimizer")
        )
    size = _EXPORTED[config.precision.is_narrow] * forecast.num_params[0]
    exported = {"exported model": size} if config.export else {}
    return replace(forecast, host_allowances=allowances, host_once=exported)


def weigh(
    profile: Profile,
    num_trained: int,
    config: TrialConfig,
    num_workers: int,
    cuda: bool,
    capacity: int | None,
    streams: Mapping[str, str] = STREAMS,
    expandable: bool | None = None,
) -> Forecast:
    """Return the memory that a device needs for a profile. On a CPU, memory comes from the system: nothing is reserved.

    Args:
        num_trained: parameters of the rank that get gradients.
        capacity: of the device, in bytes; None: not known.
        streams: see `allocator_peaks`.
        expandable: see `CachingAllocator`; None: as the environment says.
    """
    if not cuda:
        return Forecast(False, num_workers, profile.peaks, capacity_bytes=capacity)
    sharded, peak = config.sharding.kind != "ddp", profile.peaks["device"]
    expandable = expands() if expandable is None else expandable
    flat = config.sharding.kind == "fsdp1"
    streams = FLAT_STREAMS if flat else streams
    taken = allocator_peaks(profile, sharded, [WORKSPACE_BYTES], streams, expandable, flat)
    allowances = {
        "CUDA context": CONTEXT_BYTES,
        "NCCL buffers": NCCL_BYTES * communicators(config, num_workers),
        "kernel workspaces": WORKSPACE_BYTES,
        "fragmentation": taken.reserved - peak["total"] - WORKSPACE_BYTES,
    }
    precision = config.precision
    if not sharded and precision.reduce_dtype is not Dtype.float32 and not precision.is_narrow:
        # NCCL's watchdog frees sent tensors every 0.1 s: two copies, as on an H200 with steps of 0.05 s
        allowances[COMPRESSED] = 2 * 2 * num_trained
    pinned = {"input", *(("param", "grad") if config.offload.target is OffloadTarget.cpu else ())}
    if config.activation_offload is not ActivationOffload.none:
        pinned.add("activation")
    return Forecast(
        True,
        num_workers,
        profile.peaks,
        allowances,
        {"rounding of pinned buffers": pinned_rounding(profile, pinned)},
        capacity,
        active_bytes=taken.active,
        reserved_bytes=taken.reserved,
        expandable=expandable,
    )


def pinned_rounding(profile: Profile, pinned: Collection[str]) -> int:
    """Return the bytes that pinned buffers waste at the host's peak.

    PyTorch's pinned allocator rounds each up to a power of two.

    Args:
        pinned: the categories. The loader pins batches; `offload=cpu` pins parameters and gradients, not the
            optimizer's state; `activation_offload=cpu` pins activations.
    """
    peak = profile.peak("host")
    sizes = [held.num_bytes for held in peak.held if held.category in pinned] if peak else []
    return sum((1 << (size - 1).bit_length()) - size for size in sizes)


def communicators(config: TrialConfig, num_workers: int) -> int:
    """Return the number of NCCL communicators of one worker.

    One is for the world. Two each are for the meshes of hybrid sharding and of tensor parallelism. One each is for the
    smaller mesh of `reshard_after_forward=to_size` and for `sharding.separate_reduce_scatter_group`.
    """
    if num_workers == 1:
        return 1  # its group is bound to its GPU
    sharding, reshard = config.sharding, config.reshard_after_forward
    if sharding.kind == "ddp":
        return 1
    smaller = reshard.policy is ReshardPolicy.to_size and reshard.size not in (1, Ranks.of(sharding, num_workers).shard)
    meshes = (sharding.dp_replicate > 1) + (sharding.tp > 1)
    return 1 + 2 * meshes + smaller + sharding.separate_reduce_scatter_group
