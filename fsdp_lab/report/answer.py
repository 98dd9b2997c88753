"""The recommended setting, by rules that the report prints: fits, learned, then the fastest, ties to the smaller."""

from __future__ import annotations

import math
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from fsdp_lab.config.training import TrainingConfig
from fsdp_lab.metrics import MEMORY, MIB, SPEED, VAL_LOSS, declared
from fsdp_lab.report.data import REPEATS, Setting, Sweep, words
from fsdp_lab.status import TrialStatus

# An epoch's speed is that of its steps after those that warm up: the configured ones, and two that are followed.
STEPS_TO_TIME = TrainingConfig().timing_warmup_steps + 2 + 1

# The setting that others are compared with is the one that has most of these, the first weighing most; of two that
# are as fast and as large it is taken: nobody should offload to save nothing.
_PLAIN = {
    "sharding": "ddp",
    "precision": "fp32",
    "offload": "none",
    "reshard_after_forward": "always",
    "activation_checkpointing": "none",
}
_WHY_NOT = {
    TrialStatus.oom: "ran out of memory",
    TrialStatus.diverged: "diverged",
    TrialStatus.failed: "failed",
    TrialStatus.stopped: "was stopped early",
    TrialStatus.skipped: "was not started: by its forecast it cannot fit",
    TrialStatus.interrupted: "was interrupted",
}


@dataclass(frozen=True)
class Answer:
    """What the sweep says.

    Attributes:
        setting: the recommended one; None when nothing qualifies.
        sentence: for people, with the reason.
        command: trains the setting, alone; "" without one.
        rules: how it was chosen, a sentence each.
        why_not: name of a setting -> why it does not qualify.
        front: the settings that no other beats in memory or speed without being worse in the other, by name.
    """

    setting: Setting | None
    sentence: str
    command: str
    rules: list[str]
    why_not: dict[str, str] = field(default_factory=dict)
    front: list[str] = field(default_factory=list)


def answer(sweep: Sweep) -> Answer:
    """Choose the recommended setting."""
    why_not = {s.name: reason for s in sweep.settings if (reason := _does_not_fit(s))}
    fitting = [s for s in sweep.settings if s.name not in why_not]
    losses = [s.median(sweep.loss_key) for s in fitting]
    best_loss = min((loss for loss in losses if math.isfinite(loss)), default=math.nan)
    for setting, loss in zip(fitting, losses, strict=True):
        if reason := _has_not_learned(sweep, loss, best_loss):
            why_not[setting.name] = reason
    able = [s for s in fitting if s.name not in why_not]
    timed = [s for s in able if math.isfinite(s.median(SPEED))]
    for setting in able:
        if timed and setting not in timed:
            why_not[setting.name] = "has no samples/s: it ended before a step was timed"
    points = [{MEMORY: s.median(MEMORY), SPEED: s.median(SPEED)} for s in fitting]
    front = [fitting[i].name for i in pareto_front(points, [(key, declared(key).better) for key in (MEMORY, SPEED)])]
    if not able:
        return Answer(None, _so_far(sweep) + _nothing(sweep, why_not), "", _rules(sweep), why_not, front)
    if not timed:
        chosen = min(able, key=lambda s: (_or_inf(s.median(MEMORY)), _not_plain(s)))
        sentence = _so_far(sweep) + _untimed_sentence(sweep, chosen, able)
        return Answer(chosen, sentence, _command(chosen), _rules(sweep), why_not, front)
    able = timed
    fastest = max(able, key=lambda s: s.median(SPEED))
    close = [s for s in able if _as_fast(s, fastest, sweep.speed_tolerance)]
    least = min(_or_inf(s.median(MEMORY)) for s in close)
    smallest = [s for s in close if _or_inf(s.median(MEMORY)) == least]
    limit = max(s.median(SPEED) for s in smallest) * (1 - sweep.speed_tolerance)
    chosen = min((s for s in smallest if s.median(SPEED) >= limit), key=lambda s: (_not_plain(s), -s.median(SPEED)))
    sentence = _so_far(sweep) + _sentence(sweep, chosen, able, best_loss)
    return Answer(chosen, sentence, _command(chosen), _rules(sweep), why_not, front)


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


def _so_far(sweep: Sweep) -> str:
    count = len(sweep.trials)
    return f"So far, with {count - sweep.unfinished} of {count} results: " if sweep.unfinished else ""


def _rules(sweep: Sweep) -> list[str]:
    idle = [f"On a CPU {axis} changes nothing: its values count as repeats of a setting." for axis in sweep.idle_axes]
    kind = "validation" if sweep.loss_key == VAL_LOSS else "training"
    return [
        "It fits: every trial of the setting finished, within the capacity of a device where that is known.",
        f"It learned: its last {kind} loss is within {sweep.loss_tolerance:.3g} of the best, as a ratio "
        "(report.loss_tolerance).",
        f"Then the fastest in samples/s; settings within {sweep.speed_tolerance:.3g} of the fastest "
        "(report.speed_tolerance), or whose repeats overlap with its, tie: of these the smallest peak memory is "
        "taken. Of equal peaks the fastest is, and of those within the tolerance of it the plainest "
        f"({words(_PLAIN)}; the first counts most).",
        *idle,
    ]


