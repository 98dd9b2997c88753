"""One night: run the study's sweep, compare it with the last good night, and leave word of it everywhere."""

from __future__ import annotations

import ctypes
import dataclasses
import fcntl
import getpass
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from fsdp_lab.config import UserError
from fsdp_lab.config.schema import NightlyConfig, TrackingConfig
from fsdp_lab.nightly.gate import FORECAST_ERROR, LOSS, Finding, Result, compare, table
from fsdp_lab.nightly.nights import (
    ACCEPTED,
    FAILED,
    GOOD,
    LEFT,
    REGRESSION,
    Night,
    last_good,
    night_id,
    read_nights,
    write_night,
)
from fsdp_lab.nightly.notify import notify
from fsdp_lab.nightly.others import Others
from fsdp_lab.nightly.page import write_page
from fsdp_lab.report.data import MEMORY, SPEED, Sweep
from fsdp_lab.report.write import write_text
from fsdp_lab.tracking import TrackingError, annotate, find_sweep_run
from fsdp_lab.tracking.tags import machine_tags

NOTHING_FINISHED, BAD_INPUT, REGRESSED = 1, 2, 3
_MOST_ATTEMPTS = 3  # of a sweep in one night that keeps being killed
_END_LIMIT_S = 60.0  # of a sweep that was told to end
_LOCK_LIMIT_S = 120.0  # of what a killed night left, to end
_NO_RESULT = ("waiting", "starting", "running", "interrupted")
_MOST_EARLIER = 10  # nights by which noise is judged


@dataclass(frozen=True)
class Study:
    """What runs every night.

    Attributes:
        folder: its own, below `nightly.folder`.
        arguments: of its sweep, all axes named, the repeats first: so that they lie as far apart in time as they can.
        settings: what all its trials share.
        shares_cores: it computes on this machine's cores, so that what others do there is felt.
    """

    name: str
    folder: Path
    nightly: NightlyConfig
    tracking: TrackingConfig
    arguments: list[str]
    settings: dict[str, Any]
    shares_cores: bool


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
            raise UserError(f"nightly.baseline={named} is no night of {study.folder} with results; the last: {known}.")
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
            raise UserError(
                f"the baseline, night {found.id}, is of another study: {'; '.join(others[:5])}. Put that back, give "
                "this study a folder of its own with nightly.folder=..., or move the old nights away."
            )
    return found


def _typed(value: Any) -> str:
    return "null" if value is None else str(value)


def run_night(study: Study, due: float, say: Callable[[str], None], now: Callable[[], float] = time.time) -> int:
    """Run a night to its end, or go on with the one of the same time that was interrupted.

    Args:
        due: when it was to be, seconds since 1970.

    Returns:
        0: good; 1: nothing finished; 2: the sweep was refused; 3: regression.

    Raises:
        UserError: the baseline cannot be compared with, or the night waits for something that is to be mended.
        KeyboardInterrupt: the next start within the same night goes on with it.
    """
    nights = read_nights(study.folder)
    baseline = baseline_of(study, nights)
    night = _begin(study, nights, due, now, say)
    folder = study.folder / night.id
    sweep, sweep_id, status = None, "", 0
    while night.attempts < _MOST_ATTEMPTS:
        if night.attempts:
            say(f"night {night.id} goes on: attempt {night.attempts + 1} of {_MOST_ATTEMPTS}")
        night = _keep(study, night, attempts=night.attempts + 1)
        others = Others()
        try:
            with others:
                status = _run_sweep(study, folder / "sweep", say)
        finally:  # of a night in several parts, the worst
            night = _keep(study, night, others=max(night.others, round(others.share, 4)))
        sweep, sweep_id = _results_of(folder / "sweep")
        if status == BAD_INPUT or (sweep is not None and not any(t.status in _NO_RESULT for t in sweep.trials)):
            break
        say(f"the night's sweep ended by itself, with status {status} and trials without a result")
        sweep = None
    if status == BAD_INPUT or sweep is None or not any(trial.status == "finished" for trial in sweep.trials):
        night = dataclasses.replace(night, verdict=FAILED, ended=now())
    else:
        busy = study.shares_cores and night.others > study.nightly.others_cpu
        if busy:
            say(
                f"others had {night.others:.0%} of this machine's cores, more than nightly.others_cpu="
                f"{study.nightly.others_cpu:g}: speed is not judged tonight"
            )
        night = _judge(study, dataclasses.replace(night, busy=busy), nights, baseline, sweep, now)
    night = dataclasses.replace(night, run_id=_run_of(study, sweep_id, say))
    # all that leaves word of it first: a kill before the verdict is written makes the next start say it again
    _tell(study, night, say)
    write_night(study.folder, night)
    try:
        write_page(study.folder / "nights.html", study.name, read_nights(study.folder))
        prune(study)
    except (OSError, UserError) as error:
        say(f"the page of the nights is not up to date: {error}")
    say(f"night {night.id}: {night.verdict}   page: {study.folder / 'nights.html'}")
    if night.verdict == FAILED:
        return BAD_INPUT if status == BAD_INPUT else NOTHING_FINISHED
    return REGRESSED if night.verdict == REGRESSION else 0


