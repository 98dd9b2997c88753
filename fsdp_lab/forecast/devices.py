"""The device that a forecast is for, and its memory. Imports no torch."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from functools import cache, lru_cache
from importlib.metadata import version
from math import inf
from pathlib import Path

from fsdp_lab.config import ConfigError, SweepConfig, TrialConfig, workers_of
from fsdp_lab.config.key import divisors
from fsdp_lab.config.machine import check_gpus, gpus_are_here
from fsdp_lab.config.options import DEVICE_KINDS, PROBE, data_sheets, device_file, own_devices
from fsdp_lab.config.sweep import Engine
from fsdp_lab.forecast.capacity import GIB, Host
from fsdp_lab.forecast.keep import ratio_group
from fsdp_lab.forecast.observations import read_observations
from fsdp_lab.forecast.speed.device import Device, digest, load_device, on_network
from fsdp_lab.forecast.speed.refine import refine
from fsdp_lab.machine.hardware import cpu_name, gpus, host_memory, num_gpus


def for_cuda(config: SweepConfig) -> bool:
    """Return whether the forecast is for GPUs: as `forecast.device` says, or if this machine has one.

    Raises:
        UserError: see `check_gpus`.
    """
    device = config.forecast.device
    if device == "auto":
        check_gpus()
    if device not in DEVICE_KINDS and (sheet := data_sheet(config)) is not None:
        return sheet.kind == "cuda"
    return device == "cuda" or (device == "auto" and num_gpus() > 0)


def data_sheet(config: SweepConfig) -> Device | None:
    """Return the device that `forecast.device` names; None without a data sheet.

    `auto` is this machine's GPU if that has a data sheet. `forecast.network_gbit` and `cluster.gpus_per_node` replace
    the network and the GPUs of its nodes.

    Raises:
        ConfigError: its file is no data sheet.
    """
    file, gbit = device_file(config.forecast.device), config.forecast.network_gbit
    if file is not None:
        device: Device | None = _load(file)
    else:
        here = config.forecast.device == "auto" and gpus_are_here(config.cluster)
        names = {gpu.name for gpu in gpus()} if here else set()
        device = sheet_of(names.pop()) if len(names) == 1 else None
    if device is not None and config.cluster.gpus_per_node is not None:
        device = replace(device, node_size=config.cluster.gpus_per_node)
    return device if device is None or gbit is None else on_network(device, gbit)


@cache
def torch_version() -> str:
    """Return the version of the installed PyTorch, without importing it."""
    return version("torch")


def refined(device: Device | None, config: TrialConfig, num_workers: int, before: float = inf) -> Device | None:
    """Return the device, corrected by finished trials for this configuration.

    Args:
        before: ignore trials that ended later, in seconds since 1970.

    Raises:
        UserError: the file of the trials is not one.
    """
    if device is None or before == 0:
        return device
    trials = read_observations(device.name, torch_version(), digest(device))
    return _refine(device, tuple(one for one in trials if one.at < before), ratio_group(config, num_workers, device))


def sheet_of(gpu: str) -> Device | None:
    """Return the data sheet of a GPU, by the driver's name for it; None without one."""
    sheets = (_load(file) for file in data_sheets())
    return next((sheet for sheet in sheets if sheet.name == gpu), None)


def file_here() -> Path | None:
    """Return the device file of this machine, by the name of its device: the user's file, else a data sheet of ours.

    None: there is none, or the machine has several kinds of GPUs.
    """
    names = {gpu.name for gpu in gpus()} or {cpu_name()}
    for file in (*own_devices(), *data_sheets()):
        with suppress(ConfigError):  # may be invalid: no forecast has read it
            if names == {_load(file).name}:
                return file
    return None


def words_for(file: Path) -> str:
    """Return the options with which a command uses a device file of the user's."""
    if file.parent.name != "device":
        return f"forecast.device={file}"
    return f"--config-dir {file.parent.parent} forecast.device={file.stem}"


def no_file_note(config: SweepConfig) -> list[str]:
    """Return a note if a sweep uses no probe of this machine: there is none, or its file is not named."""
    asked = config.forecast
    if not asked.enabled or asked.device not in DEVICE_KINDS or not config.cluster.is_here:
        return []
    if (file := file_here()) is not None:
        unused = f"forecast.device={asked.device} does not use this machine's device file: use it with "
        return [] if file in data_sheets() else [unused + words_for(file)]
    return [f"this machine has no device file, so speeds are not predicted: {PROBE} measures one in a minute"]


# Cached, because each cell of a grid asks for both.
_refine = lru_cache(maxsize=64)(refine)
_read = lru_cache(maxsize=64)(lambda file, changed: load_device(file))


