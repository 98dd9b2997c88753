"""Names of modules in profiles: their path in the model, and which of several active modules is meant."""

from __future__ import annotations

from collections import defaultdict
from itertools import chain

from torch import nn


def plain_name(name: str) -> str:
    """Return a module's name without what DDP puts before it."""
    return name.removeprefix("module.")


class ModuleNames:
    """Names the module that was entered last. In a backward pass several outer ones stay open.

    A module that several others hold, such as the rotary embedding of all blocks, has a name for each. It gets the name
    below the module that uses it, or only its last part if none of them is active.
    """

    def __init__(self, model: nn.Module) -> None:
        names: dict[nn.Module, list[str]] = defaultdict(list)
        for name, module in model.named_modules(remove_duplicate=False):
            names[module].append(plain_name(name))
        self._shared = {name: same for same in names.values() if len(same) > 1 for name in same}
        self._open: dict[str, int] = {}
        self._entered = 0
        self._latest = ""

    def innermost(self, at_work: set[str]) -> str:
        """Return the plain name of the innermost module; "" outside of all.

        Args:
            at_work: the full names of the modules that have been entered and not left, the model's own class first.
        """
        if at_work != self._open.keys():
            kept = {name: order for name, order in self._open.items() if name in at_work}
            for name in sorted(at_work - kept.keys(), key=lambda name: (len(name), name)):
                self._entered += 1
                kept[name] = self._entered
            self._open = kept
            self._latest = self._named(sorted(kept, key=kept.__getitem__, reverse=True))
        return self._latest

    def _named(self, latest: list[str]) -> str:
        shared_name = _below_the_model(latest[0]) if latest else ""
        if shared_name not in self._shared:
            return shared_name
        users = [user for name in latest if (user := _below_the_model(name)) and user not in self._shared]
        by_user = (name for user in users for name in self._shared[shared_name] if name.startswith(f"{user}."))
        the_models = (name for name in self._shared[shared_name] if "." not in name)
        return next(chain(by_user, the_models), shared_name.rpartition(".")[2])


def _below_the_model(full: str) -> str:
    return plain_name(full.partition(".")[2])
