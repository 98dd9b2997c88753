"""What a recommendation states, as codes with values. Their texts are in `templates/words.j2`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class WhyNot(StrEnum):
    """Why a setting does not qualify."""

    oom = "oom"
    diverged = "diverged"
    failed = "failed"
    stopped = "stopped"
    skipped = "skipped"
    interrupted = "interrupted"
    no_result = "no_result"
    too_large = "too_large"
    tight = "tight"
    no_figure = "no_figure"
    loss_too_high = "loss_too_high"
    timing_excluded = "timing_excluded"
    untimed = "untimed"


class Why(StrEnum):
    """Why the recommended setting is the one."""

    no_trial = "no_trial"
    none_qualifies = "none_qualifies"
    only = "only"
    pending = "pending"
    alone = "alone"
    tied = "tied"
    fastest = "fastest"
    same_speed = "same_speed"
    objectives = "objectives"
    least_memory = "least_memory"
    lowest_loss = "lowest_loss"


class TieBreak(StrEnum):
    """What decided among settings that are equally good."""

    memory = "memory"
    simplicity = "simplicity"
    loss = "loss"
    speed = "speed"
    order = "order"


class NoSpeeds(StrEnum):
    """Why speeds are not compared."""

    excluded = "excluded"
    only_one = "only_one"
    too_short = "too_short"


class Note(StrEnum):
    """What the figures do not show."""

    excluded = "excluded"
    limit_raised = "limit_raised"
    one_run = "one_run"
    nothing_learned = "nothing_learned"
    rounding = "rounding"
    idle = "idle"
    auto = "auto"


@dataclass(frozen=True)
class Statement:
    """A code, and the values that its text needs."""

    code: StrEnum
    values: Mapping[str, Any] = field(default_factory=dict)
