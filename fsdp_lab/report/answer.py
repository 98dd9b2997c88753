"""The answer of a sweep in words: the recommended setting, how sure it is, and every other value against it."""

from __future__ import annotations

import math
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from fsdp_lab.config.training import TrainingConfig
from fsdp_lab.metrics import MEMORY, SPEED, VAL_LOSS, declared
from fsdp_lab.report.choice import DISTURBED, PLAIN, SAME_MEMORY, Choice, choose, departures, value
from fsdp_lab.report.data import REPEATS, Setting, SweepData, TrialRow, words
from fsdp_lab.report.notes import apart, contention, named, notes_on, smaller_forecast
from fsdp_lab.report.rounding import rounding
from fsdp_lab.report.speed import Interval, Speeds
from fsdp_lab.report.texts import memory_text, ratio_text, speed_text, times_text
from fsdp_lab.status import TrialStatus
from fsdp_lab.wording import count

# An epoch's speed is that of its steps after those that warm up: the configured ones, and two that are followed.
STEPS_TO_TIME = TrainingConfig().timing_warmup_steps + 2 + 1

# What is typed for a sweep and says nothing of one trial.
_OF_A_SWEEP = ("repeat=", "repeat_max=", "search=", "search.", "scheduler=", "scheduler.", "objective=")
_MOST_LINES = 6  # settings that are all told; of more, those that differ from the recommended one in one value
_MOST_TIED = 3
_MOST_PRINTED = 8  # lines on a terminal
_SAME = 5e-4  # a difference that three digits do not show


@dataclass(frozen=True)
class Answer:
    """The answer of a sweep.

    Attributes:
        setting: the recommended one; None: none qualifies.
        sentence: for people, with the reason.
        command: trains the setting alone; "" without one.
        rules: how it was chosen, a sentence each.
        lines: the costs and gains of every other value against the recommended setting, a line each.
        notes: what the figures do not show: noise that was not measured, speeds that do not count.
        why_not: name of a setting -> why it does not qualify.
        front: the settings that no other beats in one of `axes` without being worse in another, by name.
        axes: `(metric, "min" or "max")` of the main picture.
        intervals: name of a setting -> its samples/s and their 95 % interval.
        title: what was compared.
        described: names of the settings in `lines`.
        by_memory: speeds are not compared, because other processes used the cores too. The setting is the one with the
            least memory.
    """

    setting: Setting | None
    sentence: str
    command: str
    rules: list[str]
    lines: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    why_not: dict[str, str] = field(default_factory=dict)
    front: list[str] = field(default_factory=list)
    axes: list[tuple[str, str]] = field(default_factory=list)
    intervals: dict[str, Interval] = field(default_factory=dict)
    title: str = ""
    described: list[str] = field(default_factory=list)
    by_memory: bool = False

    @property
    def basis(self) -> str:
        """The basis of the recommendation, as in `results.csv`: `yes`, or `by memory` or `by loss` without speeds."""
        if not self.by_memory or self.setting is None:
            return "yes"
        return "by memory" if math.isfinite(self.setting.median(MEMORY)) else "by loss"

    @property
    def head(self) -> str:
        """The words before the sentence: `Recommended: `; "" if nothing is recommended by speed."""
        return "Recommended: " if self.setting and not self.by_memory else ""

    @property
    def to_train(self) -> str:
        """The words before the command; "" if the setting is recommended."""
        return "to train it: " if self.by_memory else ""


