"""Which setting a sweep recommends, by figures alone: it fits, it learned, then it is the fastest, ties to the smaller.

Where objectives were asked for, they take the place of learning and speed.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from fsdp_lab.metrics import MEMORY, MIB, OTHERS_CPU, SPEED, VAL_LOSS, declared
from fsdp_lab.report.data import Setting, Sweep
from fsdp_lab.report.speed import SIGNIFICANCE, Basis, Speeds
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
_BEYOND_NOISE = 3.0
_POCOCK = {1: 0.05, 2: 0.0294, 3: 0.0221, 4: 0.0182, 5: 0.0158}  # all looks together: 0.05
_WHY_NOT = {
    TrialStatus.oom: "ran out of memory",
    TrialStatus.diverged: "diverged",
    TrialStatus.failed: "failed",
    TrialStatus.stopped: "was stopped early",
    TrialStatus.skipped: "was not started: by its forecast it cannot fit",
    TrialStatus.interrupted: "was interrupted",
}


@dataclass(frozen=True)
class Choice:
    """What the figures say.

    Attributes:
        setting: the recommended one; None when nothing qualifies.
        able: the settings that qualify.
        tied: of these the ones that cannot be told from the recommended one in what is looked for, without itself: by
            the tolerance, or by the noise of speeds.
        broke_tie: what decided among them; "" without a tie.
        why_not: name of a setting -> why it does not qualify.
        front: the settings that no other beats in one of `axes` without being worse in another, by name.
        axes: `(metric, "min" or "max")` of the main picture.
        speeds: of `Sweep.groups`.
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


def choose(sweep: Sweep) -> Choice:
    """Choose the recommended setting."""
    speeds = Speeds(sweep.runs, significance_of(sweep.repeat_max))
    able, why_not = _able(sweep)
    by_speed = not sweep.objectives or any(metric == SPEED for metric, _ in sweep.objectives)
    timed = [s for s in able if speeds.has(sweep.groups[s.name])] if by_speed else []
    if timed:
        why_not |= {s.name: _untimed(sweep, s) for s in able if s not in timed}
        able = timed
    axes = _axes(sweep)
    fitting = [s for s in sweep.settings if _does_not_fit(s) is None]
    front = [
        fitting[i].name for i in pareto_front([{m: value(sweep, speeds, s, m) for m, _ in axes} for s in fitting], axes)
    ]
    if not able:
        return Choice(None, [], [], "", why_not, front, axes, speeds)
    best = _best(sweep, speeds, able)
    chosen, broke_tie = _break_tie(sweep, speeds, best)
    tied = [s for s in best if s is not chosen]
    if timed and not sweep.objectives:
        tied = [s for s in able if s is not chosen and _tied(sweep, speeds, s, chosen)]
    return Choice(chosen, able, tied, broke_tie if tied else "", why_not, front, axes, speeds, bool(timed))


def significance_of(repeat_max: int | None) -> float:
    """The significance with which ratios are judged: of each look, where repeats go on until the answer is settled.

    There is a look after each round but the first, which alone shows no noise. Pocock's levels for looks in groups of
    equal size ("Group sequential methods in the design and analysis of clinical trials", Biometrika 64, 1977), beyond
    five Bonferroni's.
    """
    looks = 1 if repeat_max is None else max(repeat_max - 1, 1)
    return _POCOCK[looks] if looks in _POCOCK else SIGNIFICANCE / looks


def candidates(sweep: Sweep) -> list[Setting]:
    """The settings that more repeats could still make the recommended one, one for each group of equal speeds; a single
    one, or none, when the answer is settled. None where objectives were asked for and speed is not among them.

    A setting is out when another is faster beyond noise and tolerance; or when another takes less memory, or is the
    plainer of two equals, and this one is, beyond noise, no faster than the tolerance. One run of each shows no noise:
    then it is out when another was three times as fast, which is more than runs of one setting differ on cores of their
    own.
    """
    speeds = Speeds(sweep.runs, significance_of(sweep.repeat_max))
    able, _ = _able(sweep)
    if sweep.objectives:
        wanted = [metric for metric, _ in sweep.objectives]
        if SPEED not in wanted:
            return []
        able = _best(sweep, speeds, able, before=SPEED)
    firsts: dict[int, Setting] = {}
    for setting in sorted(able, key=_rank):
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
        return faster or (memory_breaks_ties and ratio.known and _rank(other) < _rank(one) and ratio.low > 1 / limit)

    found = list(firsts.values())
    return [one for one in found if not any(beaten(one, other) for other in found if other is not one)]


