"""The setting that a sweep recommends, by figures alone: it fits, it learned, it is the fastest; the smaller wins ties.

Objectives, if there are any, replace learning and speed.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fsdp_lab.metrics import MEMORY, MIB, OTHERS_CPU, SPEED, VAL_LOSS, declared
from fsdp_lab.report.data import Setting, SweepData, TrialRow
from fsdp_lab.report.rounding import rounding
from fsdp_lab.report.speed import SIGNIFICANCE, Basis, Interval, Speeds
from fsdp_lab.report.texts import ratio_text
from fsdp_lab.status import TrialStatus

# The setting that others are compared with is the one that has most of these, the first weighing most; of two that
# are as fast and as large it is taken: nobody should offload to save nothing.
PLAIN = {
    "sharding": "ddp",
    "precision": "fp32",
    "offload": "none",
    "reshard_after_forward": "always",
    "activation_checkpointing": "none",
}
SAME_MEMORY = 0.01  # of the smallest: what needs no more than this above it counts as equally small
_NO_MATTER = {
    TrialStatus.waiting, TrialStatus.starting, TrialStatus.running, TrialStatus.interrupted, TrialStatus.stopped,
}  # fmt: skip
_BEYOND_NOISE = 3.0
_POCOCK = {1: 0.05, 2: 0.0294, 3: 0.0221, 4: 0.0182, 5: 0.0158}  # all looks together: 0.05
DISTURBED = "its speed was measured while other processes used"
_WHY_NOT = {
    TrialStatus.oom: "ran out of memory",
    TrialStatus.diverged: "diverged",
    TrialStatus.failed: "failed",
    TrialStatus.stopped: "was stopped early",
    TrialStatus.skipped: "was not started, because of its forecast",
    TrialStatus.interrupted: "was interrupted",
}


@dataclass(frozen=True)
class Choice:
    """The recommendation by figures.

    Attributes:
        setting: the recommended one; None: none qualifies.
        able: the settings that qualify.
        tied: of these the ones that are equally good as the recommended one, by the tolerance or the noise of speeds;
            without itself.
        broke_tie: what decided among them, a clause; "" without a tie.
        why_not: name of a setting -> why it does not qualify.
        front: the settings that no other beats in one of `axes` without being worse in another, by name.
        axes: `(metric, "min" or "max")` of the main picture.
        speeds: of `SweepData.groups`; none if only one counts because the others were disturbed.
        timed: whether speeds decided.
    """

    setting: Setting | None
    able: list[Setting]
    tied: list[Setting]
    broke_tie: str
    why_not: dict[str, str]
    front: list[str]
    axes: list[tuple[str, str]]
    speeds: Speeds = field(repr=False)
    timed: bool = False

    def ratio(self, sweep: SweepData, one: Setting, other: Setting) -> Interval:
        """Return how many times as fast one setting is as another."""
        return self.speeds.ratio(sweep.groups[one.name], sweep.groups[other.name])


def choose(sweep: SweepData) -> Choice:
    """Choose the recommended setting."""
    speeds = Speeds(sweep.runs, significance_of(sweep))
    able, why_not = _able(sweep)
    if _only_one_counts(sweep, speeds, able):
        speeds = Speeds([])  # there is nothing to compare it with
    by_speed = not sweep.objectives or any(metric == SPEED for metric, _ in sweep.objectives)
    timed = [s for s in able if speeds.has(sweep.groups[s.name])] if by_speed else []
    if timed:
        counted = {s.name for s in timed}
        why_not |= {s.name: _untimed(sweep, s) for s in able if s.name not in counted}
        able = timed
    axes = _axes(sweep)
    fitting = [s for s in sweep.settings if _does_not_fit(s) is None]
    front = [
        fitting[i].name for i in pareto_front([{m: value(sweep, speeds, s, m) for m, _ in axes} for s in fitting], axes)
    ]
    if not able:
        return Choice(None, [], [], "", why_not, front, axes, speeds)
    best, raced = _best(sweep, speeds, able)
    chosen, broke_tie = _break_tie(sweep, speeds, best)
    others = [s for s in (raced or best) if s is not chosen]
    tied = [s for s in others if _tied(sweep, speeds, s, chosen)] if raced else others
    if raced and len(best) == 1:
        broke_tie = "this one had the highest measured speed"
    elif raced and not broke_tie.startswith("nothing"):
        broke_tie += f" among those within {sweep.speed_tolerance * 100:.3g} % of the fastest"
    return Choice(chosen, able, tied, broke_tie if tied else "", why_not, front, axes, speeds, bool(raced))


def significance_of(sweep: SweepData) -> float:
    """Return the significance with which ratios are judged: of each look, if repeats run until the answer is settled.

    There is a look after each round. The first shows no noise, unless several of its runs share one speed.
    """
    if sweep.repeat_max is None:
        return SIGNIFICANCE
    first = min((run.round for run in sweep.runs), default=0)
    groups = [run.group for run in sweep.runs if run.round == first]
    return level_of(sweep.repeat_max - (len(set(groups)) == len(groups)))


def level_of(looks: int) -> float:
    """Return the significance of each of so many looks, all of which together have the usual one.

    Pocock's ("Group sequential methods in the design and analysis of clinical trials", Biometrika 64, 1977); beyond
    five looks Bonferroni's.
    """
    return _POCOCK.get(looks, SIGNIFICANCE / max(looks, 1))


def candidates(sweep: SweepData) -> list[Setting]:
    """Return the settings that more repeats could still make the recommended one, one for each group of equal speeds.

    A single one, or none, means that the answer is settled. With objectives that lack speed there is none. A setting is
    out in any of these cases:

    - Another is faster beyond noise and tolerance.
    - Another takes less memory, or is the simpler of two equals, and this one is not faster beyond noise and tolerance.
    - Without repeats, another was three times as fast: runs of one setting differ less on cores of their own.
    """
    speeds = Speeds(sweep.runs, significance_of(sweep))
    able, _ = _able(sweep)
    if sweep.objectives:
        wanted = [metric for metric, _ in sweep.objectives]
        if SPEED not in wanted:
            return []
        _, able = _best(sweep, speeds, able)
    firsts: dict[int, Setting] = {}
    for setting in sorted(able, key=lambda s: _rank(sweep, s)):
        firsts.setdefault(sweep.groups[setting.name], setting)
    limit = 1 / (1 - sweep.speed_tolerance)
    memory_breaks_ties = not sweep.objectives or sweep.objectives[-1][0] == SPEED

    def beaten(one: Setting, other: Setting) -> bool:
        a, b = sweep.groups[one.name], sweep.groups[other.name]
        if not speeds.has(a) or not speeds.has(b):
            return False
        ratio = speeds.ratio(b, a)
        if speeds.basis is not Basis.repeats:
            return ratio.value > _BEYOND_NOISE
        faster = ratio.known and ratio.low > 1 and ratio.value > limit
        # With no tolerance nothing is ever shown to be as fast.
        return faster or (
            memory_breaks_ties
            and ratio.known
            and _breaks_tie(ranks[other.name], ranks[one.name])
            and ratio.low > 1 / limit
        )

    settings = list(firsts.values())
    fast = sorted(settings, key=lambda s: -_or_zero(value(sweep, speeds, s, SPEED)))  # first, because these beat most
    ranks = {s.name: _rank(sweep, s) for s in settings}
    return [one for one in settings if not any(beaten(one, other) for other in fast if other is not one)]


def pareto_front(rows: Sequence[Mapping[str, float]], objectives: Sequence[tuple[str, str]]) -> list[int]:
    """Return the indices of rows that no other row beats in one objective without being worse in another.

    Rows that lack a value for an objective are ignored.
    """
    points = {
        place: tuple(row[metric] * (1 if direction == "min" else -1) for metric, direction in objectives)
        for place, row in enumerate(rows)
        if all(math.isfinite(row.get(metric, math.nan)) for metric, _ in objectives)
    }
    front: dict[tuple[float, ...], list[int]] = {}
    for place, mine in sorted(points.items(), key=lambda point: point[1]):
        # what beats a point comes before it, and is of the front or beaten by one that is
        if mine in front or not any(all(o <= m for o, m in zip(other, mine, strict=True)) for other in front):
            front.setdefault(mine, []).append(place)
    return sorted(place for places in front.values() for place in places)


def value(sweep: SweepData, speeds: Speeds, setting: Setting, metric: str) -> float:
    """Return a setting's figure: for speed the estimate from its runs, else the median; NaN without one."""
    if metric != SPEED:
        return setting.median(metric)
    group = sweep.groups[setting.name]
    return speeds.estimate(group) if speeds.has(group) else math.nan


