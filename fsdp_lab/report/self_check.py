"""Find settings with other losses than they must have. Pure.

In float32 and with the same data, a model computes the same however it is sharded, gathered, offloaded and recomputed.
Only rounding differs. Training amplifies it: with a large learning rate by a factor of 10,000 in ten steps. So these
decide:

- The losses of the first three steps. In ViTs, language models, batch norm and dropout they agree to 1e-7, at any
  learning rate of our optimizers. A user's optimizer may round by shards, as those with states in 8 bits do.
- The gradient's norm in the first step, since a warm-up hides wrong gradients from the losses. And the loss after the
  warm-up, or of its twentieth step: there rounding is at most 2e-3 apart.
- Later, only the validation loss of an epoch with equal training losses: batch norm's statistics are within 1e-3 there.

A record without its first steps is judged by the first epoch that differs.

With another `sharding.tp` a batch has other parts, on which dropout, batch norm and `optimizer.scale_lr` depend. Such
trials are not compared.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from fsdp_lab.config.axes import AXES
from fsdp_lab.config.axes.precision import PrecisionConfig
from fsdp_lab.config.axes.sharding import FEWEST_UNITS
from fsdp_lab.config.closeness import NORM, least_of, relative_gap
from fsdp_lab.config.metrics import EARLY_LOSS, FIRST_GRAD_NORM, FIRST_LOSS, LOSS_EPS, TRAIN_LOSS, VAL_LOSS, WARM_LOSS
from fsdp_lab.record.trial import TrialRecord
from fsdp_lab.report.choice import departures

_STEPS = 1e-5  # a ratio, like the others: rounding of the first three steps is below it
_WARM = 0.01  # rounding of the first steps at the full learning rate is below it
_CALM = 1e-6  # the rounding of an epoch that training has not amplified
_EPOCH = 0.02  # rounding of an epoch that follows calm ones is below it
_VISIBLE = 1e-4
_NEXT_TO_ZERO = 1e-4  # of the first losses
# Keys and groups that must not change a loss: those by which a model is divided, and others.
_LAYOUT = tuple(key for axis in AXES if axis.divides for key in axis.keys)
_OTHERS = (
    *(key for axis in AXES if not (axis.divides or axis.changes_losses) for key in axis.keys),
    *("repeat", "memory_profile", "profile_trace", "export"),
    *("training.sync_each_microbatch", "training.timing_warmup_steps"),
)
_TF32 = ("precision=tf32", "precision.tf32=true")
_FACTS = ("world_size", "dp_degree_of_losses", "device", "data_digest")

Values = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Difference:
    """The first figure in which a trial differs from the reference.

    Attributes:
        reference: the number of a trial of the setting that is sharded least.
        witness: the number of the trial with these figures: another one of this layout, if that is in float32.
        metric: of the first figure that differs.
        expected: its value in the reference.
        found: its value here.
        epoch: from which it differs.
    """

    reference: int
    witness: int
    metric: str
    expected: float
    found: float
    epoch: int


@dataclass(frozen=True)
class SelfCheck:
    """The result of comparing settings that must compute the same.

    Attributes:
        different: number of a trial -> how it differs from the reference.
        agreeing: the numbers of trials that agree, the reference first, for each group that was compared.
    """

    different: Mapping[int, Difference] = field(default_factory=dict)
    agreeing: Sequence[Sequence[int]] = ()


def check_itself(trials: Sequence[TrialRecord], axes: Sequence[str], wrong: Collection[int] = ()) -> SelfCheck:
    """Compare the trials of a sweep that must have the same losses, by their epochs and first steps.

    Trials without an epoch, and settings with repeats that disagree, are not compared. A difference in float32 also
    counts for other precisions of the same layout.

    Args:
        wrong: the numbers of trials that train another model than a plain loop; they are left out.
    """
    trials = [trial for trial in trials if trial.number not in wrong]
    groups: dict[tuple[Values, Values], list[TrialRecord]] = {}
    for trial in sorted(trials, key=_simplicity):
        if trial.epochs and is_float32(trial):
            facts = [(key, str(trial.facts.get(key, ""))) for key in _FACTS]
            # `${per_worker:2}` computes it from the number of workers and sharding.tp
            facts.append(("batch", str(trial.config.training.global_batch_size) if trial.config else ""))
            groups.setdefault((_without(trial, axes, (*_LAYOUT, *_OTHERS)), tuple(facts)), []).append(trial)
    different: dict[int, Difference] = {}
    agreeing = [_compare(group, axes, different) for group in groups.values()]
    layouts = {trial.number: _without(trial, axes, ("precision", *_OTHERS)) for trial in trials}
    right = {layouts[number] for group in agreeing for number in group}
    others = {layouts[number]: one for number, one in different.items() if layouts[number] not in right}
    for trial in trials:
        if layouts[trial.number] in others and not is_float32(trial):
            different[trial.number] = others[layouts[trial.number]]
    return SelfCheck(different, [group for group in agreeing if group])


def _compare(group: Sequence[TrialRecord], axes: Sequence[str], different: dict[int, Difference]) -> list[int]:
    """Compare the settings of a group with its first, and return the numbers of those that agree."""
    settings: dict[Values, list[TrialRecord]] = {}
    for trial in group:
        settings.setdefault(_without(trial, axes, ("repeat",)), []).append(trial)
    (reference, *again), *others = settings.values()
    if not others or any(_difference(reference, one) for one in again):
        return []
    agreeing = [reference.number, *(trial.number for trial in again)]
    for repeats in others:
        found = {trial.number: _difference(reference, trial) for trial in repeats}
        agreeing += [number for number, one in found.items() if one is None]
        if None not in found.values():
            different |= {number: one for number, one in found.items() if one is not None}
    return agreeing


def _difference(reference: TrialRecord, trial: TrialRecord) -> Difference | None:
    """Return the first figure in which two trials differ by more than rounding; None: there is none."""
    # losses, and their differences, may be next to zero: the largest of these is the scale
    firsts = [reference.figures.get(FIRST_LOSS), reference.figures.get(EARLY_LOSS), reference.epochs[0].get(TRAIN_LOSS)]
    scale = max((abs(loss) for loss in firsts if loss is not None and math.isfinite(loss)), default=1.0)
    own_optimizer = trial.config is not None and trial.config.optimizer.target is not None
    limits = {
        FIRST_LOSS: _STEPS, EARLY_LOSS: _EPOCH if own_optimizer else _STEPS, FIRST_GRAD_NORM: NORM, WARM_LOSS: _WARM,
    }  # fmt: skip
    gaps = {key: relative_gap(reference.figures, trial.figures, key, least_of(key, scale)) for key in limits}
    early = [key for key in (FIRST_LOSS, EARLY_LOSS) if not math.isnan(gaps[key])]
    apart = [key for key, limit in limits.items() if gaps[key] > limit]
    by_epoch = {epoch["epoch"]: epoch for epoch in reference.epochs}
    for epoch in trial.epochs:
        before = by_epoch.get(epoch["epoch"], {})
        if before.get("step") != epoch.get("step"):
            break  # one of the two was cut short
        train, val = (relative_gap(before, epoch, key, _NEXT_TO_ZERO * scale) for key in (TRAIN_LOSS, VAL_LOSS))
        is_calm = not train > _CALM
        limit = _VISIBLE if apart else _EPOCH
        if apart or is_calm or not early:
            for key, gap in ((VAL_LOSS, val), (TRAIN_LOSS, train)):
                if gap > limit:
                    numbers = reference.number, trial.number
                    return Difference(*numbers, key, before[key], epoch[key], int(epoch["epoch"]))
        if not is_calm and not apart:
            break
    for key in apart:
        return Difference(reference.number, trial.number, key, reference.figures[key], trial.figures[key], 1)
    return None


def _without(trial: TrialRecord, axes: Sequence[str], groups: Sequence[str]) -> Values:
    """Return the values of a trial's axes, without those of some groups."""
    kept = (axis for axis in axes if axis not in groups and axis.partition(".")[0] not in groups)
    return tuple((axis, trial.setting.get(axis, "")) for axis in kept)


