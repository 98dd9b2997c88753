"""What a night is compared with, and what it comes to."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fsdp_lab.config import UserError
from fsdp_lab.metrics import SPEED
from fsdp_lab.nightly.gate import LOSS, NOT_JUDGED, Finding, Result, compare, judged_metrics, speeds, table
from fsdp_lab.nightly.nights import FAILED, GOOD, LEFT, REGRESSION, Night, last_good
from fsdp_lab.nightly.study import Study
from fsdp_lab.report.data import Sweep
from fsdp_lab.terminal import Column, FittingTable
from fsdp_lab.wording import count

_MOST_EARLIER = 10  # nights by which noise is judged


def baseline_of(study: Study, nights: Sequence[Night]) -> Night | None:
    """What a night is compared with: the one that is named, or the last good one.

    Raises:
        UserError: there is no such night, or it is of another study.
    """
    named = study.nightly.baseline
    if named is None:
        found = last_good(nights)
    else:
        found = next((night for night in nights if night.id == named), None)
        if found is None or not found.results:
            known = ", ".join(night.id for night in nights[-5:] if night.results) or "none yet"
            raise UserError(f"nightly.baseline={named} is no night of {study.where} with results; the last: {known}.")
    if found is not None:
        here, there = study.settings, found.study
        # a key that one of them does not have is of other code, but for an axis: that one varied nothing
        keys = [k for k in sorted(here.keys() | there.keys()) if (k in here and k in there) or k.startswith("axis ")]
        others = [
            f"{k}={_typed(there.get(k, 'one value'))} there, {_typed(here.get(k, 'one value'))} here"
            for k in keys
            if there.get(k) != here.get(k)
        ]
        if others:
            # nights here and in storage are read together: one of the two anew would still find the old baseline
            place = "nightly.folder=..." if study.storage is None else "cluster.storage_path=... and nightly.folder=..."
            raise UserError(
                f"the baseline, night {found.id}, is of another study: {'; '.join(others[:5])}. Put that back, give "
                f"this study a place of its own with {place}, or move the old nights away."
            )
    return found


def _typed(value: Any) -> str:
    return "null" if value is None else str(value)


def judge(
    study: Study, night: Night, nights: Sequence[Night], baseline: Night | None, sweep: Sweep, now: Callable[[], float]
) -> Night:
    results, named = results_of(sweep), study.nightly.baseline is not None
    findings: list[Finding] = []
    speeds_of = None
    if baseline is not None:
        speeds_of = None if night.busy else _with_speeds(nights, baseline, night, named)
        findings = compare(
            results if not night.busy else without_speed(results),
            reference(nights, baseline, night, named),
            [n.results if _same_speed(n, night) else without_speed(n.results) for n in nights if n.is_good][
                -_MOST_EARLIER:
            ],
            study.nightly.tolerance,
            study.nightly.significance,
            _why_no_speed(night, named),
        )
    return dataclasses.replace(
        night,
        ended=now(),
        results=results,
        baseline=baseline.id if baseline else None,
        speed_baseline=speeds_of.id if speeds_of else None,
        findings=[dataclasses.asdict(finding) for finding in findings],
        verdict=REGRESSION if any(finding.regression for finding in findings) else GOOD,
    )


def _why_no_speed(night: Night, named: bool) -> str:
    if night.busy:
        return f"others used {night.others:.0%} of the cores"
    if named:
        return "the night of nightly.baseline ran on another machine, or while others used this one"
    return "no good night yet on this machine in which others left it alone"


def results_of(sweep: Sweep) -> dict[str, Result]:
    """What a sweep's settings are compared by."""
    keys = {found.key: sweep.loss_key if found.key == LOSS else found.metric.key for found in judged_metrics()}
    return {
        setting.name: Result(
            [trial.status for trial in setting.trials], {name: setting.of(key) for name, key in keys.items()}
        )
        for setting in sweep.settings
    }


def without_speed(results: Mapping[str, Result]) -> dict[str, Result]:
    """What was found while others had the machine."""
    return {
        setting: Result(found.statuses, {key: v for key, v in found.values.items() if key not in speeds()})
        for setting, found in results.items()
    }


