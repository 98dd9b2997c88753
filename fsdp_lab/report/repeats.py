"""Which settings more repeats could still make the recommended one, for `repeat=auto`. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from fsdp_lab.metrics import SPEED
from fsdp_lab.report.choice import departures, smallest
from fsdp_lab.report.qualify import qualify
from fsdp_lab.report.settings import Rules, Setting, Settings
from fsdp_lab.report.speed import Basis
from fsdp_lab.report.ties import best_of, is_memory_scarce

if TYPE_CHECKING:
    import pandas as pd

_BEYOND_NOISE = 3.0


def undecided(frame: pd.DataFrame, rules: Rules) -> list[Setting]:
    """Return the settings that more repeats could still make the recommended one, one for each group of equal speeds.

    A single one, or none, means that the answer is settled. With objectives that lack speed there is none. A setting is
    out in any of these cases:

    - Another is faster beyond noise and tolerance.
    - Another goes first among equals, and this one is not faster beyond noise and tolerance.
    - Without repeats, another was three times as fast: runs of one setting differ less on cores of their own.
    """
    if not rules.by_speed:
        return []
    settings = Settings(frame, rules)
    able = settings.without(qualify(settings))
    if rules.objectives:
        _, able = best_of(settings, able)
    ranked = _ranked(able)
    breaks_ties = not rules.objectives or rules.objectives[-1][0] == SPEED
    limit = 1 / (1 - rules.speed_tolerance)

    def is_beaten(one: Setting, other: Setting) -> bool:
        if not one.speed or not other.speed:
            return False
        ratio = settings.speeds.ratio(other.group, one.group)
        if settings.speeds.basis is not Basis.repeats:
            return ratio.value > _BEYOND_NOISE
        faster = ratio.known and ratio.low > 1 and ratio.value > limit
        first = breaks_ties and ranked.index(other) < ranked.index(one)
        # With no tolerance nothing is ever shown to be as fast.
        return faster or (first and ratio.known and ratio.low > 1 / limit)

    fast = sorted(ranked, key=lambda s: -s.figure(SPEED, 0.0))  # these beat most
    return [one for one in ranked if not any(is_beaten(one, other) for other in fast if other is not one)]


def _ranked(able: Sequence[Setting]) -> list[Setting]:
    """Return one setting of each group, those that win ties first."""
    firsts: dict[int, Setting] = {}
    for setting in sorted(able, key=lambda s: departures(s.values)):
        firsts.setdefault(setting.group, setting)
    ranked, left = list[Setting](), list(firsts.values())
    while is_memory_scarce(able) and left:
        ranked += [left[place] for place in smallest([s.peak for s in left])]
        left = [s for s in left if s not in ranked]
    return ranked + left