def _load(file: Path) -> Device:
    """Read a device's file, again only when it has changed."""
    return _read(file.absolute(), file.stat().st_mtime_ns if file.exists() else 0)  # the reader raises the error


def check_device(config: SweepConfig, num_workers: int) -> None:
    """Check the device's file, and that its nodes make up the workers and hold whole tensor-parallel groups.

    Raises:
        ConfigError: the file is no data sheet, the workers do not fill whole nodes, or a group would span two nodes.
    """
    sheet = data_sheet(config)
    tp = config.sharding.tp
    if sheet is not None and sheet.node_size % tp:
        raise ConfigError(
            f"sharding.tp={tp} with forecast.device={config.forecast.device}: tensor parallelism stays within a node, "
            f"and {tp} does not divide the {sheet.node_size} devices of one; use one of {divisors(sheet.node_size)}."
        )
    if sheet is not None and num_workers > sheet.node_size and num_workers % sheet.node_size:
        raise ConfigError(
            f"cluster.num_workers={num_workers} with forecast.device={config.forecast.device}: its nodes have "
            f"{sheet.node_size} devices, and {num_workers} is not a multiple of that; use a multiple of "
            f"{sheet.node_size}, or fewer."
        )


def check_sweep(config: SweepConfig) -> None:
    """Call `check_here` for trials on this machine; a running cluster is not known yet."""
    if config.engine is Engine.ray and config.cluster.is_here:
        check_here(config, workers_of(config), num_gpus() > 0)


def check_here(config: SweepConfig, num_workers: int, cuda: bool) -> None:
    """Check that a forecast can select among trials that run here.

    Raises:
        ConfigError: see `check_device`; or trials would be selected by predictions for another device.
    """
    check_device(config, num_workers)
    asked = config.forecast
    prunes = asked.prune and asked.device not in DEVICE_KINDS and capacity_here(config, cuda) is None
    if data_sheet_here(config, cuda) is None and (asked.keep is not None or prunes):
        name, value = ("prune", "true") if asked.keep is None else ("keep", asked.keep)
        here = ", ".join(sorted({gpu.name for gpu in gpus()})) or "CPUs"
        raise ConfigError(
            f"forecast.{name}={value} with forecast.device={asked.device}: these trials run on {here}, and predictions "
            f"for another device do not apply to them; leave forecast.{name} out, name a data sheet of {here}, or rank "
            "the settings for that device with python -m fsdp_lab.forecast -m."
        )


def data_sheet_here(config: SweepConfig, cuda: bool) -> Device | None:
    """Return the device that `forecast.device` names, if trials run on it; else None.

    The GPUs of other nodes are not visible; they are assumed to be that device.
    """
    sheet = data_sheet(config)
    if sheet is None or (sheet.kind == "cuda") is not cuda:
        return None
    here = {gpu.name for gpu in gpus()} if cuda and gpus_are_here(config.cluster) else set()
    return sheet if here <= {sheet.name} else None


def capacity_bytes(config: SweepConfig, cuda: bool) -> int | None:
    """Return the bytes of one device; None: not known.

    `forecast.capacity_gib`, or the memory of the named device; for GPUs without either, that of the smallest GPU here.
    """
    if config.forecast.capacity_gib is None and (file := device_file(config.forecast.device)) is not None:
        return _load(file).memory_bytes
    return capacity_here(config, cuda)


def capacity_here(config: SweepConfig, cuda: bool) -> int | None:
    """Return the bytes of one device for trials that run here; a named device's memory does not count."""
    if config.forecast.capacity_gib is not None:
        return int(config.forecast.capacity_gib * GIB)
    if cuda and num_gpus() and gpus_are_here(config.cluster):
        return gpu_memory()
    sheet = data_sheet_here(config, cuda)
    return None if sheet is None else sheet.memory_bytes


def is_here(config: SweepConfig) -> bool:
    """Return whether `forecast.device` is this machine's GPU."""
    if config.forecast.device not in DEVICE_KINDS:
        return num_gpus() > 0 and data_sheet_here(config, cuda=True) is not None
    return num_gpus() > 0 and config.forecast.capacity_gib is None


def host_of(num_workers: int, sheet: Device | None, here: bool) -> Host:
    """Return the host of GPUs, and how many of the workers it has.

    Args:
        sheet: the data sheet; None: its nodes are not known.
        here: it is this machine, whose memory is known.
    """
    if here:
        return Host(host_memory(), min(num_workers, num_gpus()))
    return Host(None, min(num_workers, sheet.node_size if sheet else num_workers))


def gpu_memory() -> int | None:
    """Return the bytes of the smallest GPU, or None."""
    return min((gpu.memory_bytes for gpu in gpus()), default=None)
