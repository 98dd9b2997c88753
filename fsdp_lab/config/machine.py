"""What the configuration resolves to on this machine: the only module of the package that counts its GPUs and cores."""

from __future__ import annotations

import importlib.util
import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from fsdp_lab.config.address import SCHEMES, is_address, scheme_of
from fsdp_lab.config.errors import ConfigError, UserError
from fsdp_lab.config.sweep import ClusterConfig, Engine, SweepConfig
from fsdp_lab.config.trial import TrialConfig
from fsdp_lab.machine.hardware import (
    cpus_per_gpu,
    default_loader_workers,
    gpu_problem,
    least_capability,
    num_cpus,
    num_gpus,
    pytorch_version,
)

FLOAT8_SINCE = (8, 9)
_SOCKET_PATH = 107  # bytes, by the size of `sun_path` in unix(7)
_SEPARATE_GROUP_SINCE = (2, 12)  # 2.11 is without it, 2.13 has it


@dataclass(frozen=True)
class RunningCluster:
    """A Ray cluster at `cluster.address`.

    Attributes:
        num_workers: that null stands for there: the GPUs of the node with the most, or 2 without GPUs.
        is_here: whether every worker runs on this machine, whose GPUs are the cluster's.
    """

    num_workers: int
    is_here: bool


_asks: list[Callable[[str], RunningCluster]] = []
_clusters: dict[str, RunningCluster] = {}


def ask_clusters(ask: Callable[[str], RunningCluster]) -> None:
    """Let commands that train ask the cluster at an address, once, before its trials are composed and checked."""
    _asks[:] = [ask]


def _cluster_at(address: str | None) -> RunningCluster | None:
    """Return the cluster; None on this machine, or in a command that reaches none.

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
        address: of a running cluster, whose nodes count then.
    """
    running = _cluster_at(address)
    return num_gpus() or 2 if running is None else running.num_workers


def workers_of(config: SweepConfig) -> int:
    """Return the number of ranks that `cluster.num_workers` stands for; null is one rank inline, else the default."""
    if config.cluster.num_workers is not None:
        return config.cluster.num_workers
    return 1 if config.engine is Engine.inline else default_num_workers(config.cluster.address)


def cpus_per_worker_of(cluster: ClusterConfig) -> float:
    """Return the number of CPUs that `cluster.cpus_per_worker` stands for; for null see `hardware.cpus_per_gpu`."""
    return cpus_per_gpu() if cluster.cpus_per_worker is None else cluster.cpus_per_worker


def loader_workers_of(config: SweepConfig) -> int:
    """Return the loader processes that `data.loader_workers` stands for; for null see `default_loader_workers`."""
    if config.data.loader_workers is not None:
        return config.data.loader_workers
    return default_loader_workers(num_gpus() > 0, cpus_per_worker_of(config.cluster))


def ray_folder() -> Path:
    """Return the folder below which a Ray that is started here puts its files.

    Raises:
        UserError: the path is too long for the sockets there.
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
    return Path(folder)


def check_gpus() -> None:
    """Check that PyTorch sees this machine's GPUs, unless they are hidden.

    Raises:
        UserError: it does not, and trials would train on the CPU.
    """
    if problem := gpu_problem():
        raise UserError(
            f"PyTorch cannot use this machine's GPUs ({problem}); update their driver, install a PyTorch built for it, "
            'use some with CUDA_VISIBLE_DEVICES=<index>, or hide all with CUDA_VISIBLE_DEVICES="" to train on the CPU.'
        )


def check_pytorch(config: TrialConfig) -> None:
    """Check that the installed PyTorch has what the settings need.

    Raises:
        UserError: it is too old; the message names its version.
    """
    version = pytorch_version()
    if config.sharding.separate_reduce_scatter_group and version < _SEPARATE_GROUP_SINCE:
        raise UserError(
            "sharding.separate_reduce_scatter_group=true needs FSDPModule.set_separate_reduce_scatter_group, which "
            f"PyTorch {version[0]}.{version[1]} does not have; use a newer PyTorch, or "
            "sharding.separate_reduce_scatter_group=false."
        )


def check_float8(config: SweepConfig) -> None:
    """Check that torchao and the GPUs support float8. The workers of a running cluster check their own GPUs.

    Raises:
        UserError: torchao is not installed, or there is no GPU with float8.
    """
    if not config.precision.float8:
        return
    if config.cluster.is_here:
        _check_float8_gpus()
    if importlib.util.find_spec("torchao") is None:
        raise UserError(
            "precision=float8 needs torchao, which is not installed: pip install -e '.[float8]' in the clone."
        )


def check_storage(config: SweepConfig) -> None:
    """Check that this environment can read the address in `cluster.storage_path`.

    Raises:
        UserError: the module for its scheme is not installed.
    """
    place = config.cluster.storage_path
    if place is None or not is_address(place):
        return
    module, extra = SCHEMES[scheme_of(place)]
    if importlib.util.find_spec(module) is None:
        raise UserError(
            f"cluster.storage_path={place} needs {module}, which is not installed: "
            f"pip install -e '.[{extra}]' in the clone."
        )


def _check_float8_gpus() -> None:
    capability, needs = least_capability(), "a GPU of compute capability 8.9 (Ada, Hopper or newer)"
    if not num_gpus():
        raise UserError(f"precision=float8 needs {needs}, and this machine has no GPU; use precision=bf16_mixed.")
    if capability is not None and capability < FLOAT8_SINCE:
        raise UserError(
            f"precision=float8 needs {needs}, and this machine's GPU has {capability[0]}.{capability[1]}; use "
            "precision=bf16_mixed."
        )


def check_local_capacity(cluster: ClusterConfig, num_workers: int) -> None:
    """Refuse more workers than a Ray on this machine could ever have. Does nothing for a running cluster.

    Args:
        num_workers: the number of ranks that `cluster.num_workers` stands for.

    Raises:
        ConfigError: with the resources that are needed and those that exist.
        UserError: see `check_gpus`.
    """
    if not cluster.is_here:
        return  # another machine's resources are known when it has been reached
    check_gpus()
    gpus = num_gpus()
    if 0 < gpus < num_workers:
        raise ConfigError(
            f"cluster.num_workers={num_workers} needs a GPU for each, this machine has {gpus}; use "
            f"cluster.num_workers={gpus}, or hide the GPUs with CUDA_VISIBLE_DEVICES='' to train on the CPU."
        )
    each, cores = cpus_per_worker_of(cluster), num_cpus()
    needed = num_workers * each
    if needed > cores:
        fits, share = int(cores / each), math.floor(cores / num_workers * 100) / 100
        fewer = f"cluster.num_workers={fits}, or " if fits else ""
        sharing = ", so that workers share cores" if share < 1 else ""
        if "SLURM_JOB_ID" in os.environ:
            fewer = f"sbatch --cpus-per-task={math.ceil(needed)}, {fewer or 'or '}"
        raise ConfigError(
            f"cluster.num_workers={num_workers} needs {needed:g} CPUs (cluster.cpus_per_worker={each:g} each), this "
            f"machine has {cores}; use {fewer}cluster.cpus_per_worker={share:g}{sharing}."
        )


def check_forecast(config: SweepConfig) -> None:
    """Refuse a forecast that this machine cannot compute.

    Raises:
        ConfigError: see `ForecastConfig.check`.
    """
    config.forecast.check(has_gpu=num_gpus() > 0 and gpus_are_here(config.cluster))
