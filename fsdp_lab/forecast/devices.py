"""Which device a forecast is for, and how much memory it has. Imports no torch."""

from __future__ import annotations

from functools import cache

from fsdp_lab.config import ConfigError, SweepConfig, workers_of
from fsdp_lab.config.conf import DEVICE_KINDS, device_file, known_devices
from fsdp_lab.config.sweep import Engine
from fsdp_lab.forecast.fits import GIB
from fsdp_lab.hardware import gpus, num_gpus
from fsdp_lab.speed.device import Device, load_device
from fsdp_lab.speed.fitted import believed


def for_cuda(config: SweepConfig) -> bool:
    """Whether the forecast is for GPUs: as `forecast.device` says, or where this machine has one."""
    device = config.forecast.device
    if device not in DEVICE_KINDS and (sheet := data_sheet(config)) is not None:
        return sheet.kind == "cuda"
    return device == "cuda" or (device == "auto" and num_gpus() > 0)


def data_sheet(config: SweepConfig) -> Device | None:
    """The device that `forecast.device` names, or with `auto` the GPU of this machine, where it has a data sheet; else
    None.

    Raises:
        ConfigError: its file is no data sheet.
    """
    claimed = _claimed(config)
    return None if claimed is None else believed(claimed)


def device_note(config: SweepConfig) -> str | None:
    """Return what to say of the device's file: that it claims an error which its figures do not have."""
    claimed = _claimed(config)
    if claimed is None or (taken := believed(claimed)) == claimed:
        return None
    return (
        f"the file of forecast.device={config.forecast.device} says `basis: {claimed.basis}`, and its figures are not "
        f"those that were fitted: it counts as `{taken.basis}` with error_elsewhere ({taken.error.p90 * 100:.2g} % for "
        "nine of ten); write `basis: data sheet` and its error."
    )


def _claimed(config: SweepConfig) -> Device | None:
    """The device as its file has it."""
    file = device_file(config.forecast.device)
    if file is not None:
        return load_device(file)
    names = {gpu.name for gpu in gpus()} if config.forecast.device == "auto" else set()
    return sheet_of(names.pop()) if len(names) == 1 else None


@cache
def sheet_of(gpu: str) -> Device | None:
    """The data sheet of a GPU, by the name that its driver tells."""
    sheets = (load_device(file) for name in known_devices() if (file := device_file(name)) is not None)
    return next((sheet for sheet in sheets if sheet.name == gpu), None)


def check_device(config: SweepConfig, num_workers: int) -> None:
    """
    Raises:
        ConfigError: the device's file is no data sheet, or nodes of its size do not make up the workers.
    """
    sheet = data_sheet(config)
    if sheet is not None and num_workers > sheet.node_size and num_workers % sheet.node_size:
        raise ConfigError(
            f"cluster.num_workers={num_workers} with forecast.device={config.forecast.device}: its nodes have "
            f"{sheet.node_size} devices, and {num_workers} are no whole number of nodes; use a multiple of "
            f"{sheet.node_size}, or fewer."
        )


def check_sweep(config: SweepConfig) -> None:
    """`check_here` for trials that Ray is to run on this machine; those of a cluster elsewhere are not known yet.

    Raises:
        ConfigError: see `check_here`.
    """
    if config.engine is Engine.ray and config.cluster.address is None:
        check_here(config, workers_of(config), num_gpus() > 0)


def check_here(config: SweepConfig, num_workers: int, cuda: bool) -> None:
    """
    Raises:
        ConfigError: see `check_device`; or trials are to be chosen by what is predicted for a device that is not here.
    """
    check_device(config, num_workers)
    asked = config.forecast
    if asked.device in DEVICE_KINDS or data_sheet_here(config, cuda) is not None:
        return
    here = ", ".join(sorted({gpu.name for gpu in gpus()})) or "CPUs"
    for name, value in (("keep", asked.keep), ("prune", "true" if asked.prune else None)):
        if value is not None and (name == "keep" or capacity_here(config, cuda) is None):
            raise ConfigError(
                f"forecast.{name}={value} with forecast.device={asked.device}: these trials run on {here}, and "
                f"what is predicted for another device says nothing of them; leave forecast.{name} out, or rank the "
                "settings for that device by python -m fsdp_lab.forecast -m."
            )


def data_sheet_here(config: SweepConfig, cuda: bool) -> Device | None:
    """The device that `forecast.device` names, where trials run on it, as far as this machine can tell: the GPUs of a
    cluster elsewhere are not seen."""
    sheet = data_sheet(config)
    if sheet is None or (sheet.kind == "cuda") is not cuda:
        return None
    return sheet if not cuda or {gpu.name for gpu in gpus()} <= {sheet.name} else None


def capacity_bytes(config: SweepConfig, cuda: bool) -> int | None:
    """`forecast.capacity_gib`, or the memory of the device that is named, or of the smallest GPU here when the forecast
    is for GPUs."""
    if config.forecast.capacity_gib is None and config.forecast.device not in DEVICE_KINDS:
        sheet = data_sheet(config)
        return None if sheet is None else int(sheet.memory_gib * GIB)
    return capacity_here(config, cuda)


def capacity_here(config: SweepConfig, cuda: bool) -> int | None:
    """The same for trials that run: a named device's memory is not that of the GPUs here."""
    if config.forecast.capacity_gib is not None:
        return int(config.forecast.capacity_gib * GIB)
    if cuda and num_gpus():
        return gpu_memory()
    sheet = data_sheet_here(config, cuda)
    return None if sheet is None else int(sheet.memory_gib * GIB)


def gpu_memory() -> int | None:
    """Bytes of the smallest GPU, or None. The driver is asked: PyTorch would take a context on the GPU."""
    return min((gpu.memory_bytes for gpu in gpus() if gpu.memory_bytes), default=None)
