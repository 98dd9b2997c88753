"""Checks of this machine's cores, memory, disk and limits."""

from __future__ import annotations

import os
import resource
import shutil
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

from fsdp_lab.config.machine import default_num_workers
from fsdp_lab.doctor.finding import GIB, Finding, gib
from fsdp_lab.hardware import host_memory, num_cpus, shared_memory
from fsdp_lab.limits import Limits

_LEAST_MEMORY = 3 * GIB  # the driver, Ray and two workers of the default trial had 2.7 GiB to themselves
_LEAST_SHARED_MEMORY = GIB  # below, `data.loader_workers` is 0 by default
_LEAST_DISK = GIB
_RAY_FULL = 0.95  # Ray writes nothing more to a disk that is fuller
_FEW_FILES = 4096  # below, Ray itself warns
_FEW_PROCESSES = 1000


def check_cores(limits: Limits) -> Finding:
    """Compare the cores with the workers of a trial."""
    cores, wanted = num_cpus(), default_num_workers()
    observation = f"{cores} for this process" + (f", limited to the time of {limits.cpus:g}" if limits.cpus else "")
    usable = min(cores, limits.cpus or cores)
    if cores < wanted:
        share = int(cores / wanted * 100) / 100
        remedy = f"add cluster.num_workers={cores}, or cluster.cpus_per_worker={share:g} so that workers share cores"
        return Finding("cores", f"{observation}; a trial has {wanted} workers with a core each", remedy)
    if usable < cores:
        remedy = f"give the container {cores} CPUs (docker run --cpus={cores}), or show it fewer (--cpuset-cpus)"
        return Finding("cores", f"{observation}: the limit slows workers down, and speeds are unreliable", remedy)
    return Finding("cores", observation)


def check_memory(limits: Limits) -> Finding:
    """Report how much of the host's memory is free, for the machine and for this process's group."""
    total, free = host_memory(), _free_memory()
    if limits.memory is not None and limits.memory <= total:
        total, free = limits.memory, min(free, limits.memory_free or 0)
    observation = f"{gib(free)} free of {gib(total)}"
    if free < _LEAST_MEMORY:
        remedy = "end other programs, or raise the container's limit (docker run --memory=...)"
        return Finding(
            "memory",
            f"{observation}: Ray and the two workers of a small trial need {gib(_LEAST_MEMORY)}",
            remedy,
            fails=True,
        )
    return Finding("memory", observation)


def _free_memory() -> int:
    with suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return host_memory()


def check_shared_memory() -> Finding:
    """Report the size of /dev/shm: loader processes pass batches through it, and Ray keeps its objects there."""
    total = shared_memory()
    if total == sys.maxsize:
        return Finding("shared memory", "no /dev/shm")
    if total < _LEAST_SHARED_MEMORY:
        observation = f"/dev/shm has {gib(total)}: data.loader_workers is 0 by default"
        return Finding("shared memory", observation, "docker run --shm-size=8g, or --ipc=host")
    if not os.access("/dev/shm", os.W_OK):
        observation = "/dev/shm cannot be written: loader processes fail"
        return Finding("shared memory", observation, "mount -o remount,rw /dev/shm, or data.loader_workers=0")
    return Finding("shared memory", f"{gib(shutil.disk_usage('/dev/shm').free)} free of {gib(total)}")


def check_folder(folder: Path) -> Finding:
    """Report whether sweeps can write into a folder, which need not exist yet, and its free space."""
    above = (folder.absolute(), *folder.absolute().parents)
    there = next(path for path in above if os.path.exists(path))  # where Path.exists may raise PermissionError
    if wrong := _unwritable(there):
        return Finding("disk", f"{there}: {wrong}", "start in your own folder, or set hydra.sweep.dir", fails=True)
    free = shutil.disk_usage(there).free
    observation = f"{gib(free)} free in {there}"
    if free < _LEAST_DISK:
        remedy = "remove old sweeps, or name another disk with hydra.sweep.dir=<folder>"
        return Finding(
            "disk", f"{observation}: checkpoints, exported models and MLflow's artifacts go there", remedy, fails=True
        )
    return Finding("disk", observation)


def check_temporary() -> Finding:
    """Report whether Ray can keep its session in the temporary folder."""
    folder = Path(tempfile.gettempdir())
    if wrong := _unwritable(folder):
        return Finding("temporary files", f"{folder}: {wrong}", "set TMPDIR to your own folder", fails=True)
    usage = shutil.disk_usage(folder)
    observation = f"{gib(usage.free)} free in {folder}"
    if usage.used / max(1, usage.used + usage.free) > _RAY_FULL:
        remedy = f"free space on the disk of {folder}, or set TMPDIR to another"
        return Finding("temporary files", f"{observation}: Ray stops writing to a disk that is 95 % full", remedy)
    return Finding("temporary files", observation)


def _unwritable(folder: Path) -> str:
    """Return the reason why a folder cannot be written; "" if it can."""
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"x")
            file.flush()
    except OSError as error:
        return f"cannot be written ({error.strerror})"
    return ""


def check_open_files() -> Finding:
    """Compare the limit of open files with Ray's recommendation. Ray raises the soft limit to the hard one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= hard < _FEW_FILES:
        observation = f"{hard:,} per process: in large sweeps Ray's connections may fail"
        remedy = "ulimit -n 8192, or docker run --ulimit nofile=8192:8192, or nofile in /etc/security/limits.conf"
        return Finding("open files", observation, remedy)
    return Finding("open files", f"{soft:,} per process")


def check_processes(limits: Limits) -> Finding:
    """Compare the limit of processes and threads with the needs of Ray and PyTorch."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    by_group = limits.processes is not None and (soft == resource.RLIM_INFINITY or limits.processes < soft)
    most = limits.processes if by_group else None if soft == resource.RLIM_INFINITY else soft
    if most is None:
        return Finding("processes", "any number")
    free = limits.processes_free if by_group else most
    observation = f"{free:,} more of {most:,}" if by_group else f"{most:,} for this user"
    if free is not None and free < _FEW_PROCESSES:
        remedy = "docker run --pids-limit=-1, or raise the job's limit" if by_group else "ulimit -u 8192"
        return Finding("processes", f"{observation}: each Ray process has dozens of threads", remedy)
    return Finding("processes", observation)
