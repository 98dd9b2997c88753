"""What a recommendation states, as codes with values. Their texts are in `templates/words.j2`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from fsdp_lab.config.status import TrialStatus

# Why a setting does not qualify, besides the statuses in which its trials ended.
WhyNot = Literal["no_result", "too_large", "tight", "no_figure", "loss_too_high", "untimed", "differs"]
# Why the recommended setting is the one, or why there is none.
Why = Literal[
    "no_trial", "none_qualifies", "only", "pending", "alone", "tied", "fastest", "same_speed", "objectives",
    "least_memory", "lowest_loss",
]  # fmt: skip
TieBreak = Literal["memory", "simplicity", "loss", "speed", "order"]
Note = Literal["differs", "agree", "amplified", "others_cpu", "side_by_side", "one_run", "nothing_learned", "idle"]


@dataclass(frozen=True)
class Statement:
    """A code, and the values that its text needs."""

    code: WhyNot | TrialStatus | Why | Note
    values: Mapping[str, Any] = field(default_factory=dict)
