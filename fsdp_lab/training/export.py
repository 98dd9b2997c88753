"""The trained model as a file, or as a folder in its own format, for use without fsdp_lab."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from fsdp_lab.config.errors import UserError
from fsdp_lab.config.serialize import to_dict
from fsdp_lab.config.trial import TrialConfig
from fsdp_lab.config.workload import ModelConfig, source_of
from fsdp_lab.storage.files import whole, whole_folder, write_json
from fsdp_lab.training.distributed import DistributedContext
from fsdp_lab.workloads.user.model import build_model_spec

FORMAT = 1
_DATA_FILE = "fsdp_lab.json"  # in the folder of a model with its own format


def export_model(
    model: nn.Module,
    config: TrialConfig,
    ranks: DistributedContext,
    folder: Path,
    step: int,
    save: Callable[[Mapping[str, Tensor], Path], None] | None = None,
) -> None:
    """Gather the full weights to rank 0's CPU and write them; every rank calls it.

    `model.pt` is a dictionary of tensors and plain values: `torch.load(path, weights_only=True)`. A model with its own
    format becomes a folder `model` instead, which also names its training data.

    Args:
        step: the optimizer step of these weights; recorded in such a folder.
        save: writes such a folder; None: write `model.pt`.
    """
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights: dict[str, Any] = get_model_state_dict(model, options=options)
    if not ranks.is_first:
        return
    if save is not None:
        tensors = {name: tensor for name, tensor in weights.items() if isinstance(tensor, Tensor)}
        with whole_folder(folder / "model") as making:
            save(tensors, making)
            about = {"format": FORMAT, "step": step, "data": to_dict(config.data)}
            write_json(making / _DATA_FILE, about, parents=False)
        return
    content = {
        "format": FORMAT,
        "torch_version": str(torch.__version__),
        "model": to_dict(config.model),
        "data": to_dict(config.data),
        "state_dict": weights,
    }
    with whole(folder / "model.pt", durable=True, parents=False) as making:
        torch.save(content, making)


def load_exported(path: Path) -> nn.Module:
    """Return the model of an exported file; see `fsdp_lab.api.load_exported`."""
    if not path.is_file():
        raise UserError(f"{path}: no such file; give the path of a model.pt that a trial exported.")
    try:
        content = torch.load(path, weights_only=True, map_location="cpu")
    except Exception as error:
        # in place of torch's message, which advises to trust the file
        raise UserError(f"{path} is not an exported model, which has only tensors and plain values.") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise UserError(f"{path} was not exported by this version, which reads format {FORMAT}.")
    model = replace(ModelConfig.of_keys(content["model"], "model."), block_classes=None)  # only training needs them
    function = model.function()
    is_model = source_of(model) is not None or (isinstance(function, type) and issubclass(function, nn.Module))
    if not is_model or model.paths() != [model.target]:
        # no other function that a file names is called: the file may be from anybody
        raise UserError(
            f"{path} names model._target_={model.target}, which is not called, since it is no class of a module, or "
            f'calls others; build the model with its own code, and load torch.load("{path}", '
            'weights_only=True)["state_dict"].'
        )
    module = build_model_spec(model).build()
    module.load_state_dict(content["state_dict"])
    return module.eval()
