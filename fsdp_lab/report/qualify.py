"""Find the settings that fit and have a loss close to the best. Note what figures do not show. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType

from fsdp_lab.config.metrics import OTHERS_CPU, SPEED
from fsdp_lab.config.status import TrialStatus
from fsdp_lab.report.settings import CHANGED, Coded, Setting, Settings, column
from fsdp_lab.report.speed import Interval, measured

_NO_MATTER = {
    TrialStatus.waiting, TrialStatus.starting, TrialStatus.running, TrialStatus.interrupted, TrialStatus.stopped,
}  # fmt: skip

_CLEARLY = 0.02  # a loss that is lower by less may be chance
_RECOMPUTED = "activation_checkpointing"
_FEW_STEPS, _SHORT_S = 10, 1.0  # fewer steps, in less time, are too few to order speeds
_BUSY = 0.25  # the share of the cores above which other processes are reported

LEAST = "least_bytes"  # a column of forecasts: the least bytes with which a trial can run


def qualify(settings: Settings) -> dict[str, Coded]:
    """Return why settings do not qualify, by name; those without a reason do.

    A setting with other losses than it must have is never the best, and disqualifies no other.
    """
    compared = _compared_changes(settings)
    why_not = {
        s.name: reason
        for s in settings.all
        if (reason := does_not_fit(s, settings.reasons) or _changed(s, compared) or _differs(settings, s))
    }
    fitting = settings.without(why_not)
    metrics = [metric for metric, _ in settings.rules.objectives]
    if any(metric.startswith(("val/", "train/")) for metric in metrics):
        for metric in metrics:
            lacking = [s for s in fitting if metric != SPEED and metric not in s.figures]
            why_not |= {s.name: Coded("no_figure", {"metric": metric}) for s in lacking}
    elif fitting and not settings.rules.predicted:
        best = min(fitting, key=lambda s: s.figure(settings.loss_key, math.inf))
        why_not |= {s.name: reason for s in fitting if (reason := _loss_too_high(settings, s, best))}
    return why_not


def does_not_fit(setting: Setting, reasons: Mapping[int, str] = MappingProxyType({})) -> Coded | None:
    """Return why a setting did not finish, or cannot fit by its forecast; None if neither is so.

    A repeat that has no result yet, or that a scheduler stopped, is ignored if another one finished.

    Args:
        reasons: number of a trial -> why it did not finish, in words.
    """
    passed = {TrialStatus.finished, *(_NO_MATTER if setting.is_finished else ())}
    ended = Counter(status for status in setting.statuses if status not in passed)
    if ended:
        status, count = ended.most_common(1)[0]
        first = setting.trials[setting.statuses.index(status)]
        of = {"count": count, "of": len(setting.trials), "text": reasons.get(first, "")}
        return Coded(status if status.ended else "no_result", of)
    needed, capacity = (setting.figure(f"forecast/{key}_bytes") for key in ("needed", "capacity"))
    if LEAST in setting.figures:
        return Coded("unsure", {})
    if needed > capacity:
        return Coded("too_large", {"needed": needed, "capacity": capacity})
    return None


def _compared_changes(settings: Settings) -> str:
    """Return the value of `CHANGED` that most finished trials have; in a tie the first."""
    found = Counter(s.values.get(CHANGED, "") for s in settings.all if s.is_finished for _ in s.trials)
    return found.most_common(1)[0][0] if found else ""


def _changed(setting: Setting, compared: str) -> Coded | None:
    own = setting.values.get(CHANGED, "")
    return Coded("changed", {"own": own}) if own != compared and setting.is_finished else None


def _differs(settings: Settings, setting: Setting) -> Coded | None:
    if departures := [settings.plain.different[n] for n in setting.trials if n in settings.plain.different]:
        return Coded("another_model", vars(departures[0]))
    found = [settings.check.different[n] for n in setting.trials if n in settings.check.different]
    if not found:
        return None
    named = {"reference": settings.of_trial[found[0].reference], "witness": settings.of_trial[found[0].witness]}
    return Coded("differs", {**vars(found[0]), **named})


def _loss_too_high(settings: Settings, setting: Setting, best: Setting) -> Coded | None:
    """Return why a loss is too high. Settings that must compute the same differ by chance: the best of them counts."""
    metric = settings.loss_key
    if metric not in setting.figures:
        return Coded("no_figure", {"metric": metric})
    lowest = min(settings.alike(setting), key=lambda s: s.figure(metric, math.inf))
    loss, least = lowest.figure(metric), best.figure(metric)
    if loss <= least + settings.rules.loss_tolerance * abs(least) + setting.rounding(best, metric):
        return None
    runs, runs_of_best = (settings.runs(s, metric) for s in (lowest, best))
    of_runs, limit = _ratio_of_runs(settings, runs, runs_of_best), 1 + settings.rules.loss_tolerance
    # if every run is too high, the spread of the runs is no excuse
    if of_runs.known and of_runs.low <= limit and min(runs.values()) <= limit * max(runs_of_best.values()):
        return None
    of = {
        "metric": metric,
        "above": ratio(loss, least),
        "loss": loss,
        "least": least,
        "once": len(runs) == len(runs_of_best) == 1,
    }
    return Coded("loss_too_high", of)


def _ratio_of_runs(settings: Settings, one: Mapping[int, float], other: Mapping[int, float]) -> Interval:
    """Return the ratio of two losses, by the runs of both settings.

    It has no interval if neither has repeats, and is NaN if a loss is not positive.
    """
    losses = {place: list(runs.values()) for place, runs in enumerate((one, other))}
    if not all(loss > 0 for runs in losses.values() for loss in runs):
        return Interval(math.nan)
    rounds = {place: list(settings.rounds[list(runs)]) for place, runs in enumerate((one, other))}
    means = measured(losses, rounds)
    return means[0].ratio(means[1])


def ratio(loss: float, reference: float) -> float:
    """Return the change of a loss as a ratio, infinite for a reference of zero; NaN: not known."""
    return (loss - reference) / abs(reference) if reference else loss * math.inf if loss else 0.0


def notes_on_the_model(settings: Settings) -> Iterator[Coded]:
    """Yield notes on the model, from settings that must compute the same; each note once."""
    yield from notes_on_plain_loops(settings)
    different = list(settings.check.different.items())
    if different:
        one = next((d for number, d in different if number == d.witness), different[0][1])
        reference, witness = settings.of_trial[one.reference], settings.of_trial[one.witness]
        wrong = list(dict.fromkeys(settings.of_trial[number] for number, _ in different))
        agree = [s for s in settings.alike(reference)[1:] if s not in wrong]
        plain = any(settings.of_trial[d.witness].values.get(_RECOMPUTED, "none") == "none" for _, d in different)
        named = {"reference": reference, "witness": witness, "wrong": wrong, "agree": agree, "sharded": plain}
        yield Coded("differs", {**vars(one), **named})
    key = settings.loss_key
    for group in settings.check.agreeing:
        alike = settings.alike(settings.of_trial[group[0]])
        ranked = sorted((s for s in alike if key in s.figures), key=lambda s: s.figure(key))
        if not ranked:
            continue
        low, high = ranked[0], ranked[-1]
        least, most = low.figure(key), high.figure(key)
        if most - least > settings.rules.loss_tolerance * abs(least) + high.rounding(low, key):
            yield Coded("amplified", {"metric": key, "least": least, "most": most})
            return
    finished = [s for s in settings.all if s.is_finished]
    as_plain = {settings.of_trial[number] for number, one in settings.plain.agreeing.items() if one.steps}
    same = len(finished) > 1 and {*finished} <= {*settings.alike(finished[0])}
    if same and not different and not {*finished} <= as_plain:
        yield Coded("agree", {"count": len(finished)})


def notes_on_plain_loops(settings: Settings) -> Iterator[Coded]:
    """Yield notes: which settings train another model than a plain loop, how many the same, what was not compared."""
    plain = settings.plain
    wrong = list(dict.fromkeys(settings.of_trial[number] for number in plain.different))
    if wrong:
        departure = next(iter(plain.different.values()))
        first = settings.of_trial[departure.witness]
        others = [setting for setting in wrong if setting is not first]
        yield Coded("another_model", {**vars(departure), "setting": first, "others": others})
    agreeing = plain.agreeing.values()
    if same := {settings.of_trial[number] for number in plain.agreeing} - set(wrong):
        exact, narrow = ([one.apart for one in agreeing if one.in_float32 is whole] for whole in (True, False))
        steps, smaller = min(one.steps for one in agreeing), any(one.smaller for one in agreeing)
        yield Coded(
            "as_plain", {"count": len(same), "steps": steps, "exact": exact, "narrow": narrow, "smaller": smaller}
        )
    for why in plain.missing:
        yield Coded("no_plain", {"why": why})


def caveats_on(settings: Settings, able: Sequence[Setting]) -> Iterator[Coded]:
    """Yield why measured speeds may mislead. `able`: the settings that qualify."""
    compared = settings.compared
    others = column(compared[compared["device"] == "cpu"], OTHERS_CPU)
    if len(busy := others[others > _BUSY]):
        yield Coded("others_cpu", {"trials": list(busy.index), "share": busy.max(), "limit": _BUSY})
    if num_beside := int((column(compared, "beside") > 0).sum()):
        yield Coded("side_by_side", {"count": num_beside})
    steps, seconds = (column(compared, f"perf/timed_{what}") for what in ("steps", "s"))
    few = steps[(steps < _FEW_STEPS) & (seconds < _SHORT_S)]
    if len(few) and _once_each(able):
        yield Coded("few_steps", {"steps": int(few.min()), "trials": list(few.index)})


def _once_each(able: Sequence[Setting]) -> bool:
    """Return whether speeds are compared without knowing how much two runs of a setting differ."""
    return len({s.group for s in able}) > 1 and not any(s.pace.interval.known for s in able)


def notes_on(settings: Settings, able: Sequence[Setting], raced: bool) -> Iterator[Coded]:
    """Yield what the figures below a recommendation do not show.

    Args:
        able: the settings that qualify.
        raced: whether speeds were compared.
    """
    if raced and _once_each(able):
        tried = any(len(s.trials) > 1 for s in settings.all)
        yield Coded("one_run", {"tried": tried, "grid": not settings.rules.objectives})
    if settings.idle_axes:
        yield Coded("idle", {"axes": settings.idle_axes})
    trivial, least = settings.rules.trivial_loss, min(s.figure(settings.loss_key, math.inf) for s in able)
    if trivial is not None and trivial * (1 - _CLEARLY) <= least < math.inf:  # none clearly better than guessing
        yield Coded("nothing_learned", {"metric": settings.loss_key, "loss": least, "trivial": trivial})
