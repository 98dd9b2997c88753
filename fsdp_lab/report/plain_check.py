"""Compare trials with plain loops of the user's own code: which train the same model, and which another. Pure.

A difference found in float32 also counts for other precisions of the same layout.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from fsdp_lab.config.closeness import gaps_to_plain, narrowest, why_other_weights
from fsdp_lab.config.compare import layout_settings, plain_kind, plain_settings
from fsdp_lab.config.metrics import FIRST_LOSS
from fsdp_lab.config.ranks import Ranks
from fsdp_lab.record.plain_loops import PlainLoop
from fsdp_lab.record.trial import TrialRecord
from fsdp_lab.report.self_check import has_tf32, is_float32


@dataclass(frozen=True)
class Departure:
    """The first figure in which a trial departs from the plain loop.

    Attributes:
        witness: the number of the trial with this figure: another one of the layout, if this one was not compared.
        metric: its key.
        expected: the plain loop's.
        found: the trial's.
    """

    witness: int
    metric: str
    expected: float
    found: float


@dataclass(frozen=True)
class Agreement:
    """How closely a trial has the losses of the plain loop.

    Attributes:
        apart: the largest difference of a loss, as a ratio.
        steps: how many were compared; 0: only the loss before the first, because the forward pass draws random numbers.
        in_float32: it computes in float32 throughout.
        smaller: the smaller model of `check.keys` was compared.
    """

    apart: float
    steps: int
    in_float32: bool
    smaller: bool = False


@dataclass(frozen=True)
class PlainCheck:
    """The result of comparing trials with plain loops.

    Attributes:
        different: number of a trial -> how it differs.
        agreeing: number of a trial -> how closely it agrees.
        missing: why plain loops have no figures, each reason once.
    """

    different: Mapping[int, Departure] = field(default_factory=dict)
    agreeing: Mapping[int, Agreement] = field(default_factory=dict)
    missing: Sequence[str] = ()

    @property
    def nothing_agrees(self) -> bool:
        """Whether every trial that was compared trains another model."""
        return bool(self.different) and not self.agreeing


def check_against_plain(trials: Sequence[TrialRecord], loops: Sequence[PlainLoop]) -> PlainCheck:
    """Compare each trial with the plain loop of its values, if both have figures."""
    missing = list(dict.fromkeys(loop.missing for loop in loops if loop.missing))
    different: dict[int, Departure] = {}
    agreeing: dict[int, Agreement] = {}
    for trial, found, loop in _with_loops(trials, [loop for loop in loops if loop.figures]):
        config, in_tf32 = trial.config, has_tf32(trial) or loop.device != trial.device  # convolutions use it
        assert config is not None
        gaps = list(gaps_to_plain(loop.figures, found, config, in_tf32, loop.draws, loop.noise, loop.eps))
        if (key := next((gap.key for gap in gaps if gap.found > gap.limit), None)) is not None:
            different[trial.number] = Departure(trial.number, key, loop.figures[key], found[key])
        elif losses := [gap.found for gap in gaps if gap.is_of_loss]:
            in_float32 = not narrowest(config, found, in_tf32)
            steps = 0 if loop.draws else loop.steps
            agreeing[trial.number] = Agreement(max(losses), steps, in_float32, bool(loop.found))
    if different:
        _spread([trial for trial in trials if trial.config is not None], different, agreeing)
    return PlainCheck(different, agreeing, missing)


def _with_loops(
    trials: Sequence[TrialRecord], loops: Sequence[PlainLoop]
) -> Iterator[tuple[TrialRecord, Mapping[str, float], PlainLoop]]:
    """Yield each trial with a plain loop of its values, the figures to compare, and the loop."""
    by_number = {trial.number: trial for trial in trials if trial.config is not None}
    loops = [loop for loop in loops if loop.trial in by_number]
    yield from ((by_number[loop.trial], loop.found, loop) for loop in loops if loop.found)
    by_values = {_values(by_number[loop.trial], loop.dp_degree): loop for loop in loops if not loop.found}
    for trial in by_number.values() if by_values else ():
        if trial.config is None or FIRST_LOSS not in trial.figures or why_other_weights(trial.config):
            continue
        if (loop := by_values.get(_values(trial, _dp_degree(trial)))) is not None:
            yield trial, trial.figures, loop


def _dp_degree(trial: TrialRecord) -> int:
    workers = trial.facts.get("world_size")
    return Ranks.of(trial.config.sharding, workers).dp if trial.config and isinstance(workers, int) else 0


def _values(trial: TrialRecord, dp_degree: int) -> str:
    assert trial.config is not None
    return json.dumps(plain_settings(trial.config, dp_degree), sort_keys=True)


def _layout(trial: TrialRecord, with_precision: bool) -> str:
    """Return a key that is equal for trials that compute by the same operators."""
    assert trial.config is not None
    kind = plain_kind(trial.config, _dp_degree(trial)), layout_settings(trial.config)
    return json.dumps([*kind, repr(trial.config.precision) if with_precision else ""], sort_keys=True)


def _spread(trials: Sequence[TrialRecord], different: dict[int, Departure], agreeing: dict[int, Agreement]) -> None:
    """Apply what was found for a layout to its other trials: those with other values, and in other precisions."""
    exact = {number for number, one in agreeing.items() if one.in_float32}
    for with_precision in (True, False):
        layouts = {trial.number: _layout(trial, with_precision) for trial in trials}
        right = {layouts[number] for number in (agreeing if with_precision else exact)}
        wrong = {
            layouts[trial.number]: different[trial.number]
            for trial in trials
            if trial.number in different and (with_precision or is_float32(trial))
        }
        for trial in trials:
            found = wrong.get(layouts[trial.number])
            if found is not None and layouts[trial.number] not in right and trial.number not in different:
                different[trial.number] = found
                agreeing.pop(trial.number, None)