def answer(sweep: SweepData) -> Answer:
    """Say which setting is recommended, why, and how sure that is."""
    choice = choose(sweep)
    chosen = choice.setting
    so_far = _so_far(sweep)
    contended = contention(sweep, choice)
    others = _settings_with_a_line(sweep, chosen) if chosen else []
    if chosen is None:
        sentence = _nothing(sweep, choice.why_not)
    elif sweep.objectives:
        sentence = _objective_sentence(sweep, choice, chosen)
    elif choice.timed:
        sentence = _sentence(sweep, choice, chosen)
    else:
        sentence = _untimed_sentence(sweep, choice, chosen)
    return Answer(
        chosen,
        so_far + sentence,
        _command(chosen, sweep.command) if chosen else "",
        _rules(sweep),
        [f"`{named(sweep, chosen, o)}`: {_against(sweep, choice, chosen, o)}" for o in others] if chosen else [],
        notes_on(sweep, choice) if chosen else [],
        choice.why_not,
        choice.front,
        choice.axes,
        _intervals(sweep, choice.speeds),
        title(sweep),
        [other.name for other in others],
        bool(contended) and all(metric == SPEED for metric, _ in sweep.objectives),
    )


def _intervals(sweep: SweepData, speeds: Speeds) -> dict[str, Interval]:
    known = {s.name: speeds.speed(g) for s in sweep.settings if speeds.has(g := sweep.groups[s.name])}
    return {name: i if math.isfinite(i.high) else Interval(i.value) for name, i in known.items()}


def plain_text(recommendation: Answer) -> list[str]:
    """Return the lines of an answer for a terminal: the sentence, the other values, the notes and the command."""
    shown = [f"  {line}" for line in recommendation.lines[:_MOST_PRINTED]]
    if more := len(recommendation.lines) - len(shown):
        shown.append(f"  and {count(more, 'more setting')}: see report.html")
    heading = ["Compared with it, changing only:"] if shown else []
    lines = [recommendation.sentence, *heading, *shown, *recommendation.notes]
    plain = [line.replace("`", "") for line in lines]
    if recommendation.command:  # without a recommendation it needs a word of what it does
        plain.append(f"  {recommendation.to_train}{recommendation.command}")
    return plain


def title(sweep: SweepData) -> str:
    """Return what was compared, such as `sharding × precision, 6 trials`."""
    count = len(sweep.trials)
    return f"{' × '.join(sweep.setting_axes) or 'one setting'}, {count} trial{'s' if count != 1 else ''}"


def _so_far(sweep: SweepData) -> str:
    count = len(sweep.trials)
    return f"So far, with {count - sweep.unfinished} of {count} results: " if sweep.unfinished else ""


def _rules(sweep: SweepData) -> list[str]:
    idle = [f"On a CPU, {axis} has no effect: its values count as repeats of a setting." for axis in sweep.idle_axes]
    same = [axis for axis in sweep.setting_axes if axis not in sweep.speed_axes]
    pooled = [f"{' and '.join(same)} cannot change speed or peak memory: runs that are otherwise equal count as "
              "repeats of one speed."] if same else []  # fmt: skip
    fits = "It fits: every trial of the setting finished, within the capacity of a device if that is known."
    if sweep.objectives:
        order = ", then ".join(f"{metric} ({better})" for metric, better in sweep.objectives)
        return [
            fits,
            f"Then the objectives decide, in this order: {order}. Samples/s keeps the settings within a ratio of "
            f"{sweep.speed_tolerance:.3g} of the fastest (report.speed_tolerance). Each other metric except the last "
            f"keeps those within {sweep.loss_tolerance:.3g} of the best (report.loss_tolerance). Ties go to the "
            "smallest peak memory.",
            *pooled,
            *idle,
        ]
    kind = "validation" if sweep.loss_key == VAL_LOSS else "training"
    return [
        fits,
        f"It learned: its last {kind} loss is within {sweep.loss_tolerance:.3g} of the best, as a ratio "
        "(report.loss_tolerance).",
        "It has the most samples/s. Among settings within "
        f"{sweep.speed_tolerance * 100:.3g} % of the fastest (report.speed_tolerance), the smallest peak memory wins; "
        f"among equal peaks, the simplest setting ({words(PLAIN)}; the first counts most). Settings are tied if they "
        "are within the tolerance, or if the interval of their ratio includes 1.",
        "95 % intervals: Student's for speeds, Tukey's for ratios, which are valid jointly. They come from repeats, "
        "with drift between rounds removed; without repeats, from the steps of each run, by batch means.",
        "On a CPU, the speed of a run does not count if other processes used more than "
        f"{sweep.others_cpu * 100:.3g} % of the cores (report.others_cpu).",
        *pooled,
        *idle,
    ]