def smallest(sizes: Sequence[float]) -> list[int]:
    """Return the indices of the smallest size, and of sizes that exceed it by at most the share `SAME_MEMORY`."""
    limit = min(sizes) * (1 + SAME_MEMORY)
    return [place for place, size in enumerate(sizes) if size <= limit]


def departures(values: Mapping[str, str]) -> list[bool]:
    """Return for each of `PLAIN` whether the values depart from it."""
    return [values.get(key, value) != value for key, value in PLAIN.items()]


def _tied(sweep: SweepData, speeds: Speeds, one: Setting, other: Setting) -> bool:
    """Return whether two settings are equal in speed, within the tolerance or the noise."""
    ratio = speeds.ratio(sweep.groups[one.name], sweep.groups[other.name])
    limit = 1 / (1 - sweep.speed_tolerance)
    return ratio.value == 1 or 1 / limit <= ratio.value <= limit or (ratio.known and ratio.low <= 1 <= ratio.high)


def _axes(sweep: SweepData) -> list[tuple[str, str]]:
    if len(sweep.objectives) > 1:
        return list(sweep.objectives)
    standard: list[tuple[str, str]] = [(metric, declared(metric).better) for metric in (MEMORY, SPEED)]
    if not sweep.objectives or sweep.objectives[0] in standard:
        return standard
    return [standard[0], sweep.objectives[0]]


