"""Checks of the checkpoint from which a trial starts: its own, or another run's."""

from __future__ import annotations

from typing import Any

import torch

from fsdp_lab.config.compare import CHECKPOINT, settings
from fsdp_lab.config.trial import TrialConfig
from fsdp_lab.training.model_state import CheckpointError

_GROUPS = ("optimizer.groups=", "optimizer.decay=", "optimizer.embedding_lr=None")  # they change groups, and so states
_DIVIDES = ("model.tp_plan", "model.block_classes=", "model.forward_methods=")  # they change no weight


def check_meta(meta: dict[str, Any], source: str, config: TrialConfig) -> None:
    """Refuse a checkpoint of another model, optimizer or PyTorch, naming the difference.

    Weights of the same shapes would be loaded whatever else differs, such as the number of heads.

    Raises:
        CheckpointError: they differ. DCP promises nothing between PyTorch versions.
    """
    differs = [each for each in _differences(meta, config) if each.startswith(("model.", *_GROUPS))]
    other = [each for each in differs if not each.startswith(_DIVIDES)]
    if meta["optimizer"] != config.optimizer.kind:
        other.append(f"optimizer={meta['optimizer']} in the checkpoint, {config.optimizer.kind} now")
    if other:
        raise CheckpointError(
            f"the checkpoint {source} has another model or optimizer: {'; '.join(other)}; use the same values, "
            "or start a new trial in another folder."
        )
    here = torch.__version__
    if _minor(meta["torch_version"]) != _minor(here) and not config.checkpoint.any_torch_version:
        raise CheckpointError(
            f"the checkpoint {source} was written by PyTorch {meta['torch_version']}, and this is {here}; PyTorch does "
            "not promise that versions are compatible. Use that version, or try checkpoint.any_torch_version=true."
        )


def trial_identity(config: TrialConfig) -> dict[str, Any]:
    return settings(config, CHECKPOINT)


def check_same_trial(meta: dict[str, Any], source: str, config: TrialConfig, world_size: int) -> None:
    """Refuse a folder in which another trial was trained, or a user's loader with another number of workers.

    Raises:
        CheckpointError: with the settings that differ.
    """
    if config.data.loader is not None and meta["world_size"] != world_size:
        raise CheckpointError(
            f"the checkpoint {source} has the places of {meta['world_size']} workers in {config.data.typed}, and this "
            f"trial has {world_size}; resume with cluster.num_workers={meta['world_size']}, or start with its weights "
            "in another folder, by checkpoint.resume_from."
        )
    if other := _differences(meta, config):
        folder = source.rpartition("/checkpoints/")[0]
        raise CheckpointError(
            f"the folder {folder} holds another trial ({'; '.join(other)}); use another folder, or "
            f"checkpoint.resume_from={source} in a new one to continue from its weights."
        )


def _differences(meta: dict[str, Any], config: TrialConfig) -> list[str]:
    here, there, older = trial_identity(config), meta["trial"], trial_identity(TrialConfig())
    return [
        f"{k}={there.get(k)} in the checkpoint, {here.get(k)} now"
        for k in dict.fromkeys([*here, *there])
        if there.get(k, older.get(k)) != here.get(k)  # a version before this one may lack a key
    ]


def _minor(version: str) -> list[str]:
    return version.split(".")[:2]
