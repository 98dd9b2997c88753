"""Notes about what the figures of a sweep do not show: unmeasured noise, and speeds that do not count."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from fsdp_lab.config.sweep import ReportConfig
from fsdp_lab.metrics import FORECAST, OTHERS_CPU, PREDICTED_SPEED, SPEED
from fsdp_lab.report.choice import Choice, candidates, choose, too_large, value
from fsdp_lab.report.data import REPEATS, Setting, SweepData, TrialRow, words
from fsdp_lab.report.predictions import predictions_sentence
from fsdp_lab.report.rounding import rounding_note
from fsdp_lab.report.speed import Basis, Interval
from fsdp_lab.report.texts import figures_text, memory_text, times_text
from fsdp_lab.status import TrialStatus
from fsdp_lab.wording import count

_MOST_TRIALS = 3  # that are named by their numbers
_MOST_NAMED = 3  # settings


def contention(sweep: SweepData, choice: Choice) -> str:
    """Return how much of the cores other processes used, if speeds are not compared for that reason; else ""."""
    asked = not sweep.objectives or any(metric == SPEED for metric, _ in sweep.objectives)
    shares = [t.figures[OTHERS_CPU] for s in choice.able for t in s.trials if sweep.shared(t)]
    if choice.timed or not asked or not shares:
        return ""
    used = (
        f"other processes used up to {max(shares) * 100:.0f} % of the cores (report.others_cpu={sweep.others_cpu:g} "
        "is the limit)"
    )
    counted = {run.group for run in sweep.runs}
    names = [f"`{s.name}`" for s in choice.able if sweep.groups[s.name] in counted]
    if not names:
        return used
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    return f"only the speed of {', '.join(names[:_MOST_NAMED])}{more} counts: while the others were timed, {used}"


def notes_on(sweep: SweepData, choice: Choice) -> list[str]:
    """Return the notes below an answer, each a sentence or two."""
    notes = []
    shared = [trial for trial in sweep.trials if sweep.shared(trial)]
    if shared and choice.timed:
        most = max(trial.figures[OTHERS_CPU] for trial in shared)
        notes.append(
            f"The speed of {_which(shared, sweep)} does not count: other processes used up to {most * 100:.0f} % of "
            f"the cores. To compare speeds, {_again(sweep)}."
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
    notes += [sentence for sentence in (rounding_note(sweep), predictions_sentence(sweep)) if sentence]
    notes += _passed_over(sweep, choice)
    if sweep.repeat_max is not None and not sweep.unfinished:
        notes += _why_auto_stopped(sweep, sweep.repeat_max)
    return notes


def _passed_over(sweep: SweepData, choice: Choice) -> list[str]:
    """Return how wrong a prediction would have to be for a setting skipped by `forecast.keep` to change the answer.

    Only predictions that were too low count: a skipped setting may be faster by the same factor.
    """
    skipped = [
        t for t in sweep.trials
        if t.status is TrialStatus.skipped and PREDICTED_SPEED in t.figures and not too_large(t)
    ]  # fmt: skip
    asked = not sweep.objectives or any(metric == SPEED for metric, _ in sweep.objectives)
    if not skipped or choice.setting is None or not choice.timed or not asked:
        return []
    measured = [t for t in sweep.trials if _excess(sweep, t)]
    most_off = {t.number: _most_exceeded(sweep, t, measured) for t in skipped}

    def at_most(trial: TrialRow) -> float:
        """Return the samples/s if its prediction is as far too low as any of those."""
        other = most_off[trial.number]
        return trial.figures[PREDICTED_SPEED] * (1.0 if other is None else _excess(sweep, other))

    fastest = max(skipped, key=at_most)
    factor = value(sweep, choice.speeds, choice.setting, SPEED) / at_most(fastest)
    head = (
        f"forecast.keep skipped {count(len(skipped), 'trial')}. The fastest of them may be `{fastest.name}`, "
        f"predicted {figures_text(fastest.figures[PREDICTED_SPEED])} samples/s"
    )
    if (other := most_off[fastest.number]) is not None:
        head += (
            f", or {figures_text(at_most(fastest))} if its prediction has the error of `{other.name}`, which was "
            f"{(_excess(sweep, other) - 1) * 100:.2g} % faster than predicted"
        )
    if factor <= 1:
        return [f"{head}. That is faster than the recommended setting: try it, too."]
    return [f"{head}. Only {times_text(Interval(factor))} that speed would change the answer."]


def _most_exceeded(sweep: SweepData, trial: TrialRow, measured: Sequence[TrialRow]) -> TrialRow | None:
    """Return the measured trial that exceeded its prediction most; None if none did.

    Trials in the same precision come first. That others were slower does not matter.
    """
    same = [other for other in measured if _precision(other) == _precision(trial)]
    most = max(same or measured, key=lambda other: _excess(sweep, other), default=None)
    return most if most is not None and _excess(sweep, most) >= 1.005 else None


def _excess(sweep: SweepData, trial: TrialRow) -> float:
    """Return the measured over the predicted speed; 0 if one of them is not known, or does not count."""
    measured, predicted = trial.figures.get(SPEED), trial.figures.get(PREDICTED_SPEED)
    if trial.status is not TrialStatus.finished or not measured or not predicted or sweep.shared(trial):
        return 0.0
    return measured / predicted


def _precision(trial: TrialRow) -> dict[str, str]:
    return {key: text for key, text in trial.setting.items() if key.partition(".")[0] == "precision"}


def _which(trials: Sequence[TrialRow], sweep: SweepData) -> str:
    """Return text such as `trial 1`, `trials 1 and 3`, `7 of 12 runs`."""
    if len(trials) > _MOST_TRIALS:
        return f"{len(trials)} of {len(sweep.trials)} runs"
    *first, last = [str(trial.number) for trial in trials]
    return f"trials {', '.join(first)} and {last}" if first else f"trial {last}"


def _counted_anyway(sweep: SweepData) -> str:
    """Return the answer that the sweep would give if runs on shared cores counted, and how to see it."""
    choice = choose(replace(sweep, others_cpu=math.inf))
    how = f"To compare speeds, {_again(sweep)}, or see: {sweep.report} report.others_cpu=1"
    if choice.setting is None or not choice.timed:
        return how
    by_memory = choose(sweep).setting
    assert by_memory is not None
    groups = sweep.groups[choice.setting.name], sweep.groups[by_memory.name]
    if groups[0] == groups[1] or not all(map(choice.speeds.has, groups)):
        return how
    both = apart(by_memory, choice.setting), apart(choice.setting, by_memory)
    timed = [[t for t in setting.trials if t.figures.get(SPEED)] for setting in (choice.setting, by_memory)]
    shared = [set(map(sweep.shared, trials)) for trials in timed]
    if shared != [{True}, {True}]:
        return f"`{both[0]}` and `{both[1]}` ran under different loads, so their speeds cannot be compared. {how}"
    ratio = times_text(choice.speeds.ratio(*groups))
    return f"In the runs on shared cores, `{both[0]}` had {ratio} the speed of `{both[1]}`. {how}"


def _again(sweep: SweepData) -> str:
    """Return how speeds that do not count are measured again, as the end of a sentence."""
    if not sweep.resume:
        return "run it again when the machine is free"
    return f"measure them again when the machine is free (`{sweep.resume} resume_failed=true`)"


def _what_one_run_cannot_show(sweep: SweepData) -> str:
    repeated = any(len(setting.trials) > 1 for setting in sweep.settings)
    counted = [
        [t for t in setting.trials if not sweep.shared(t) and t.figures.get(SPEED)] for setting in sweep.settings
    ]
    once = "No setting has two runs whose speeds count" if repeated else "Each setting ran once"
    if any(len(trials) > 1 for trials in counted):
        once = "Too few settings have two runs whose speeds count"
    note = f"{once}, so the variation between runs of a setting is unknown"
    if repeated or sweep.repeat_max is not None:
        return f"{note}."
    if sweep.objectives:
        return f"{note}; a grid of the best settings with repeat=0,1,2 measures it."
    return f"{note}; repeat=auto measures it."


def _why_auto_stopped(sweep: SweepData, most: int) -> list[str]:
    names = [tuple(trial.setting.get(axis, "") for axis in REPEATS) for trial in sweep.trials]
    rounds, first = len(set(names)), names.count(names[0])
    if first < 2:
        return []
    if sweep.objectives and not any(metric == SPEED for metric, _ in sweep.objectives):
        return ["repeat=auto repeated nothing: it compares speeds, and no objective is a speed."]
    if not sweep.timed:
        return ["repeat=auto repeated nothing: no step was timed, so there are no speeds to compare."]
    left = candidates(sweep)
    saved = f" ({len(names)} runs instead of {rounds * first})" if len(names) < rounds * first else ""
    after = f"repeat=auto stopped after {count(rounds, 'round')}{saved}"
    if not sweep.runs and any(sweep.shared(trial) for trial in sweep.trials):
        return [f"{after}: the machine was too busy to compare speeds in all {len(names)} runs."]
    if len(set(sweep.groups.values())) == 1:
        return [f"{after}: {' and '.join(sweep.setting_axes)} cannot change the speed."]
    if len(left) < 2:
        return [f"{after}: the answer is settled."]
    listed = ", ".join(f"`{setting.name}`" for setting in left[:_MOST_NAMED])
    more = f" and {len(left) - _MOST_NAMED} more" if len(left) > _MOST_NAMED else ""
    if rounds < most:
        return [f"{after}, before it was settled; resume the sweep to tell {listed}{more} apart."]
    return [f"{after}, the limit: more runs could still tell {listed}{more} apart."]


def apart(setting: Setting, other: Setting) -> str:
    """Return the other setting by those values that differ from this one's."""
    return words({key: text for key, text in other.values.items() if setting.values.get(key) != text})


