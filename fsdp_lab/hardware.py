"""The GPUs and cores of this machine: the one place that counts them.

GPUs come from NVML, the driver's own library, which Ray and nvidia-smi use too. It needs no context on a GPU and no
slow import. AMD's GPUs have no NVML: a PyTorch that is built for ROCm counts them, in a process of its own. Each rank
compares the count with what PyTorch sees (`engine/rank.py`).
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from fsdp_lab.limits import read_limits

_MAX_CPUS_PER_WORKER = 16
_MAX_LOADER_WORKERS = 4
_LEAST_SHARED_MEMORY = 2**30  # Docker gives 64 MiB where nobody asks for more
_ROCM_VISIBLE = ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")  # the first goes before
_COUNT_BY_PYTORCH = """
import json, torch
properties = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
print(json.dumps([[device.name, device.total_memory] for device in properties]))
"""
_COUNT_S = 120.0  # for a process that imports PyTorch
# Cores that a launcher gave to this process; see `worker_cpus`.
WORKER_CPUS = "FSDP_LAB_WORKER_CPUS"


@dataclass(frozen=True)
class Gpu:
    """A device as CUDA counts them: a GPU, or a MIG instance of one.

    Attributes:
        index: NVML's, of the whole GPU.
        uuid: "": the driver does not report it.
        name: "": the driver does not report it.
        memory_bytes: that CUDA can use; 0: the driver does not report it.
    """

    index: int
    uuid: str
    name: str
    memory_bytes: int


@dataclass(frozen=True)
class Driver:
    """The NVIDIA driver.

    Attributes:
        version: such as "535.104.05".
        cuda: the highest CUDA version that it supports; None: not reported.
    """

    version: str
    cuda: tuple[int, int] | None


@dataclass(frozen=True)
class _Physical:
    """A GPU and, with MIG, its instances; without instances, CUDA does not see a GPU in MIG mode.

    `capability`: None: the driver does not report it.
    """

    gpu: Gpu
    mig: bool
    instances: tuple[Gpu, ...] = ()
    capability: tuple[int, int] | None = None


@cache
def _machine() -> tuple[Driver, tuple[_Physical, ...]] | None:
    """Return the driver and all its GPUs, whoever may use them; None without NVML."""
    try:
        import pynvml
    except ImportError:  # `python -m fsdp_lab.training` needs PyTorch only
        return None
    try:
        pynvml.nvmlInit()
        try:
            return _driver(), tuple(_physical(index) for index in range(pynvml.nvmlDeviceGetCount()))
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError:
        return None


def _told(default: Any, function: Callable[..., Any], *arguments: Any) -> Any:
    """Return what NVML reports, or a default: a driver may be too old for it, and a container may hide it."""
    import pynvml

    try:
        return function(*arguments)
    except pynvml.NVMLError:
        return default


def _driver() -> Driver:
    import pynvml

    # The second form asks libcuda itself, which may be newer than the driver (NVIDIA's cuda-compat packages).
    cuda = _told(0, pynvml.nvmlSystemGetCudaDriverVersion_v2) or _told(0, pynvml.nvmlSystemGetCudaDriverVersion)
    return Driver(pynvml.nvmlSystemGetDriverVersion(), (cuda // 1000, cuda % 1000 // 10) if cuda else None)


def _physical(index: int) -> _Physical:
    import pynvml

    handle = pynvml.nvmlDeviceGetHandleByIndex(index)
    mig = bool(_told((0, 0), pynvml.nvmlDeviceGetMigMode, handle)[0])
    places = range(pynvml.nvmlDeviceGetMaxMigDeviceCount(handle)) if mig else ()
    made = [_told(None, pynvml.nvmlDeviceGetMigDeviceHandleByIndex, handle, place) for place in places]
    instances = tuple(_gpu(index, instance) for instance in made if instance is not None)
    capability = _told(None, pynvml.nvmlDeviceGetCudaComputeCapability, handle)
    return _Physical(_gpu(index, handle), mig, instances, tuple(capability) if capability else None)


def _gpu(index: int, handle: Any) -> Gpu:
    import pynvml

    uuid, name = _told("", pynvml.nvmlDeviceGetUUID, handle), _told("", pynvml.nvmlDeviceGetName, handle)
    return Gpu(index, uuid, name, _told(0, _memory, handle))


def _memory(handle: Any) -> int:
    """Return the bytes that CUDA can use: NVML's second form separates the driver's own."""
    import pynvml

    if info := _told(None, pynvml.nvmlDeviceGetMemoryInfo, handle, pynvml.nvmlMemory_v2):
        return int(info.total - info.reserved)
    return int(pynvml.nvmlDeviceGetMemoryInfo(handle).total)


def driver() -> Driver | None:
    """Return the NVIDIA driver; None without one."""
    machine = _machine()
    return machine[0] if machine else None


def gpus() -> list[Gpu]:
    """Return the GPUs that this process may use, as CUDA counts them under `CUDA_VISIBLE_DEVICES`; may be empty."""
    machine = _machine()
    if machine is None:
        return list(_rocm_gpus(tuple(map(os.environ.get, _ROCM_VISIBLE)))) if is_rocm() else []
    return _visible(machine[1], os.environ.get("CUDA_VISIBLE_DEVICES"))


@cache
def _rocm_gpus(visible: tuple[str | None, ...]) -> tuple[Gpu, ...]:
    """Return the GPUs that PyTorch sees; it is asked once for each value of the variables that hide GPUs.

    In a process of its own: here it would start AMD's runtime, which does not survive a fork.
    """
    try:
        done = subprocess.run(
            [sys.executable, "-c", _COUNT_BY_PYTORCH], capture_output=True, text=True, timeout=_COUNT_S, check=True
        )
        seen = json.loads(done.stdout.splitlines()[-1])
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):  # as a driver that does not answer
        return ()
    return tuple(Gpu(index, "", name, memory) for index, (name, memory) in enumerate(seen))


def visible_devices() -> str | None:
    """Return the GPUs that are visible to this process, as its environment lists them; None: all."""
    return os.environ.get(_ROCM_VISIBLE[0]) or os.environ.get("CUDA_VISIBLE_DEVICES")


def least_capability() -> tuple[int, int] | None:
    """Return the lowest compute capability of the GPUs that this process may use, such as (9, 0).

    None without a GPU, or if the driver does not report it.
    """
    machine = _machine()
    if machine is None:
        return None
    capabilities = {physical.gpu.index: physical.capability for physical in machine[1]}
    return min((capability for gpu in gpus() if (capability := capabilities.get(gpu.index))), default=None)


def num_gpus() -> int:
    """Return how many GPUs this process may use."""
    return len(gpus())


def _visible(machine: tuple[_Physical, ...], visible: str | None) -> list[Gpu]:
    """Return the GPUs in `CUDA_VISIBLE_DEVICES`, as CUDA reads it.

    An unknown entry ends the list, a repeated one empties it. A process gets at most one MIG instance, and no whole GPU
    beside it (NVIDIA's MIG user guide, CUDA Device Enumeration).
    """
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
    devices = [device for one in named for device in _devices(one)]
    instances = [device for device in devices if device.uuid.startswith("MIG-")]
    return instances[:1] or devices


def _devices(named: _Physical | Gpu) -> tuple[Gpu, ...]:
    if isinstance(named, Gpu):
        return (named,)
    return named.instances if named.mig else (named.gpu,)


def _named(machine: tuple[_Physical, ...], entry: str) -> _Physical | Gpu | None:
    """Return the GPU for an index or the beginning of a UUID; None for no match, or several."""
    if entry.startswith("MIG-"):
        instances = [i for physical in machine for i in physical.instances if i.uuid.startswith(entry)]
        return instances[0] if len(instances) == 1 else None
    if entry.startswith("GPU-"):
        whole = [physical for physical in machine if physical.gpu.uuid.startswith(entry)]
        return whole[0] if len(whole) == 1 else None
    number = re.match(r"\+?\d+", entry)  # CUDA reads what an entry begins with, and stops at what is no digit
    return machine[int(number[0])] if number and int(number[0]) < len(machine) else None


def pytorch_cuda() -> tuple[int, int] | None:
    """Return the CUDA version that PyTorch is built for, read without importing it; None: for none, or no PyTorch."""
    match = re.search(r"^cuda\b[^=\n]*=\s*['\"](\d+)\.(\d+)", _pytorch_version_file(), re.MULTILINE)
    return (int(match[1]), int(match[2])) if match else None


def is_rocm() -> bool:
    """Return whether PyTorch is built for AMD's GPUs, read without importing it."""
    return re.search(r"^hip\b[^=\n]*=\s*['\"]\d", _pytorch_version_file(), re.MULTILINE) is not None


def pytorch_version() -> tuple[int, int] | None:
    """Return PyTorch's major and minor version, read without importing it; None without PyTorch."""
    match = re.search(r"^__version__\b[^=\n]*=\s*['\"](\d+)\.(\d+)", _pytorch_version_file(), re.MULTILINE)
    return (int(match[1]), int(match[2])) if match else None


def _pytorch_version_file() -> str:
    """Return the content of `torch/version.py`, which the build of PyTorch writes; "" without it."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return ""
    file = Path(spec.origin).with_name("version.py")
    return file.read_text() if file.is_file() else ""


def num_cpus() -> int:
    """Return how many whole cores this process may use: by its affinity and its cgroup's quota, at least one."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = read_limits().cpus
    return cores if quota is None else max(1, min(cores, int(quota)))


def host_memory() -> int:
    """Return the bytes of this machine's memory that this process may use: its cgroup may limit them."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min(total, read_limits().memory or total)


def cpus_per_gpu() -> float:
    """Return the cores that a worker on this machine gets by default; see `default_cpus_per_worker`."""
    return default_cpus_per_worker(num_cpus(), num_gpus())


def default_cpus_per_worker(cpus: float, gpus: int) -> float:
    """Return the cores of one worker on a node of so many cores and GPUs: 1 on a CPU, else the GPU's share, 1 to 16."""
    return float(max(1, min(_MAX_CPUS_PER_WORKER, cpus // gpus))) if gpus else 1.0


def default_loader_workers(cuda: bool, cpus_per_worker: float) -> int:
    """Return the number of processes that prepare a worker's batches.

    None on a CPU, whose cores all compute. On a GPU one for each core except the worker's own, at most 4. Also none if
    shared memory is as small as Docker makes it: they pass batches through it, and are killed if it is full.
    """
    if not cuda or shared_memory() < _LEAST_SHARED_MEMORY:
        return 0
    return max(0, min(_MAX_LOADER_WORKERS, int(cpus_per_worker) - 1))


def shared_memory() -> int:
    """Return the bytes of /dev/shm; the largest integer without one."""
    try:
        return shutil.disk_usage("/dev/shm").total
    except OSError:
        return sys.maxsize


def worker_cpus() -> float:
    """Return the cores of this process, one of a trial's workers: those that Ray reserved, or under torchrun its share.

    Not `OMP_NUM_THREADS`, which torchrun sets to 1 by default.
    """
    given = os.environ.get(WORKER_CPUS)
    return float(given) if given else num_cpus() / int(os.environ.get("LOCAL_WORLD_SIZE", 1))
