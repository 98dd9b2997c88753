"""The GPUs, cores and memory of this machine: the one place that counts them."""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path

_MAX_CPUS_PER_WORKER = 16
_MAX_LOADER_WORKERS = 4
_LEAST_SHARED_MEMORY = 2**30  # Docker gives 64 MiB by default
_DRIVER_FILES = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")  # of NVIDIA, of AMD, and of both under WSL
_VISIBLE = ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")  # the first one set wins
# Runs in another process: PyTorch takes a second to import, and creates a GPU context, after which a process cannot
# fork.
_COUNT = """
import json, warnings, torch
with warnings.catch_warnings(record=True) as caught:  # a driver that is too old is only warned about
    warnings.simplefilter("always")
    seen = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
gpus = [[gpu.name, gpu.total_memory, [gpu.major, gpu.minor]] for gpu in seen]
print()
print(json.dumps([gpus, [str(warning.message) for warning in caught]]))
"""
_COUNT_S = 120.0  # limit of a process that imports PyTorch
_OWN_GROUPS, _ALL_GROUPS = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")
# In the order in which PyTorch reads them on CUDA (`c10/cuda/CUDAAllocatorConfig.h`).
ALLOCATOR_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
# Cores that a launcher gave to this process; see `worker_cpus`.
WORKER_CPUS = "FSDP_LAB_WORKER_CPUS"


@dataclass(frozen=True)
class Gpu:
    """A GPU, or a MIG instance of one, as PyTorch reports it.

    Attributes:
        name: such as `NVIDIA H200`.
        memory_bytes: that CUDA can use.
        capability: compute capability, such as (9, 0).
    """

    name: str
    memory_bytes: int
    capability: tuple[int, int]


def gpus() -> list[Gpu]:
    """Return the GPUs that PyTorch sees in this environment, of NVIDIA or AMD; may be empty.

    Another process asks PyTorch, once for each value of the variables that hide GPUs.
    """
    return list(_ask_pytorch(tuple(map(os.environ.get, _VISIBLE)))[0])


def gpu_problem() -> str:
    """Return why PyTorch sees none of this machine's GPUs; "" if it does, or there are none, or they are hidden."""
    return _ask_pytorch(tuple(map(os.environ.get, _VISIBLE)))[1]


@cache
def _ask_pytorch(visible: tuple[str | None, ...]) -> tuple[tuple[Gpu, ...], str]:
    if not any(map(os.path.exists, _DRIVER_FILES)) or "" in visible:
        return (), ""
    command = [sys.executable, "-P", "-c", _COUNT]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_COUNT_S, check=False)
    except subprocess.TimeoutExpired:
        return (), f"PyTorch does not answer within {_COUNT_S:g} s"
    if done.returncode:
        errors = re.findall(r"^[\w.]+: .+", done.stderr, re.MULTILINE)  # the first line of each warning
        return (), errors[-1] if errors else f"PyTorch ends with status {done.returncode}"
    seen, warned = json.loads(done.stdout.splitlines()[-1])
    hidden = any(value is not None for value in visible)
    if not seen and (warned or not hidden):
        return (), warned[-1].strip().partition("\n")[0] if warned else f"PyTorch {version('torch')} sees no device"
    return tuple(Gpu(name, memory, tuple(capability)) for name, memory, capability in seen), ""


def least_capability() -> tuple[int, int] | None:
    """Return the lowest compute capability of the GPUs that this process may use, such as (9, 0); None without one."""
    return min((gpu.capability for gpu in gpus()), default=None)


def num_gpus() -> int:
    """Return how many GPUs this process may use."""
    return len(gpus())


def pytorch_version() -> tuple[int, int]:
    """Return PyTorch's major and minor version, without importing it."""
    major, minor = version("torch").split(".")[:2]
    return int(major), int(minor)


def allocator_settings() -> str:
    """Return the settings that the environment gives PyTorch's allocator of GPU memory; "" for none."""
    return next((os.environ[name] for name in ALLOCATOR_VARIABLES if name in os.environ), "")


def num_cpus() -> int:
    """Return how many whole cores this process may use: by its affinity and its control group's quota, at least one."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quotas = []
    for group in _control_groups("cpu"):
        words = _words(group / "cpu.max") or _words(group / "cpu.cfs_quota_us") + _words(group / "cpu.cfs_period_us")
        if len(words) == 2 and words[0] not in ("max", "-1"):
            quotas.append(int(words[0]) // int(words[1]))
    return max(1, min([cores, *quotas]))


def cpu_name() -> str:
    """Return the model of this machine's CPU, and of how many cores this process may use."""
    found = None
    with suppress(OSError):  # only Linux has the file
        found = re.search(r"^model name\s*: (.+)", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    cores = num_cpus()
    return f"{found[1] if found else platform.machine()} ({cores} core{'s' if cores != 1 else ''})"


def host_memory() -> int:
    """Return the bytes of this machine's memory that this process may use: its control group may limit them."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for group in _control_groups("memory"):
        limits += [
            int(w) for w in _words(group / "memory.max") or _words(group / "memory.limit_in_bytes") if w != "max"
        ]
    return min(limits)


def free_memory() -> int:
    """Return the bytes of this machine's memory that this process may still use; the file cache counts as free."""
    known = re.search(r"MemAvailable: (\d+) kB", " ".join(_words(Path("/proc/meminfo"))))  # Linux only
    free = [int(known[1]) * 1024 if known else host_memory()]
    for group in _control_groups("memory"):
        limit = _words(group / "memory.max") or _words(group / "memory.limit_in_bytes")
        used = _words(group / "memory.current") or _words(group / "memory.usage_in_bytes")
        cached = re.search(r"inactive_file (\d+)", " ".join(_words(group / "memory.stat")))
        if limit and used and limit[0] != "max":
            free.append(int(limit[0]) - int(used[0]) + int(cached[1] if cached else 0))
    return max(min(free), 0)


def _control_groups(controller: str) -> Iterator[Path]:
    """Yield the folder of this process's control group and those of its parents, version 1 or 2 (cgroups(7))."""
    with suppress(OSError):
        for line in _OWN_GROUPS.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            root = _ALL_GROUPS / controller if controllers else _ALL_GROUPS
            if controller in controllers.split(",") or not controllers:
                group = root / path.lstrip("/")
                yield from (folder for folder in (group, *group.parents) if folder.is_relative_to(root))


def _words(file: Path) -> list[str]:
    try:
        return file.read_text().split()
    except OSError:
        return []


def cpus_per_gpu() -> float:
    """Return the cores that a worker on this machine gets by default; see `default_cpus_per_worker`."""
    return default_cpus_per_worker(num_cpus(), num_gpus())


def default_cpus_per_worker(cpus: float, gpus: int) -> float:
    """Return the cores of one worker on a node of so many cores and GPUs: 1 on a CPU, else the GPU's share, 1 to 16."""
    return float(max(1, min(_MAX_CPUS_PER_WORKER, cpus // gpus))) if gpus else 1.0


def default_loader_workers(cuda: bool, cpus_per_worker: float) -> int:
    """Return the number of processes that prepare a worker's batches.

    0 on a CPU, where all cores compute. On a GPU one for each core except the worker's own, at most 4. Also 0 if shared
    memory is as small as Docker's default: loader processes pass batches through it, and are killed if it is full.
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
    """Return the cores of this worker process: those that Ray reserved, or under torchrun its share.

    Ignores `OMP_NUM_THREADS`, which torchrun sets to 1 by default.
    """
    given = os.environ.get(WORKER_CPUS)
    return float(given) if given else num_cpus() / int(os.environ.get("LOCAL_WORLD_SIZE", 1))