def named(sweep: SweepData, chosen: Setting, other: Setting) -> str:
    """Return a setting by the values that differ from the recommended one.

    All its values are named if it has no result and another setting with those values has one, so that nobody reads
    that the other did not run.
    """
    short = apart(chosen, other)
    differs = {axis: text for axis, text in other.values.items() if chosen.values[axis] != text}
    fits = [s for s in sweep.settings if s is not other and differs.items() <= s.values.items()]
    return other.name if not other.finished and any(s.finished for s in fits) else short


def smaller_forecast(sweep: SweepData, memory: float) -> str:
    """Return the unmeasured setting that fits and whose forecast is below a measured peak; "" without one."""
    peaks = {
        s.name: peak
        for s in sweep.settings
        if not s.finished and (peak := _skipped_peak(s)) is not None and peak < memory
    }
    if not peaks:
        return ""
    name = min(peaks, key=lambda name: peaks[name])
    return f" (forecast for `{name}`, which was not started: {memory_text(peaks[name])})"


def _skipped_peak(setting: Setting) -> float | None:
    """Return the forecast peak, in bytes, of a setting that was skipped for its speed; None without one."""
    peaks = [t.figures.get(FORECAST) for t in setting.trials if t.status is TrialStatus.skipped and not too_large(t)]
    return max((peak for peak in peaks if peak), default=None)