def _figures(sweep: SweepData, choice: Choice, chosen: Setting, without: Sequence[str] = ()) -> str:
    """Return text such as `1,950 samples/s (1,900 to 2,000), 40.00 MiB at the peak, val/loss 1.012`.

    Args:
        sweep: of the setting.
        choice: with the speeds.
        chosen: the setting.
        without: metrics to leave out; the speed is repeated for its interval.
    """
    parts = []
    if choice.speeds.has(sweep.groups[chosen.name]):
        parts.append(speed_text(choice.speeds.speed(sweep.groups[chosen.name])))
    memory = chosen.median(MEMORY)
    if MEMORY not in without:
        parts.append(f"{memory_text(memory)} at the peak" if math.isfinite(memory) else "memory not measured")
    if sweep.loss_key not in without and math.isfinite(loss := chosen.median(sweep.loss_key)):
        parts.append(f"{sweep.loss_key} {loss:#.4g}")
    return ", ".join(parts)


def _sentence(sweep: SweepData, choice: Choice, chosen: Setting) -> str:
    figures = _figures(sweep, choice, chosen)
    plain = min(choice.able, key=lambda s: departures(s.values))
    tie = _tie(choice)
    if plain is chosen:
        if len(sweep.settings) == 1:
            if sweep.idle_axes:
                return (
                    f"{figures}. {' and '.join(sweep.idle_axes)} cannot change anything on a CPU: nothing to compare."
                )
            return f"{figures}: the only setting, so there is nothing to choose."
        others = [s for s in choice.able if s is not chosen]
        if not others:
            alone = "no other setting fits and learned"
            if sweep.unfinished:
                alone = "no other has a result yet"
            return f"`{chosen.name}`: {figures}; {alone}."
        if tie:
            return f"`{chosen.name}`: {figures}. {tie}"
        next_best = max(others, key=lambda s: value(sweep, choice.speeds, s, SPEED))
        ratio = choice.ratio(sweep, chosen, next_best)
        disturbed = any(reason.startswith(DISTURBED) for reason in choice.why_not.values())
        which = "whose speed counts" if disturbed else "that fit and learned"
        return (
            f"`{chosen.name}`: the fastest of {len(choice.able)} settings {which}, {times_text(ratio)} the speed of "
            f"the next, `{apart(chosen, next_best)}` ({figures})."
        )
    memory, other = chosen.median(MEMORY), plain.median(MEMORY)
    at = f" at {memory / other * 100:.3g} % of its peak memory" if memory > 0 and other > 0 else ""
    if at and abs(memory / other - 1) < _SAME:
        at = " with the same peak memory"
    ratio = choice.ratio(sweep, chosen, plain)
    loss = _loss_change(sweep, chosen, plain)
    return f"`{chosen.name}`: {times_text(ratio)} the speed of `{apart(chosen, plain)}`{at}, {loss} ({figures})." + (
        f" {tie}" if tie else ""
    )


def _tie(choice: Choice) -> str:
    if not choice.tied:
        return ""
    names = [f"`{s.name}`" for s in choice.tied[:_MOST_TIED]]
    more = len(choice.tied) - len(names)
    listed = ", ".join(names) + (f" and {more} more" if more else "")
    return f"Tied in speed with {listed}; {choice.broke_tie}."


