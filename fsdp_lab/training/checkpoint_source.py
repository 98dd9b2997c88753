"""The checkpoint that a trial starts from: its own, or another run's, and what of the other counts here."""

from __future__ import annotations

from typing import Any

import torch

from fsdp_lab.config.compare import CHECKPOINT, settings
from fsdp_lab.config.trial import TrialConfig
from fsdp_lab.training.model_state import CheckpointError


def check_meta(meta: dict[str, Any], source: str, config: TrialConfig) -> None:
    """Refuse a checkpoint of another optimizer or PyTorch, naming the difference.

    Raises:
        CheckpointError: they differ. DCP promises nothing between PyTorch versions.
    """
    if meta["optimizer"] != config.optimizer.kind:
        raise CheckpointError(
            f"the checkpoint {source} has another optimizer: optimizer={meta['optimizer']} in the checkpoint, "
            f"{config.optimizer.kind} now; use the same, or start a new trial in another folder."
        )
    here = torch.__version__
    if _minor(meta["torch_version"]) != _minor(here) and not config.checkpoint.any_torch_version:
        raise CheckpointError(
            f"the checkpoint {source} was written by PyTorch {meta['torch_version']}, and this is {here}; PyTorch does "
            "not promise that versions are compatible. Use that version, or try checkpoint.any_torch_version=true."
        )


def trial_identity(config: TrialConfig) -> dict[str, Any]:
    return settings(config, CHECKPOINT)


def check_same_trial(meta: dict[str, Any], source: str, config: TrialConfig) -> None:
    """Refuse to resume in a folder in which another trial was trained.

    Raises:
        CheckpointError: with the settings that differ.
    """
    here, there, older = trial_identity(config), meta["trial"], trial_identity(TrialConfig())
    other = [
        f"{k}={there.get(k)} in the checkpoint, {here.get(k)} now"
        for k in dict.fromkeys([*here, *there])
        if there.get(k, older.get(k)) != here.get(k)  # a version before this one may lack a key
    ]
    if other:
        folder = source.rpartition("/checkpoints/")[0]
        raise CheckpointError(
            f"the folder {folder} holds another trial ({'; '.join(other)}); use another folder, or "
            f"checkpoint.resume_from={source} in a new one to continue from its weights."
        )


def _minor(version: str) -> list[str]:
    return version.split(".")[:2]
