"""What the figures of a sweep do not show, as codes with values. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from fsdp_lab.config.sweep import ReportConfig
from fsdp_lab.metrics import LOSS_EPS, OTHERS_CPU
from fsdp_lab.report.repeats import undecided
from fsdp_lab.report.settings import Setting, Settings, or_inf
from fsdp_lab.report.speed import Basis
from fsdp_lab.report.statements import Note, Statement
from fsdp_lab.status import TrialStatus

_TYPES = {2.0**-7: "bfloat16", 2.0**-10: "float16"}

_MEASURED = (TrialStatus.finished, TrialStatus.stopped)
_CLEARLY = 0.02  # a loss that is lower by less may be chance


def notes_on(settings: Settings, able: Sequence[Setting], raced: bool) -> list[Statement]:
    """Return the notes below a recommendation.

    Args:
        settings: of the sweep.
        able: the settings that qualify.
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
    notes += [*_nothing_learned(settings, able), *_rounding(settings)]
    ended = all(status.is_result for status in settings.statuses.values())
    if raced and ended and settings.rules.repeat_max is not None and len(settings.all) > 1:
        count = {"rounds": settings.rounds.nunique(), "runs": len(settings.frame)}
        notes.append(Statement(Note.auto, {**count, "left": undecided(settings.frame, settings.rules)}))
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