def _objective_sentence(sweep: SweepData, choice: Choice, chosen: Setting) -> str:
    def of(setting: Setting, metric: str) -> float:
        return value(sweep, choice.speeds, setting, metric)

    contended = contention(sweep, choice)
    objectives = [o for o in sweep.objectives if not (contended and o[0] == SPEED)]
    if not objectives:
        return _untimed_sentence(sweep, choice, chosen)
    measured = [f"{metric} {declared(metric).text(of(chosen, metric))}" for metric, _ in objectives]
    others = len(choice.able) - 1
    metric, direction = objectives[0]
    best = "lowest" if direction == "min" else "highest"
    values = [of(s, metric) for s in choice.able]
    if not others:
        what = "the only setting that qualifies"
    elif len(objectives) > 1:
        metrics = " and ".join(metric for metric, _ in objectives)
        what = f"one of the {len(choice.front)} settings" if len(choice.front) > 1 else "the only setting"
        what += f" on the Pareto front of {metrics}"
        if chosen.name not in choice.front:
            what = f"within the tolerances of the best in {metrics}"
    elif of(chosen, metric) == (min(values) if direction == "min" else max(values)):
        what = f"the {best} {metric} of {others + 1} settings"
    else:
        what = f"within the tolerance of the {best} {metric} of {others + 1} settings"
    tie = f" {_tie(choice)}" if choice.timed and choice.tied else ""
    speed = f" {SPEED} was not compared: {contended}." if contended else ""
    figures = _figures(sweep, choice, chosen, without=[metric for metric, _ in objectives])
    return f"`{chosen.name}`: {', '.join(measured)}; {what}{f' ({figures})' if figures else ''}.{tie}{speed}"


def _untimed_sentence(sweep: SweepData, choice: Choice, chosen: Setting) -> str:
    """Return why speeds are not compared, and that memory decides.

    No run was long enough to be timed, or none had the cores for itself.
    """
    able = choice.able
    memory, loss = chosen.median(MEMORY), chosen.median(sweep.loss_key)
    figures = f"{sweep.loss_key} {loss:#.4g}"
    if math.isfinite(memory):
        of = f" of {len(able)} settings that fit and learned" if len(able) > 1 else ""
        smallest = min(m for s in able if math.isfinite(m := s.median(MEMORY)))
        near = sum(s.median(MEMORY) <= smallest * (1 + SAME_MEMORY) for s in able) - 1
        within = f"within {SAME_MEMORY * 100:g} %"
        which = "the least" if memory == smallest else f"{within} of the least"
        also = f", with {count(near, 'other')} {within}" if near and memory == smallest else ""
        least = f", {which}{of}{also}{smaller_forecast(sweep, memory)}" if of else ""
        figures = f"{memory_text(memory)} at the peak{least}, {figures}"
    if contended := contention(sweep, choice):
        by = "By memory alone" if math.isfinite(memory) else "No memory was measured either; by the loss alone"
        return f"No setting is recommended, because {contended}. {by}: `{chosen.name}`: {figures}."
    return (
        f"`{chosen.name}`: {figures}. No step was timed, so speeds are not compared. The first {STEPS_TO_TIME - 1} "
        f"steps are not timed (training.timing_warmup_steps={STEPS_TO_TIME - 3}, and 2 of memory_profile=peaks): "
        f"run {STEPS_TO_TIME} or more."
    )


def _settings_with_a_line(sweep: SweepData, chosen: Setting) -> list[Setting]:
    """Return the settings that get a line against the recommended one.

    If there are many: for each other value the setting with the fewest other differences. Then the settings of which
    a scheduler stopped every trial have none: their figures end at different epochs.
    """
    others = [s for s in sweep.settings if s is not chosen]
    if len(others) <= _MOST_LINES:
        return others
    others = [s for s in others if any(trial.status is not TrialStatus.stopped for trial in s.trials)]
    apart = {s.name: sum(s.values[axis] != chosen.values[axis] for axis in s.values) for s in others}
    chosen_names: set[str] = set()
    for axis in chosen.values:
        for text in dict.fromkeys(s.values[axis] for s in others if s.values[axis] != chosen.values[axis]):
            chosen_names.add(min((s for s in others if s.values[axis] == text), key=lambda s: apart[s.name]).name)
    return [s for s in others if s.name in chosen_names]


