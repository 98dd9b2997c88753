"""The user's own optimizer, made for sharded parameters, with the same groups as for whole ones."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from fsdp_lab.config.errors import ModelError, UserError
from fsdp_lab.config.target import NAMED, given_to, import_callable, in_words, instantiate, parameters
from fsdp_lab.memory.torch_private import FakeTensorMode
from fsdp_lab.training.groups import Groups, grouped
from fsdp_lab.training.own_step import reads_refused
from fsdp_lab.training.parallel.base import Parallel
from fsdp_lab.workloads.base import original_name, unwrapped
from fsdp_lab.workloads.construct import seeded

Settings = dict[str, dict[str, str]]  # of each parameter: the settings of its group, in words
_NO_GROUP = {"group": "none"}


def lr_scale(parallel: Parallel) -> int:
    return parallel.dims.dp_degree if parallel.config.optimizer.scale_lr else 1


def learning_rate(parallel: Parallel) -> float:
    return parallel.config.optimizer.lr * lr_scale(parallel)


def build_own(
    parallel: Parallel, target: str, named: Iterable[tuple[str, nn.Parameter]], groups: Groups, lr: float
) -> torch.optim.Optimizer:
    """Build the user's optimizer.

    Args:
        named: parameters by their original names.

    Raises:
        UserError: the callable fails, or returns no optimizer.
    """
    config, function = parallel.config, import_callable(target, "optimizer._target_")
    arguments = {**instantiate(config.optimizer.arguments, "optimizer"), "lr": lr}
    given = given_to(function)
    foreach = (parameters(function) or {}).get("foreach")
    if foreach is not None and foreach.default is None and not arguments.keys() & {"foreach", "fused"}:
        # PyTorch's choice on a GPU; a forecast runs on a CPU, where the choice is another
        arguments["foreach"] = not parallel.is_sharded
    try:
        with seeded(config.training.seed), reads_refused(f"the constructor of optimizer._target_={target}"):
            made = function(**{given: grouped(named, groups, given == NAMED)}, **arguments)
    except (
        TypeError,
        ValueError,
        LookupError,
        ArithmeticError,
        AttributeError,
        AssertionError,
        OSError,
        ImportError,
    ) as error:
        shown = ", ".join(f"optimizer.{name}={value}" for name, value in config.optimizer.users_arguments.items())
        raise UserError(
            f"optimizer._target_={target} with {shown} fails: {in_words(error)}{parallel.gives_optimizer}"
        ) from error
    if not isinstance(made, torch.optim.Optimizer):
        raise UserError(
            f"optimizer._target_={target} returns a {type(made).__name__}; it must return a torch.optim.Optimizer."
        )
    closure = (parameters(made.step) or {}).get("closure")
    if closure is not None and closure.default is closure.empty:
        raise UserError(
            f"optimizer._target_={target}: step() of {type(made).__name__} needs a closure that computes the loss, "
            "but fsdp_lab calls step() once after the backward pass; use an optimizer that needs none, such as "
            "optimizer=adamw."
        )
    return made


def users_optimizers(model: nn.Module, parallel: Parallel) -> dict[str, torch.optim.Optimizer]:
    """Return the optimizers that `task.optimizers` makes for the parts of a model, sharded or not yet.

    Raises:
        UserError: it fails, or returns no optimizers by name that train each trained parameter once.
    """
    task = parallel.config.task
    function, typed = import_callable(str(task.optimizers), "task.optimizers"), f"task.optimizers={task.optimizers}"
    try:
        with seeded(parallel.config.training.seed), reads_refused(typed):
            parts = {name: unwrapped(part) for name, part in parallel.roots(model).items()}
            made = function(parts, learning_rate(parallel))
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"{typed} fails: {in_words(error)}{parallel.gives_optimizer}") from error
    ours = isinstance(made, Mapping) and all(isinstance(each, torch.optim.Optimizer) for each in made.values())
    if not ours or not made:
        raise UserError(f"{typed} returns a {type(made).__name__}; it must return {{name: torch.optim.Optimizer}}.")
    times = Counter(id(p) for optimizer in made.values() for group in optimizer.param_groups for p in group["params"])
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and (count := times[id(parameter)]) != 1:
            raise UserError(
                f"{typed}: {original_name(name)} is in {count} optimizers; give each trained parameter one, and freeze "
                "others by requires_grad_(False) in the model."
            )
    return dict(made)


def unsharded_settings(model: nn.Module, parallel: Parallel, groups: Groups) -> Settings:
    """Return the settings that the user's class gives each parameter of a model that is not sharded yet.

    It is called with fake parameters, which have the attributes of the real ones.

    Returns:
        by parameter; empty if sharding does not replace the parameters, or the class needs their values.
    """
    target, task = parallel.config.optimizer.target, parallel.config.task
    if task.optimizers is not None and parallel.is_sharded:
        return _settings(users_optimizers(model, parallel), model.named_parameters())
    if target is None or not parallel.is_sharded:
        return {}
    with suppress(Exception), FakeTensorMode():  # errors of a class are reported with real parameters
        made = {name: _fake(p, parallel.home) for name, p in model.named_parameters() if p.requires_grad}
        own = build_own(parallel, target, made.items(), groups, learning_rate(parallel))
        return _settings({"model": own}, made.items())
    return {}


def _fake(parameter: nn.Parameter, device: torch.device) -> nn.Parameter:
    made = nn.Parameter(torch.empty(parameter.shape, dtype=parameter.dtype, device=device))
    vars(made).update(vars(parameter))
    return made


def _settings(optimizers: Mapping[str, torch.optim.Optimizer], named: Iterable[tuple[str, nn.Parameter]]) -> Settings:
    names = {id(parameter): original_name(name) for name, parameter in named}
    return {
        names[id(parameter)]: {"group": of, **{k: _in_words(value) for k, value in group.items() if k != "params"}}
        for of, optimizer in optimizers.items()
        for group in optimizer.param_groups
        for parameter in group["params"]
        if id(parameter) in names
    }


def _in_words(value: Any) -> str:
    """Return a plain value as it is, but of an object its class: two calls of a constructor make two objects."""
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_in_words, value))}]"
    kind = Tensor if isinstance(value, Tensor) else type(value)  # fake ones have a class of their own
    return str(value) if isinstance(value, str | int | float | None) else kind.__name__


def check_settings(optimizers: Mapping[str, torch.optim.Optimizer], parallel: Parallel, unsharded: Settings) -> None:
    """Check that the user's class gives each sharded parameter the settings that it gives the whole one.

    Args:
        unsharded: as `unsharded_settings` returns them.

    Raises:
        ModelError: it groups by what sharding changes.
    """
    if not unsharded:
        return
    sharded, config = _settings(optimizers, unwrapped(parallel.model).named_parameters()), parallel.config
    by = f"task.optimizers={config.task.optimizers}" if config.task.optimizers else ""
    by = by or f"optimizer._target_={config.optimizer.target}"
    for name in unsharded | sharded:
        whole, here = unsharded.get(name, _NO_GROUP), sharded.get(name, _NO_GROUP)
        for key in whole | here:
            if whole.get(key) != here.get(key):
                raise ModelError(
                    f"{parallel.sharding} sharding.api={config.sharding.api.name}: {by} gives {name} "
                    f"{key}={here.get(key)}, but {key}={whole.get(key)} where it is not sharded"
                    f"{parallel.changes_shapes}. Group by an attribute that the model's constructor sets, as "
                    f"parameter.no_decay = True, or use {parallel.keeps_shapes}."
                )
