"""What the figures of a sweep do not show, as codes with values. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from fsdp_lab.config.metrics import OTHERS_CPU
from fsdp_lab.report.settings import Coded, Setting, Settings, column

_CLEARLY = 0.02  # a loss that is lower by less may be chance
_RECOMPUTED = "activation_checkpointing"
_BUSY = 0.25  # of the cores: the share from which other processes are named


def notes_on(settings: Settings, able: Sequence[Setting], raced: bool) -> list[Coded]:
    """Return the notes below a recommendation.

    Args:
        able: the settings that qualify.
        raced: whether speeds were compared.
    """
    return [*_on_speeds(settings, able, raced), *_on_losses(settings, able)]


def notes_on_the_model(settings: Settings) -> Iterator[Coded]:
    """Yield what settings that must compute the same show of the model, once each."""
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
    if len(finished) > 1 and not different and {*finished} <= {*settings.alike(finished[0])}:
        yield Coded("agree", {"count": len(finished)})


def _on_speeds(settings: Settings, able: Sequence[Setting], raced: bool) -> Iterator[Coded]:
    rules = settings.rules
    others = column(settings.compared[settings.compared["device"] == "cpu"], OTHERS_CPU)
    busy = others[others > _BUSY]
    if raced and len(busy):
        yield Coded("others_cpu", {"trials": list(busy.index), "share": busy.max(), "limit": _BUSY})
    beside = column(settings.compared, "beside")
    if raced and (beside > 0).any():
        yield Coded("side_by_side", {"count": int((beside > 0).sum())})
    if raced and len({s.group for s in able}) > 1 and not any(s.pace.interval.known for s in able):
        tried = any(len(s.trials) > 1 for s in settings.all)
        yield Coded("one_run", {"tried": tried, "grid": not rules.objectives})
    if settings.idle_axes:
        yield Coded("idle", {"axes": settings.idle_axes})


def _on_losses(settings: Settings, able: Sequence[Setting]) -> Iterator[Coded]:
    """Yield a note if no loss is clearly below that of a model that guesses."""
    trivial = settings.rules.trivial_loss
    least = min(s.figure(settings.loss_key, math.inf) for s in able)
    if trivial is not None and trivial * (1 - _CLEARLY) <= least < math.inf:
        yield Coded("nothing_learned", {"metric": settings.loss_key, "loss": least, "trivial": trivial})
