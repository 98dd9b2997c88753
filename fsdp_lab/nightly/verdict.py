"""The comparison of a night with its baseline, and the verdict."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fsdp_lab.config import UserError
from fsdp_lab.metrics import SPEED
from fsdp_lab.nightly.gate import DISTURBED, LOSS, NOT_JUDGED, Finding, Result, compare, judged_metrics, speeds, table
from fsdp_lab.nightly.nights import FAILED, GOOD, LEFT, REGRESSION, Night, changes, last_good
from fsdp_lab.nightly.study import Study
from fsdp_lab.redact import redact
from fsdp_lab.report.data import Setting, SweepData
from fsdp_lab.terminal import Column, FittingTable
from fsdp_lab.wording import count

_MOST_EARLIER = 10  # nights by which noise is judged


def baseline_of(study: Study, nights: Sequence[Night]) -> Night | None:
    """Return the night to compare with: the named one, or the last good one; None without any.

    Raises:
        UserError: there is no such night, or it is of another study.
    """
    named = study.nightly.baseline
    if named is None:
        baseline = last_good(nights)
    else:
        baseline = next((night for night in nights if night.id == named), None)
        if baseline is None or not baseline.results:
            known = ", ".join(night.id for night in nights[-5:] if night.results) or "none yet"
            raise UserError(
                f"nightly.baseline={named} is not a night of {study.where} with results; the last ones: {known}."
            )
    if baseline is not None and (others := differences(study, baseline)):
        raise UserError(
            f"the baseline, night {baseline.id}, is of another study: {'; '.join(others[:5])}. Restore the study, "
            f"set {study.elsewhere} for this one, or move the old nights away."
        )
    return baseline


def differences(study: Study, night: Night) -> list[str]:
    """Return how the study differs from that of a night, such as `training.epochs was 3 and is 2`; no passwords."""
    here, there = study.settings, night.study
    # a key that one of them does not have is of other code, but for an axis: that one varied nothing
    keys = [k for k in sorted(here.keys() | there.keys()) if (k in here and k in there) or k.startswith("axis ")]
    return [
        redact(f"{k} was {_typed(there.get(k, 'one value'))} and is {_typed(here.get(k, 'one value'))}")
        for k in keys
        if there.get(k) != here.get(k)
    ]


def _typed(value: Any) -> str:
    return "null" if value is None else str(value)


def judge(
    study: Study,
    night: Night,
    nights: Sequence[Night],
    baseline: Night | None,
    sweep: SweepData,
    now: Callable[[], float],
) -> Night:
    """Return the night with its results, its findings and its verdict.

    Args:
        study: of the night.
        night: that has run.
        nights: all of them.
        baseline: to compare with; None: the verdict is good.
        sweep: of the night.
        now: returns the time.
    """
    sweep = dataclasses.replace(sweep, others_cpu=study.nightly.others_cpu)
    results = results_of(sweep)
    named = study.nightly.baseline is not None
    findings: list[Finding] = []
    speeds_of: list[str] = []
    if baseline is not None:
        before = reference(nights, baseline, night, named)
        if not night.busy:
            lenders = _lenders(nights, baseline, night, named).items()
            speeds_of = sorted({n.id for (setting, key), n in lenders if n.results[setting].values[key]})
        findings = compare(
            results if not night.busy else without_speed(results),
            before,
            [n.results if _same_speed(n, night) else without_speed(n.results) for n in nights if n.is_good][
                -_MOST_EARLIER:
            ],
            study.nightly.tolerance,
            study.nightly.significance,
            _why_no_speed(night, named, sweep, results),
        )
    return dataclasses.replace(
        night,
        ended=now(),
        results=results,
        baseline=baseline.id if baseline else None,
        speed_baseline=" and ".join(speeds_of) or None,
        code="" if baseline is None else _changed(baseline, night),
        findings=[dataclasses.asdict(finding) for finding in findings],
        verdict=REGRESSION if any(finding.regression for finding in findings) else GOOD,
    )


def _changed(baseline: Night, night: Night) -> str:
    """Return what changed in code, libraries and machine since the baseline."""
    found = changes(baseline, night)
    if baseline.commit == night.commit and (not night.commit or "+" in night.commit):
        found.insert(0, "uncommitted changes in both nights, which may differ" if night.commit else "commits not known")
    return ", ".join(found) or "nothing"


def _why_no_speed(night: Night, named: bool, sweep: SweepData, results: Mapping[str, Result]) -> str:
    if night.busy:
        return f"other processes used {night.others:.0%} of the cores"
    if not any(result.values.get(key) for result in results.values() for key in speeds()):
        return DISTURBED if any(sweep.shared(trial) for trial in sweep.trials) else "none was measured"
    if named:
        return "the night of nightly.baseline ran on another machine, or while other processes used this one"
    return "no good night on this machine has measured it yet without disturbance"


def results_of(sweep: SweepData) -> dict[str, Result]:
    """Return the results of a sweep's settings. A setting has no speed if other processes disturbed all its trials."""
    return {setting.name: _result_of(sweep, setting) for setting in sweep.settings}


