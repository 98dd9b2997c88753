"""The GPUs and cores of this machine: the one place that counts them.

GPUs come from NVML, the driver's own library, which Ray and nvidia-smi ask too. That takes no context on a GPU and no
slow import. Each worker compares the count with what PyTorch sees (`engine/worker.py`).
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import platform
import re
import shutil
import sys
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

_LIBRARY = "libnvidia-ml.so.1"
_TEXT_BYTES = 96  # NVML's longest: a device's name or UUID
_MAX_CPUS_PER_WORKER = 16
_MAX_LOADER_WORKERS = 4
_LEAST_SHARED_MEMORY = 2**30  # Docker gives 64 MiB where nobody asks for more
# Cores that a launcher gave to this process; see `worker_cpus`.
WORKER_CPUS = "FSDP_LAB_WORKER_CPUS"


@dataclass(frozen=True)
class Gpu:
    """A device as CUDA counts them: a GPU, or a MIG instance of one.

    `index`: NVML's, of the whole GPU. `uuid` and `name` are "" and `memory_bytes`, what CUDA may have of it, is 0 where
    the driver does not say.
    """

    index: int
    uuid: str
    name: str
    memory_bytes: int


@dataclass(frozen=True)
class Driver:
    """`version`: as in "535.104.05". `cuda`: the highest CUDA version that it supports; None: it does not say."""

    version: str
    cuda: tuple[int, int] | None


@dataclass(frozen=True)
class _Physical:
    """A GPU and, where MIG is on, its instances; without any, CUDA does not see the GPU either.

    `capability`: None where the driver does not say.
    """

    gpu: Gpu
    mig: bool
    instances: tuple[Gpu, ...] = ()
    capability: tuple[int, int] | None = None


class _MemoryInfo(ctypes.Structure):
    """`nvmlMemory_v2_t`."""

    _fields_ = (
        ("version", ctypes.c_uint),
        ("total", ctypes.c_ulonglong),
        ("reserved", ctypes.c_ulonglong),
        ("free", ctypes.c_ulonglong),
        ("used", ctypes.c_ulonglong),
    )


class _NvmlError(Exception):
    """NVML is not there, or refused."""


class _Nvml:
    """The few calls of NVML that are needed, between `nvmlInit` and `nvmlShutdown`."""

    def __init__(self) -> None:
        try:
            self._library = ctypes.CDLL(_LIBRARY)
        except OSError as error:
            raise _NvmlError(str(error)) from error

    def __enter__(self) -> _Nvml:
        self.call("nvmlInit_v2")
        return self

    def __exit__(self, *_: object) -> None:
        self.call("nvmlShutdown")

    def call(self, function: str, *arguments: object) -> None:
        """
        Raises:
            _NvmlError: this NVML lacks the function, or it returned an error.
        """
        try:
            status = getattr(self._library, function)(*arguments)
        except AttributeError as error:  # an older driver
            raise _NvmlError(function) from error
        if status != 0:
            raise _NvmlError(f"{function} returned {status}")

    def text(self, function: str, *arguments: object) -> str:
        buffer = ctypes.create_string_buffer(_TEXT_BYTES)
        self.call(function, *arguments, buffer, ctypes.c_uint(_TEXT_BYTES))
        return buffer.value.decode(errors="replace")

    def number(self, function: str, *arguments: object) -> int:
        value = ctypes.c_uint()
        self.call(function, *arguments, ctypes.byref(value))
        return value.value

    def handle(self, function: str, *arguments: object) -> ctypes.c_void_p:
        handle = ctypes.c_void_p()
        self.call(function, *arguments, ctypes.byref(handle))
        return handle

    def memory(self, handle: ctypes.c_void_p) -> int:
        """What CUDA may have of it: the second form tells what the driver keeps for itself."""
        info = _MemoryInfo(version=ctypes.sizeof(_MemoryInfo) | 2 << 24)
        try:
            self.call("nvmlDeviceGetMemoryInfo_v2", handle, ctypes.byref(info))
            return int(info.total - info.reserved)
        except _NvmlError:  # an older driver
            total_free_used = (ctypes.c_ulonglong * 3)()
            self.call("nvmlDeviceGetMemoryInfo", handle, ctypes.byref(total_free_used))
            return int(total_free_used[0])

    def gpu(self, index: int, handle: ctypes.c_void_p) -> Gpu:
        """A GPU counts also where a container is not told its name, UUID or memory."""
        found: dict[str, Any] = {"uuid": "", "name": "", "memory_bytes": 0}
        for key, ask in (
            ("uuid", lambda: self.text("nvmlDeviceGetUUID", handle)),
            ("name", lambda: self.text("nvmlDeviceGetName", handle)),
            ("memory_bytes", lambda: self.memory(handle)),
        ):
            with suppress(_NvmlError):
                found[key] = ask()
        return Gpu(index, **found)

    def physical(self, index: int) -> _Physical:
        handle = self.handle("nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(index))
        gpu = self.gpu(index, handle)
        current, pending = ctypes.c_uint(), ctypes.c_uint()
        try:
            self.call("nvmlDeviceGetMigMode", handle, ctypes.byref(current), ctypes.byref(pending))
        except _NvmlError:  # neither this GPU nor this driver has MIG
            return _Physical(gpu, mig=False, capability=self.capability(handle))
        instances = tuple(self._instances(index, handle)) if current.value else ()
        return _Physical(gpu, bool(current.value), instances, self.capability(handle))

    def capability(self, handle: ctypes.c_void_p) -> tuple[int, int] | None:
        major, minor = ctypes.c_int(), ctypes.c_int()
        try:
            self.call("nvmlDeviceGetCudaComputeCapability", handle, ctypes.byref(major), ctypes.byref(minor))
        except _NvmlError:
            return None
        return major.value, minor.value

    def _instances(self, index: int, handle: ctypes.c_void_p) -> list[Gpu]:
        found = []
        for number in range(self.number("nvmlDeviceGetMaxMigDeviceCount", handle)):
            try:
                mig = self.handle("nvmlDeviceGetMigDeviceHandleByIndex", handle, ctypes.c_uint(number))
            except _NvmlError:  # nothing was made in this place
                continue
            found.append(self.gpu(index, mig))
        return found

    def driver(self) -> Driver:
        version = self.text("nvmlSystemGetDriverVersion")
        # The second form asks libcuda itself, which may be newer than the driver (NVIDIA's cuda-compat packages).
        for function in ("nvmlSystemGetCudaDriverVersion_v2", "nvmlSystemGetCudaDriverVersion"):
            try:
                cuda = self.number(function)
            except _NvmlError:
                continue
            return Driver(version, (cuda // 1000, cuda % 1000 // 10))
        return Driver(version, None)


@cache
def _machine() -> tuple[Driver, tuple[_Physical, ...]] | None:
    """The driver and all its GPUs, whoever may use them; None without NVML."""
    try:
        with _Nvml() as nvml:
            count = nvml.number("nvmlDeviceGetCount_v2")
            return nvml.driver(), tuple(nvml.physical(index) for index in range(count))
    except _NvmlError:
        return None


def driver() -> Driver | None:
    """The NVIDIA driver; None where there is none."""
    machine = _machine()
    return machine[0] if machine else None


def gpus() -> list[Gpu]:
    """The GPUs that this process may use, as CUDA counts them under `CUDA_VISIBLE_DEVICES`; [] without a driver."""
    machine = _machine()
    return _visible(machine[1], os.environ.get("CUDA_VISIBLE_DEVICES")) if machine else []


def least_capability() -> tuple[int, int] | None:
    """The lowest compute capability of the GPUs that this process may use, such as (9, 0); None: there is none, or the
    driver does not say."""
    machine = _machine()
    if machine is None:
        return None
    found = {physical.gpu.index: physical.capability for physical in machine[1]}
    return min((told for gpu in gpus() if (told := found.get(gpu.index))), default=None)


def num_gpus() -> int:
    return len(gpus())


def _visible(machine: tuple[_Physical, ...], visible: str | None) -> list[Gpu]:
    """`CUDA_VISIBLE_DEVICES` as CUDA reads it: an entry that names nothing ends the list, one that comes twice empties
    it. A process gets one MIG instance at most, and beside it no whole GPU (NVIDIA's MIG user guide, CUDA Device
    Enumeration)."""
    if visible is None:
        named: list[_Physical | Gpu] = list(machine)
    else:
        named = []
        for entry in visible.split(","):
            one = _named(machine, entry.strip())
            if one is None:
                break
            if one in named:
                return []
            named.append(one)
    found = [device for one in named for device in _devices(one)]
    instances = [device for device in found if device.uuid.startswith("MIG-")]
    return instances[:1] or found


def _devices(named: _Physical | Gpu) -> tuple[Gpu, ...]:
    if isinstance(named, Gpu):
        return (named,)
    return named.instances if named.mig else (named.gpu,)


def _named(machine: tuple[_Physical, ...], entry: str) -> _Physical | Gpu | None:
    """What an index or the beginning of a UUID stands for; None where that is nothing, or more than one."""
    if entry.startswith("MIG-"):
        instances = [i for physical in machine for i in physical.instances if i.uuid.startswith(entry)]
        return instances[0] if len(instances) == 1 else None
    if entry.startswith("GPU-"):
        whole = [physical for physical in machine if physical.gpu.uuid.startswith(entry)]
        return whole[0] if len(whole) == 1 else None
    number = re.match(r"\+?\d+", entry)  # CUDA reads what an entry begins with, and stops at what is no digit
    return machine[int(number[0])] if number and int(number[0]) < len(machine) else None


def pytorch_cuda() -> tuple[int, int] | None:
    """The CUDA version that PyTorch is built for, read without importing it; None: for none, or there is no PyTorch."""
    found = re.search(r"^cuda\b[^=\n]*=\s*['\"](\d+)\.(\d+)", _pytorch_version_file(), re.MULTILINE)
    return (int(found[1]), int(found[2])) if found else None


def pytorch_version() -> tuple[int, int] | None:
    """The version of PyTorch to its minor, read without importing it; None where there is none."""
    found = re.search(r"^__version__\b[^=\n]*=\s*['\"](\d+)\.(\d+)", _pytorch_version_file(), re.MULTILINE)
    return (int(found[1]), int(found[2])) if found else None


def _pytorch_version_file() -> str:
    """`torch/version.py`, which the build of PyTorch writes; "" where it is not there."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return ""
    file = Path(spec.origin).with_name("version.py")
    return file.read_text() if file.is_file() else ""


