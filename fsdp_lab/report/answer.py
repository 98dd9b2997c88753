"""The answer of a sweep: its recommendation, and the sentences that every medium shows."""

from __future__ import annotations

import math
import shlex
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from fsdp_lab.config import SweepConfig
from fsdp_lab.config.status import TrialStatus
from fsdp_lab.record.sweep import SweepRecord
from fsdp_lab.record.trial import TrialRecord
from fsdp_lab.report.choice import departures
from fsdp_lab.report.plain_check import check_against_plain
from fsdp_lab.report.recommend import Comparison, Recommendation, recommend
from fsdp_lab.report.render import environment, lines_of, reason_text
from fsdp_lab.report.self_check import check_itself
from fsdp_lab.report.settings import CHANGED, REPEATS, Coded, Rules, Setting, Settings

# Keys that are typed for a sweep and do not describe a trial.
_OF_A_SWEEP = ("repeat=", "repeats=", "search=", "search.", "scheduler=", "scheduler.", "objective=")
_say = partial(lines_of, "words.j2")
_MOST_LINES = 6  # with more settings, only those are compared that differ from the recommended one in one value


@dataclass(frozen=True)
class Answer:
    """The answer of a sweep, in words.

    Attributes:
        recommendation: as codes and figures.
        sentence: the recommended setting and its figures, after `Recommended: `; or why there is none.
        details: why it was chosen, and how certain that is, a line each.
        lines: what every other value costs or gains against the recommended setting. An entry may have two lines.
        notes: what the figures do not show.
        why_not: name of a setting -> why it does not qualify.
        rules: how it was chosen, a sentence each.
        command: trains only the setting; "" without one.
        trial: the number of the trial that represents the setting; None without one.
    """

    recommendation: Recommendation
    sentence: str = ""
    details: list[str] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    why_not: dict[str, str] = field(default_factory=dict)
    rules: list[str] = field(default_factory=list)
    command: str = ""
    trial: TrialRecord | None = None

    @property
    def setting(self) -> Setting | None:
        """The recommended setting; None: none qualifies."""
        return self.recommendation.setting

    @property
    def as_data(self) -> dict[str, Any]:
        """The answer for other programs: its sentence, and the recommended setting with its trial and figures."""
        notes = zip(self.recommendation.notes, self.notes, strict=True)
        found = next((text for note, text in notes if note.code in ("another_model", "differs")), "")
        finding = self.sentence if self.recommendation.why.code == "another_model" else found
        data: dict[str, Any] = {"sentence": self.sentence, "finding": finding}
        if (chosen := self.setting) is not None and self.trial is not None:
            data |= {"trial": self.trial.number, "setting": chosen.values, "figures": chosen.figures}
        return data


def answer(sweep: SweepRecord) -> Answer:
    """Return which setting is recommended, why, and how certain that is."""
    r = recommend(settings_of(sweep))
    trial = plainest(sweep, r.setting) if r.setting else None
    r.notes += [Coded("of_trial", {"text": note}) for note in (trial.notes if trial else ())]
    slow = sweep.slow_ranks()
    r.notes += [
        Coded("of_trial", {"text": text}) for number, text in slow.items() if not trial or number != trial.number
    ]
    return Answer(
        r,
        sentence=" ".join(_say("sentence", r, sweep)),
        details=[*(text_of_note(note) for note in r.caveats), *_say("details", r)] if r.setting else [],
        rules=_say("rules", r),
        command=_command(sweep, r.setting, trial) if r.setting and trial else "",
        trial=trial,
        **comparisons(r),
    )


def comparisons(r: Recommendation) -> dict[str, Any]:
    """Return the texts that need only the recommendation: lines, notes, and why settings do not qualify."""
    return {
        "lines": ["\n".join(_say("against", other, r)) for other in with_a_line(r)],
        "notes": [text_of_note(note) for note in r.notes],
        "why_not": {name: " ".join(_say("why_not", reason)) for name, reason in r.why_not.items()},
    }