def _able(sweep: SweepData) -> tuple[list[Setting], dict[str, str]]:
    """Return the settings that qualify, and why the others do not."""
    why_not = {s.name: reason for s in sweep.settings if (reason := _does_not_fit(s))}
    fitting = [s for s in sweep.settings if s.name not in why_not]
    if any(metric.startswith(("val/", "train/")) for metric, _ in sweep.objectives):
        for setting in fitting:
            for metric, _ in sweep.objectives:
                if not math.isfinite(setting.median(metric)) and metric != SPEED:
                    why_not[setting.name] = f"has no finite {metric}"
    else:
        best = min(fitting, key=lambda s: _or_inf(s.median(sweep.loss_key)), default=None)
        for setting in fitting:
            if best is not None and (reason := _has_not_learned(sweep, setting, best)):
                why_not[setting.name] = reason
    return [s for s in fitting if s.name not in why_not], why_not


def _only_one_counts(sweep: SweepData, speeds: Speeds, able: Sequence[Setting]) -> bool:
    """Return whether other processes disturbed all speeds but one, which would be the fastest only for that."""
    disturbed = {sweep.groups[s.name] for s in able if any(sweep.shared(trial) for trial in s.finished)}
    counted = {group for s in able if speeds.has(group := sweep.groups[s.name])}
    return len(counted) == 1 and bool(disturbed - counted)


def _best(sweep: SweepData, speeds: Speeds, able: Sequence[Setting]) -> tuple[list[Setting], list[Setting]]:
    """Return the settings that are equally good, and those that were compared by their speeds."""
    left, raced = list(able), []
    for metric, direction in sweep.objectives or [(SPEED, "max")]:
        if metric == SPEED and direction == "max":
            raced = [s for s in left if speeds.has(sweep.groups[s.name])]
            speed = {s.name: value(sweep, speeds, s, SPEED) for s in raced}
            limit = max(speed.values(), default=0.0) * (1 - sweep.speed_tolerance)
            left = [s for s in raced if speed[s.name] >= limit * (1 - 1e-9)] or left
            continue
        last = metric == sweep.objectives[-1][0]
        values = {s.name: value(sweep, speeds, s, metric) * (1 if direction == "min" else -1) for s in left}
        best = min(left, key=lambda s: _or_inf(values[s.name]))
        limit = values[best.name] + (0.0 if last else abs(values[best.name]) * sweep.loss_tolerance)
        left = [s for s in left if values[s.name] <= limit + rounding(s, best, metric)] or left
    return left, raced