def num_cpus() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cpu_name() -> str:
    """The processor's name and the cores that this process may use, as `AMD EPYC 9654, 2 cores`."""
    name = platform.processor() or platform.machine()
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), name)
    return f"{name or 'CPU'}, {num_cpus()} core{'s' if num_cpus() > 1 else ''}"


def host_memory() -> int:
    """The bytes of this machine's memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def cpus_per_gpu() -> float:
    """The cores that a worker on this machine gets by default; see `default_cpus_per_worker`."""
    return default_cpus_per_worker(num_cpus(), num_gpus())


def default_cpus_per_worker(cpus: float, gpus: int) -> float:
    """The cores of one worker on a node of so many cores and GPUs: 1 on a CPU, else the GPU's share, 1 to 16."""
    return float(max(1, min(_MAX_CPUS_PER_WORKER, cpus // gpus))) if gpus else 1.0


def default_loader_workers(cuda: bool, cpus_per_worker: float) -> int:
    """Processes that prepare a worker's images: none on a CPU, whose cores all compute; on a GPU one for each core
    but that of the worker itself, 4 at most. None either where shared memory, through which they hand over images, is
    as small as Docker makes it: what does not fit kills them."""
    if not cuda or shared_memory() < _LEAST_SHARED_MEMORY:
        return 0
    return max(0, min(_MAX_LOADER_WORKERS, int(cpus_per_worker) - 1))


def shared_memory() -> int:
    """The bytes of /dev/shm; as much as can be where there is none."""
    try:
        return shutil.disk_usage("/dev/shm").total
    except OSError:
        return sys.maxsize


def worker_cpus() -> float:
    """The cores of this process, one of a trial's workers: what Ray reserved, or under torchrun its share of all.

    Not `OMP_NUM_THREADS`: torchrun sets that to 1 where nobody else did.
    """
    given = os.environ.get(WORKER_CPUS)
    return float(given) if given else num_cpus() / int(os.environ.get("LOCAL_WORLD_SIZE", 1))
