"""The checks before a trial, a sweep, a night or a forecast starts, in order. Imports neither Ray nor torch."""

from __future__ import annotations

import importlib.util
import math
import os
from typing import Any

from fsdp_lab.config.address import SCHEMES, check_address, is_address, scheme_of
from fsdp_lab.config.axes import AXES
from fsdp_lab.config.axes.base import refuse
from fsdp_lab.config.axes.tensor_parallel import check_placement
from fsdp_lab.config.errors import CombinationError, ConfigError, UserError
from fsdp_lab.config.machine import check_gpus, cpus_per_worker_of, gpus_are_here, workers_of
from fsdp_lab.config.options import device_file, known_devices, path_of
from fsdp_lab.config.rules import check_epoch, check_files, check_trial
from fsdp_lab.config.serialize import flatten
from fsdp_lab.config.sweep import ClusterConfig, Engine, Placement, Solve, SweepConfig, objectives, stops_on
from fsdp_lab.config.trial import TrialConfig
from fsdp_lab.machine import hardware


def check(config: SweepConfig) -> None:
    """Apply every rule for trials before they start.

    Raises:
        ConfigError: a value is invalid, alone or with others (CombinationError). UserError: this machine lacks cores,
            GPUs, libraries or files for the trial.
    """
    num_workers = workers_of(config)
    check_local_capacity(config.cluster, num_workers)
    check_keys(config, num_workers)
    check_epoch(config, num_workers)
    check_pytorch(config)
    for axis in AXES:
        axis.check_machine(config, config.cluster.is_here)
    check_storage(config)
    check_forecast(config, config.forecast.keep)
    if config.forecast.solve in (Solve.gpus, Solve.capacity):
        raise ConfigError(
            f"forecast.solve={config.forecast.solve.name} finds what a trial should have, and this command trains with "
            "what it has; ask python -m fsdp_lab.forecast."
        )
    if config.cluster.is_here:  # otherwise the files are on the cluster's nodes
        check_files(config)


def check_to_forecast(config: SweepConfig) -> None:
    """Apply the rules for configurations that are only forecast, for any machine. Reads the shape of a batch.

    Raises:
        UserError: as `check`.
    """
    for name, value in (("dry_run", "true" if config.dry_run else None), ("resume", config.resume)):
        if value is not None:
            raise ConfigError(f"{name}={value}: forecasts start no trial; leave it out, or use python -m fsdp_lab.")
    check_cluster(config.cluster)
    if config.cluster.num_workers is None and config.cluster.address is not None:
        raise ConfigError(
            f"cluster.num_workers=null with cluster.address={config.cluster.address}: a forecast asks no cluster for "
            "its GPUs; set cluster.num_workers, as in cluster.num_workers=8."
        )
    check_keys(config, workers_of(config))
    check_pytorch(config)
    config.data.check_files()
    check_forecast(config, keep=None)  # without effect here


def check_hydra(hydra: Any) -> None:
    """Reject settings that only Hydra's own launcher applies to a job.

    Raises:
        ConfigError: a setting changes a trial's working directory or environment.
    """
    if hydra.job.chdir:
        raise ConfigError(
            "hydra.job.chdir=true: every path is seen from where the command is typed; leave it out. hydra.run.dir, or "
            "hydra.sweep.dir with -m, names the folder for what a trial writes."
        )
    if hydra.job.env_set:
        raise ConfigError(f"hydra.job.env_set: export {', '.join(hydra.job.env_set)} before the command instead.")


def check_keys(config: SweepConfig, num_workers: int) -> None:
    """Apply the rules between the keys of a trial and its sweep.

    Args:
        num_workers: the number of ranks that `cluster.num_workers` stands for.

    Raises:
        ConfigError: a value is wrong alone, or invalid with others (CombinationError).
    """
    check_trial(config, num_workers)
    path_of("search.name", config.search.name)
    path_of("scheduler.name", config.scheduler.name)
    objectives(config.objective)
    stops_on(config)
    if config.forecast.keep is not None and config.search.samples:
        raise CombinationError(
            f"search={config.search.name} with forecast.keep={config.forecast.keep}: a search suggests its trials one "
            "by one, so the fastest settings are not known; use forecast.keep=null, or search=grid.",
        )
    if config.engine is Engine.inline:
        _check_inline(config, num_workers)
    check_cluster(config.cluster)
    check_placement(config.sharding.tp, spread=config.cluster.placement is Placement.spread)


