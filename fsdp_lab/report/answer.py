"""The answer of a sweep: its recommendation, and the sentences that every medium shows."""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from fsdp_lab.config.training import TrainingConfig
from fsdp_lab.metrics import MIB, declared
from fsdp_lab.record.trial import words
from fsdp_lab.report.choice import PLAIN, departures
from fsdp_lab.report.data import SweepData, TrialRow
from fsdp_lab.report.recommend import Comparison, Recommendation, recommend
from fsdp_lab.report.settings import REPEATS, Setting
from fsdp_lab.report.statements import Why
from fsdp_lab.report.texts import figures_text, memory_text, percent_text, ratio_text, short_count, times_text
from fsdp_lab.status import TrialStatus
from fsdp_lab.wording import count

# An epoch's speed is that of its steps after those that warm up: the configured ones, and two that are followed.
STEPS_TO_TIME = TrainingConfig().timing_warmup_steps + 2 + 1
# The values of `fsdp_lab.speed.device.Basis`, which an older or newer version may have written otherwise.
_BASES = {
    "data sheet": "the device's data sheet",
    "fitted": "efficiencies fitted to published steps on this device",
    "calibration": "the calibration of this machine",
    "trials": "earlier trials on this device",
}
# What is typed for a sweep and says nothing of one trial.
_OF_A_SWEEP = ("repeat=", "repeat_max=", "search=", "search.", "scheduler=", "scheduler.", "objective=")
_MOST_LINES = 6  # settings that are all compared; of more, those that differ from the recommended one in one value


@dataclass(frozen=True)
class Answer:
    """The answer of a sweep, in words.

    Attributes:
        recommendation: as codes and figures.
        sentence: the setting and its figures, or why there is none.
        details: why it is the one, and how sure that is, a line each.
        lines: the costs and gains of every other value against the recommended setting. One may have two lines of text.
        notes: what the figures do not show.
        why_not: name of a setting -> why it does not qualify.
        rules: how it was chosen, a sentence each.
        command: trains the setting alone; "" without one.
        trial: that represents the setting; None without one.
        described: the settings in `lines`.
    """

    recommendation: Recommendation
    sentence: str
    details: list[str]
    lines: list[str]
    notes: list[str]
    why_not: dict[str, str]
    rules: list[str]
    command: str
    trial: TrialRow | None
    described: list[Setting] = field(default_factory=list)

    @property
    def setting(self) -> Setting | None:
        """The recommended setting; None: none qualifies."""
        return self.recommendation.setting

    @property
    def head(self) -> str:
        """The words before the sentence: `Recommended: `; "" if nothing is recommended by speed."""
        return "Recommended: " if self.setting and self.recommendation.is_by_speed else ""

    @property
    def to_train(self) -> str:
        """The words before the command; "" if the setting is recommended."""
        return "" if self.recommendation.is_by_speed else "to train it: "


def answer(sweep: SweepData) -> Answer:
    """Say which setting is recommended, why, and how sure that is."""
    r = recommend(sweep.frame(), sweep.rules)
    texts: Any = template_words().get_template("words.j2").module
    chosen = r.setting
    others = with_a_line(r)
    details = [texts.tie(r)] if r.why.code is Why.tied else [texts.why(r)]
    if r.tied and r.why.code is Why.objectives:
        details.append(texts.tie(r))
    details = [line for line in (*details, texts.how_sure(r, sweep)) if line.strip()] if chosen else []
    trial = plainest(sweep, chosen) if chosen else None
    return Answer(
        r,
        _line(texts.sentence(r, sweep)),
        [_line(line) for line in details],
        ["\n".join(map(_line, texts.against(other, r).split("\n"))) for other in others],
        [_line(texts.note(note, sweep)) for note in r.notes],
        {name: _line(texts.why_not(reason)) for name, reason in r.why_not.items()},
        [_line(rule) for rule in texts.rules(r, sweep).split("\n") if rule.strip()],
        _command(sweep, chosen, trial) if chosen and trial else "",
        trial,
        [other.setting for other in others],
    )


def _line(text: str) -> str:
    return " ".join(text.split())


def as_lines(text: str) -> str:
    """Return text for a terminal: no empty lines, each with single blanks behind its indent, no backticks."""
    lines = (line.replace("`", "").rstrip() for line in text.split("\n"))
    return "\n".join(line[: len(line) - len(line.lstrip())] + " ".join(line.split()) for line in lines if line)


