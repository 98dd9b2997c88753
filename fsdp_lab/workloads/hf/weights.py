"""Weights in .safetensors: the tensors of a folder, their names in the model, and how a rank reads its part."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

from fsdp_lab.config.errors import UserError
from fsdp_lab.workloads.hf.hf_private import renamer, superfluous

_SINGLE, _PART = "model.safetensors", re.compile(r"model-\d+-of-\d+\.safetensors")
_NAMED = 3  # names in a message


def stored_in(folder: Path | None, config: str) -> dict[str, torch.Size]:
    """Return the shapes of the tensors in a folder's weights by their names, from the headers of the files.

    Args:
        folder: None: `config` is a name on the hub.
        config: `model.config` as typed, for messages.

    Raises:
        UserError: weights are missing, pickled or damaged, or two files have a tensor of the same name. Ranks search
            all files for a name.
    """
    if folder is None:
        raise UserError(
            f"model.pretrained=true: model.config={config} is a name on the hub, but weights are read from a folder; "
            f"run hf download {config} --local-dir <folder>, then use model.config=<folder>."
        )
    heads = {file.name: _read_head(file) for file in sorted(folder.glob("*.safetensors"))}
    place: dict[str, str] = {}
    for file, head in heads.items():
        if again := sorted(place.keys() & head.keys()):
            raise UserError(
                f"model.pretrained=true: {folder} has {again[0]} in {place[again[0]]} and {file}; remove one of the "
                "files."
            )
        place |= dict.fromkeys(head, file)
    # The folder may have files of another format, too. A single file goes before parts, as in from_pretrained.
    chosen = [_SINGLE] if _SINGLE in heads else [file for file in heads if _PART.fullmatch(file)]
    if not chosen:
        raise UserError(
            f"model.pretrained=true: the folder {folder} has no {_SINGLE}, nor parts of it. Pickles (.bin) are not "
            "read, because they can run code; if you trust them, convert them with "
            "AutoModel.from_pretrained(...).save_pretrained(...)."
        )
    return {name: shape for file in chosen for name, shape in heads[file].items()}


def _read_head(file: Path) -> dict[str, torch.Size]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="pt") as content:
            return {name: torch.Size(content.get_slice(name).get_shape()) for name in content.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise UserError(
            f"model.pretrained=true: {file} is not a complete .safetensors file ({error}); download it again."
        ) from error


def places(model: Any, stored: Mapping[str, torch.Size], config: str) -> dict[str, str]:
    """Return the name of each stored tensor -> the name of the model's parameter or buffer.

    Tied tensors appear once. Tensors that the model is known to leave out do not appear.

    Args:
        model: on `meta`.
        config: `model.config` as typed, for messages.

    Raises:
        UserError: the tensors are not those of this model.
    """
    state, first = model.state_dict(), _first_names(model)
    source: dict[str, str] = {}
    unexpected = []
    for name, given in _renamed(model, stored, state).items():
        if given in state:
            source.setdefault(first[given], name)
        elif not _is_left_out(model, name):
            unexpected.append(name)
    missing = [name for name, _ in model.named_parameters() if name not in source]
    shapes = [
        f"{name} is {list(stored[name])} there and {list(state[place].shape)} in the model"
        for place, name in source.items()
        if stored[name] != tuple(state[place].shape)
    ]
    wrong = [
        f"{len(these)} {what} ({', '.join(these[:_NAMED])}{', ...' if len(these) > _NAMED else ''})"
        for these, what in ((missing, "missing"), (unexpected, "unknown to the model"), (shapes, "of another shape"))
        if these
    ]
    if wrong:
        raise UserError(
            f"model.pretrained=true: the weights of model.config={config} are not those of this "
            f"{type(model).__name__}: {'; '.join(wrong)}. Remove the overrides that change its sizes, download all "
            "parts of the model that they were made for, or use model.pretrained=false."
        )
    return {name: place for place, name in source.items()}


def _first_names(model: nn.Module) -> dict[str, str]:
    """Return the name of each tensor of the state -> the first name of the same tensor."""
    first: dict[int, str] = {}
    tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return {name: first.setdefault(id(tensor), name) for name, tensor in tensors}


def _renamed(model: Any, stored: Mapping[str, torch.Size], state: Mapping[str, Tensor]) -> dict[str, str]:
    """Return the name of each stored tensor -> the name that transformers gives it.

    Some models were renamed after their weights were published, and the weights of a base model lack its prefix.
    """
    rename, given = renamer(model, state), {}
    for name in stored:
        given[name], converted = rename(name)
        if converted is not None:
            raise UserError(
                f"model.pretrained=true: {name} has another layout in transformers' {type(model).__name__}, and ranks "
                "read their shards directly from the file; convert it with "
                "from_pretrained(...).save_pretrained(folder, save_original_format=False)."
            )
    return given


def _is_left_out(model: Any, name: str) -> bool:
    """Return whether a tensor that the model lacks is known to be superfluous, usually a table that it computes."""
    buffers = {buffer for buffer, _ in model.named_buffers()}
    return any(re.search(pattern, name) for pattern in superfluous(model)) or bool(
        {name, f"{model.base_model_prefix}.{name}"} & buffers
    )


def load(folder: Path, places: Mapping[str, str], state: Mapping[str, Tensor]) -> None:
    """Read this rank's part of each tensor, in place. Ranks do not communicate.

    Args:
        state: the parameters and buffers of the model by their names, sharded or not.
    """
    wanted: dict[str, Any] = {name: state[place] for name, place in places.items()}
    with torch.no_grad():
        dcp.load(wanted, storage_reader=dcp.HuggingFaceStorageReader(str(folder)), no_dist=True)


def save(model: Any, weights: Mapping[str, Tensor], folder: Path) -> None:
    """Write a model as `from_pretrained` reads it: its configuration, and whole weights by the names of `model`.

    Args:
        model: on `meta`.
        weights: whole tensors by name; names that `model` lacks are ignored.
    """
    kept = {*_first_names(model).values()} & model.state_dict().keys()
    model.save_pretrained(folder, state_dict={name: weights[name] for name in weights if name in kept})
