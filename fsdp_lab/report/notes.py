"""What the figures of a sweep do not show, as codes with values. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from fsdp_lab.metrics import OTHERS_CPU
from fsdp_lab.report.settings import Setting, Settings, column
from fsdp_lab.report.speed import Basis
from fsdp_lab.report.statements import Statement

_CLEARLY = 0.02  # a loss that is lower by less may be chance
_BUSY = 0.25  # of the cores: the share from which other processes are named


def notes_on(settings: Settings, able: Sequence[Setting], raced: bool) -> list[Statement]:
    """Return the notes below a recommendation.

    Args:
        able: the settings that qualify.
        raced: whether speeds were compared.
    """
    return [*_on_speeds(settings, able, raced), *_on_losses(settings, able)]


def _on_speeds(settings: Settings, able: Sequence[Setting], raced: bool) -> Iterator[Statement]:
    rules = settings.rules
    others = column(settings.compared[settings.compared["device"] == "cpu"], OTHERS_CPU)
    busy = others[others > _BUSY]
    if raced and len(busy):
        yield Statement("others_cpu", {"trials": list(busy.index), "share": busy.max(), "limit": _BUSY})
    if raced and len({s.group for s in able}) > 1 and settings.speeds.basis is Basis.nothing:
        tried = any(len(s.trials) > 1 for s in settings.all)
        yield Statement("one_run", {"tried": tried, "grid": not rules.objectives})
    if settings.idle_axes:
        yield Statement("idle", {"axes": settings.idle_axes})


def _on_losses(settings: Settings, able: Sequence[Setting]) -> Iterator[Statement]:
    """Yield a note if no loss is clearly below that of a model that guesses."""
    trivial = settings.rules.trivial_loss
    least = min(s.figure(settings.loss_key, math.inf) for s in able)
    if trivial is not None and trivial * (1 - _CLEARLY) <= least < math.inf:
        yield Statement("nothing_learned", {"metric": settings.loss_key, "loss": least, "trivial": trivial})
