"""The files in which a setting can be taken home."""

from __future__ import annotations

from collections.abc import Callable

from fsdp_lab.redact import redact
from fsdp_lab.takehome.accelerate import to_accelerate
from fsdp_lab.takehome.pytorch import to_pytorch
from fsdp_lab.takehome.setup import Setup
from fsdp_lab.takehome.torchtitan import to_torchtitan

_WRITERS: dict[str, Callable[[Setup], str]] = {
    "pytorch": to_pytorch,
    "accelerate": to_accelerate,
    "torchtitan": to_torchtitan,
}
# A value of `use=` -> the name of the file beside the report.
FILES = {"pytorch": "use_pytorch.py", "accelerate": "use_accelerate.yaml", "torchtitan": "use_torchtitan.toml"}


def write_out(use: str, setup: Setup) -> str:
    """Return the text of a file, without passwords.

    Args:
        use: a key of `FILES`.
        setup: the trial.

    Raises:
        UserError: the setting cannot be written in this form.
    """
    return redact(_WRITERS[use](setup))