def _keep(study: Study, night: Night, **changed: Any) -> Night:
    night = dataclasses.replace(night, **changed)
    write_night(study.folder, night)
    return night


def _tell(study: Study, night: Night, say: Callable[[str], None]) -> None:
    """The verdict to everybody: a file, MLflow, the webhook, the terminal."""
    gate = gate_text(night)
    folder = study.folder / night.id
    write_text(folder / "gate.md", gate)
    _tag(study, night, [folder / "gate.md"], say)
    if problem := notify(study.nightly.notify, verdict_of(study, night, folder)):
        say(problem)
    say(gate)


def _begin(
    study: Study, nights: Sequence[Night], due: float, now: Callable[[], float], say: Callable[[str], None]
) -> Night:
    for night in nights:
        if not night.over and night.due == due and night.study == study.settings:
            say(f"night {night.id} was interrupted and goes on")
            return night
        if not night.over:
            say(f"night {night.id} was interrupted, and is another night or study by now: it is left as it is")
            night = dataclasses.replace(night, verdict=LEFT)
            _tell(study, night, say)
            write_night(study.folder, night)
    begun = now()
    night = Night(night_id(begun), due, begun, study=study.settings, **_origin(study))
    write_night(study.folder, night)
    say(f"night {night.id} begins")
    return night


def _origin(study: Study) -> dict[str, Any]:
    """With what it is run, as it is now."""
    tags = machine_tags()
    return {
        "machine": f"{platform.node()}, {study.settings['device']}, {study.settings['workers']} workers",
        "commit": tags.get("mlflow.source.git.commit", "") + ("+changes" if tags.get("git.dirty") == "true" else ""),
        "libraries": {key.removeprefix("version."): tags[key] for key in tags if key.startswith("version.")},
    }


def _run_sweep(study: Study, folder: Path, say: Callable[[str], None]) -> int:
    """Its exit status: 0, 1 (a trial failed), 2 (refused), or anything else when it was ended.

    Raises:
        UserError: what was begun cannot go on until something is mended; nothing of it is lost.
    """
    if (folder / "sweep.json").exists():
        _wait_until_free(folder, say)
        if not changed_since(folder):
            status = _run(["resume=" + _quoted(folder)])
            if status == BAD_INPUT:
                raise UserError(f"the night's sweep in {folder} cannot go on: mend what it says, then start again.")
            return status
        aside = next(p for n in count(1) if not (p := folder.with_name(f"sweep.{n}")).exists())
        say(f"the code is other than when the night began: what it has goes to {aside.name}, and it starts anew")
        folder.rename(aside)
        night = next(night for night in read_nights(study.folder) if night.id == folder.parent.name)
        write_night(study.folder, dataclasses.replace(night, **_origin(study)))
    return _run(["-m", *study.arguments, "hydra.sweep.dir=" + _quoted(folder)])


def changed_since(folder: Path) -> list[str]:
    """What code and libraries a sweep was begun with that are others now."""
    from fsdp_lab.sweep.record import changes_of_code, read_record

    return changes_of_code(read_record(folder, "sweep"))


