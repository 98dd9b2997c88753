"""The text of a verdict: its title, its sentences and its table, for the terminal, gate.md and the page of nights.

All words about findings are made here; everything else passes codes and values.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from fsdp_lab.metrics import FORECAST_ERROR, MEMORY, SPEED, Metric, gated
from fsdp_lab.nightly.gate import LOSS, STATUS, Finding, Outcome
from fsdp_lab.nightly.nights import Night, Verdict
from fsdp_lab.report.render import environment
from fsdp_lab.status import TrialStatus
from fsdp_lab.terminal import Column, FittingTable
from fsdp_lab.wording import count

_WHY_NO_SPEED = {
    Outcome.excluded: "other processes used the cores while it was timed",
    Outcome.unmatched: "no good night on this machine has measured it with its timing included",
}
_REASONS = {
    Outcome.ok: "ok",
    Outcome.better: "better",
    Outcome.noise: "within the noise, which explains up to {noise}",
    Outcome.rounding: "within the rounding of this loss",
    Outcome.slope: "{slope} a night over {nights}, within the tolerance so far",
    Outcome.regression: "regression: beyond the tolerance ({tolerance}){by_noise}",
    Outcome.drift: "drift: {slope} a night over {nights}, since {against}, the best one; beyond the tolerance "
    "({tolerance}){by_noise}",
    Outcome.unfinished: "regression: fewer trials finish",
    Outcome.lost: "regression: no longer measured",
    Outcome.new: "new",
}
_SUBJECTS = {MEMORY: "memory", LOSS: "loss", FORECAST_ERROR: "forecast"}


class Row(NamedTuple):
    """A line of the table, as text."""

    setting: str
    metric: str
    before: str
    tonight: str
    change: str
    verdict: str


def row(finding: Finding) -> Row:
    """Return the line of a finding."""
    if finding.metric == STATUS:
        tonight, before = (_ended(statuses) for statuses in finding.ended)
        return Row(finding.setting, "result", before, tonight, "", _REASONS[finding.outcome])
    metric = next(metric for metric in gated() if metric.key == finding.metric)
    before, tonight = (metric.text(value) for value in (finding.before, finding.tonight))
    tonight = tonight or ("none" if finding.outcome is Outcome.lost else "")
    change = _change(metric, finding.change)
    return Row(finding.setting, metric.label, before, tonight, change, _reason(finding, metric))


def title(night: Night) -> str:
    """Return the verdict on a night in a line."""
    if night.baseline is None or night.verdict in (Verdict.failed, Verdict.left):
        return f"Night {night.id}: {night.verdict}"
    return f"Night {night.id} against {night.baseline}: {_outcome(night)}"


def sentences(night: Night) -> list[str]:
    """Return what there is to say below the title and above the table."""
    if night.verdict is Verdict.failed:
        return ["Its sweep did not end, or no trial finished."]
    if night.verdict is Verdict.left:
        return ["It was interrupted, and not resumed in time with the same study and code."]
    said = [f"Accepted by {night.accepted['by']}: {night.accepted['reason']}"] if night.accepted else []
    if night.baseline is None:
        bad = [trial for trial in night.trials if trial["status"] != TrialStatus.finished]
        said.append("The first good night: it is the baseline from now on.")
        if bad:
            said.append(f"Not every trial finished: {', '.join(sorted({trial['setting'] for trial in bad}))}.")
        return said
    return [f"Changed since {night.baseline}: {changed_words(night.changed)}.", *said]


def changed_words(changed: Sequence[Sequence[str]]) -> str:
    """Return what changed between two nights."""
    own = [what.removeprefix("user code ") for what, *_ in changed if what.startswith("user code ")]
    words = [f"your code ({', '.join(own)})"] if own else []
    for what, before, now in changed:
        if what == "code":
            words.append("the uncommitted code of fsdp_lab")
        elif not what.startswith("user code "):
            words.append(f"{what.removeprefix('library ')} {before} → {now}")
    return ", ".join(words) or "nothing in code, libraries and machine"


def regressions_line(night: Night) -> str:
    """Return the regressions of a night in a line; "" without any."""
    return "; ".join(f"{r.setting}: {r.metric} {r.change or r.tonight}" for r in map(row, night.regressions))


def markdown(night: Night) -> str:
    """Return gate.md."""
    text = fill("gate.md", title=title(night), said=sentences(night), rows=_rows(night))
    return text.rstrip() + "\n"


def terminal_table(night: Night) -> FittingTable:
    """Return the table for a terminal, regressions first. A setting is named in its first row."""
    rows = _rows(night)
    names = [r.setting for r in rows]
    settings = [name if name != before else "" for before, name in zip(["", *names], names, strict=False)]
    return FittingTable(
        [
            Column("setting", settings, breaks=True, justify="left"),
            Column("metric", [r.metric for r in rows], justify="left"),
            Column("before", [r.before for r in rows]),
            Column("tonight", [r.tonight for r in rows]),
            Column("change", [r.change for r in rows], drop=1),
            Column("verdict", [r.verdict for r in rows], breaks=True, justify="left"),
        ],
        elsewhere="gate.md",
    )


def fill(template: str, **values: Any) -> str:
    """Return a template of this package with these values, which are escaped if it is HTML."""
    text: str = environment(template.endswith(".html"), "fsdp_lab.nightly").get_template(template).render(**values)
    return text


def _rows(night: Night) -> list[Row]:
    return [row(finding) for finding in sorted(night.findings, key=lambda finding: not finding.is_regression)]


def _outcome(night: Night) -> str:
    """Return whether something got worse, what gets worse slowly, and what was not judged."""
    bad = len(night.regressions)
    slopes = [] if bad else [row(finding) for finding in night.findings if finding.outcome is Outcome.slope]
    speeds = [finding.outcome for finding in night.findings if finding.metric == SPEED]
    why = next((_WHY_NO_SPEED[o] for o in speeds if o in _WHY_NO_SPEED), "")
    unjudged = bool(why) and all(outcome in _WHY_NO_SPEED for outcome in speeds)
    what = "drift" if all(finding.outcome is Outcome.drift for finding in night.regressions) else "regression"
    text = f"a {what}" if bad == 1 else f"{bad} {what}s" if bad else "nothing got worse"
    if unjudged and not bad:
        seen = [subject for key, subject in _SUBJECTS.items() if any(f.metric == key for f in night.findings)]
        text = f"no regression in {' or '.join(filter(None, [', '.join(seen[:-1]), *seen[-1:]])) or 'what finished'}"
    text += f"; speed was not judged: {why}" if unjudged else ""
    return text + "".join(f"; {r.metric} of {r.setting}: {r.verdict}" for r in slopes[:1])


def _reason(finding: Finding, metric: Metric) -> str:
    if finding.outcome in _WHY_NO_SPEED:
        return f"not judged: {_WHY_NO_SPEED[finding.outcome]}"
    return _REASONS[finding.outcome].format(
        tolerance=_change(metric, finding.tolerance),
        noise=_change(metric, finding.noise),
        by_noise=f" and the noise ({_change(metric, finding.noise)})" if finding.noise else "",
        slope=_change(metric, finding.slope, digits="+.2g"),
        nights=count(finding.nights, "night"),
        against=finding.against,
    )


def _change(metric: Metric, change: float | None, digits: str = "+.1f") -> str:
    """Return a change of a metric, with its sign."""
    if not change:
        return "" if change is None else "none"
    if metric.gate.kind != "ratio":
        return f"{change / metric.scale:+.3g}"
    text = f"{change * 100:{digits}}"
    return "below 0.1 %" if float(text) == 0 else f"{text} %"


def _ended(statuses: Sequence[str]) -> str:
    """Return how many trials finished, and how the others ended."""
    others = [status for status in statuses if status != TrialStatus.finished]
    words = f" ({', '.join(dict.fromkeys(others))})" if others else ""
    return f"{len(statuses) - len(others)} of {len(statuses)} finished{words}" if statuses else "not run"