def reference(nights: Sequence[Night], baseline: Night, night: Night, named: bool = False) -> dict[str, Result]:
    """What a night is compared with: the baseline, and where its speeds say nothing (others had the machine, or it was
    another one) those of the last good night in which they do.

    Args:
        named: the baseline was chosen by hand, so that no other night stands in for it.
    """
    speeds_of = _with_speeds(nights, baseline, night, named)
    if speeds_of is baseline:
        return dict(baseline.results)
    found = without_speed(baseline.results)
    if speeds_of is None:
        return found
    of_another = {
        setting: {key: result.values[key] for key in speeds() if key in result.values}
        for setting, result in speeds_of.results.items()
    }
    none = {SPEED: list[float]()}
    return {
        setting: Result(result.statuses, {**result.values, **none, **of_another.get(setting, {})})
        for setting, result in found.items()
    }


def _with_speeds(nights: Sequence[Night], baseline: Night, night: Night, named: bool) -> Night | None:
    """The night whose speeds a night is compared with; None where there is none. See `reference`."""
    usable = [n for n in nights if n.is_good and not named and _same_speed(n, night)]
    return baseline if _same_speed(baseline, night) else usable[-1] if usable else None


def _same_speed(one: Night, other: Night) -> bool:
    """Whether the speeds of `one` can be held against those of `other`."""
    return one.machine == other.machine and not one.busy


def gate_words(night: Night) -> str:
    """Returns the verdict in words: its first line is the title."""
    if night.verdict == FAILED:
        tried = count(night.attempts, "attempt")
        return f"Night {night.id}: failed\n\nIts sweep came to no end, or nothing finished: {tried}.\n"
    if night.verdict == LEFT:
        return f"Night {night.id}: left\n\nIt was interrupted, and nothing went on with it that night.\n"
    taken = f"Accepted by {night.accepted['by']}: {night.accepted['reason']}\n\n" if night.accepted else ""
    if night.baseline is None:
        short = [f"`{name}`: {r.finished}" for name, r in night.results.items() if r.share < 1]
        also = f"\nNot all of it finished: {'; '.join(short)}.\n" if short else ""
        first = "The first good night: from now on it is the baseline."
        first += f" Not of speed: others used {night.others:.0%} of the cores." if night.busy else ""
        return f"Night {night.id}: {night.verdict}\n\n{taken}{first}\n{also}"
    speeds_of = night.speed_baseline
    speed = f" (speed against {speeds_of})" if speeds_of not in (None, night.baseline) else ""
    return f"Night {night.id} against {night.baseline}{speed}: {_outcome(_findings(night))}\n\n{taken}"


def _outcome(findings: Sequence[Finding]) -> str:
    """Whether something got worse, and what was not looked at."""
    bad = sum(finding.regression for finding in findings)
    said = f"{bad} regressions" if bad > 1 else "a regression" if bad else "nothing got worse"
    metrics = {judged.key: judged for judged in judged_metrics()}
    speed = metrics.pop(SPEED).label
    notes = [finding.note for finding in findings if finding.metric == speed]
    if not notes or not all(note.startswith(NOT_JUDGED) for note in notes):
        return said
    *seen, last = [
        judged.word for judged in metrics.values() if any(finding.metric == judged.label for finding in findings)
    ] or ["what finished"]
    which = " or ".join([", ".join(seen), last] if seen else [last])
    return f"{said if bad else f'no regression in {which}'}; speed was {notes[0]}"


def _findings(night: Night) -> list[Finding]:
    return [Finding(**finding) for finding in night.findings]


def gate_text(night: Night) -> str:
    """Returns the verdict and the table, as Markdown."""
    return f"# {gate_words(night)}" + (table(_findings(night)) if night.is_compared else "")


def gate_table(night: Night) -> FittingTable:
    """Returns the table for a terminal; the regressions first. A setting is named in its first row."""
    shown = sorted(_findings(night), key=lambda finding: not finding.regression)
    names = [finding.setting for finding in shown]
    settings = [name if name != before else "" for before, name in zip(["", *names], names, strict=False)]
    verdicts = [": ".join(filter(None, ["regression" if f.regression else "", f.note])) or "ok" for f in shown]
    return FittingTable(
        [
            Column("setting", settings, breaks=True, justify="left"),
            Column("metric", [f.metric for f in shown], justify="left"),
            Column("baseline", [f.baseline for f in shown]),
            Column("tonight", [f.tonight for f in shown]),
            Column("change", [f.change for f in shown], drop=1),
            Column("verdict", verdicts, breaks=True, justify="left"),
        ],
        elsewhere="gate.md",
    )
