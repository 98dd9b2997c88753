"""Where a resume works that is typed in another folder than its sweep was."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from fsdp_lab.config import is_address
from fsdp_lab.config.key_value_args import key_of
from fsdp_lab.config.sweep import TrackingConfig
from fsdp_lab.engine.ray_private import RUNTIME_ENV_FOLDER
from fsdp_lab.redact import redact


def why_here(launched_in: str, words: Sequence[str], own: bool) -> str | None:
    """Return why a resume stays in the working directory; None if it moves to where the sweep was started.

    A sweep in object storage needs only its MLflow store from that folder: without it, a new store there would not be
    found by anybody. Ray deletes its copy of a job's files, and what is written there.

    Args:
        launched_in: the folder in which the sweep was started.
        words: the command line that `resume=...` stands for.
        own: whether the sweep's folder is this user's; a copy from object storage is not.
    """
    if RUNTIME_ENV_FOLDER in Path(launched_in).parts:
        return f"the sweep was started in Ray's copy of a job's files ({launched_in}), which Ray deletes"
    if own or not is_address(_last(words, "cluster.storage_path", "")):
        return None
    uri = _last(words, "tracking.uri", TrackingConfig().uri)
    kind, local, name = uri.partition("sqlite:///")
    if kind or not local or name.startswith("/"):
        return None
    store = Path(launched_in, name.partition("?")[0])
    return None if store.exists() else f"the sweep's MLflow store, {redact(str(store))}, is gone"


def print_stay(reason: str) -> None:
    """Print why a resume stays in the working directory."""
    print(f"resumes in {os.getcwd()}, the current folder: {reason}", flush=True)


def _last(words: Sequence[str], key: str, default: str) -> str:
    """Return the last value of a key, which is the effective one."""
    values = [word.partition("=")[2].strip("'\"") for word in words if key_of(word) == key]
    return values[-1] if values else default
