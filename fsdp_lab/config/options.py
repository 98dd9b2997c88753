"""The choices: groups and their options, devices with a data sheet, tasks, samplers and schedulers.

Names and paths only: nothing is imported here, so a misspelled name fails without PyTorch, Ray or Optuna.
"""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path
from typing import Any

from fsdp_lab.config.errors import ConfigError
from fsdp_lab.config.suggest import did_you_mean

# Devices without a data sheet; `auto`: GPUs if this machine has any, else CPUs.
DEVICE_KINDS = ("auto", "cpu", "cuda")
OPEN_GROUPS = ("model", "data", "optimizer", "lr_schedule")  # they accept a user's class, and so any key
_DEVICES = "device"  # the folder of data sheets
OWN_FOLDER = "conf_of_mine"  # the name of the user's folder in the docs
PROBE = f"python -m fsdp_lab.probe --out {OWN_FOLDER}/device/mine.yaml"
_OWN = "FSDP_LAB_CONFIG_DIR"  # the folder of `--config-dir`, also for forecast processes
# The key that names an entry -> its entries: name -> module.
REGISTRY: dict[str, dict[str, str]] = {
    # a module with `build_task(TaskConfig, ModelConfig) -> Task`
    "task.name": {
        "classification": "fsdp_lab.workloads.tasks.classification",
        "language": "fsdp_lab.workloads.tasks.language",
        "seq2seq": "fsdp_lab.workloads.tasks.seq2seq",
        "model_loss": "fsdp_lab.workloads.user.task",
        "custom": "fsdp_lab.workloads.user.task",
    },
    # a callable `(seed=...) -> optuna.samplers.BaseSampler`; a grid samples nothing
    "search.name": {
        "grid": "",
        "random": "optuna.samplers.RandomSampler",
        "optuna": "optuna.samplers.TPESampler",
    },
    # a function `(SweepConfig, watched) -> ray.tune.schedulers.TrialScheduler`
    "scheduler.name": {
        "fifo": "fsdp_lab.sweep.schedulers.fifo",
        "asha": "fsdp_lab.sweep.schedulers.asha",
        "median": "fsdp_lab.sweep.schedulers.median",
    },
}


def conf_dir() -> Path:
    """Return the folder of YAML values: inside the package in a wheel, next to it in a checkout."""
    package = Path(__file__).resolve().parent.parent
    return next(d for d in (package / "conf", package.parent / "conf") if d.is_dir())


def group_dirs() -> list[Path]:
    """Return the folder of each group of options. Data sheets are no options: `forecast.device` names one."""
    return sorted(folder for folder in conf_dir().iterdir() if folder.is_dir() and folder.name != _DEVICES)


def device_file(name: str) -> Path | None:
    """Return the data sheet that `forecast.device` names, by its name or path; None for `auto`, `cpu` and `cuda`."""
    if name in DEVICE_KINDS:
        return None
    if _is_path(name):
        return Path(name).expanduser()
    files = [folder / _DEVICES / f"{name}.yaml" for folder in (conf_dir(), *_own_folders())]
    return next((file for file in files if file.is_file()), files[0])


def use_devices_of(config_dir: str | None) -> None:
    """Also accept names of devices in the user's folder of `--config-dir`."""
    os.environ.pop(_OWN, None)
    if config_dir is not None:
        os.environ[_OWN] = str(Path(config_dir).absolute())


def _own_folders() -> list[Path]:
    return [Path(os.environ[_OWN])] if _OWN in os.environ else []


def own_devices() -> list[Path]:
    """Return the device files of the user's folder, by default of the one that the docs name."""
    folders = _own_folders() or [Path(OWN_FOLDER)]
    return sorted(file for folder in folders for file in (folder / _DEVICES).glob("*.yaml"))


def data_sheets() -> list[Path]:
    """Return the data sheets that come with fsdp_lab."""
    return sorted((conf_dir() / _DEVICES).glob("*.yaml"))


def known_devices() -> list[str]:
    return [file.stem for file in (*data_sheets(), *(own_devices() if _own_folders() else []))]


def is_device(name: str) -> str | None:
    """Take `auto`, `cpu`, `cuda`, or a data sheet: its name in `conf/device`, or its path."""
    file = device_file(name)
    if file is None or file.is_file():
        return None
    if _is_path(name):
        return "is not a file; name an existing data sheet, or one of " + ", ".join(known_devices())
    known = ", ".join([*DEVICE_KINDS, *known_devices()])
    return f"is not known. {did_you_mean(name, known_devices())}Use {known}, or the path of a data sheet (.yaml)"


def _is_path(name: str) -> bool:
    return "/" in name or name.endswith((".yaml", ".yml"))


def options_of(group: str, config_dir: str | None = None) -> list[str]:
    """Return the names of a group's options, including the user's; one in a subfolder is `team/small`."""
    folders = (folder / group for folder in (conf_dir(), Path(config_dir or conf_dir())))
    files = {file.relative_to(folder).with_suffix("") for folder in folders for file in folder.rglob("*.yaml")}
    return sorted(map(str, files))


@cache
def option_of(group: str, target: str) -> str | None:
    """Return the option of ours whose `_target_` is this path; None: no option's is."""
    files = sorted((conf_dir() / group).glob("*.yaml"))
    return next((file.stem for file in files if f"\n_target_: {target}\n" in file.read_text()), None)


def groups() -> list[str]:
    return [folder.name for folder in group_dirs()]


def option_values(group: str, option: str, config_dir: str | None = None) -> dict[str, Any]:
    """Return the keys and values of a group's option, as its file has them.

    It is empty for an option that is neither ours nor in the user's folder.
    """
    import yaml  # training needs only PyTorch and torchvision, which do not include it

    files = (folder / group / f"{option}.yaml" for folder in (conf_dir(), Path(config_dir or conf_dir())))
    file = next((file for file in files if file.is_file()), None)
    return (yaml.safe_load(file.read_text()) or {}) if file is not None else {}


def register(key: str, name: str, path: str) -> None:
    """Add a name to a key of the registry, for code of another package, in this process.

    Args:
        key: `task.name`, `search.name` or `scheduler.name`.
        name: the value that users type.
        path: the dotted path of what the comment at the key asks for.
    """
    REGISTRY[key][name] = path


def path_of(key: str, name: str) -> str:
    """Return the dotted path that a value of a key of the registry stands for.

    Raises:
        ConfigError: the name is unknown; the message lists the known ones.
    """
    known = REGISTRY[key]
    if name not in known:
        raise ConfigError(f"{key}={name} is not an option. Choose one of: {', '.join(known)}.")
    return known[name]