def check_cluster(cluster: ClusterConfig) -> None:
    """Raise ConfigError if the address is Ray Client's or the job server's, or the storage is unknown."""
    address, place = cluster.address, cluster.storage_path
    if address is not None and address.startswith(("ray://", "http://", "https://")):
        raise ConfigError(
            f"cluster.address={address}: Ray Tune and Ray Train do not run through Ray Client or the "
            "job server. Run the command on a node of the cluster with cluster.address=<head>:6379, or submit it "
            "there with `ray job submit --address=http://<head>:8265 --working-dir=. -- python -m fsdp_lab ... "
            "cluster.address=auto`."
        )
    if place is not None and is_address(place):
        check_address(place)


def _check_inline(config: SweepConfig, num_workers: int) -> None:
    forecast, scheduler = config.forecast, config.scheduler
    lacks = {
        f"cluster.num_workers={num_workers}": (
            num_workers != 1,
            "a trial in this process has one worker; use cluster.num_workers=1",
        ),
        "forecast.prune=true": (
            forecast.prune,
            "a trial in this process has no forecast; use forecast.prune=false",
        ),
        f"forecast.keep={forecast.keep}": (
            forecast.keep is not None,
            "a trial in this process has no forecast; use forecast.keep=null",
        ),
        f"scheduler={scheduler.name}": (
            scheduler.stops_early,
            "trials in this process run one after the other, and a scheduler cannot stop them; use scheduler=fifo",
        ),
    }
    refuse("engine=inline", lacks, ", or engine=ray.")


def check_local_capacity(cluster: ClusterConfig, num_workers: int) -> None:
    """Reject more workers than Ray on this machine can have. Does nothing for a running cluster.

    Raises:
        ConfigError: its message has the needed and the existing resources.
        UserError: see `check_gpus`.
    """
    if not cluster.is_here:
        return  # another machine's resources are known only once it is connected
    check_gpus()
    gpus = hardware.num_gpus()
    if 0 < gpus < num_workers:
        raise ConfigError(
            f"cluster.num_workers={num_workers} needs a GPU for each, this machine has {gpus}; use "
            f"cluster.num_workers={gpus}, or hide the GPUs with CUDA_VISIBLE_DEVICES='' to train on the CPU."
        )
    each, cores = cpus_per_worker_of(cluster), hardware.num_cpus()
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


def check_pytorch(config: TrialConfig) -> None:
    """Raise UserError if the installed PyTorch lacks a method that the settings need."""
    known = flatten(config)
    for name, (method, since) in {name: needs for axis in AXES for name, needs in axis.since.items()}.items():
        asked = known[name] and config.sharding.kind != "ddp"
        if asked and (version := hardware.pytorch_version()) < since:
            raise UserError(
                f"{name}=true needs FSDPModule.{method}, which PyTorch {version[0]}.{version[1]} does not "
                f"have; use a newer PyTorch, or {name}=false."
            )


def check_storage(config: SweepConfig) -> None:
    """Raise UserError if the module for the address in `cluster.storage_path` is not installed."""
    place = config.cluster.storage_path
    if place is None or not is_address(place):
        return
    module, extra = SCHEMES[scheme_of(place)]
    if importlib.util.find_spec(module) is None:
        raise UserError(
            f"cluster.storage_path={place} needs {module}, which is not installed: "
            f"pip install -e '.[{extra}]' in the clone."
        )


def check_forecast(config: SweepConfig, keep: str | None) -> None:
    """Check that the capacity and the speeds that a forecast needs are known.

    Args:
        keep: `forecast.keep`, which selects settings by speed; None: all.

    Raises:
        ConfigError: they are not, or forecasts are disabled.
    """
    asked, has_gpu = config.forecast, hardware.num_gpus() > 0 and gpus_are_here(config.cluster)
    has_sheet = device_file(asked.device) is not None
    solves = asked.solve.name if asked.solve else None
    for name, value in (("prune", "true" if asked.prune else None), ("solve", solves)):
        if value in (None, "capacity") or has_gpu or has_sheet or asked.capacity_gib is not None:
            continue
        raise ConfigError(
            f"forecast.{name}={value} needs the memory of a GPU, and this machine has none; set "
            "forecast.capacity_gib, for example forecast.capacity_gib=24."
        )
    for name, value in (("prune", "true" if asked.prune else None), ("keep", keep)):
        if value is not None and not asked.enabled:
            raise ConfigError(
                f"forecast.{name}={value} with forecast.enabled=false: without forecasts it has no effect; use "
                "forecast.enabled=true."
            )
    if keep is not None and not has_sheet and not (asked.device == "auto" and has_gpu):
        raise ConfigError(
            f"forecast.keep={keep} needs predicted speeds, and data sheets exist for GPUs only; leave it out "
            f"on CPUs. For GPUs set forecast.device=<{'|'.join(known_devices())}> or the path of a data sheet."
        )
