"""Sharding units by their names."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn


def names_of(model: nn.Module, units: Iterable[nn.Module]) -> list[str]:
    """The names that modules have in a model."""
    names = {id(module): name for name, module in model.named_modules()}
    return [names[id(unit)] for unit in units]
