"""One night: run the study's sweep, compare it with the last good night, and leave word of it everywhere."""

from __future__ import annotations

import dataclasses
import getpass
import platform
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any
from uuid import uuid4

from fsdp_lab.config import UserError
from fsdp_lab.cpu_contention import Others
from fsdp_lab.files import write_text
from fsdp_lab.nightly.attempt import results_in, run_sweep, set_aside_if_changed
from fsdp_lab.nightly.nights import (
    ACCEPTED,
    FAILED,
    LEFT,
    REGRESSION,
    Night,
    night_id,
)
from fsdp_lab.nightly.page import write_page
from fsdp_lab.nightly.publish import publish, tag
from fsdp_lab.nightly.shared import mark_pruned, put_page, read_all, send_missing, write
from fsdp_lab.nightly.study import Study
from fsdp_lab.nightly.verdict import baseline_of, differences, gate_text, judge
from fsdp_lab.record.paths import sweep_address
from fsdp_lab.report.data import SweepData
from fsdp_lab.status import ExitCode, TrialStatus
from fsdp_lab.tracking import TrackingError, find_sweep_run
from fsdp_lab.tracking.tags import machine_tags

NOTHING_FINISHED, REGRESSED = 1, 3
_MOST_ATTEMPTS = 3  # of a sweep in one night that keeps being killed


def run_night(study: Study, due: float, log: Callable[[str], None], now: Callable[[], float] = time.time) -> int:
    """Run a night to its end, or resume the interrupted one of the same time.

    Args:
        study: to run.
        due: when it was due, in seconds since 1970.
        log: logs a message.
        now: returns the time.

    Returns:
        0: good; 1: nothing finished; 2: the sweep was refused; 3: regression.

    Raises:
        UserError: the baseline cannot be used, or the user has to fix something before the night can be resumed.
        KeyboardInterrupt: the next start within the same night resumes it.
    """
    nights = read_all(study)
    baseline = baseline_of(study, nights)
    night = _begin(study, nights, due, now, log)
    night, status = _sweep(study, night, log)
    sweep, sweep_id = results_in(study.folder / night.id / "sweep")
    refused = status == ExitCode.refused
    if refused or sweep is None or _lacks_results(sweep) or TrialStatus.finished not in sweep.statuses:
        night = dataclasses.replace(night, verdict=FAILED, ended=now())
    else:
        busy = study.shares_cores and night.others > study.nightly.others_cpu
        if busy:
            log(
                f"other processes used {night.others:.0%} of this machine's cores, more than "
                f"nightly.others_cpu={study.nightly.others_cpu:g}: speed is not judged tonight"
            )
        night = judge(study, dataclasses.replace(night, busy=busy), nights, baseline, sweep, now)
    night = dataclasses.replace(night, run_id=_run_of(study, sweep_id, log), sweeps=_addresses(study, night))
    # all that leaves word of it first: a kill before the verdict is written makes the next start say it again
    publish(study, night, log)
    write(study, night, log)
    _page(study, log)
    prune(study, log)
    log(f"night {night.id}: {night.verdict}   page: {study.folder / 'nights.html'}")
    if night.verdict == FAILED:
        return ExitCode.refused if status == ExitCode.refused else NOTHING_FINISHED
    return REGRESSED if night.verdict == REGRESSION else 0


def _sweep(study: Study, night: Night, log: Callable[[str], None]) -> tuple[Night, int]:
    """Run its sweep until every trial has a result, or it was refused, or started too often; with its exit status."""
    folder, status = study.folder / night.id / "sweep", 0
    while night.attempts < _MOST_ATTEMPTS:
        if night.attempts:
            log(f"night {night.id} resumes: attempt {night.attempts + 1} of {_MOST_ATTEMPTS}")
        if set_aside_if_changed(folder, log):
            night = dataclasses.replace(night, attempts=0, others=0.0)  # nothing is measured yet
        if not (folder / "sweep.json").exists():
            night = _keep(study, night, log, **_origin(study))
        others = Others()
        try:
            with others:
                status = run_sweep(study.arguments, folder, study.resume_command)
            night = dataclasses.replace(night, attempts=night.attempts + 1)  # it ended by itself, we were not ended
        finally:  # of a night in several parts, the worst
            night = _keep(study, night, log, others=max(night.others, round(others.share, 4)))
        sweep, _ = results_in(folder)
        if status == ExitCode.refused or (sweep is not None and not _lacks_results(sweep)):
            break
        log(f"the night's sweep ended by itself, with status {status} and trials without a result")
    return night, status


def _lacks_results(sweep: SweepData) -> bool:
    return any(not status.is_result for status in sweep.statuses)


def _keep(study: Study, night: Night, log: Callable[[str], None], **changed: Any) -> Night:
    night = dataclasses.replace(night, **changed)
    write(study, night, log)
    return night


def _addresses(study: Study, night: Night) -> list[str]:
    """Return the addresses of a night's sweeps in object storage, including those with other code."""
    addresses = []
    for path in sorted((study.folder / night.id).glob("sweep*/.storage")):
        with suppress(UserError):  # a damaged name: its checkpoints stay
            addresses.append(sweep_address(study.storage, path.parent))
    return [address for address in addresses if address is not None]


