"""Which settings of a sweep qualify: they fit, and their loss is close to the best. Pure."""

from __future__ import annotations

import math
from collections import Counter

from fsdp_lab.config.metrics import SPEED
from fsdp_lab.config.status import TrialStatus
from fsdp_lab.report.settings import Coded, Setting, Settings

_NO_MATTER = {
    TrialStatus.waiting, TrialStatus.starting, TrialStatus.running, TrialStatus.interrupted, TrialStatus.stopped,
}  # fmt: skip

LEAST = "least_bytes"  # a column of forecasts: the bytes without which a trial cannot run, its allowance aside


def qualify(settings: Settings) -> dict[str, Coded]:
    """Return why settings do not qualify, by name; those without a reason do.

    A setting that computes other losses than it must is not the best, and says nothing against another one.
    """
    why_not = {s.name: reason for s in settings.all if (reason := does_not_fit(s) or _differs(settings, s))}
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


def does_not_fit(setting: Setting) -> Coded | None:
    """Return why a setting did not run to its end, or cannot fit by its forecast; None if neither is so.

    A repeat that has no result yet, or that a scheduler stopped, says nothing against one that finished.
    """
    passed = {TrialStatus.finished, *(_NO_MATTER if setting.is_finished else ())}
    ended = Counter(status for status in setting.statuses if status not in passed)
    if ended:
        status, count = ended.most_common(1)[0]
        of = {"count": count, "of": len(setting.trials)}
        return Coded(status if status.ended else "no_result", of)
    needed, capacity = (setting.figure(f"forecast/{key}_bytes") for key in ("needed", "capacity"))
    if needed > capacity:
        is_tight = setting.figure(LEAST) <= capacity
        return Coded("tight" if is_tight else "too_large", {"needed": needed, "capacity": capacity})
    return None


def _differs(settings: Settings, setting: Setting) -> Coded | None:
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
    loss, least = min(setting.figure(metric), settings.least_alike.get(setting, math.inf)), best.figure(metric)
    if loss <= least + settings.rules.loss_tolerance * abs(least) + setting.rounding(best, metric):
        return None
    return Coded("loss_too_high", {"metric": metric, "above": ratio(loss, least), "loss": loss, "least": least})


def ratio(loss: float, reference: float) -> float:
    """Return the change of a loss as a ratio, infinite for a reference of zero; NaN: not known."""
    return (loss - reference) / abs(reference) if reference else loss * math.inf if loss else 0.0