def _break_tie(sweep: SweepData, speeds: Speeds, tied: Sequence[Setting]) -> tuple[Setting, str]:
    """Return one of settings that are equally good, and what decided."""
    small = smallest([_or_inf(sweep.peaks[sweep.groups[s.name]]) for s in tied])
    left = [tied[place] for place in small]
    decided = "the smallest peak memory decided" if len(left) < len(tied) else ""
    rules: tuple[tuple[str, Callable[[Setting, Sequence[Setting]], Any]], ...] = (
        ("the simplest setting", lambda s, _: departures(s.values)),
        (f"the lowest {sweep.loss_key}", lambda s, others: _loss_above(s, others, sweep.loss_key)),
        ("the measured speed", lambda s, _: -_or_zero(value(sweep, speeds, s, SPEED))),
    )
    for name, key in rules:
        best = min(key(s, left) for s in left)
        kept = [s for s in left if key(s, left) == best]
        decided = f"{name} decided" if len(kept) < len(left) else decided
        left = kept
    return left[0], decided or "nothing separates them: the one listed first is taken"


def _loss_above(setting: Setting, others: Sequence[Setting], metric: str) -> float:
    """Return by how much a loss exceeds the lowest one, beyond their rounding; 0: it does not."""
    lowest = min(others, key=lambda s: _or_inf(s.median(metric)))
    above = _or_inf(setting.median(metric)) - lowest.median(metric) - rounding(setting, lowest, metric)
    return max(above, 0.0) if math.isfinite(lowest.median(metric)) else 0.0


def _rank(sweep: SweepData, setting: Setting) -> tuple[float, list[bool]]:
    """Return what breaks a tie: the peak memory and the departures from `PLAIN`; see `_breaks_tie`."""
    return (_or_inf(sweep.peaks[sweep.groups[setting.name]]), departures(setting.values))


def _breaks_tie(one: tuple[float, list[bool]], other: tuple[float, list[bool]]) -> bool:
    """Whether the first is clearly smaller, or the plainer of two of the same size."""
    if smallest([one[0], other[0]]) == [0, 1]:
        return one[1] < other[1]
    return one[0] < other[0]


def _does_not_fit(setting: Setting) -> str | None:
    # A repeat that has no result yet, or that a scheduler stopped early, says nothing against the one that finished.
    passed = {TrialStatus.finished, *(_NO_MATTER if setting.finished else ())}
    ended = Counter(trial.status for trial in setting.trials if trial.status not in passed)
    if ended:
        status, count = ended.most_common(1)[0]
        of = f" in {count} of {len(setting.trials)} trials" if len(setting.trials) > 1 else ""
        return _WHY_NOT.get(status, "has no result yet") + of
    return next((reason for trial in setting.trials if (reason := too_large(trial))), None)


def too_large(trial: TrialRow) -> str | None:
    """Return why a trial cannot fit, by its forecast; None if it can, or that is not known."""
    needed, capacity = (trial.figures.get(f"forecast/{key}_bytes") for key in ("needed", "capacity"))
    if needed is None or capacity is None or needed <= capacity:
        return None
    return f"needs {needed / MIB:,.0f} MiB of {capacity / MIB:,.0f} MiB per device, by its forecast"


def _has_not_learned(sweep: SweepData, setting: Setting, learned_most: Setting) -> str | None:
    loss, best = setting.median(sweep.loss_key), learned_most.median(sweep.loss_key)
    if not math.isfinite(loss):
        return f"has no finite {sweep.loss_key}"
    if loss > best + sweep.loss_tolerance * abs(best) + rounding(setting, learned_most, sweep.loss_key):
        kind = "validation" if sweep.loss_key == VAL_LOSS else "training"
        above = ratio_text((loss - best) / max(abs(best), 1e-12)).lstrip("+")
        return f"learned less: {kind} loss {loss:#.4g} is {above} above the best"
    return None


def _untimed(sweep: SweepData, setting: Setting) -> str:
    shared = [trial.figures[OTHERS_CPU] for trial in setting.trials if sweep.shared(trial)]
    if shared:
        return f"{DISTURBED} {max(shared) * 100:.0f} % of the cores"
    return "has no samples/s: it ended before a step was timed"


def _or_inf(number: float) -> float:
    return number if math.isfinite(number) else math.inf


def _or_zero(number: float) -> float:
    return number if math.isfinite(number) else 0.0
