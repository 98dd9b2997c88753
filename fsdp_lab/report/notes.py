"""What the figures of a sweep do not show, as codes with values. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from fsdp_lab.config.sweep import ReportConfig
from fsdp_lab.metrics import LOSS_EPS, OTHERS_CPU, PREDICTED_SPEED, SPEED
from fsdp_lab.report.qualify import too_large
from fsdp_lab.report.repeats import undecided
from fsdp_lab.report.settings import Setting, Settings, or_inf
from fsdp_lab.report.speed import Basis
from fsdp_lab.report.statements import Note, Statement
from fsdp_lab.status import TrialStatus

_TYPES = {2.0**-7: "bfloat16", 2.0**-10: "float16"}

_MEASURED = (TrialStatus.finished, TrialStatus.stopped)
_CLEARLY = 0.02  # a loss that is lower by less may be chance


def notes_on(settings: Settings, able: Sequence[Setting], chosen: Setting, raced: bool) -> list[Statement]:
    """Return the notes below a recommendation.

    Args:
        settings: of the sweep.
        able: the settings that qualify.
        chosen: the recommended one.
        raced: whether speeds were compared.
    """
    notes = []
    if settings.excluded and settings.rules.by_speed:
        share = max(settings.figure(number, OTHERS_CPU) for number in settings.excluded)
        notes.append(Statement(Note.excluded, {"count": len(settings.excluded), "share": share, "compared": raced}))
    if raced and (shares := _raised(settings)):
        notes.append(Statement(Note.limit_raised, {"count": len(shares), "share": max(shares)}))
    if raced and len({s.group for s in able}) > 1 and settings.speeds.basis is Basis.nothing:
        tried = settings.rules.repeat_max is not None or any(len(s.trials) > 1 for s in settings.all)
        notes.append(Statement(Note.one_run, {"tried": tried, "grid": not settings.rules.objectives}))
    if settings.idle_axes:
        notes.append(Statement(Note.idle, {"axes": settings.idle_axes}))
    if settings.rules.predicted:
        return notes
    notes += [*_nothing_learned(settings, able), *_rounding(settings), *_predictions(settings)]
    if raced:
        notes += _skipped(settings, settings.value(chosen, SPEED))
    if settings.rules.repeat_max is not None and all(status.is_result for status in settings.statuses.values()):
        notes += _auto(settings, settings.rules.repeat_max)
    return notes


def _raised(settings: Settings) -> list[float]:
    """Return the shares of other processes in timings that only a raised `report.others_cpu` counts."""
    on_cpu = settings.frame.index[settings.frame["device"] == "cpu"]
    counted = [n for n in on_cpu if n in settings.timed and n not in settings.excluded]
    shares = [settings.figure(n, OTHERS_CPU) for n in counted if settings.statuses[n] in _MEASURED]
    return [share for share in shares if share > ReportConfig().others_cpu]


def _nothing_learned(settings: Settings, able: Sequence[Setting]) -> Iterator[Statement]:
    """Yield a note if no loss is clearly below that of a model that guesses."""
    trivial = settings.rules.trivial_loss
    least = min(or_inf(settings.median(s, settings.loss_key)) for s in able)
    if trivial is not None and trivial * (1 - _CLEARLY) <= least < math.inf:
        yield Statement(Note.nothing_learned, {"metric": settings.loss_key, "loss": least, "trivial": trivial})


def _rounding(settings: Settings) -> Iterator[Statement]:
    spacings: dict[str, float] = {}
    for setting in settings.all:
        name = _TYPES.get(settings.median(setting, LOSS_EPS), "a narrow type")
        if spacing := settings.spacing(setting, settings.loss_key):
            spacings[name] = max(spacing, spacings.get(name, 0.0))
    for name, spacing in sorted(spacings.items()):
        yield Statement(Note.rounding, {"type": name, "spacing": spacing})


def _predictions(settings: Settings) -> Iterator[Statement]:
    """Yield how far the predicted speeds were off. Excluded timings are not compared."""
    if PREDICTED_SPEED not in settings.frame:
        return
    predicted = settings.frame[settings.frame[PREDICTED_SPEED] > 0]
    if predicted.empty:
        return
    able = settings.timed.keys() - settings.excluded
    measured = predicted[(predicted["status"] == TrialStatus.finished) & predicted.index.isin(list(able))]
    by = sorted(set(predicted["predicted_by"]) - {""})
    values: dict[str, Any] = {"by": by, "count": len(measured)}
    if len(measured):
        errors = (measured[SPEED] / measured[PREDICTED_SPEED] - 1).abs()
        values |= {"median": errors.median(), "largest": errors.max()}
        values["behind"] = 1 - measured.at[measured[PREDICTED_SPEED].idxmax(), SPEED] / measured[SPEED].max()
    yield Statement(Note.predictions, values)


def _skipped(settings: Settings, chosen_speed: float) -> Iterator[Statement]:
    """Yield the skipped setting of the highest predicted speed, if that is above the recommended setting's."""
    skipped = [n for n, s in settings.statuses.items() if s is TrialStatus.skipped and not too_large(settings, n)]
    known = {number: speed for number in skipped if (speed := settings.figure(number, PREDICTED_SPEED)) > 0}
    if known and settings.rules.by_speed:
        first = max(known, key=known.__getitem__)
        values = {"count": len(skipped), "setting": settings.of_trial[first], "predicted": known[first]}
        yield Statement(Note.skipped, {**values, "factor": chosen_speed / known[first]})


def _auto(settings: Settings, most: int) -> Iterator[Statement]:
    """Yield why `repeat=auto` stopped."""
    in_round = settings.rounds.value_counts()
    if in_round.get(0, 0) < 2:
        return
    left = undecided(settings.frame, settings.rules)
    if not settings.rules.by_speed or not settings.timed:
        state = "no_speed" if settings.timed else "untimed"
    elif not settings.runs and settings.excluded:
        state = "busy"
    elif len({s.group for s in settings.all}) == 1:
        state = "same"
    else:
        state = "settled" if len(left) < 2 else "early" if len(in_round) < most else "limit"
    yield Statement(Note.auto, {"state": state, "rounds": len(in_round), "runs": len(settings.frame), "left": left})
