"""Which settings of a sweep qualify: they fit, and their loss is close to the best. Pure."""

from __future__ import annotations

import math
from collections import Counter

from fsdp_lab.metrics import OTHERS_CPU, SPEED
from fsdp_lab.report.settings import Setting, Settings, or_inf
from fsdp_lab.report.statements import Statement, WhyNot
from fsdp_lab.status import TrialStatus

_NO_MATTER = {
    TrialStatus.waiting, TrialStatus.starting, TrialStatus.running, TrialStatus.interrupted, TrialStatus.stopped,
}  # fmt: skip

LEAST = "least_bytes"  # a column of forecasts: the bytes without which a trial cannot run, its allowance aside


def qualify(settings: Settings) -> tuple[list[Setting], dict[str, Statement]]:
    """Return the settings that qualify, and why the others do not, by name."""
    why_not = {s.name: reason for s in settings.all if (reason := does_not_fit(settings, s))}
    fitting = [s for s in settings.all if s.name not in why_not]
    loss = settings.loss_key
    objectives = [metric for metric, _ in settings.rules.objectives]
    if any(metric.startswith(("val/", "train/")) for metric in objectives):
        for setting in fitting:
            for metric in objectives:
                if metric != SPEED and not math.isfinite(settings.median(setting, metric)):
                    why_not[setting.name] = Statement(WhyNot.no_figure, {"metric": metric})
    elif fitting and not settings.rules.predicted:
        best = min(fitting, key=lambda s: or_inf(settings.median(s, loss)))
        why_not |= {s.name: reason for s in fitting if (reason := _loss_too_high(settings, s, best))}
    return [s for s in fitting if s.name not in why_not], why_not


def does_not_fit(settings: Settings, setting: Setting) -> Statement | None:
    """Return why a setting did not run to its end, or cannot fit by its forecast; None if neither is so.

    A repeat that has no result yet, or that a scheduler stopped, says nothing against one that finished.
    """
    passed = {TrialStatus.finished, *(_NO_MATTER if settings.is_finished(setting) else ())}
    ended = Counter(s for number in setting.trials if (s := settings.statuses[number]) not in passed)
    if ended:
        status, count = ended.most_common(1)[0]
        code = WhyNot(status) if status in WhyNot.__members__ else WhyNot.no_result
        return Statement(code, {"count": count, "of": len(setting.trials)})
    return next((reason for number in setting.trials if (reason := too_large(settings, number))), None)


def too_large(settings: Settings, number: int) -> Statement | None:
    """Return why a trial cannot fit, by its forecast; None if it can, or that is not known."""
    needed, capacity = (settings.figure(number, f"forecast/{key}_bytes") for key in ("needed", "capacity"))
    code = WhyNot.tight if settings.figure(number, LEAST) <= capacity else WhyNot.too_large
    return Statement(code, {"needed": needed, "capacity": capacity}) if needed > capacity else None


def _loss_too_high(settings: Settings, setting: Setting, best: Setting) -> Statement | None:
    loss, least = settings.median(setting, settings.loss_key), settings.median(best, settings.loss_key)
    if not math.isfinite(loss):
        return Statement(WhyNot.no_figure, {"metric": settings.loss_key})
    allowed = settings.rules.loss_tolerance * abs(least) + settings.rounding(setting, best, settings.loss_key)
    if loss <= least + allowed:
        return None
    above = (loss - least) / max(abs(least), 1e-12)
    return Statement(WhyNot.loss_too_high, {"metric": settings.loss_key, "loss": loss, "above": above})


def not_compared(settings: Settings, setting: Setting) -> Statement:
    """Return why a setting has no speed that is compared with others."""
    shares = [settings.figure(number, OTHERS_CPU) for number in setting.trials if number in settings.excluded]
    if shares:
        return Statement(WhyNot.timing_excluded, {"share": max(shares)})
    return Statement(WhyNot.untimed)


def only_one_counts(settings: Settings, able: list[Setting]) -> bool:
    """Return whether all timings but one are excluded: that one would be the fastest only for it."""
    excluded = {s.group for s in able if settings.excluded.intersection(s.trials)}
    counted = {s.group for s in able if settings.speeds.has(s.group)}
    return len(counted) == 1 and bool(excluded - counted)
