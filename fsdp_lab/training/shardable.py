"""What of a model's parameters cannot be sharded or trained, found before the first step; by forecasts, too."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from fsdp_lab.config.errors import ModelError
from fsdp_lab.training.torch_private import has_hooks
from fsdp_lab.workloads.generators import reached


def has_complex(model: nn.Module) -> bool:
    """Return whether an optimizer has to update complex numbers, which fused kernels cannot."""
    return any(parameter.is_complex() and parameter.requires_grad for parameter in model.parameters())


def check_hooks(model: nn.Module, where: str, remedy: str) -> None:
    """Check that no parameter has a hook.

    Raises:
        ModelError: one has, and would lose it.
    """
    for name, parameter in model.named_parameters():
        if has_hooks(parameter):
            raise ModelError(
                f"{where}: the parameter {name} has a hook (register_hook or register_post_accumulate_grad_hook), "
                f"which would not be called: another parameter takes its place. Change the gradient in forward, or "
                f"{remedy}."
            )


def held_parameters(model: nn.Module) -> Iterator[tuple[str, str]]:
    """Yield the name of each parameter that something but its module holds, and the attribute that leads to it."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    own = {id(module) for module in model.modules()}
    seen = set(own)
    for path, module in model.named_modules():
        for attribute, value in vars(module).items():
            if attribute != "_parameters" and not isinstance(module, nn.RNNBase):  # which updates what it holds
                for parameter in reached(value, seen, nn.Parameter):
                    if id(parameter) in names:
                        yield names[id(parameter)], f"{path or 'the model'}'s {attribute}"