def _result_of(sweep: SweepData, setting: Setting) -> Result:
    calm = Setting(setting.values, [trial for trial in setting.trials if not sweep.shared(trial)])
    values = {}
    for judged in judged_metrics():
        measured = setting.of(key := sweep.loss_key if judged.key == LOSS else judged.metric.key)
        if judged.metric.is_speed and measured:
            measured = calm.of(key)
            if not measured:
                continue
        values[judged.key] = measured
    return Result([trial.status for trial in setting.trials], values)


def without_speed(results: Mapping[str, Result]) -> dict[str, Result]:
    """Return results without speeds, as of a night in which other processes used the machine."""
    return {
        setting: Result(result.statuses, {key: v for key, v in result.values.items() if key not in speeds()})
        for setting, result in results.items()
    }


def reference(nights: Sequence[Night], baseline: Night, night: Night, named: bool = False) -> dict[str, Result]:
    """Return the results to compare a night with.

    They are the baseline's. A setting without a reliable speed there (other processes used the machine, or it was
    another one) gets that of the last good night that has one.

    Args:
        nights: all of them.
        baseline: to compare with.
        night: to judge.
        named: the baseline was chosen by hand, so no other night replaces it.
    """
    results = without_speed(baseline.results)
    for (setting, key), lender in _lenders(nights, baseline, night, named).items():
        results[setting].values[key] = lender.results[setting].values[key]
    return results


def _lenders(nights: Sequence[Night], baseline: Night, night: Night, named: bool) -> dict[tuple[str, str], Night]:
    """Return setting and key -> the night whose speed a night is compared with, if there is one. See `reference`."""
    others = [] if named else [n for n in reversed(nights) if n.is_good]
    usable = [n for n in [baseline, *others] if _same_speed(n, night)]
    lenders = {}
    for setting in baseline.results:
        for key in speeds():
            lender = next((n for n in usable if setting in n.results and _decides(n.results[setting], key)), None)
            if lender is not None:
                lenders[setting, key] = lender
    return lenders


def _decides(result: Result, key: str) -> bool:
    """Return whether a speed was measured, or is known not to be measured any more.

    Not so if all trials were disturbed or failed.
    """
    return bool(result.values.get(key)) or (key in result.values and result.share > 0)


def _same_speed(one: Night, other: Night) -> bool:
    """Whether the speeds of `one` can be held against those of `other`."""
    return one.machine == other.machine and not one.busy


def gate_words(night: Night) -> str:
    """Return the verdict in words; the first line is the title."""
    if night.verdict == FAILED:
        tried = count(night.attempts, "attempt")
        return f"Night {night.id}: failed\n\nIts sweep did not end, or no trial finished: {tried}.\n"
    if night.verdict == LEFT:
        return f"Night {night.id}: left\n\nIt was interrupted, and was not resumed that night.\n"
    taken = f"Accepted by {night.accepted['by']}: {night.accepted['reason']}\n\n" if night.accepted else ""
    if night.baseline is None:
        short = [f"`{name}`: {r.finished}" for name, r in night.results.items() if r.share < 1]
        also = f"\nNot every trial finished: {'; '.join(short)}.\n" if short else ""
        first = "The first good night: from now on it is the baseline."
        first += f" Its speeds do not count: others used {night.others:.0%} of the cores." if night.busy else ""
        return f"Night {night.id}: {night.verdict}\n\n{taken}{first}\n{also}"
    code = f"Changed in code, libraries and machine: {night.code}.\n\n" if night.code else ""
    speeds_of = night.speed_baseline
    speed = f" (speed against {speeds_of})" if speeds_of not in (None, night.baseline) else ""
    return f"Night {night.id} against {night.baseline}{speed}: {_outcome(_findings(night))}\n\n{code}{taken}"


def _outcome(findings: Sequence[Finding]) -> str:
    """Return whether something got worse, and what was not judged."""
    bad = sum(finding.regression for finding in findings)
    outcome = f"{bad} regressions" if bad > 1 else "a regression" if bad else "nothing got worse"
    metrics = {judged.key: judged for judged in judged_metrics()}
    speed = metrics.pop(SPEED).label
    notes = [finding.note for finding in findings if finding.metric == speed]
    if not notes or not all(note.startswith(NOT_JUDGED) for note in notes):
        return outcome
    *seen, last = [
        judged.word for judged in metrics.values() if any(finding.metric == judged.label for finding in findings)
    ] or ["what finished"]
    which = " or ".join([", ".join(seen), last] if seen else [last])
    return f"{outcome if bad else f'no regression in {which}'}; speed was {notes[0]}"


def _findings(night: Night) -> list[Finding]:
    return [Finding(**finding) for finding in night.findings]


def gate_text(night: Night) -> str:
    """Return the verdict and the table, as Markdown."""
    return f"# {gate_words(night)}" + (table(_findings(night)) if night.is_compared else "")


def gate_table(night: Night) -> FittingTable:
    """Return the table for a terminal, regressions first. A setting is named in its first row."""
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