def _run(arguments: Sequence[str]) -> int:
    # in a session of its own: Ctrl-C comes to us, and we hand it on; it ends with us, however we end
    process = subprocess.Popen(
        [sys.executable, "-m", "fsdp_lab", *arguments], start_new_session=True, preexec_fn=_end_with_parent
    )
    try:
        return process.wait()
    except BaseException:
        process.send_signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(_END_LIMIT_S)
        if process.poll() is None:
            process.kill()
            process.wait()
        raise


def _end_with_parent() -> None:
    with suppress(OSError, AttributeError):  # Linux alone has it
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)


def _wait_until_free(folder: Path, say: Callable[[str], None]) -> None:
    """A sweep whose night was killed takes a moment to end.

    Raises:
        UserError: it does not.
    """
    handle = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
    until, told = time.monotonic() + _LOCK_LIMIT_S, False
    try:
        while time.monotonic() < until:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if not told:
                    say(f"waits up to {_LOCK_LIMIT_S:g} s for the sweep in {folder} to end")
                told = True
                time.sleep(0.5)
    finally:
        os.close(handle)
    raise UserError(f"the sweep in {folder} still runs; end it first.")


def _quoted(folder: Path) -> str:
    text = str(folder.absolute()).replace("\\", "\\\\").replace("'", "\\'")
    return f"'{text}'"


def _results_of(folder: Path) -> tuple[Sweep | None, str]:
    """The sweep and its id; None where it fell over before its first trial."""
    from fsdp_lab.sweep.report import sweep_in

    try:
        sweep, record, _ = sweep_in(folder)
    except UserError:
        return None, ""
    return sweep, record.id


def _judge(
    study: Study, night: Night, nights: Sequence[Night], baseline: Night | None, sweep: Sweep, now: Callable[[], float]
) -> Night:
    results = results_of(sweep)
    findings: list[Finding] = []
    if baseline is not None:
        findings = compare(
            results if not night.busy else without_speed(results),
            reference(nights, baseline, night, named=study.nightly.baseline is not None),
            [n.results if _same_speed(n, night) else without_speed(n.results) for n in nights if n.is_good][
                -_MOST_EARLIER:
            ],
            study.nightly.tolerance,
            study.nightly.significance,
            f"others had {night.others:.0%} of the cores"
            if night.busy
            else "no good night yet on this machine in which others left it alone",
        )
    return dataclasses.replace(
        night,
        ended=now(),
        results=results,
        baseline=baseline.id if baseline else None,
        findings=[dataclasses.asdict(finding) for finding in findings],
        verdict=REGRESSION if any(finding.regression for finding in findings) else GOOD,
    )


def results_of(sweep: Sweep) -> dict[str, Result]:
    """What a sweep's settings are compared by."""
    keys = {MEMORY: MEMORY, SPEED: SPEED, LOSS: sweep.loss_key, FORECAST_ERROR: FORECAST_ERROR}
    return {
        setting.name: Result(
            [trial.status for trial in setting.trials], {name: setting.of(key) for name, key in keys.items()}
        )
        for setting in sweep.settings
    }


def without_speed(results: Mapping[str, Result]) -> dict[str, Result]:
    """What was found while others had the machine."""
    return {
        setting: Result(found.statuses, {key: v for key, v in found.values.items() if key != SPEED})
        for setting, found in results.items()
    }


def reference(nights: Sequence[Night], baseline: Night, night: Night, named: bool = False) -> dict[str, Result]:
    """What a night is compared with: the baseline, and where its speeds say nothing (others had the machine, or it was
    another one) those of the last good night in which they do.

    Args:
        named: the baseline was chosen by hand, so that no other night stands in for it.
    """
    if _same_speed(baseline, night):
        return dict(baseline.results)
    found = without_speed(baseline.results)
    usable = [] if named else [n for n in nights if n.is_good and _same_speed(n, night)]
    if not usable:
        return found
    speeds = {setting: result.values.get(SPEED, []) for setting, result in usable[-1].results.items()}
    return {
        setting: Result(result.statuses, {**result.values, SPEED: speeds.get(setting, [])})
        for setting, result in found.items()
    }


def _same_speed(one: Night, other: Night) -> bool:
    """Whether the speeds of `one` can be held against those of `other`."""
    return one.machine == other.machine and not one.busy