def pareto_front(rows: Sequence[Mapping[str, float]], objectives: Sequence[tuple[str, str]]) -> list[int]:
    """The rows that no other row beats in one objective without being worse in another, by their places.

    Rows without a value for each objective are in nobody's way, and not in the front.
    """
    points = {
        place: tuple(row[metric] * (1 if direction == "min" else -1) for metric, direction in objectives)
        for place, row in enumerate(rows)
        if all(math.isfinite(row.get(metric, math.nan)) for metric, _ in objectives)
    }
    return [
        place
        for place, mine in points.items()
        if not any(other != mine and all(o <= m for o, m in zip(other, mine, strict=True)) for other in points.values())
    ]


def value(sweep: Sweep, speeds: Speeds, setting: Setting, metric: str) -> float:
    """A setting's figure: of speed the estimate from its runs, else the median; NaN where it has none."""
    if metric != SPEED:
        return setting.median(metric)
    group = sweep.groups[setting.name]
    return speeds.speed(group).value if speeds.has(group) else math.nan


def departures(values: Mapping[str, str]) -> list[bool]:
    """For each of `PLAIN`, whether the values depart from it."""
    return [values.get(key, value) != value for key, value in PLAIN.items()]


def _tied(sweep: Sweep, speeds: Speeds, one: Setting, other: Setting) -> bool:
    """Whether two settings cannot be told apart in speed: they are within the tolerance, or within the noise."""
    ratio = speeds.ratio(sweep.groups[one.name], sweep.groups[other.name])
    limit = 1 / (1 - sweep.speed_tolerance)
    return 1 / limit <= ratio.value <= limit or (ratio.known and ratio.low <= 1 <= ratio.high)


def _axes(sweep: Sweep) -> list[tuple[str, str]]:
    if len(sweep.objectives) > 1:
        return list(sweep.objectives)
    standard: list[tuple[str, str]] = [(metric, declared(metric).better) for metric in (MEMORY, SPEED)]
    if not sweep.objectives or sweep.objectives[0] in standard:
        return standard
    return [standard[0], sweep.objectives[0]]


def _able(sweep: Sweep) -> tuple[list[Setting], dict[str, str]]:
    """The settings that qualify, and why the others do not."""
    why_not = {s.name: reason for s in sweep.settings if (reason := _does_not_fit(s))}
    fitting = [s for s in sweep.settings if s.name not in why_not]
    if any(metric.startswith(("val/", "train/")) for metric, _ in sweep.objectives):
        for setting in fitting:
            for metric, _ in sweep.objectives:
                if not math.isfinite(setting.median(metric)) and metric != SPEED:
                    why_not[setting.name] = f"has no finite {metric}"
    else:
        losses = [s.median(sweep.loss_key) for s in fitting]
        best_loss = min((loss for loss in losses if math.isfinite(loss)), default=math.nan)
        for setting, loss in zip(fitting, losses, strict=True):
            if reason := _has_not_learned(sweep, loss, best_loss):
                why_not[setting.name] = reason
    return [s for s in fitting if s.name not in why_not], why_not


