"""Weights in .safetensors: what a folder has, which of a model's parameters that is, and how a rank reads its part."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

from fsdp_lab.config.errors import UserError
from fsdp_lab.workloads.hf.configuration import CONFIG_FILE, check_values
from fsdp_lab.workloads.hf.hf_private import renamer, superfluous
from fsdp_lab.workloads.hf.library import transformers

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_NAMED = 3  # names in a message


@dataclass(frozen=True)
class Stored:
    """A tensor in a file: its shape."""

    shape: tuple[int, ...]


def stored_in(folder: Path | None, config: str) -> dict[str, Stored]:
    """Return the tensors in a folder's weights by their names, from the heads of the files.

    Raises:
        UserError: there are none, only pickles, one is damaged, one that the index names is missing, or two files of
            the folder have a tensor of one name: ranks look for a name in all of them.
    """
    if folder is None:
        raise UserError(
            f"model.pretrained=true: model.config={config} is a name on the hub, and weights are read from a folder: "
            f"hf download {config} --local-dir <folder>; then model.config=<folder>."
        )
    found: dict[str, Stored] = {}
    places: dict[str, Path] = {}
    files = _files(folder)
    for file in [*files, *sorted({*folder.glob("*.safetensors")} - {*files})]:
        head = _read_head(file)
        if again := sorted(places.keys() & head.keys()):
            raise UserError(
                f"model.pretrained=true: {places[again[0]]} and {file.name} both have {again[0]}; take the one that is "
                "not to be read out of the folder."
            )
        places |= dict.fromkeys(head, file)
        found |= head if file in files else {}
    return found


def _files(folder: Path) -> list[Path]:
    index, single = folder / _INDEX, folder / _SINGLE
    if single.is_file():  # before an index, as from_pretrained
        return [single]
    if not index.is_file():
        pickles = sorted(path.name for path in folder.glob("*.bin"))
        remedy = (
            f"only {', '.join(pickles[:_NAMED])}, which are pickles and are not read, for they can run code; where you "
            "trust them, write them again with AutoModel.from_pretrained(...).save_pretrained(...)"
            if pickles
            else f"put {_SINGLE}, or its parts with {_INDEX}, there, or take model.pretrained=false"
        )
        raise UserError(f"model.pretrained=true: the folder {folder} has no .safetensors weights; {remedy}.")
    try:
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        files = [folder / name for name in names if Path(name).name == name]
        assert len(files) == len(names) > 0
    except (ValueError, KeyError, TypeError, AttributeError, AssertionError) as error:
        raise UserError(f"model.pretrained=true: {index} is no index of weights; download it again.") from error
    if missing := [file.name for file in files if not file.is_file()]:
        raise UserError(
            f"model.pretrained=true: {index} names {len(missing)} files that are not there, {missing[0]} the first; "
            "download them."
        )
    return files


def _read_head(file: Path) -> dict[str, Stored]:
    """
    Raises:
        UserError: the file is damaged.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="pt") as content:
            return {name: Stored(tuple(content.get_slice(name).get_shape())) for name in content.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise UserError(
            f"model.pretrained=true: {file} is not a complete .safetensors file ({error}); download it again."
        ) from error


def places(model: Any, stored: Mapping[str, Stored], config: str) -> dict[str, str]:
    """Return the name of a stored tensor -> that of the model's parameter or buffer. Tied ones are there once, and what
    the model is known to leave out is not.

    Args:
        model: on `meta`.

    Raises:
        UserError: the tensors are not those of this model.
    """
    state = model.state_dict()
    first = _first_names(model)
    found: dict[str, str] = {}
    unexpected, taken = [], set()
    for name, given in _renamed(model, stored, state).items():
        if given not in state:
            unexpected.append(name)
        elif first[given] not in taken:
            taken.add(first[given])
            found[name] = first[given]
    missing = [name for name, _ in model.named_parameters() if name not in taken]
    _check(model, stored, state, found, missing, [name for name in unexpected if not _is_left_out(model, name)], config)
    return found


def _first_names(model: nn.Module) -> dict[str, str]:
    """The name of each tensor of the state -> the first name of the same tensor."""
    first: dict[int, str] = {}
    tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return {name: first.setdefault(id(tensor), name) for name, tensor in tensors}


def _renamed(model: Any, stored: Mapping[str, Stored], state: Mapping[str, Tensor]) -> dict[str, str]:
    """The name of each stored tensor -> the one that transformers gives it: some models have other names than when
    their weights were published, and those of a base model lack its name.

    Raises:
        UserError: a tensor is divided otherwise in the model.
    """
    rename, given = renamer(model, state), {}
    for name in stored:
        given[name], converted = rename(name)
        if converted is not None:
            raise UserError(
                f"model.pretrained=true: {name} is divided otherwise in transformers' {type(model).__name__}, and "
                "ranks read what they hold as it lies in the file; write it again with "
                "from_pretrained(...).save_pretrained(folder, save_original_format=False)."
            )
    return given


def _is_left_out(model: Any, name: str) -> bool:
    """Whether a tensor that the model has not is known to be superfluous: a table that it computes, above all."""
    buffers = {buffer for buffer, _ in model.named_buffers()}
    return any(re.search(pattern, name) for pattern in superfluous(model)) or bool(
        {name, f"{model.base_model_prefix}.{name}"} & buffers
    )


def _check(
    model: nn.Module,
    stored: Mapping[str, Stored],
    state: Mapping[str, Tensor],
    found: Mapping[str, str],
    missing: list[str],
    unexpected: list[str],
    config: str,
) -> None:
    """
    Raises:
        UserError: names or shapes differ.
    """
    shapes = [
        f"{name} is {list(stored[name].shape)} there and {list(state[place].shape)} in the model"
        for name, place in found.items()
        if stored[name].shape != tuple(state[place].shape)
    ]
    wrong = [
        f"{len(these)} {what} ({', '.join(these[:_NAMED])}{', ...' if len(these) > _NAMED else ''})"
        for these, what in (
            (missing, "missing"), (unexpected, "unknown to the model"), (shapes, "of another shape"),
        )
        if these
    ]  # fmt: skip
    if wrong:
        raise UserError(
            f"model.pretrained=true: the weights of model.config={config} are not those of this "
            f"{type(model).__name__}: {'; '.join(wrong)}. Remove the overrides that change its "
            "sizes, use the model that they were made for, or take model.pretrained=false."
        )


def load(folder: Path, places: Mapping[str, str], state: Mapping[str, Tensor]) -> None:
    """Read what this rank holds of each tensor, in place; no message is sent.

    Args:
        places: see above.
        state: the parameters and buffers of the model by their names, divided or not.
    """
    wanted: dict[str, Any] = {name: state[place] for name, place in places.items()}
    with torch.no_grad():
        dcp.load(wanted, storage_reader=dcp.HuggingFaceStorageReader(str(folder)), no_dist=True)


def save(model: Any, weights: Mapping[str, Tensor], folder: Path) -> None:
    """Write a model as `from_pretrained` reads it: its configuration, and whole weights by the names of `model`.

    Args:
        model: on `meta`.
    """
    kept = {*_first_names(model).values()} & model.state_dict().keys()
    with _silent():
        model.save_pretrained(folder, state_dict={name: weights[name] for name in weights if name in kept})


def load_whole(folder: Path) -> Any:
    """Return a sequence-to-sequence model that was saved, in eval mode and float32, on the host. No code of the folder
    is run, and no pickle is read.

    Raises:
        UserError: the folder has no such model.
    """
    kind = transformers().AutoModelForSeq2SeqLM
    try:
        check_values(json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8")), str(folder))
        with _silent():
            return kind.from_pretrained(
                folder, dtype=torch.float32, local_files_only=True, use_safetensors=True, trust_remote_code=False
            ).eval()
    except Exception as error:  # each file that is read raises what it likes
        reason = " ".join(str(error).split())[:300]
        raise UserError(f"{folder} is no exported sequence-to-sequence model: {reason}") from error


@contextmanager
def _silent() -> Iterator[None]:
    """Show no bar of what is written or read."""
    logging = transformers().logging
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
