"""`.hydra/` of a trial: its config, overrides and choices, as Hydra's own launcher leaves them."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

from fsdp_lab.compose import Trial
from fsdp_lab.config import NightlyConfig, SweepConfig, from_dict, part, to_dict
from fsdp_lab.files import report_damaged, write_text
from fsdp_lab.redact import has_password, redact, redact_strings

_ADDRESSES = ("uri", "ui")  # of `tracking`
# Each of Hydra's files has this key near its end, whatever version wrote it: a file that was cut short lacks it.
_LAST_KEYS = {"config.yaml": "report", "hydra.yaml": "verbose"}


def read_hydra_file(trial_folder: Path, name: str) -> dict[str, Any] | None:
    """Return the content of `.hydra/config.yaml`, or of `hydra.yaml` below its only key.

    None for no file, or, with a warning, for a damaged one.
    """
    path = trial_folder / ".hydra" / name
    try:
        text = path.read_text(encoding="utf-8")
        content = yaml.load(text, Loader=yaml.CSafeLoader)
    except FileNotFoundError:
        return None
    except (ValueError, yaml.YAMLError) as error:
        report_damaged(path, " ".join(str(error).split()))
        return None
    if name == "hydra.yaml" and isinstance(content, dict):
        content = content.get("hydra")
    if not isinstance(content, dict) or _LAST_KEYS[name] not in content or not text.endswith("\n"):
        report_damaged(path, "it is cut short")
        return None
    return content


def saved_config(values: dict[str, Any]) -> SweepConfig:
    """Read a trial's `.hydra/config.yaml`, in which Hydra leaves the keys of the nights too.

    Raises:
        ConfigError: a key or a value that is none any more.
    """
    return part(from_dict(NightlyConfig, values), SweepConfig)


def _as_typed(trial: Trial) -> dict[str, Any]:
    """Return a trial's config in plain values, with the variables in its addresses, which may be passwords."""
    content, typed = to_dict(trial.config), trial.composed["tracking"]
    for name in _ADDRESSES:  # a file of the user's own may hold a password
        value = typed[name]
        content["tracking"][name] = redact(value) if isinstance(value, str) and has_password(value) else value
    return content


def write_hydra_folder(trial: Trial) -> None:
    """Write `.hydra/` of a trial, as Hydra's own launcher does, but without passwords."""
    hydra_folder = trial.folder / ".hydra"
    trial.folder.mkdir(0o700, parents=True, exist_ok=True)
    hydra_folder.mkdir(exist_ok=True)
    contents = {
        "config": _as_typed(trial),
        "hydra": {"hydra": redact_strings(trial.composed["hydra"])},  # what was typed is in it more than once
        "overrides": trial.overrides,
    }
    for name, content in contents.items():
        _write_yaml(hydra_folder / f"{name}.yaml", content)


def write_multirun_yaml(folder: Path, config: Any) -> None:
    """Write `multirun.yaml`, the composed configuration of a sweep in plain values, without passwords."""
    _write_yaml(folder / "multirun.yaml", redact_strings(config))


def _write_yaml(path: Path, content: Any) -> None:
    """Write by libyaml, which is many times as fast as Hydra's way."""
    write_text(path, yaml.dump(content, Dumper=yaml.CSafeDumper, sort_keys=False, allow_unicode=True))


def restore_hydra_folder(trial: Trial) -> None:
    """Write damaged or missing files of `.hydra/` again, as the trial is composed now."""
    if not all(read_hydra_file(trial.folder, name) for name in _LAST_KEYS):
        with suppress(OSError):  # the folder cannot be written: what needs it says so
            write_hydra_folder(trial)