def _against(sweep: SweepData, choice: Choice, chosen: Setting, other: Setting) -> str:
    """Return a line about the costs and gains of another setting.

    Such as `0.57× (0.51 to 0.64) the speed, 0.56× the memory, val/loss +2.7 %, above the tolerance of 2 %`.
    """
    parts = []
    groups = sweep.groups[other.name], sweep.groups[chosen.name]
    if other.finished and all(choice.speeds.has(group) for group in groups):
        if groups[0] == groups[1]:
            parts.append("the same speed")
        else:
            tied = " (tied)" if other in choice.tied else ""
            parts.append(f"{times_text(choice.ratio(sweep, other, chosen))} the speed{tied}")
    memory, mine = other.median(MEMORY), chosen.median(MEMORY)
    if memory > 0 and mine > 0:
        parts.append("the same memory" if abs(memory / mine - 1) < _SAME else f"{memory / mine:.3g}× the memory")
    if math.isfinite(other.median(sweep.loss_key)):
        parts.append(_loss_change(sweep, other, chosen))
    reason = choice.why_not.get(other.name, "")
    if reason.startswith("learned less"):
        parts.append(f"above the tolerance of {sweep.loss_tolerance * 100:.3g} %")
    elif reason:
        parts.append(reason)
    return ", ".join(parts) or "no result"


def _loss_change(sweep: SweepData, setting: Setting, reference: Setting) -> str:
    mine, other = setting.median(sweep.loss_key), reference.median(sweep.loss_key)
    if not (math.isfinite(mine) and math.isfinite(other)):
        return f"{sweep.loss_key} not known"
    if 0 < abs(mine - other) <= rounding(setting, reference, sweep.loss_key):
        return f"the same {sweep.loss_key}, to its rounding"
    change = (mine - other) / max(abs(other), 1e-12)
    return f"the same {sweep.loss_key}" if abs(change) < 1e-5 else f"{sweep.loss_key} {ratio_text(change)}"


def _nothing(sweep: SweepData, why_not: Mapping[str, str]) -> str:
    if not sweep.trials:
        return "Nothing can be recommended: no trial was started."
    reasons = Counter(reason.partition(":")[0].partition(" in ")[0] for reason in why_not.values())
    counts = ", ".join(
        f"{count} {_of_many(reason) if count > 1 else reason}" for reason, count in reasons.most_common()
    )
    if len(sweep.settings) == 1:
        return f"No setting qualifies: the only one {next(iter(reasons))}."
    return f"No setting qualifies: of {len(sweep.settings)}, {counts}."


def _of_many(reason: str) -> str:
    """Return a reason about one setting in the plural."""
    verb, space, rest = reason.partition(" ")
    return {"has": "have", "was": "were", "needs": "need"}.get(verb, verb) + space + rest


def plainest(setting: Setting) -> TrialRow:
    """Return the trial that represents a setting: the one with the simplest values on axes that change nothing."""
    return min(setting.trials, key=lambda trial: departures(trial.setting))


def _command(setting: Setting, typed: str) -> str:
    """Return the command that trains a setting alone.

    Args:
        setting: to train.
        typed: the command of the sweep, which may name a folder of the user's options.
    """
    try:
        folders = [word for word in shlex.split(typed) if word.startswith("--config-dir=")]
    except ValueError:  # a store cuts what is long, maybe between two quotes
        folders = []
    varied = [set(trial.overrides) for trial in setting.trials]
    common = set.intersection(*varied)  # a seed that was given to all belongs to the setting
    kept = [
        override
        for override in plainest(setting).overrides
        if not override.startswith(("nightly.", "hydra."))
        and (override in common or override.partition("=")[0].lstrip("+") not in REPEATS)
        and not override.startswith(_OF_A_SWEEP)
    ]
    return shlex.join(["python", "-m", "fsdp_lab", *folders, *kept])
