"""A model's state as checkpoints hold it: sharded parameters, buffers of any size, and extra state.

A buffer may have grown, or been made, since the model was built. Extra state, which a module's `get_extra_state`
returns, may be any object.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

from fsdp_lab.config.errors import UserError
from fsdp_lab.workloads.base import original_name, unwrapped

_BELOW = "train.model."  # the prefix of a model's state in a checkpoint
_SHOWN = 3  # differences in a message


class CheckpointError(UserError):
    """A checkpoint that cannot be loaded here, and the reason."""


def is_extra_state(name: str) -> bool:
    return name.rpartition(".")[2] == "_extra_state"


def model_state(model: nn.Module) -> dict[str, Any]:
    """Return what DCP saves of a model. Extra state is bytes: of a dictionary DCP would load only the current keys."""
    return {
        name: _pack(value) if is_extra_state(name) else value for name, value in get_model_state_dict(model).items()
    }


def load_model_state(model: nn.Module, state: Mapping[str, Any]) -> None:
    """Load what `model_state` returned."""
    modules = _modules(model)
    for name, value in state.items():
        path, _, leaf = name.rpartition(".")
        there = None if is_extra_state(name) else getattr(modules[path], leaf)
        if not is_extra_state(name) and not isinstance(there, nn.Parameter) and _size(there) != [*value.shape]:
            own = there.dtype if isinstance(there, Tensor) and there.is_floating_point() else value.dtype
            setattr(modules[path], leaf, value.to(own))  # a buffer of another size
    set_model_state_dict(model, {n: _unpack(value) if is_extra_state(n) else value for n, value in state.items()})


def _pack(value: Any) -> bytes:
    torch.save(value, content := io.BytesIO())
    return content.getvalue()


def _unpack(content: bytes) -> Any:
    """Return the object. Its tensors are on the CPU or on this rank's GPU, whichever rank saved them."""
    return torch.load(
        io.BytesIO(content),
        weights_only=False,
        map_location=lambda storage, place: storage if place == "cpu" else storage.cuda(),  # type: ignore[attr-defined]
    )


def _modules(model: nn.Module) -> dict[str, nn.Module]:
    """Return each module by its name in a saved state, in which wrappers have no name."""
    named = unwrapped(model).named_modules(remove_duplicate=False)  # a wrapper comes before its module
    return {original_name(name): module for name, module in named}


class AsSaved(dcp.DefaultLoadPlanner):
    """Loads what was saved: buffers in the size they had, and the optimizer state that each parameter had.

    Args:
        model: gets the state.
        device: of buffers that the model does not have yet.
        source: the checkpoint, for messages.

    Attributes:
        left_out: names of parameters that are not trained here, and had optimizer state.
    """

    def __init__(self, model: nn.Module, device: torch.device, source: Any) -> None:
        super().__init__()
        self.model, self.device, self.source = model, device, source
        self.left_out: list[str] = []

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """Fit the state to the checkpoint.

        Raises:
            CheckpointError: the checkpoint has other parameters, or optimizer state that cannot be loaded here.
        """
        assert metadata is not None
        state = state_dict["train"]
        self._fit_model(state["model"], metadata.state_dict_metadata)
        if "optimizer" in state:
            self._fit_optimizer(state, metadata)
        super().set_up_planner(state_dict, metadata, is_coordinator)

    def _fit_optimizer(self, state: dict[str, Any], metadata: Metadata) -> None:
        """Make the optimizer state that was saved, which later steps may have made, and drop what was not saved."""
        trained = {name for group in state["optimizer"]["param_groups"] for name in group["params"]}
        made, states = state["optimizer"]["state"], dict[str, dict[str, Any]]()
        for saved_as, (_, part, *path) in (metadata.planner_data or {}).items():
            if (part, *path[:1]) != ("optimizer", "state"):
                continue
            _, name, *keys, last = path
            if not all(isinstance(key, str) for key in (*keys, last)):  # of a list: this trial's stays
                first = next(key for key in (*keys, last) if isinstance(key, str))
                if first not in made.get(name, {}):
                    raise CheckpointError(_unknown(self.source, saved_as, "a list"))
                states.setdefault(name, {})[first] = made[name][first]
                continue
            if name not in trained:
                self.left_out = [*dict.fromkeys([*self.left_out, name])]
                continue
            there, here = made.get(name, {}), states.setdefault(name, {})
            for key in keys:
                there, here = there.get(key, {}), here.setdefault(key, {})
            entry = metadata.state_dict_metadata[saved_as]
            here[last] = there[last] if last in there else self._place(saved_as, entry, state["model"][name])
        state["optimizer"]["state"] = states

    def _place(self, name: str, entry: Any, parameter: Tensor) -> Tensor | None:
        if not isinstance(entry, TensorStorageMetadata):
            return None
        if entry.size == parameter.shape:
            return torch.empty_like(parameter, dtype=entry.properties.dtype)
        if entry.size.numel() <= 1:
            return torch.empty(entry.size, dtype=entry.properties.dtype, device=parameter.device)
        raise CheckpointError(_unknown(self.source, name, f"of the size {[*entry.size]}"))

    def _fit_model(self, model: dict[str, Any], saved: Mapping[str, Any]) -> None:
        there = {name.removeprefix(_BELOW): entry for name, entry in saved.items() if name.startswith(_BELOW)}
        sizes = {n: [*e.size] if isinstance(e, TensorStorageMetadata) else None for n, e in there.items()}
        modules = _modules(self.model)
        for name, entry in there.items():
            path, _, leaf = name.rpartition(".")
            tensor = getattr(modules.get(path), leaf, nn.Parameter)  # a buffer may be None
            is_buffer = tensor is None or (isinstance(tensor, Tensor) and not isinstance(tensor, nn.Parameter))
            if is_buffer and isinstance(entry, TensorStorageMetadata) and _size(model.get(name)) != sizes[name]:
                model[name] = torch.empty(entry.size, dtype=entry.properties.dtype, device=self.device)
        ours = {name: _size(value) for name, value in model.items()}
        other = [
            f"{name} is {sizes.get(name, 'missing')} there and {ours.get(name, 'missing')} in the model"
            for name in dict.fromkeys([*ours, *sizes])
            if ours.get(name, "missing") != sizes.get(name, "missing")
        ]
        if other:
            more = f" and {len(other) - _SHOWN} more" if other[_SHOWN:] else ""
            raise CheckpointError(
                f"the checkpoint {self.source} is of another model: {'; '.join(other[:_SHOWN])}{more}; use the code "
                "that it was saved with, or start a new trial in another folder."
            )


def _unknown(source: Any, name: str, what: str) -> str:
    return (
        f"the checkpoint {source} has {name.removeprefix('train.')}, {what}, which an optimizer makes in a later step, "
        "so its form here is not known; let the optimizer make it in its first step, or start a new trial in another "
        "folder."
    )


def _size(value: Any) -> list[int] | None:
    """Return the size of a tensor; None for anything else."""
    return [*value.shape] if isinstance(value, Tensor) else None
