"""The setting that a sweep recommends, by figures alone: of those that qualify the fastest, or the best by objectives.

Pure: from a frame and rules to codes with values. The texts are in `templates/`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from fsdp_lab.metrics import MEMORY, OTHERS_CPU, SPEED, declared
from fsdp_lab.report.choice import SAME_MEMORY, pareto_front
from fsdp_lab.report.notes import notes_on
from fsdp_lab.report.qualify import does_not_fit, not_compared, only_one_counts, qualify
from fsdp_lab.report.settings import Rules, Setting, Settings
from fsdp_lab.report.speed import Interval, Speeds
from fsdp_lab.report.statements import NoSpeeds, Statement, TieBreak, Why
from fsdp_lab.report.ties import best_of, break_tie, is_tied

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class Comparison:
    """Another setting against the recommended one.

    Attributes:
        setting: the other.
        speed: how many times as fast it is; None: not compared, or it cannot differ.
        tied: it is equally fast, within the tolerance or the noise.
        memory: its peak over the recommended one's; NaN: not known.
        loss: the change of the loss as a ratio; NaN: not known, 0: equal, or within rounding.
        rounded: the losses differ by no more than their rounding.
        why_not: why it does not qualify; None: it does.
    """

    setting: Setting
    speed: Interval | None
    tied: bool
    memory: float
    loss: float
    rounded: bool
    why_not: Statement | None


@dataclass(frozen=True)
class Recommendation:
    """The answer of a sweep, as codes and figures.

    Attributes:
        setting: the recommended one; None: none qualifies.
        why: why it is the one, or why there is none.
        no_speeds: why speeds are not compared, though they were asked for; None: they are.
        tied: settings that are equally good as the recommended one, by the tolerance or the noise of speeds.
        tie_break: what decided among them; None without a tie.
        able: the settings that qualify.
        why_not: name of a setting -> why it does not qualify.
        front: the settings that no other beats in one of `axes` without being worse in another.
        axes: `(metric, "min" or "max")` of the main picture.
        others: every other setting against the recommended one.
        notes: what the figures do not show.
        settings: all of the sweep.
    """

    setting: Setting | None
    why: Statement
    no_speeds: Statement | None
    tied: list[Setting]
    tie_break: TieBreak | None
    able: list[Setting]
    why_not: dict[str, Statement]
    front: list[Setting]
    axes: list[tuple[str, str]]
    others: list[Comparison]
    notes: list[Statement]
    settings: Settings = field(repr=False)

    @property
    def is_by_speed(self) -> bool:
        """Whether the setting may be called recommended: not where speeds alone should decide and are not known."""
        without = self.no_speeds is not None and self.no_speeds.code is not NoSpeeds.too_short
        return not (without and all(metric == SPEED for metric, _ in self.settings.rules.objectives))

    @property
    def basis(self) -> str:
        """The basis of the recommendation, as in `report.csv`: `yes`, or `by memory` or `by loss` without speeds."""
        if self.is_by_speed or self.setting is None:
            return "yes"
        return "by memory" if math.isfinite(self.value(self.setting, MEMORY)) else "by loss"

    def value(self, setting: Setting, metric: str) -> float:
        """Return a setting's figure; NaN without one."""
        return self.settings.value(setting, metric)

    def interval(self, setting: Setting) -> Interval | None:
        """Return a setting's speed; None if it is not compared."""
        if not self.settings.speeds.has(setting.group):
            return None
        speed = self.settings.speeds.speed(setting.group)
        return speed if math.isfinite(speed.high) else Interval(speed.value)


def recommend(frame: pd.DataFrame, rules: Rules) -> Recommendation:
    """Choose a setting of a sweep.

    Args:
        frame: a row a trial, as of `SweepRecord.frame`.
        rules: of the choice.
    """
    settings = Settings(frame, rules)
    able, why_not = qualify(settings)
    alone = only_one_counts(settings, able)
    no_speeds = _no_speeds(settings, able, alone)
    if alone:
        settings.speeds = Speeds([])  # there is nothing to compare it with
    timed = [s for s in able if settings.speeds.has(s.group)] if rules.by_speed else []
    if timed:
        counted = {s.name for s in timed}
        why_not |= {s.name: not_compared(settings, s) for s in able if s.name not in counted}
        able = timed
    axes = _axes(rules)
    front = _front(settings, axes)
    if not able:
        why = Statement(Why.none_qualifies if settings.all else Why.no_trial)
        return Recommendation(None, why, no_speeds, [], None, [], why_not, front, axes, [], [], settings)
    best, raced = best_of(settings, able)
    chosen, tie_break = break_tie(settings, best, bool(raced))
    others = [s for s in (raced or best) if s is not chosen]
    if raced:
        tied = [s for s in others if s.group != chosen.group and is_tied(settings, s, chosen)]
    elif rules.objectives:
        tied = others
    else:
        tied = [s for s in others if settings.peaks[s.group] <= settings.peaks[chosen.group] * (1 + SAME_MEMORY)]
    why = _why(settings, able, chosen, tied, front, bool(raced), no_speeds)
    compared = [_compare(settings, s, chosen, s in tied, why_not) for s in settings.all if s is not chosen]
    notes = notes_on(settings, able, bool(raced))
    return Recommendation(
        chosen, why, no_speeds, tied, tie_break if tied else None, able, why_not, front, axes, compared, notes,
        settings,
    )  # fmt: skip


