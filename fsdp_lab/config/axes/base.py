"""One axis of a sweep. `AXES` lists all; rules, notes, comparisons and choices iterate over it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from fsdp_lab.config.errors import CombinationError

if TYPE_CHECKING:
    from fsdp_lab.config.ranks import Ranks
    from fsdp_lab.config.trial import TrialConfig


@dataclass(frozen=True)
class Where:
    """Where a trial runs, or would run; only what notes need.

    Attributes:
        cuda: on GPUs.
        has_tf32: the GPUs can multiply in TF32; None: not known.
        trains: the trial is trained, not only forecast.
        groups_compared: a user's optimizer was found to group sharded parameters like whole ones.
        nodes: the node of each rank; empty: not known.
    """

    cuda: bool
    has_tf32: bool | None = None
    trains: bool = False
    groups_compared: bool = False
    nodes: Sequence[str] = ()


@dataclass(frozen=True)
class Axis:
    """One axis of a sweep: its keys and their rules.

    Attributes:
        keys: its keys, the first of which names it; a group stands for all its keys.
        plain: the value of the first key that wins a tie between settings; "": any.
        changes_losses: other values may change a loss by more than rounding.
        is_layout: a plain loop of the user's code does not have it.
        divides: it divides or recomputes the model: a value with wrong losses has them in every precision.
        since: key -> the method of FSDP2 that it calls, and the first version of PyTorch with that method.
        check: raises ConfigError for an invalid value, CombinationError for values that are invalid together.
        check_machine: raises UserError if this machine lacks something that the settings need; its second argument:
            trials run here.
        effective: key -> the value that other settings and the ranks decide; equal values train alike.
        notes: a sentence for each setting with an unexpected effect.
    """

    keys: tuple[str, ...]
    plain: str = ""
    changes_losses: bool = False
    is_layout: bool = True
    divides: bool = False
    since: Mapping[str, tuple[str, tuple[int, int]]] = field(default_factory=dict)
    check: Callable[[TrialConfig, Ranks], None] = lambda trial, ranks: None
    check_machine: Callable[[TrialConfig, bool], None] = lambda trial, is_here: None
    effective: Callable[[TrialConfig, Ranks], dict[str, Any]] = lambda trial, ranks: {}
    notes: Callable[[TrialConfig, Where], Iterator[str]] = lambda trial, where: iter(())


def refuse(setting: str, others: Mapping[str, tuple[bool, str]], instead: str) -> None:
    """Raise CombinationError for the first of `others` that is set.

    Args:
        others: text as typed -> whether it is set, and why it conflicts with the setting.
        instead: the end of the message.
    """
    for typed, (is_set, why) in others.items():
        if is_set:
            raise CombinationError(f"{setting} with {typed}: {why}{instead}")