def _page(study: Study, log: Callable[[str], None]) -> None:
    page = study.folder / "nights.html"
    try:
        write_page(page, study.name, read_all(study), study.nightly.tolerance)
        put_page(study, page)
    except (OSError, UserError) as error:
        log(f"the page of the nights could not be written: {error}")


def _begin(
    study: Study, nights: Sequence[Night], due: float, now: Callable[[], float], log: Callable[[str], None]
) -> Night:
    for night in nights:
        if not night.over and night.due == due and night.study == study.settings:
            log(f"night {night.id} was interrupted and resumes")
            return night
        if not night.over:
            log(
                f"night {night.id} was interrupted, but its night has passed or the study has changed: it is not "
                "resumed"
            )
            _, sweep_id = results_in(study.folder / night.id / "sweep")
            run_id, sweeps = _run_of(study, sweep_id, log), _addresses(study, night)
            night = dataclasses.replace(night, verdict=LEFT, run_id=run_id, sweeps=sweeps)
            publish(study, night, log)
            write(study, night, log)
    send_missing(study)
    begun = now()
    own = "" if study.shared is None else f"-{uuid4().hex[:4]}"  # another machine may begin in the same second
    night = Night(night_id(begun) + own, due, begun, study=study.settings, **_origin(study))
    write(study, night, log)
    log(f"night {night.id} begins")
    return night


def _origin(study: Study) -> dict[str, Any]:
    """Return the machine, the code and the libraries of a night, as they are now."""
    tags = machine_tags()
    return {
        "machine": f"{platform.node()}, {study.settings['device']}, {study.settings['workers']} workers",
        "commit": tags.get("mlflow.source.git.commit", "") + ("+changes" if tags.get("git.dirty") == "true" else ""),
        "libraries": {key.removeprefix("version."): tags[key] for key in tags if key.startswith("version.")},
    }


def _run_of(study: Study, sweep_id: str, log: Callable[[str], None]) -> str:
    try:
        return find_sweep_run(study.tracking, sweep_id) if sweep_id else ""
    except TrackingError as error:
        log(f"the run of this night was not found in MLflow: {error}")
        return ""


def accept(study: Study, reason: str, log: Callable[[str], None], now: Callable[[], float] = time.time) -> None:
    """Make the last night the baseline, whatever its verdict.

    Raises:
        UserError: there is no night with results, or no reason.
    """
    every = read_all(study)
    nights = [night for night in every if night.over and night.verdict != LEFT]
    if not reason.strip():
        raise UserError('--accept takes a reason, which is recorded: --accept "the new model is larger".')
    if not nights or not nights[-1].results:
        which = f"night {nights[-1].id} has no results" if nights else f"no night has ended in {study.where}"
        raise UserError(f"--accept: {which}, so there is nothing to accept; run one with --once.")
    try:
        who = getpass.getuser()
    except (KeyError, OSError):
        who = "unknown"
    if every[-1].begun > nights[-1].begun:
        log(f"night {every[-1].id} is unfinished: the last finished night, {nights[-1].id}, is accepted")
    if others := differences(study, nights[-1]):
        log(
            f"note: night {nights[-1].id} is of another study than this command's: {'; '.join(others[:5])}. While it "
            "is the baseline, nights of this command are refused: use the settings of that night, or set "
            f"{study.elsewhere}"
        )
    before = f"{nights[-1].accepted['reason']}; then: " if nights[-1].accepted else ""
    for finding in nights[-1].findings:
        if finding["regression"]:
            log("accepts: {setting}: {metric} {baseline} -> {tonight} {change}".format(**finding).rstrip())
    accepted = {"reason": before + reason.strip(), "by": who, "at": night_id(now())}
    night = dataclasses.replace(nights[-1], verdict=ACCEPTED, accepted=accepted)
    tag(study, night, [], log)
    write_text(study.folder / night.id / "gate.md", gate_text(night))
    write(study, night, log)
    _page(study, log)
    known = "is the baseline already; the reason is added" if before else "is the baseline from now on"
    log(f"night {night.id} {known}: {accepted['reason']}")


def prune(study: Study, log: Callable[[str], None]) -> None:
    """Remove the checkpoints and models of all but the newest `nightly.keep` nights; metrics stay.

    Each machine removes those in its own folder; those in storage are removed by the first machine that runs.
    """
    try:
        over = [night for night in read_all(study) if night.over]
    except (OSError, UserError) as error:
        log(f"the checkpoints of old nights could not be removed: {error}")
        return
    for night in over[: -study.nightly.keep]:
        try:
            _prune(study, night)
        except (OSError, UserError) as error:
            log(f"the checkpoints of night {night.id} could not be removed: {error}")


def _prune(study: Study, night: Night) -> None:
    from fsdp_lab.sweep.store.checkpoints import drop_checkpoints, drop_stored_sweep

    for sweep in (study.folder / night.id).glob("sweep*"):  # those with other code too
        drop_checkpoints(sweep, stored=not night.pruned)  # another machine's mark says nothing of this folder
    if night.pruned:
        return
    for address in night.sweeps:  # another machine's
        if address.startswith(f"{study.storage}/"):
            drop_stored_sweep(address)
    mark_pruned(study, night)
