"""What the figures of a sweep do not show: noise that was not measured, and speeds that do not count."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from statistics import median

from fsdp_lab.config.sweep import ReportConfig
from fsdp_lab.metrics import OTHERS_CPU, PREDICTED_SPEED, SPEED
from fsdp_lab.report.choice import Choice, candidates, choose, too_large, value
from fsdp_lab.report.data import REPEATS, Setting, Sweep, Trial, words
from fsdp_lab.report.predictions import predictions_sentence
from fsdp_lab.report.speed import Basis, Interval
from fsdp_lab.report.texts import figures_text, times_text
from fsdp_lab.status import TrialStatus
from fsdp_lab.wording import count

_MOST_TRIALS = 3  # that are named by their numbers
_MOST_NAMED = 3  # settings


def contention(sweep: Sweep, choice: Choice) -> str:
    """How much of the cores others used, where for that reason no speed counts; else ""."""
    asked = not sweep.objectives or any(metric == SPEED for metric, _ in sweep.objectives)
    shares = [t.figures[OTHERS_CPU] for s in choice.able for t in s.trials if sweep.shared(t)]
    if choice.timed or not asked or not shares:
        return ""
    return (
        f"other processes used up to {max(shares) * 100:.0f} % of the cores (report.others_cpu={sweep.others_cpu:g} "
        "is the limit)"
    )


def notes_on(sweep: Sweep, choice: Choice) -> list[str]:
    notes = []
    shared = [trial for trial in sweep.trials if sweep.shared(trial)]
    if shared and choice.timed:
        most = max(trial.figures[OTHERS_CPU] for trial in shared)
        notes.append(
            f"The speed of {_which(shared, sweep)} does not count: other processes used up to {most * 100:.0f} % of "
            "the cores."
        )
    if contention(sweep, choice):
        notes.append(_counted_anyway(sweep))
    if sweep.others_cpu > ReportConfig().others_cpu:
        strict = replace(sweep, others_cpu=ReportConfig().others_cpu)
        if counted := [trial for trial in sweep.trials if strict.shared(trial)]:
            most = max(trial.figures[OTHERS_CPU] for trial in counted)
            notes.append(
                f"report.others_cpu={sweep.others_cpu:g} counts the speed of {_which(counted, sweep)}, though other "
                f"processes used up to {most * 100:.0f} % of the cores."
            )
    if choice.timed and len(choice.able) > 1 and choice.speeds.basis is not Basis.repeats:
        notes.append(_what_one_run_cannot_show(sweep))
    notes += [sentence] if (sentence := predictions_sentence(sweep)) else []
    notes += _passed_over(sweep, choice)
    if sweep.repeat_max is not None and not sweep.unfinished:
        notes += _why_auto_stopped(sweep, sweep.repeat_max)
    return notes


def _passed_over(sweep: Sweep, choice: Choice) -> list[str]:
    """How wrong a prediction would have to be for a setting that `forecast.keep` left out to change the answer."""
    skipped = [
        t for t in sweep.trials
        if t.status is TrialStatus.skipped and PREDICTED_SPEED in t.figures and not too_large(t)
    ]  # fmt: skip
    asked = not sweep.objectives or any(metric == SPEED for metric, _ in sweep.objectives)
    if not skipped or choice.setting is None or not choice.timed or not asked:
        return []
    fastest = max(skipped, key=lambda trial: trial.figures[PREDICTED_SPEED])
    predicted = fastest.figures[PREDICTED_SPEED]
    level = _level(sweep)
    factor = value(sweep, choice.speeds, choice.setting, SPEED) / (predicted * level)
    head = (
        f"forecast.keep left out {count(len(skipped), 'trial')}: the fastest by its prediction is `{fastest.name}`, "
        f"predicted {figures_text(predicted)} samples/s"
    )
    if abs(level - 1) >= 0.005:  # what is common to all predictions decides nothing between two
        head += f", {figures_text(predicted * level)} by how far the others were off"
    if factor <= 1:
        return [f"{head}, more than was measured here: try it, too."]
    return [f"{head}: it would have to be {times_text(Interval(factor))} as fast as that to change the answer."]


def _level(sweep: Sweep) -> float:
    """Measured over predicted speed, the median of the trials that have both, if they count; 1 without any."""
    ratios = [
        t.figures[SPEED] / t.figures[PREDICTED_SPEED]
        for t in sweep.trials
        if t.status is TrialStatus.finished
        and t.figures.get(SPEED)
        and t.figures.get(PREDICTED_SPEED)
        and not sweep.shared(t)
    ]
    return median(ratios) if ratios else 1.0


def _which(trials: Sequence[Trial], sweep: Sweep) -> str:
    """`trial 1`, `trials 1 and 3`, `7 of 12 runs`."""
    if len(trials) > _MOST_TRIALS:
        return f"{len(trials)} of {len(sweep.trials)} runs"
    *first, last = [str(trial.number) for trial in trials]
    return f"trials {', '.join(first)} and {last}" if first else f"trial {last}"


def _counted_anyway(sweep: Sweep) -> str:
    """What the sweep would say if runs counted that shared their cores, and how to see it."""
    found = choose(replace(sweep, others_cpu=math.inf))
    how = "run it again when the machine is free, or see: python -m fsdp_lab.report sweep=last report.others_cpu=1"
    if found.setting is None or not found.timed:
        return f"To compare speeds, {how}"
    by_memory = choose(sweep).setting
    assert by_memory is not None
    groups = sweep.groups[found.setting.name], sweep.groups[by_memory.name]
    if groups[0] == groups[1] or not all(map(found.speeds.has, groups)):
        return f"To compare speeds, {how}"
    ratio = found.speeds.ratio(*groups)
    return (
        f"As measured beside those processes, `{apart(by_memory, found.setting)}` had {times_text(ratio)} its speed. "
        f"To compare speeds, {how}"
    )


def _what_one_run_cannot_show(sweep: Sweep) -> str:
    repeated = any(len(setting.trials) > 1 for setting in sweep.settings)
    once = "No setting has two runs whose speeds count" if repeated else "Each setting ran once"
    note = f"{once}, and one run cannot show how much runs of a setting differ"
    if repeated or sweep.repeat_max is not None:
        return f"{note}."
    if sweep.objectives:
        return f"{note}; a grid of the best settings with repeat=0,1,2 measures it."
    return f"{note}; repeat=auto measures it."


def _why_auto_stopped(sweep: Sweep, most: int) -> list[str]:
    names = [tuple(trial.setting.get(axis, "") for axis in REPEATS) for trial in sweep.trials]
    rounds, first = len(set(names)), names.count(names[0])
    if first < 2:
        return []
    if sweep.objectives and not any(metric == SPEED for metric, _ in sweep.objectives):
        return ["repeat=auto repeated nothing: it repeats to compare speeds, and no objective is one."]
    if not sweep.timed:
        return ["repeat=auto repeated nothing: no step was timed, so there are no speeds to compare."]
    left = candidates(sweep)
    saved = f" ({len(names)} runs instead of {rounds * first})" if len(names) < rounds * first else ""
    after = f"repeat=auto stopped after {count(rounds, 'round')}{saved}"
    if not sweep.runs and any(sweep.shared(trial) for trial in sweep.trials):
        return [f"{after}: in none of the {len(names)} runs was the machine free enough to compare speeds."]
    if len(set(sweep.groups.values())) == 1:
        return [f"{after}: {' and '.join(sweep.setting_axes)} cannot change the speed."]
    if len(left) < 2:
        return [f"{after}: the answer is settled."]
    told = ", ".join(f"`{setting.name}`" for setting in left[:_MOST_NAMED])
    more = f" and {len(left) - _MOST_NAMED} more" if len(left) > _MOST_NAMED else ""
    if rounds < most:
        return [f"{after}, before it was settled; resume the sweep to tell {told}{more} apart."]
    return [f"{after}, the limit: more runs could still tell {told}{more} apart."]


def apart(setting: Setting, other: Setting) -> str:
    """The other setting by those values that are not this one's."""
    return words({key: text for key, text in other.values.items() if setting.values.get(key) != text})