def text_of_note(note: Coded) -> str:
    return " ".join(_say("note", note))


def settings_of(sweep: SweepRecord) -> Settings:
    """Return the settings of a sweep, with the rules that judge them."""
    trivial = {_guessing_loss(trial.config) for trial in sweep.trials if trial.config is not None}
    rules = Rules(
        tuple(sweep.axes),
        sweep.loss_tolerance,
        sweep.speed_tolerance,
        tuple(sweep.objectives),
        trivial.pop() if len(trivial) == 1 else None,
    )
    plain = check_against_plain(sweep.trials, sweep.plain_loops)
    apart = {trial.number for trial in sweep.trials if trial.setting.get(CHANGED, "no") != "no"}
    checked = check_itself(sweep.trials, sweep.axes, apart | plain.different.keys())
    reasons = {trial.number: reason_text(trial.reason) for trial in sweep.trials}
    return Settings(sweep.frame(as_typed=True), rules, checked, plain, reasons)


def _guessing_loss(config: SweepConfig) -> float | None:
    """Return the cross entropy of guessing among `model.num_classes`; read from the config, without an import."""
    classes = config.model.arguments.get("num_classes")
    is_known = config.task.name == "classification"
    return math.log(classes) if is_known and isinstance(classes, int) and classes > 1 else None


def with_a_line(r: Recommendation) -> list[Comparison]:
    """Return the settings that are compared with the recommended one, a line each.

    If there are many, these are only those that differ in the fewest values. Settings are then left out if a scheduler
    stopped all their trials: their figures end at different epochs.
    """
    chosen = r.setting
    if chosen is None or len(r.others) <= _MOST_LINES:
        return r.others
    others = [other for other in r.others if {*other.setting.statuses} != {TrialStatus.stopped}]
    apart = [sum(o.setting.values[axis] != value for axis, value in chosen.values.items()) for o in others]
    return [other for other, number in zip(others, apart, strict=True) if number == min(apart)]


def plainest(sweep: SweepRecord, setting: Setting) -> TrialRecord:
    """Return the trial that represents a setting: the one with the simplest values on axes that change nothing."""
    trials = [trial for trial in sweep.trials if trial.number in setting.trials]
    return min(trials, key=lambda trial: departures(trial.setting))


def _command(sweep: SweepRecord, setting: Setting, trial: TrialRecord) -> str:
    """Return the command that trains only a setting."""
    try:
        folders = [word for word in shlex.split(sweep.command) if word.startswith("--config-dir=")]
    except ValueError:  # a store cuts a long command, maybe between two quotes
        folders = []
    common = set.intersection(*(set(t.overrides) for t in sweep.trials if t.number in setting.trials))
    kept = [word for word in trial.overrides if _belongs(word, common)]
    return shlex.join(["python", "-m", "fsdp_lab", *folders, *kept])


def _belongs(override: str, common: set[str]) -> bool:
    """Return whether an override belongs to a setting: a seed does if all of its trials have it."""
    is_attempt = override.partition("=")[0].lstrip("+") in REPEATS and override not in common
    return not is_attempt and not override.startswith(("nightly.", "hydra.", *_OF_A_SWEEP))


def plain_loop_lines(answer: Answer) -> list[str]:
    """Return the lines of an answer about plain loops."""
    found = zip(answer.recommendation.notes, answer.notes, strict=True)
    lines = [text for note, text in found if note.code in ("another_model", "as_plain")]
    another = answer.recommendation.why.code == "another_model"
    return [line.replace("`", "") for line in ([answer.sentence] if another else lines)]


def plain_text(answer: Answer, elsewhere: str = "report.html") -> list[str]:
    """Return the lines of an answer for a terminal, the sentence first; `elsewhere`: the file that has all of them."""
    text = environment(False).get_template("terminal.txt.j2").render(answer=answer, elsewhere=elsewhere)
    return text.replace("`", "").rstrip().split("\n")