def _best(sweep: Sweep, speeds: Speeds, able: Sequence[Setting], before: str = "") -> list[Setting]:
    """The settings that are best in what is looked for, and cannot be told apart in it.

    Args:
        before: look at the objectives before this one alone.
    """
    left = list(able)
    for metric, direction in sweep.objectives or [(SPEED, "max")]:
        if metric == before:
            break
        if metric == SPEED and direction == "max":
            known = {s.name: value(sweep, speeds, s, SPEED) for s in left if speeds.has(sweep.groups[s.name])}
            limit = max(known.values(), default=0.0) * (1 - sweep.speed_tolerance)
            left = [s for s in left if known.get(s.name, -1.0) >= limit * (1 - 1e-9)] or left
            continue
        last = metric == sweep.objectives[-1][0]
        values = [value(sweep, speeds, s, metric) * (1 if direction == "min" else -1) for s in left]
        best = min((v for v in values if math.isfinite(v)), default=math.nan)
        allowed = 0.0 if last else abs(best) * sweep.loss_tolerance
        left = [s for s, v in zip(left, values, strict=True) if v <= best + allowed] or left
    return left


def _break_tie(sweep: Sweep, speeds: Speeds, tied: Sequence[Setting]) -> tuple[Setting, str]:
    """Of settings that are equally good the smallest; of equally small ones the fastest as measured, or the plainest
    that is within the tolerance of it. With what decided."""
    if len(tied) == 1:
        return tied[0], "the speed as measured"
    least = min(_or_inf(s.median(MEMORY)) for s in tied)
    smallest = [s for s in tied if _or_inf(s.median(MEMORY)) == least]
    speed = {s.name: value(sweep, speeds, s, SPEED) for s in smallest}
    fastest = max((v for v in speed.values() if math.isfinite(v)), default=math.nan)
    limit = fastest * (1 - sweep.speed_tolerance)
    near = [s for s in smallest if not speed[s.name] < limit]
    chosen = min(near, key=lambda s: (departures(s.values), s.median(sweep.loss_key), -_or_zero(speed[s.name])))
    if len(smallest) == 1:
        return chosen, "the smallest peak memory"
    if len(near) == 1:
        return chosen, "the speed as measured, of those with the smallest peak memory"
    return chosen, "the plainest setting, of those with the smallest peak memory"


def _rank(setting: Setting) -> tuple[float, list[bool]]:
    """What breaks a tie: the smaller, then the plainer."""
    return (_or_inf(setting.median(MEMORY)), departures(setting.values))


def _does_not_fit(setting: Setting) -> str | None:
    ended = Counter(trial.status for trial in setting.trials if trial.status != TrialStatus.finished)
    if ended:
        status, count = ended.most_common(1)[0]
        of = f" in {count} of {len(setting.trials)} trials" if len(setting.trials) > 1 else ""
        return _WHY_NOT.get(status, "has no result yet") + of
    for trial in setting.trials:
        needed, capacity = (trial.figures.get(f"forecast/{key}_bytes") for key in ("needed", "capacity"))
        if needed is not None and capacity is not None and needed > capacity:
            return f"needs {needed / MIB:,.0f} MiB of {capacity / MIB:,.0f} MiB a device, by its forecast"
    return None


def _has_not_learned(sweep: Sweep, loss: float, best: float) -> str | None:
    if not math.isfinite(loss):
        return f"has no finite {sweep.loss_key}"
    if loss > best + sweep.loss_tolerance * abs(best):
        kind = "validation" if sweep.loss_key == VAL_LOSS else "training"
        above = ratio_text((loss - best) / max(abs(best), 1e-12)).lstrip("+")
        return f"learned less: {kind} loss {loss:#.4g} is {above} above the best"
    return None


def _untimed(sweep: Sweep, setting: Setting) -> str:
    shared = [trial.figures[OTHERS_CPU] for trial in setting.trials if sweep.shared(trial)]
    if shared:
        return (
            f"its speed was measured while others used {max(shared) * 100:.0f} % of the machine's cores; run it again"
        )
    return "has no samples/s: it ended before a step was timed"


def ratio_text(value: float) -> str:
    """A change as a ratio, in per cent with its sign and two or three digits: `+2.7 %`."""
    percent = value * 100
    digits = 0 if abs(percent) >= 100 else 1 if abs(percent) >= 1 else 2 if abs(percent) >= 0.1 else None
    return f"{percent:+.{digits}f} %" if digits is not None else f"{percent:+.1g} %"


def _or_inf(number: float) -> float:
    return number if math.isfinite(number) else math.inf


def _or_zero(number: float) -> float:
    return number if math.isfinite(number) else 0.0
