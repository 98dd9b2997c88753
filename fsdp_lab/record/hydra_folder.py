"""`.hydra/` of a trial: its config, overrides and choices, as Hydra's own launcher leaves them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from fsdp_lab.config import NightlyConfig, SweepConfig, UserError, from_dict, part, to_dict
from fsdp_lab.config.compose import Trial, variables_in, with_typed
from fsdp_lab.config.options import OPEN_GROUPS
from fsdp_lab.storage.files import write_text

# Every version of Hydra writes this key near the end of the file, so a truncated file lacks it.
_LAST_KEYS = {"config.yaml": "report", "hydra.yaml": "verbose"}


def _read(trial_folder: Path, name: str) -> dict[str, Any]:
    """Return the content of `.hydra/config.yaml`, or of `hydra.yaml` below its only key.

    Raises:
        UserError: the file is missing, or cannot be read.
    """
    path = trial_folder / ".hydra" / name
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), Loader=yaml.CSafeLoader)
        values: dict[str, Any] = content["hydra"] if name == "hydra.yaml" else content
        values[_LAST_KEYS[name]]
        if name == "hydra.yaml":
            values["runtime"]["choices"].items()
    except (OSError, ValueError, TypeError, KeyError, AttributeError, yaml.YAMLError) as error:
        why = " ".join(str(error).split())
        raise UserError(
            f"{path} cannot be read ({type(error).__name__}: {why}); restore it from a copy, or remove it and resume "
            "the sweep with resume_anyway=true, which writes it again."
        ) from None
    return values


def saved_config(trial_folder: Path) -> SweepConfig:
    """Read a trial's `.hydra/config.yaml`, which also has the keys of the nights.

    Raises:
        UserError: the file cannot be read, or has a key or a value that is no longer valid.
    """
    return part(from_dict(NightlyConfig, _read(trial_folder, "config.yaml")), SweepConfig)


def saved_choices(trial_folder: Path) -> dict[str, str]:
    """Return group -> option of a trial's `.hydra/hydra.yaml`, without Hydra's own groups. Raises UserError."""
    options = _read(trial_folder, "hydra.yaml")["runtime"]["choices"].items()
    return {key: str(option) for key, option in options if option and not key.startswith("hydra/")}


def write_hydra_folder(trial: Trial) -> None:
    """Write `.hydra/` of a trial, as Hydra's own launcher does."""
    hydra_folder = trial.folder / ".hydra"
    trial.folder.mkdir(0o700, parents=True, exist_ok=True)
    hydra_folder.mkdir(exist_ok=True)
    own = {group: trial.composed[group] for group in OPEN_GROUPS}
    contents = {
        "config": with_typed(to_dict(trial.config), variables_in(own)),  # a variable may be a secret
        "hydra": {"hydra": trial.composed["hydra"]},
        "overrides": trial.words,
    }
    for name, content in contents.items():
        write_yaml(hydra_folder / f"{name}.yaml", content)


def write_yaml(path: Path, content: Any) -> None:
    """Write plain values with libyaml, which is many times faster than Hydra's writer."""
    write_text(path, yaml.dump(content, Dumper=yaml.CSafeDumper, sort_keys=False, allow_unicode=True))


def write_missing_hydra_folder(trial: Trial) -> None:
    """If a file of `.hydra/` was removed, write the folder again, from the trial as it is composed now."""
    if not all((trial.folder / ".hydra" / name).exists() for name in _LAST_KEYS):
        write_hydra_folder(trial)