def _as_fast(setting: Setting, fastest: Setting, tolerance: float) -> bool:
    """Within the tolerance; or both were repeated, and their repeats overlap."""
    if setting.median(SPEED) >= fastest.median(SPEED) * (1 - tolerance):
        return True
    mine, theirs = setting.of(SPEED), fastest.of(SPEED)
    return len(mine) > 1 and len(theirs) > 1 and max(mine) >= min(theirs)


def _not_plain(setting: Setting) -> list[bool]:
    return _departures(setting.values)


def _departures(values: Mapping[str, str]) -> list[bool]:
    return [values.get(key, value) != value for key, value in _PLAIN.items()]


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
        return f"learned less: {sweep.loss_key} {loss:.4f}, {_ratio_above(loss, best)} above the best"
    return None


def _sentence(sweep: Sweep, chosen: Setting, able: Sequence[Setting], best_loss: float) -> str:
    speed, memory, loss = chosen.median(SPEED), chosen.median(MEMORY), chosen.median(sweep.loss_key)
    plain = min(able, key=_not_plain)
    memory_words = f"{memory / MIB:.2f} MiB at the peak" if math.isfinite(memory) else "memory not measured"
    speeds = chosen.of(SPEED)
    spread = f" (median of {len(speeds)}, {min(speeds):,.0f} to {max(speeds):,.0f})" if len(speeds) > 1 else ""
    figures = f"{speed:,.0f} samples/s{spread}, {memory_words}, {sweep.loss_key} {loss:.4f}"
    if plain is chosen:
        if len(sweep.settings) == 1:
            return f"{figures}: the only setting, so there is nothing to choose."
        best_of = f"the best of {len(able)} settings that fit and learned"
        alone = "no other has a result yet" if sweep.unfinished else "no other setting fits and learned"
        return f"`{chosen.name}`: {figures}; {best_of if len(able) > 1 else alone}."
    other = words({key: value for key, value in plain.values.items() if chosen.values.get(key) != value})
    other_memory = plain.median(MEMORY)
    known = math.isfinite(memory) and math.isfinite(other_memory) and other_memory > 0
    at = f" at {memory / other_memory * 100:.0f} % of its peak memory" if known else ""
    baseline = plain.values.get("sharding") == "ddp"
    than, reference = ("the unsharded baseline", plain.median(sweep.loss_key)) if baseline else ("the best", best_loss)
    return (
        f"`{chosen.name}`: {speed / plain.median(SPEED):.2f}× the samples/s of `{other}`{at}, "
        f"loss within {_ratio_above(loss, reference)} of {than} ({figures})."
    )


def _untimed_sentence(sweep: Sweep, chosen: Setting, able: Sequence[Setting]) -> str:
    """Where no run was long enough to be timed: memory decides, and what it would take to compare speeds."""
    memory, loss = chosen.median(MEMORY), chosen.median(sweep.loss_key)
    figures = f"{sweep.loss_key} {loss:.4f}"
    if math.isfinite(memory):
        of = f" of {len(able)} settings that fit and learned" if len(able) > 1 else ""
        figures = f"{memory / MIB:.2f} MiB at the peak, the least{of}, {figures}"
    return (
        f"`{chosen.name}`: {figures}. No step was timed, so speeds are not compared. The first {STEPS_TO_TIME - 1} "
        f"steps are not timed (training.timing_warmup_steps={STEPS_TO_TIME - 3}, and 2 that memory_profile=peaks "
        f"follows): run {STEPS_TO_TIME} or more."
    )


def _nothing(sweep: Sweep, why_not: Mapping[str, str]) -> str:
    if not sweep.trials:
        return "Nothing can be recommended: no trial was begun."
    reasons = Counter(reason.partition(":")[0].partition(" in ")[0] for reason in why_not.values())
    told = ", ".join(f"{count} {reason}" for reason, count in reasons.most_common())
    return f"Nothing qualifies: of {len(sweep.settings)} settings {told}."


def _command(setting: Setting) -> str:
    plainest = min(setting.trials, key=lambda trial: _departures(trial.setting))
    varied = [set(trial.overrides) for trial in setting.trials]
    common = set.intersection(*varied)  # a seed that was given to all belongs to the setting
    kept = [
        override
        for override in plainest.overrides
        if not override.startswith(("nightly.", "hydra."))
        and (override in common or override.partition("=")[0].lstrip("+") not in REPEATS)
        and override.partition("=")[0] != "repeat"
    ]
    return shlex.join(["python", "-m", "fsdp_lab", *kept])


def _ratio_above(value: float, reference: float) -> str:
    return f"{abs(value - reference) / max(abs(reference), 1e-12):.1%}".replace("%", " %")


def _or_inf(value: float) -> float:
    return value if math.isfinite(value) else math.inf
