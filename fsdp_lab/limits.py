"""Limits of this process's container or job: control groups, versions 1 and 2."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_UNLIMITED = 2**60  # version 1 writes a large number for no limit


@dataclass(frozen=True)
class Limits:
    """The tightest limits of the groups that this process is in; None: no limit.

    Attributes:
        cpus: cores' worth of time.
        memory: bytes.
        memory_free: bytes of `memory` that are left.
        processes: processes and threads.
        processes_free: how many of `processes` are left.
    """

    cpus: float | None = None
    memory: int | None = None
    memory_free: int | None = None
    processes: int | None = None
    processes_free: int | None = None


def read_limits(proc: Path = Path("/proc/self/cgroup"), mounted: Path = Path("/sys/fs/cgroup")) -> Limits:
    """Return the limits of this process; no limits if they cannot be read.

    Args:
        proc: the file that names this process's groups.
        mounted: the folder of all groups.
    """
    cpus = [quota for folder in _groups(proc, mounted, "cpu") if (quota := _cpus(folder)) is not None]
    memory = _tightest(proc, mounted, "memory", (("memory.max", "memory.current", "inactive_file"),
                       ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")))  # fmt: skip
    processes = _tightest(proc, mounted, "pids", (("pids.max", "pids.current", ""),))
    return Limits(min(cpus, default=None), *memory, *processes)


def _groups(proc: Path, mounted: Path, controller: str) -> Iterator[Path]:
    """Yield the folder of this process's group and those above it, for one controller."""
    lines = []
    with suppress(OSError):
        lines = proc.read_text().splitlines()
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        root = mounted / controllers if controllers else mounted
        root = root if root.is_dir() else mounted / controller
        group = root / path.lstrip("/")
        while True:
            yield group
            if group == root or root not in group.parents:
                break
            group = group.parent


def _cpus(group: Path) -> float | None:
    with suppress(OSError, ValueError, IndexError):
        quota, period = (group / "cpu.max").read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    quota_us, period_us = _number(group / "cpu.cfs_quota_us"), _number(group / "cpu.cfs_period_us")
    return quota_us / period_us if quota_us and period_us and quota_us > 0 else None


def _tightest(
    proc: Path, mounted: Path, controller: str, names: tuple[tuple[str, str, str], ...]
) -> tuple[int | None, int | None]:
    """Return the limit that leaves least, and what it leaves.

    Args:
        proc: see `read_limits`.
        mounted: see `read_limits`.
        controller: `memory` or `pids`.
        names: the file of the limit, the file of the use, and the line of `memory.stat` with the reclaimable part of
            the use: cached files.
    """
    limits = []
    for group in _groups(proc, mounted, controller):
        for limit_name, used_name, cached_name in names:
            limit = _number(group / limit_name)
            if limit is not None and limit < _UNLIMITED:
                used = (_number(group / used_name) or 0) - _stat(group, cached_name)
                limits.append((limit - max(0, used), limit))
    if not limits:
        return None, None
    free, limit = min(limits)
    return limit, max(0, free)


def _stat(group: Path, name: str) -> int:
    """Return the bytes in a line of `memory.stat`; 0 without that line."""
    with suppress(OSError, ValueError):
        for line in (group / "memory.stat").read_text().splitlines():
            word, value = line.split()
            if word == name:
                return int(value)
    return 0


def _number(file: Path) -> int | None:
    with suppress(OSError, ValueError):
        return int(file.read_text())
    return None