def _no_speeds(settings: Settings, able: Sequence[Setting], alone: bool) -> Statement | None:
    if not settings.rules.by_speed or not able or (any(settings.speeds.has(s.group) for s in able) and not alone):
        return None
    shares = [settings.figure(n, OTHERS_CPU) for s in able for n in s.trials if n in settings.excluded]
    counted = [s for s in able if settings.speeds.has(s.group)]
    if not shares:
        return Statement(NoSpeeds.too_short)
    return Statement(NoSpeeds.only_one if alone else NoSpeeds.excluded, {"share": max(shares), "counted": counted})


def _axes(rules: Rules) -> list[tuple[str, str]]:
    if len(rules.objectives) > 1:
        return list(rules.objectives)
    standard: list[tuple[str, str]] = [(metric, declared(metric).better) for metric in (MEMORY, SPEED)]
    if not rules.objectives or rules.objectives[0] in standard:
        return standard
    return [standard[0], rules.objectives[0]]


def _front(settings: Settings, axes: Sequence[tuple[str, str]]) -> list[Setting]:
    fitting = [s for s in settings.all if does_not_fit(settings, s) is None]
    rows = [{metric: settings.value(s, metric) for metric, _ in axes} for s in fitting]
    spacings = [{metric: settings.spacing(s, metric) for metric, _ in axes} for s in fitting]
    return [fitting[place] for place in pareto_front(rows, axes, spacings)]


def _why(
    settings: Settings,
    able: Sequence[Setting],
    chosen: Setting,
    tied: Sequence[Setting],
    front: Sequence[Setting],
    raced: bool,
    no_speeds: Statement | None,
) -> Statement:
    others = [s for s in able if s is not chosen]
    objectives = [o for o in settings.rules.objectives if raced or o[0] != SPEED]
    if objectives:
        metric, better = objectives[0]
        values = [settings.value(s, metric) for s in able]
        is_best = settings.value(chosen, metric) == (min(values) if better == "min" else max(values))
        of = {"objectives": objectives, "count": len(able), "is_best": is_best, "on_front": chosen in front}
        return Statement(Why.objectives, of)
    if len(settings.all) == 1:
        return Statement(Why.only)
    if not others:
        return Statement(Why.alone if all(s.ended for s in settings.statuses.values()) else Why.pending)
    if not raced:
        measured = math.isfinite(settings.median(chosen, MEMORY))
        return Statement(Why.least_memory if measured else Why.lowest_loss, {"count": len(able)})
    if tied:
        return Statement(Why.tied)
    if len({s.group for s in able}) == 1:
        return Statement(Why.same_speed, {"count": len(able)})
    following = max(others, key=lambda s: settings.speeds.estimate(s.group))
    ratio = settings.speeds.ratio(chosen.group, following.group)
    return Statement(Why.fastest, {"count": len(able), "next": following, "ratio": ratio})


def _compare(
    settings: Settings, other: Setting, chosen: Setting, tied: bool, why_not: dict[str, Statement]
) -> Comparison:
    same = other.group == chosen.group
    timed = settings.is_finished(other) and settings.speeds.has(other.group) and settings.speeds.has(chosen.group)
    memory, mine = settings.median(other, MEMORY), settings.median(chosen, MEMORY)
    loss, reference = (settings.median(s, settings.loss_key) for s in (other, chosen))
    rounded = 0 < abs(loss - reference) <= settings.rounding(other, chosen, settings.loss_key)
    return Comparison(
        other,
        settings.speeds.ratio(other.group, chosen.group) if timed and not same else None,
        tied and not same,
        memory / mine if not same and memory > 0 and mine > 0 else math.nan,
        0.0 if rounded else (loss - reference) / max(abs(reference), 1e-12),
        rounded,
        why_not.get(other.name),
    )
