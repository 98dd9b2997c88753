"""Recommend a setting by figures: of those that qualify the fastest, or the best by objectives.

Pure: from settings and rules to codes with values. The texts are in `templates/`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from fsdp_lab.config.metrics import DATA_WAIT, MEDIAN_STEP, MEMORY, SPEED, declared, spacing
from fsdp_lab.report.choice import departures, pareto_front
from fsdp_lab.report.qualify import caveats_on, does_not_fit, notes_on, notes_on_the_model, qualify, ratio
from fsdp_lab.report.settings import Coded, Setting, Settings
from fsdp_lab.report.speed import EQUAL, Interval

_SAME_MEMORY = 0.01  # of the smallest peak: others within this share count as equally small
_SCARCE = 0.9  # of a device's memory: a setting that needs more makes memory scarce, as in forecasts
_UNEVEN = 0.15  # a difference of logarithms: a mean and a median differ by more
_MOST = 0.5  # the share of the difference of two steps from which waiting for data explains it
_WIDELY = 0.1  # a difference of two shares of steps: smaller ones are usual
_SAME = 1e-5  # as a ratio: losses that differ by less are the same


@dataclass(frozen=True)
class Comparison:
    """Another setting against the recommended one.

    Attributes:
        setting: the other.
        speed: how many times as fast it is; None: not compared, or it cannot differ.
        tied: it is equally fast, within the tolerance or the noise.
        memory: its peak over the recommended one's; NaN: not known.
        loss: the change of the loss as a ratio; NaN: not known, 0: equal, or within rounding; infinite: of zero.
        rounded: the losses differ by no more than their rounding.
        why_not: why it does not qualify; None: it does.
    """

    setting: Setting
    speed: Interval | None
    tied: bool
    memory: float
    loss: float
    rounded: bool
    why_not: Coded | None


@dataclass
class Recommendation:
    """The answer of a sweep, as codes and figures.

    Attributes:
        settings: all of the sweep.
        why_not: name of a setting -> why it does not qualify.
        why: why the recommended one was chosen, or why there is none.
        setting: the recommended one; None: none qualifies.
        raced: speeds were compared.
        tied: settings as good as the recommended one, within the tolerance or the noise of speeds.
        tie_break: what decided among them; None without a tie.
        unordered: of `tied`, those with steps that contradict their speed, and how.
        others: every other setting against the recommended one.
        caveats: why speeds may mislead.
        notes: what else the figures do not show.
    """

    settings: Settings = field(repr=False)
    why_not: dict[str, Coded]
    why: Coded
    setting: Setting | None = None
    raced: bool = False
    tied: list[Setting] = field(default_factory=list)
    tie_break: str | None = None
    unordered: list[tuple[Setting, Coded]] = field(default_factory=list)
    others: list[Comparison] = field(default_factory=list)
    caveats: list[Coded] = field(default_factory=list)
    notes: list[Coded] = field(default_factory=list)

    @property
    def able(self) -> list[Setting]:
        return self.settings.without(self.why_not)

    @property
    def no_speeds(self) -> bool:
        """No step was timed, so speeds are not compared, though they were asked for."""
        return self.settings.rules.by_speed and bool(self.able) and not any(s.speed for s in self.able)

    @property
    def axes(self) -> list[tuple[str, str]]:
        """`(metric, "min" or "max")` of the main picture."""
        objectives = list(self.settings.rules.objectives)
        standard: list[tuple[str, str]] = [(metric, declared(metric).better) for metric in (MEMORY, SPEED)]
        if len(objectives) > 1:
            return objectives
        return [standard[0], *objectives] if objectives and objectives[0] not in standard else standard

    @cached_property
    def front(self) -> list[Setting]:
        """The settings that no other beats in one of `axes` without being worse in another."""
        wrong = [
            name for name, reason in self.why_not.items() if reason.code in ("another_model", "differs", "changed")
        ]
        fitting = [s for s in self.settings.without(wrong) if does_not_fit(s) is None]
        spacings = [{metric: spacing(metric, s.figures) for metric, _ in self.axes} for s in fitting]
        return [fitting[place] for place in pareto_front([s.figures for s in fitting], self.axes, spacings)]


def recommend(settings: Settings) -> Recommendation:
    """Choose a setting of a sweep."""
    rules, why = settings.rules, Coded("none_qualifies" if settings.all else "no_trial")
    r = Recommendation(settings, qualify(settings), why)
    if rules.by_speed and not r.no_speeds:
        r.why_not |= {s.name: Coded("untimed") for s in r.able if not s.speed}
    r.notes = list(notes_on_the_model(settings))
    if not (able := r.able):
        if settings.plain.nothing_agrees:
            place = [note.code for note in r.notes].index("another_model")
            r.why = r.notes.pop(place)
        return r
    best, raced = _best_of(settings, able)
    r.raced = bool(raced)
    chosen, tie_break = _break_tie(settings, best, r.raced)
    r.setting = chosen
    if raced:
        r.tied = [s for s in raced if s.group != chosen.group and _is_tied(settings, s, chosen)]
        contradicted = ((s, _contradicted(settings, chosen, s)) for s in r.tied if not _is_equal(settings, s, chosen))
        r.unordered = [(s, against) for s, against in contradicted if against]
        r.caveats = list(caveats_on(settings, able))
    else:
        limit = math.inf if rules.objectives else chosen.peak * (1 + _SAME_MEMORY)
        r.tied = [s for s in best if s is not chosen and s.peak <= limit]
    r.tie_break, r.why = tie_break if r.tied else None, _why(r, able, chosen)
    r.others = [_compare(r, s, chosen) for s in settings.all if s is not chosen]
    r.notes += notes_on(settings, able, r.raced)
    return r


def _why(r: Recommendation, able: Sequence[Setting], chosen: Setting) -> Coded:
    others, every = [s for s in able if s is not chosen], r.settings.all
    objectives = [o for o in r.settings.rules.objectives if r.raced or o[0] != SPEED]
    if objectives:
        metric, better = objectives[0]
        values = [s.figure(metric) for s in able]
        is_best = chosen.figure(metric) == (min(values) if better == "min" else max(values))
        of = {"objectives": objectives, "count": len(able), "is_best": is_best, "on_front": chosen in r.front}
        return Coded("objectives", of)
    if len(every) == 1:
        return Coded("only")
    if not others:
        return Coded("alone" if all(status.ended for s in every for status in s.statuses) else "pending")
    if not r.raced:
        return Coded("least_memory" if MEMORY in chosen.figures else "lowest_loss", {"count": len(able)})
    if r.tied:
        return Coded("tied")
    if len({s.group for s in able}) == 1:
        return Coded("same_speed", {"count": len(able)})
    following = max(others, key=lambda s: s.figure(SPEED))
    ratio = chosen.times(following)
    by_median = _by_median_steps(r.settings, chosen, following)
    uneven = by_median is not None and abs(math.log(by_median.value / ratio.value)) > _UNEVEN
    by_median = by_median if uneven else None
    return Coded("fastest", {"count": len(able), "next": following, "ratio": ratio, "by_median": by_median})


def _by_median_steps(settings: Settings, one: Setting, other: Setting) -> Interval | None:
    """Return the ratio of two speeds by the median steps of their last epochs; None: repeats are compared, or unknown.

    Speeds are means, because a median leaves out costs of every few steps. With one run each, a busy spell of the
    machine changes one of the two means, and neither median.
    """
    by_median = other.figure(MEDIAN_STEP) / one.figure(MEDIAN_STEP)
    known = not math.isnan(by_median) and "training.global_batch_size" not in settings.axes
    return Interval(by_median) if known and not one.times(other).known else None


def _contradicted(settings: Settings, one: Setting, other: Setting) -> Coded | None:
    """Return why two speeds of one run each cannot be ordered; None: they can."""
    ratio, by_median = one.times(other), _by_median_steps(settings, one, other)
    if by_median is not None and (ratio.value - 1) * (by_median.value - 1) < 0:
        return Coded("by_median", {"ratio": ratio, "by_median": by_median})
    return None if ratio.known else _by_waiting(one, other)


def _by_waiting(one: Setting, other: Setting) -> Coded | None:
    """Return how long each waited for data, if that is most of the difference of their speeds; else None.

    Data are slow when first read. None, too, if the settings differ in data or batch: these may differ in waiting.
    """
    keys = {key for key, text in one.values.items() if other.values.get(key) != text}
    if any(key.partition(".")[0] == "data" or key == "training.global_batch_size" for key in keys):
        return None
    (share, seconds), (other_share, other_seconds) = ((s.figure(DATA_WAIT), 1 / s.figure(SPEED)) for s in (one, other))
    longer, waited = seconds - other_seconds, share * seconds - other_share * other_seconds
    if not (waited * longer > _MOST * longer**2 and abs(share - other_share) > _WIDELY):
        return None
    return Coded("waiting", {"share": share, "other": other_share})


def _compare(r: Recommendation, other: Setting, chosen: Setting) -> Comparison:
    can_differ, key, why_not = other.group != chosen.group, r.settings.loss_key, r.why_not.get(other.name)
    if why_not and why_not.code == "changed":
        return Comparison(other, None, False, math.nan, math.nan, False, why_not)
    timed = can_differ and other.is_finished and other.speed and chosen.speed
    peak, mine = other.figure(MEMORY), chosen.figure(MEMORY)
    loss, reference = other.figure(key), chosen.figure(key)
    change, rounded = ratio(loss, reference), abs(loss - reference) <= other.rounding(chosen, key)
    return Comparison(
        other,
        other.times(chosen) if timed else None,
        other in r.tied and can_differ,
        peak / mine if can_differ and peak > 0 and mine > 0 else math.nan,
        0.0 if rounded else change,
        rounded and abs(change) > _SAME,
        why_not,
    )


def _best_of(settings: Settings, able: Sequence[Setting]) -> tuple[list[Setting], list[Setting]]:
    """Return the settings that are equally good, and those that were compared by their speeds.

    Predictions have no noise of runs: only equal ones tie, unless the fastest makes memory scarce.
    """
    rules, left, raced = settings.rules, list(able), list[Setting]()
    for metric, direction in rules.objectives or [(SPEED, "max")]:
        known = [s for s in left if metric in s.figures]
        if not known:
            continue
        sign = 1 if direction == "min" else -1
        best = min(known, key=lambda s: sign * s.figure(metric))
        if (metric, direction) == (SPEED, "max"):
            raced = known
            roomy = rules.predicted and not _is_memory_scarce([best])
            tolerance = EQUAL if roomy else rules.speed_tolerance
        else:
            tolerance = 0.0 if metric == rules.objectives[-1][0] else rules.loss_tolerance
        limit = sign * best.figure(metric) + (tolerance + 1e-9) * abs(best.figure(metric))
        by_speed = metric == SPEED
        left = [
            s
            for s in known
            if sign * s.figure(metric) <= limit + s.rounding(best, metric)
            or (by_speed and _contradicted(settings, best, s))
        ]
    return left, raced


def _is_memory_scarce(tied: Sequence[Setting]) -> bool:
    """Return whether one of these settings nearly fills its device, by its forecast."""
    return any(s.figure("forecast/needed_bytes") > _SCARCE * s.figure("forecast/capacity_bytes") for s in tied)


def _break_tie(settings: Settings, tied: Sequence[Setting], raced: bool) -> tuple[Setting, str]:
    left = list(tied)
    decided: str = "speed" if raced and len(tied) == 1 else "order"
    if not raced or settings.rules.predicted or _is_memory_scarce(tied):
        limit = min(s.peak for s in tied) * (1 + _SAME_MEMORY)
        left = [s for s in tied if s.peak <= limit]
        decided = "memory" if len(left) < len(tied) else decided
    rules: tuple[tuple[str, Callable[[Setting], Any]], ...] = (
        ("simplicity", lambda s: departures(s.values)),
        ("loss", lambda s: _loss_above(s, left, settings.loss_key)),
        ("speed", lambda s: -s.figure(SPEED, 0.0)),
    )
    for rule, key in rules:
        keys = [key(s) for s in left]
        kept = [s for s, own in zip(left, keys, strict=True) if own == min(keys)]
        decided = rule if len(kept) < len(left) else decided
        left = kept
    return left[0], decided


def _loss_above(setting: Setting, others: Sequence[Setting], loss: str) -> float:
    """Return by how much a loss exceeds the lowest one, beyond their rounding; 0: it does not."""
    lowest = min(others, key=lambda s: s.figure(loss, math.inf))
    if loss not in lowest.figures:
        return 0.0
    return max(setting.figure(loss, math.inf) - lowest.figure(loss) - setting.rounding(lowest, loss), 0.0)


def _is_tied(settings: Settings, one: Setting, other: Setting) -> bool:
    """Return whether two speeds are equal, or cannot be ordered."""
    return _is_equal(settings, one, other) or _contradicted(settings, one, other) is not None


def _is_equal(settings: Settings, one: Setting, other: Setting) -> bool:
    """Return whether two settings are equal in speed, within the tolerance, the noise or the error of predictions."""
    ratio = one.times(other)
    limit = 1 / (1 - (EQUAL if settings.rules.predicted else settings.rules.speed_tolerance))
    return ratio.value == 1 or 1 / limit <= ratio.value <= limit or (ratio.known and ratio.low <= 1 <= ratio.high)