def _simplicity(trial: TrialRecord) -> tuple[int, list[bool], int]:
    sharding = trial.setting.get("sharding", "")
    units = FEWEST_UNITS.index(sharding) if sharding in FEWEST_UNITS else len(FEWEST_UNITS)
    return units, departures(trial.setting), trial.number


def is_float32(trial: TrialRecord) -> bool:
    """Return whether a trial computes in float32 throughout, as far as its record shows."""
    typed = [word.lstrip("+") for word in trial.overrides] + [f"{k}={v}" for k, v in trial.setting.items()]
    precision = {word for word in typed if word.startswith(("precision=", "precision."))} - {"precision=fp32"}
    known = trial.config.precision if trial.config else PrecisionConfig()
    whole = (known.param_dtype, known.reduce_dtype) == (PrecisionConfig.param_dtype, PrecisionConfig.reduce_dtype)
    narrow = known.float8 or has_tf32(trial) or LOSS_EPS in trial.figures
    return whole and not narrow and not (precision if trial.config is None else precision - set(_TF32))


def has_tf32(trial: TrialRecord) -> bool:
    """Return whether a trial multiplies in TF32: it asks for that, and runs on a GPU that has it."""
    asked = trial.config is not None and trial.config.precision.tf32
    return asked and bool(trial.facts.get("tf32", trial.device not in ("", "cpu")))