@cache
def template_words() -> Any:
    """Return jinja2's environment for text, with what its sentences need."""
    from fsdp_lab.report.render import environment

    words_of = environment(False)
    words_of.filters |= {
        "basis": lambda basis: _BASES.get(basis, basis),
        "words": words,
        "change": ratio_text,
        "count": count,
        "figures": figures_text,
        "is_known": math.isfinite,
        "memory": memory_text,
        "metric": lambda value, metric: declared(metric).text(value),
        "percent": percent_text,
        "short": short_count,
        "times": times_text,
    }
    words_of.globals |= {"named": _named, "plain": words(PLAIN), "steps_to_time": STEPS_TO_TIME}
    words_of.globals |= {"gib": lambda size: f"{size / MIB / 1024:.4g}", "size": memory_text}
    return words_of


def _named(r: Recommendation, other: Comparison) -> str:
    """Return a setting by the values that differ from the recommended one.

    All its values are named if it has no result and another setting with those values has one, so that nobody reads
    that the other did not run.
    """
    assert r.setting is not None
    chosen, mine = r.setting, other.setting
    differs = {axis: text for axis, text in mine.values.items() if chosen.values[axis] != text}
    fits = [s for s in r.settings.all if s is not mine and differs.items() <= s.values.items()]
    unclear = not r.settings.is_finished(mine) and any(r.settings.is_finished(s) for s in fits)
    return mine.name if unclear else chosen.apart(mine)


def with_a_line(r: Recommendation) -> list[Comparison]:
    """Return the settings that get a line against the recommended one.

    If there are many: for each other value the setting with the fewest other differences. Then the settings of which
    a scheduler stopped every trial have none: their figures end at different epochs.
    """
    chosen = r.setting
    if chosen is None or len(r.others) <= _MOST_LINES:
        return r.others
    statuses = r.settings.statuses
    others = [other for other in r.others if any(statuses[n] is not TrialStatus.stopped for n in other.setting.trials)]
    apart = {id(o): sum(o.setting.values[axis] != value for axis, value in chosen.values.items()) for o in others}
    nearest = set()
    for axis, value in chosen.values.items():
        for text in dict.fromkeys(o.setting.values[axis] for o in others if o.setting.values[axis] != value):
            nearest.add(min((id(o) for o in others if o.setting.values[axis] == text), key=apart.__getitem__))
    return [other for other in others if id(other) in nearest]


def title(sweep: SweepData, recommendation: Recommendation) -> str:
    """Return the study and what it compares, such as `zero2: sharding × precision, 6 trials`."""
    compared = f"{' × '.join(recommendation.settings.axes) or 'one setting'}, {count(len(sweep.trials), 'trial')}"
    return f"{sweep.study}: {compared}" if sweep.study else compared


def plainest(sweep: SweepData, setting: Setting) -> TrialRow:
    """Return the trial that represents a setting: the one with the simplest values on axes that change nothing."""
    trials = [trial for trial in sweep.trials if trial.number in setting.trials]
    return min(trials, key=lambda trial: departures(trial.setting))


def _command(sweep: SweepData, setting: Setting, trial: TrialRow) -> str:
    """Return the command that trains a setting alone.

    Args:
        sweep: whose command may name a folder of the user's options.
        setting: to train.
        trial: that represents it.
    """
    try:
        folders = [word for word in shlex.split(sweep.command) if word.startswith("--config-dir=")]
    except ValueError:  # a store cuts what is long, maybe between two quotes
        folders = []
    common = set.intersection(*(set(t.overrides) for t in sweep.trials if t.number in setting.trials))
    kept = [word for word in trial.overrides if _belongs(word, common)]
    return shlex.join(["python", "-m", "fsdp_lab", *folders, *kept])


def _belongs(override: str, common: set[str]) -> bool:
    """Return whether an override belongs to a setting: a seed does if all of its trials have it."""
    is_attempt = override.partition("=")[0].lstrip("+") in REPEATS and override not in common
    return not is_attempt and not override.startswith(("nightly.", "hydra.", *_OF_A_SWEEP))


def plain_text(recommendation: Answer) -> list[str]:
    """Return the lines of an answer for a terminal, the sentence first."""
    from fsdp_lab.report.render import environment

    text = environment(False).get_template("terminal.txt.j2").render(answer=recommendation)
    return text.replace("`", "").rstrip().split("\n")


def numbers(trials: Sequence[int], most: int = 6) -> str:
    """Return text such as `trials 0, 1`."""
    listed = ", ".join(map(str, trials[:most])) + (" …" if len(trials) > most else "")
    return f"trial{'s' if len(trials) > 1 else ''} {listed}"
