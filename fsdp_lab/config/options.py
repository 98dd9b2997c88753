"""What can be typed: every key, and the options of the groups in `conf/`."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from fsdp_lab.config.convert import flatten
from fsdp_lab.config.key import Secret, keys_of
from fsdp_lab.config.nightly import NightlyConfig


def conf_dir() -> Path:
    """The folder of YAML values: inside the package in a wheel, beside it in a checkout."""
    package = Path(__file__).resolve().parent.parent
    return next(d for d in (package / "conf", package.parent / "conf") if d.is_dir())


def all_keys() -> list[str]:
    """Return every key that can be typed, dotted."""
    return list(keys_of(NightlyConfig))


def secret_keys() -> list[str]:
    """Return the keys whose whole value is a secret: it goes into no file, and on no screen."""
    return [name for name, key in keys_of(NightlyConfig).items() if key.secret is Secret.VALUE]


@cache
def said_by_option(group: str, option: str) -> dict[str, Any]:
    """`{"sharding.granularity": "per_block"}`: what the option of a group says by its name already."""
    import yaml  # neither PyTorch nor torchvision brings it, and training takes no more than these

    values = yaml.safe_load((conf_dir() / group / f"{option}.yaml").read_text()) or {}
    defaults, keys = flatten(NightlyConfig()), keys_of(NightlyConfig)
    said = [name for name in keys if name.startswith(f"{group}.") and keys[name].named_by_option]
    return {name: values.get(name.partition(".")[2], defaults[name]) for name in said}