def gate_text(night: Night) -> str:
    """The verdict and the table, as Markdown."""
    findings = [Finding(**finding) for finding in night.findings]
    bad = [f for f in findings if f.regression]
    if night.verdict == FAILED:
        return (
            f"# Night {night.id}: failed\n\nIts sweep came to no end, or nothing finished: {night.attempts} starts.\n"
        )
    if night.verdict == LEFT:
        return f"# Night {night.id}: left\n\nIt was interrupted, and nothing went on with it that night.\n"
    taken = f"Accepted by {night.accepted['by']}: {night.accepted['reason']}\n\n" if night.accepted else ""
    if night.baseline is None:
        short = [f"`{name}`: {r.finished}" for name, r in night.results.items() if r.share < 1]
        also = f"\nNot all of it finished: {'; '.join(short)}.\n" if short else ""
        first = "The first good night: from now on it is the baseline."
        return f"# Night {night.id}: {night.verdict}\n\n{taken}{first}\n{also}"
    said = f"{len(bad)} regressions" if len(bad) > 1 else "a regression" if bad else "nothing got worse"
    return f"# Night {night.id} against {night.baseline}: {said}\n\n{taken}{table(findings)}"


def verdict_of(study: Study, night: Night, folder: Path) -> dict[str, Any]:
    """What the webhook gets."""
    return {
        "study": study.name,
        "night": night.id,
        "verdict": night.verdict,
        "baseline": night.baseline,
        "regressions": [finding for finding in night.findings if finding["regression"]],
        "commit": night.commit,
        "machine": night.machine,
        "run_id": night.run_id,
        "folder": str(folder),
    }


def _run_of(study: Study, sweep_id: str, say: Callable[[str], None]) -> str:
    try:
        return find_sweep_run(study.tracking, sweep_id) if sweep_id else ""
    except TrackingError as error:
        say(f"MLflow does not know of this night: {error}")
        return ""


def _tag(study: Study, night: Night, files: Sequence[Path], say: Callable[[str], None]) -> None:
    if not night.run_id:
        return
    moved = "; ".join(f"{f['setting']}: {f['metric']} {f['change']}" for f in night.findings if f["regression"])
    tags = {"nightly.study": study.name, "nightly.night": night.id, "nightly.verdict": night.verdict}
    tags |= {"nightly.baseline": night.baseline} if night.baseline else {}
    tags |= {"nightly.regressions": moved[:5000]} if moved else {}
    tags |= {f"nightly.accepted_{key}": value for key, value in (night.accepted or {}).items()}
    try:
        annotate(study.tracking, night.run_id, tags, files)
    except TrackingError as error:
        say(f"MLflow has not got the verdict: {error}")


def accept(study: Study, reason: str, say: Callable[[str], None], now: Callable[[], float] = time.time) -> None:
    """Make the last night the baseline, whatever the gate said of it.

    Raises:
        UserError: there is no night with results, or no reason.
    """
    nights = [night for night in read_nights(study.folder) if night.over and night.verdict != LEFT]
    if not reason.strip():
        raise UserError('--accept takes a reason, which is recorded: --accept "the new model is larger".')
    if not nights or not nights[-1].results:
        which = f"night {nights[-1].id} has no results" if nights else f"no night is over in {study.folder}"
        raise UserError(f"--accept: {which}, so there is nothing to accept; run one with --once.")
    try:
        who = getpass.getuser()
    except (KeyError, OSError):
        who = "unknown"
    accepted = {"reason": reason.strip(), "by": who, "at": night_id(now())}
    night = dataclasses.replace(nights[-1], verdict=ACCEPTED, accepted=accepted)
    _tag(study, night, [], say)
    write_text(study.folder / night.id / "gate.md", gate_text(night))
    write_night(study.folder, night)
    write_page(study.folder / "nights.html", study.name, read_nights(study.folder))
    say(f"night {night.id} is the baseline from now on: {accepted['reason']}")


def prune(study: Study) -> None:
    """Take away the checkpoints and models of old nights: all but the newest `nightly.keep`. Metrics stay."""
    over = [night for night in read_nights(study.folder) if night.over]
    for night in over[: -study.nightly.keep]:
        for trial in (study.folder / night.id / "sweep").glob("*/"):
            shutil.rmtree(trial / "checkpoints", ignore_errors=True)
            (trial / "model.pt").unlink(missing_ok=True)
