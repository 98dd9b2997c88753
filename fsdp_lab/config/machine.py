"""What the configuration resolves to on this machine: the only module of the package that counts its GPUs and cores."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from fsdp_lab.config.errors import UserError
from fsdp_lab.config.sweep import ClusterConfig, Engine, SweepConfig
from fsdp_lab.machine import hardware

_OPEN_FILES = 256  # two workers ran with it; none started with 128 (ray 2.60, two cores)
_SOCKET_PATH = 107  # bytes, by the size of `sun_path` in unix(7)


@dataclass(frozen=True)
class RunningCluster:
    """A Ray cluster at `cluster.address`.

    Attributes:
        num_workers: the meaning of null there: the GPUs of the node with the most, or 2 without GPUs.
        is_here: every worker runs on this machine, so its GPUs are the cluster's.
    """

    num_workers: int
    is_here: bool


_asks: list[Callable[[str], RunningCluster]] = []
_clusters: dict[str, RunningCluster] = {}


def ask_clusters(ask: Callable[[str], RunningCluster]) -> None:
    """Register how a command that trains asks a cluster. Call it once, before trials are composed."""
    _asks[:] = [ask]


def _cluster_at(address: str | None) -> RunningCluster | None:
    """Return the cluster; None on this machine, or in a command that connects to none.

    Raises:
        UserError: no Ray answers there.
    """
    if address is None or not _asks:
        return None
    if address not in _clusters:
        _clusters[address] = _asks[0](address)
    return _clusters[address]


def gpus_are_here(cluster: ClusterConfig) -> bool:
    """Return whether trials use this machine's GPUs, not those of other nodes."""
    running = _cluster_at(cluster.address)
    return running is None or running.is_here


def default_num_workers(address: str | None = None) -> int:
    """Return the number of GPUs that this process may use, or 2 without GPUs.

    Args:
        address: of a running cluster, to use its nodes.
    """
    running = _cluster_at(address)
    return hardware.num_gpus() or 2 if running is None else running.num_workers


def workers_of(config: SweepConfig) -> int:
    """Return the number of ranks that `cluster.num_workers` stands for; null is one rank inline, else the default."""
    if config.cluster.num_workers is not None:
        return config.cluster.num_workers
    return 1 if config.engine is Engine.inline else default_num_workers(config.cluster.address)


def cpus_per_worker_of(cluster: ClusterConfig) -> float:
    """Return the number of CPUs that `cluster.cpus_per_worker` stands for; for null see `hardware.cpus_per_gpu`."""
    return hardware.cpus_per_gpu() if cluster.cpus_per_worker is None else cluster.cpus_per_worker


def loader_workers_of(config: SweepConfig) -> int:
    """Return the loader processes that `data.loader_workers` stands for; for null see `default_loader_workers`."""
    if config.data.loader_workers is not None:
        return config.data.loader_workers
    return hardware.default_loader_workers(hardware.num_gpus() > 0, cpus_per_worker_of(config.cluster))


def ray_folder() -> Path:
    """Return the folder for the files of a Ray that is started here.

    Raises:
        UserError: the path is too long for the sockets there, or this user may not write there.
    """
    name = next((name for name in ("RAY_TMPDIR", "TMPDIR") if name in os.environ), "")
    folder = os.environ.get(name, "/tmp")
    below = f"/ray/session_2026-01-01_00-00-00_000000_{os.getpid()}/sockets/plasma_store"
    length, most = len(os.fsencode(folder)), _SOCKET_PATH - len(below)
    if length > most:
        raise UserError(
            f"{name}={folder} has {length} bytes, and for Ray's sockets in it there may be {most}; set RAY_TMPDIR to a "
            "folder with a shorter path, for example RAY_TMPDIR=/tmp, or use engine=inline."
        )
    files = Path(folder, "ray").absolute()
    there = next(path for path in (files, *files.parents) if os.path.exists(path))  # `Path.exists` may raise
    if not os.access(there, os.W_OK | os.X_OK):
        raise UserError(
            f"Ray's files go to {folder}/ray, and this user may not write into {there}; set RAY_TMPDIR to a folder of "
            "your own, or use engine=inline."
        )
    return Path(folder)


def check_open_files() -> None:
    """Check that a Ray that is started here may open enough files; it raises the soft limit to the hard one itself.

    Raises:
        UserError: it may not; one of its servers would crash or hang.
    """
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if 0 <= limit < _OPEN_FILES:
        raise UserError(
            f"a process may open {limit} files here (`ulimit -Hn`), and Ray needs {_OPEN_FILES}; raise that limit, as "
            "in /etc/security/limits.conf or by docker run --ulimit nofile=4096, or use engine=inline."
        )


def check_gpus() -> None:
    """Check that PyTorch sees this machine's GPUs, unless they are hidden.

    Raises:
        UserError: it does not, and trials would train on the CPU.
    """
    if problem := hardware.gpu_problem():
        raise UserError(
            f"PyTorch cannot use this machine's GPUs ({problem}); update their driver, install a PyTorch built for it, "
            'use some with CUDA_VISIBLE_DEVICES=<index>, or hide all with CUDA_VISIBLE_DEVICES="" to train on the CPU.'
        )
