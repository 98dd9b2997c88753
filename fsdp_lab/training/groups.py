"""The optimizer's parameter groups: chosen by whole parameters, before sharding changes them, and kept by name."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from fsdp_lab.config.errors import ModelError
from fsdp_lab.config.target import import_callable, in_words
from fsdp_lab.config.training import Decay, OptimizerConfig

Groups = list[tuple[list[str], dict[str, Any]]]  # the names of each, and its options


def choose_groups(model: nn.Module, optimizer: OptimizerConfig, lr_factor: int) -> Groups:
    """Return the groups of a model's trained parameters; one without options for all, if the config has none.

    Args:
        model: as the constructor made it.
        lr_factor: by which `optimizer.scale_lr` multiplies rates.

    Raises:
        ModelError: `optimizer.groups` fails, or does not return each trained parameter once.
    """
    named = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    if optimizer.groups is not None:
        return _users(named, optimizer.groups)
    if optimizer.target is not None:
        return [([*named], {})]
    modules = (module for module in model.modules() if isinstance(module, nn.Embedding))
    embeddings = {id(module.weight) for module in modules} if optimizer.embedding_lr is not None else set()
    groups: dict[tuple[bool, bool], list[str]] = {}
    for name, parameter in named.items():
        decays = optimizer.decay is Decay.all or parameter.ndim >= 2
        groups.setdefault((decays, id(parameter) in embeddings), []).append(name)
    if optimizer.embedding_lr is not None and not any(of_embeddings for _, of_embeddings in groups):
        raise ModelError(
            f"optimizer.embedding_lr={optimizer.embedding_lr}: the model trains no nn.Embedding; leave it out, or make "
            "groups by optimizer.groups."
        )
    rate = (optimizer.embedding_lr or 0.0) * lr_factor
    return [
        (names, ({} if decays else {"weight_decay": 0.0}) | ({"lr": rate} if is_embedding else {}))
        for (decays, is_embedding), names in groups.items()
    ]


def _users(named: Mapping[str, nn.Parameter], path: str) -> Groups:
    typed = f"optimizer.groups={path}"
    try:
        made = [dict(group) for group in import_callable(path, "optimizer.groups")([*named.items()])]
        members = [_members(group.pop("params")) for group in made]
    except Exception as error:
        raise ModelError(
            f"{typed} fails: {in_words(error)}; return groups of PyTorch's form, as in [{{'params': [...], "
            "'weight_decay': 0.0}, ...]."
        ) from error
    names = {id(parameter): name for name, parameter in named.items()}
    if any(id(parameter) not in names for each in members for parameter in each):
        raise ModelError(f"{typed} returns what is no trained parameter of the model; return those that it is given.")
    placed_in = [[names[id(parameter)] for parameter in each] for each in members]
    placed = [name for each in placed_in for name in each]
    times = Counter(placed)
    if twice := next((name for name in placed if times[name] > 1), None):
        raise ModelError(f"{typed} puts {twice} into two groups; put each parameter into one.")
    if left_out := [name for name in named if name not in times]:
        raise ModelError(
            f"{typed} leaves out {left_out[0]}{f' and {len(left_out) - 1} more' if left_out[1:] else ''}; give each "
            "parameter a group, or freeze it by requires_grad_(False) in the model."
        )
    return [*zip(placed_in, made, strict=True)]


def _members(params: Any) -> list[Any]:
    """Return the parameters of a group: one, several, or pairs of a name and one."""
    return [one[1] if isinstance(one, tuple) else one for one in ([params] if isinstance(params, Tensor) else params)]


def grouped(named: Iterable[tuple[str, nn.Parameter]], groups: Groups, with_names: bool = False) -> Any:
    """Return parameters as PyTorch's optimizers take them, in the groups that were chosen by their names.

    Args:
        named: by the names of the model that was not sharded.
        with_names: each parameter comes as a pair with its name.

    Returns:
        a list of parameters, or with several groups, or options, a list of dictionaries.
    """
    found = dict(named)
    members = [[(name, found[name]) if with_names else found[name] for name in names] for names, _ in groups]
    if len(groups) == 1 and not groups[0][1]:
        return members[0]
    return [{"params": each, **options} for each, (_, options) in zip(members, groups, strict=True)]
