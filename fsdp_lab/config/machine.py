"""What the configuration comes to on this machine: the only module of the package that counts its GPUs and cores."""

from __future__ import annotations

import importlib.util
import math

from fsdp_lab.config.address import SCHEMES, is_address, scheme_of
from fsdp_lab.config.errors import ConfigError, UserError
from fsdp_lab.config.sweep import ClusterConfig, Engine, SweepConfig
from fsdp_lab.config.trial import TrialConfig
from fsdp_lab.hardware import (
    cpus_per_gpu,
    default_loader_workers,
    driver,
    least_capability,
    num_cpus,
    num_gpus,
    pytorch_cuda,
    pytorch_version,
)

FLOAT8_SINCE = (8, 9)
_SEPARATE_GROUP_SINCE = (2, 12)  # 2.11 is without it, 2.13 has it


def default_num_workers() -> int:
    """The GPUs that this process may use, or 2 where there are none."""
    return num_gpus() or 2


def workers_of(config: SweepConfig) -> int:
    """What `cluster.num_workers` stands for on this machine: null is one worker inline, else the default."""
    if config.cluster.num_workers is not None:
        return config.cluster.num_workers
    return 1 if config.engine is Engine.inline else default_num_workers()


def cpus_per_worker_of(cluster: ClusterConfig) -> float:
    """What `cluster.cpus_per_worker` stands for on this machine; see `default_cpus_per_worker` for null."""
    return cpus_per_gpu() if cluster.cpus_per_worker is None else cluster.cpus_per_worker


def loader_workers_of(config: SweepConfig) -> int:
    """What `data.loader_workers` stands for on this machine; see `default_loader_workers` for null."""
    if config.data.loader_workers is not None:
        return config.data.loader_workers
    return default_loader_workers(num_gpus() > 0, cpus_per_worker_of(config.cluster))


def check_driver() -> None:
    """Refuse GPUs that this PyTorch cannot use: it has no CUDA, or a newer one than the driver supports.

    Within a major version any driver does (NVIDIA's CUDA compatibility guide, minor version compatibility).

    Raises:
        UserError: with both versions.
    """
    found, gpus, built_for = driver(), num_gpus(), pytorch_cuda()
    if not gpus or found is None:
        return
    have = f"this machine has {gpus} {'GPU' if gpus == 1 else 'GPUs'}"
    if built_for is None:
        which = f"for CUDA {found.cuda[0]}" if found.cuda else "with CUDA"
        raise UserError(
            f"{have}, but PyTorch is built without CUDA; install a PyTorch built {which}, or hide the GPUs with "
            'CUDA_VISIBLE_DEVICES="" to train on the CPU.'
        )
    if found.cuda is not None and found.cuda[0] < built_for[0]:
        whose = "its" if gpus == 1 else "their"
        raise UserError(
            f"{have}, but {whose} driver {found.version} supports CUDA {found.cuda[0]}.{found.cuda[1]} at most and "
            f"PyTorch is built for CUDA {built_for[0]}.{built_for[1]}; update the driver to one that supports CUDA "
            f"{built_for[0]}, or install a PyTorch built for CUDA {found.cuda[0]}."
        )


def check_pytorch(config: TrialConfig) -> None:
    """Refuse what the installed PyTorch does not have.

    Raises:
        UserError: with its version.
    """
    version = pytorch_version()
    if config.sharding.separate_reduce_scatter_group and version is not None and version < _SEPARATE_GROUP_SINCE:
        raise UserError(
            "sharding.separate_reduce_scatter_group=true needs FSDPModule.set_separate_reduce_scatter_group, which "
            f"PyTorch {version[0]}.{version[1]} does not have; use a newer PyTorch, or "
            "sharding.separate_reduce_scatter_group=false."
        )


def check_float8(config: SweepConfig) -> None:
    """Refuse float8 where torchao or a GPU for it is missing. GPUs of a running cluster are for its workers to ask.

    Raises:
        UserError: with what is missing.
    """
    if not config.precision.float8:
        return
    if config.cluster.address is None:
        _check_float8_gpus()
    if importlib.util.find_spec("torchao") is None:
        raise UserError("precision=float8 needs torchao, which is not installed: pip install 'fsdp_lab[float8]'.")


def check_storage(config: SweepConfig) -> None:
    """Refuse an address in object storage that nothing here can read.

    Raises:
        UserError: with what is missing.
    """
    place = config.cluster.storage_path
    if place is None or not is_address(place):
        return
    module, extra = SCHEMES[scheme_of(place)]
    if importlib.util.find_spec(module) is None:
        raise UserError(
            f"cluster.storage_path={place} needs {module}, which is not installed: pip install 'fsdp_lab[{extra}]'."
        )


def _check_float8_gpus() -> None:
    """
    Raises:
        UserError: there is no GPU, or one without float8.
    """
    capability, needs = least_capability(), "a GPU of compute capability 8.9 (Ada, Hopper or newer)"
    if not num_gpus():
        raise UserError(f"precision=float8 needs {needs}, and this machine has no GPU; use precision=bf16_mixed.")
    if capability is not None and capability < FLOAT8_SINCE:
        raise UserError(
            f"precision=float8 needs {needs}, and this machine has one of {capability[0]}.{capability[1]}; use "
            "precision=bf16_mixed."
        )


def check_local_capacity(cluster: ClusterConfig, num_workers: int) -> None:
    """Refuse more workers than a Ray that is started here could ever place.

    Raises:
        ConfigError: with what is asked for and what there is.
    """
    if cluster.address is not None:
        return  # another machine's resources are known when it has been reached
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
        raise ConfigError(
            f"cluster.num_workers={num_workers} needs {needed:g} CPUs (cluster.cpus_per_worker={each:g} each), this "
            f"machine has {cores}; use {fewer}cluster.cpus_per_worker={share:g}{sharing}."
        )


def check_forecast(config: SweepConfig) -> None:
    """Refuse what is asked of a forecast and cannot be answered here.

    Raises:
        ConfigError: see `ForecastConfig.check`.
    """
    config.forecast.check(has_gpu=num_gpus() > 0)
