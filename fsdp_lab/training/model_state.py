"""A model's state as checkpoints hold it: sharded parameters, buffers of any size, and what modules keep besides.

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

_BELOW = "train.model."  # so begin the names of a model's state in a checkpoint
_SHOWN = 3  # differences in a message


class CheckpointError(UserError):
    """A checkpoint that cannot be loaded here, and the reason."""


def is_extra_state(name: str) -> bool:
    return name.rpartition(".")[2] == "_extra_state"


def model_state(model: nn.Module) -> dict[str, Any]:
    """Return what DCP saves of a model. Extra state is bytes: of a dictionary DCP would load only the keys of now."""
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
            setattr(modules[path], leaf, value)  # a buffer of another size
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
    """Return each module by its name in a saved state, which has no name for wrappers."""
    named = unwrapped(model).named_modules(remove_duplicate=False)  # a wrapper comes before the module in it
    return {original_name(name): module for name, module in named}


class AsSaved(dcp.DefaultLoadPlanner):
    """Loads what was saved: buffers in the size they had, and no optimizer state of a parameter without gradients.

    Args:
        model: gets the state.
        device: of buffers that the model does not have yet.
        source: the checkpoint, for messages.
    """

    def __init__(self, model: nn.Module, device: torch.device, source: Any) -> None:
        super().__init__()
        self.model, self.device, self.source = model, device, source

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """Fit the state to the checkpoint.

        Raises:
            CheckpointError: the checkpoint has other parameters.
        """
        assert metadata is not None
        state, saved = state_dict["train"], metadata.state_dict_metadata
        states = state["optimizer"]["state"] if "optimizer" in state else {}
        for name in list(states):
            if not any(f"train.optimizer.state.{name}.{key}" in saved for key in states[name]):
                del states[name]
        self._fit_model(state["model"], saved)
        super().set_up_planner(state_dict, metadata, is_coordinator)

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


def _size(value: Any) -> list[int] | None:
    """Return the size of a tensor; None for anything else."""
    return [*value.shape] if isinstance(value, Tensor) else None
