"""One night: run the study's sweep, compare it with the nights before, and deliver the verdict."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

from fsdp_lab.config import ConfigError, UserError
from fsdp_lab.config.code import code_digest, user_digest
from fsdp_lab.config.status import ExitCode, TrialStatus
from fsdp_lab.nightly.attempt import frame_of, run_sweep
from fsdp_lab.nightly.gate import judge, judged_columns
from fsdp_lab.nightly.nights import (
    Night,
    Verdict,
    changes,
    dated_ahead,
    night_id,
    read_nights,
    since_accepted,
    write_night,
)
from fsdp_lab.nightly.page import nights_page
from fsdp_lab.nightly.read_study import Study
from fsdp_lab.nightly.texts import markdown, regressions_line, row, say, terminal_table, title
from fsdp_lab.report.terminal import open_console
from fsdp_lab.storage.files import write_text
from fsdp_lab.tracking import annotate, find_sweep_run
from fsdp_lab.tracking.tags import machine_tags

if TYPE_CHECKING:
    import pandas as pd

WEBHOOK = "FSDP_LAB_WEBHOOK"
REGRESSED = 3
_WEBHOOK_S = 10.0
_STATUS = {Verdict.regression: REGRESSED, Verdict.failed: ExitCode.failed}

Log = Callable[[str], None]


def run_night(study: Study, log: Log, now: Callable[[], float] = time.time) -> int:
    """Run a night to its end.

    Returns:
        0: good; 1: nothing finished; 2: the sweep was refused; 3: regression.

    Raises:
        UserError: the baseline is of another study.
        KeyboardInterrupt: the night stays incomplete.
    """
    nights = read_nights(study.folder)
    past = good_nights(study, nights)
    log_dates(nights, log)
    if nights and nights[-1].verdict is Verdict.incomplete:
        log(f"night {nights[-1].id} was interrupted, and stays incomplete")
        _write_page(study, nights, log)
    moment = now()
    number = max((each.number for each in nights), default=0) + 1
    night = Night(night_id(moment), moment, study=study.settings, origin=_origin(study), number=number)
    write_night(study.folder, night)
    log(f"night {night.id} begins")
    folder = study.folder / night.id / "sweep"
    status = run_sweep(study.arguments, folder)
    frame = frame_of(folder)
    if _lacks_results(frame):
        log(f"the night's sweep ended with status {status}, and trials without a result")
    night = _with_run(study, night, folder, log)
    if status == ExitCode.refused or _lacks_results(frame) or not (frame["status"] == TrialStatus.finished).any():
        night = replace(night, verdict=Verdict.failed)
    else:
        night = _judged(study, night, past, frame)
    night = _deliver(study, night, log)
    nights.append(night)
    _write_page(study, nights, log)
    _prune(study, nights, log)
    log(f"night {night.id}: {night.verdict}   page: {study.folder / 'nights.html'}")
    return ExitCode.refused if status == ExitCode.refused else _STATUS.get(night.verdict, 0)


def good_nights(study: Study, nights: Sequence[Night]) -> list[Night]:
    """Return those that the next night is compared with, the baseline last, after a check that it can start.

    Raises:
        UserError: the baseline is of another study, or the webhook in the environment is no address. No message shows
            that one, since it may be a secret.
    """
    if (address := os.environ.get(WEBHOOK)) and not re.match(r"https?://[\w.:\[\]-]+([/?]|$)", address):
        raise ConfigError(f"{WEBHOOK} is not an http or https address without a user; set another one, or unset it.")
    past = since_accepted(nights)
    if past and (others := study.differences(past[-1])):
        raise UserError(
            f"the baseline, night {past[-1].id}, is of another study: {'; '.join(others[:5])}. Restore the study, "
            "set nightly.folder=... for this one, or move the old nights away."
        )
    return past


def accept(study: Study, reason: str, log: Log) -> None:
    """Make the last night the baseline, whatever its verdict.

    Raises:
        UserError: there is no night with results.
    """
    nights = [night for night in read_nights(study.folder) if night.verdict is not Verdict.incomplete]
    log_dates(nights, log)
    if not nights or not nights[-1].trials:
        which = f"night {nights[-1].id} has no results" if nights else f"no night has ended in {study.folder}"
        raise UserError(f"--accept: {which}, so there is nothing to accept; run one with --once.")
    night = nights[-1]
    if others := study.differences(night):
        log(f"note: night {night.id} is of another study than this command's: {'; '.join(others[:5])}.")
    for text in map(row, night.regressions):
        log(f"accepts: {text.setting}: {text.metric} {text.before} -> {text.tonight} {text.change}".rstrip())
    before = f"{night.accepted['reason']}; then: " if night.accepted else ""
    accepted = {"reason": before + reason.strip(), "by": machine_tags()["mlflow.user"], "at": night_id(time.time())}
    night = replace(night, verdict=Verdict.accepted, accepted=accepted)
    _tag(study, night, log)
    write_night(study.folder, night)
    _write_page(study, read_nights(study.folder), log)
    log(f"night {night.id} is the baseline from now on: {accepted['reason']}")


def log_dates(nights: Sequence[Night], log: Log) -> None:
    """Log which nights are dated in the future."""
    if ahead := ", ".join(dated_ahead(nights)):
        log(f"note: dated in the future, by a clock that was wrong: night {ahead}; the order is that of the runs")


def _lacks_results(frame: pd.DataFrame) -> bool:
    return frame.empty or any(not TrialStatus(status).is_result for status in frame["status"])


def _judged(study: Study, night: Night, past: Sequence[Night], frame: pd.DataFrame) -> Night:
    rows, here = judged_columns(frame), study.machine(frame["device"])
    night = replace(night, origin=night.origin | {"machine": here})
    earlier = [(each.id, each.origin.get("machine") == here, each.frame) for each in past]
    findings = judge(rows, earlier, study.config.nightly.tolerance, study.config.nightly.significance)
    return replace(
        night,
        trials=rows.astype(object).where(rows.notna(), None).to_dict("records"),
        baseline=past[-1].id if past else None,
        changed=changes(past[-1], night) if past else [],
        findings=findings,
        verdict=Verdict.regression if any(finding.is_regression for finding in findings) else Verdict.good,
    )


def _origin(study: Study) -> dict[str, str]:
    """Return the machine, the code and the libraries of a night, as they are now."""
    tags = machine_tags()
    changed = " with uncommitted changes" if tags.get("git.dirty") == "true" else ""
    return {
        "machine": study.machine(),
        "commit": tags.get("mlflow.source.git.commit", "unknown")[:10] + changed,
        "code": code_digest([]),
        **{key.replace("version.", "library "): tags[key] for key in tags if key.startswith("version.")},
    }


def _with_run(study: Study, night: Night, folder: Path, log: Log) -> Night:
    """Return the night with the digests of the user's code in its sweep, and with the sweep's run in MLflow."""
    from fsdp_lab.record.sweep_json import read_start

    try:
        record = read_start(folder, "sweep")
    except UserError:  # the sweep was refused
        return night
    packages = record.user_packages
    is_same = record.code == code_digest(packages)  # as when the sweep began; else both nights around it differ
    user_code = {f"user code {name}": user_digest(name) if is_same else record.code for name in packages}
    night = replace(night, origin=night.origin | user_code)
    with _logged("the run of this night was not found in MLflow", log):
        night = replace(night, run_id=find_sweep_run(study.config.tracking, record.id))
    return night


def _deliver(study: Study, night: Night, log: Log) -> Night:
    """Deliver the verdict, first to the disk, and return the night with a note if the webhook did not get it."""
    write_text(study.folder / night.id / "gate.md", markdown(night))
    write_night(study.folder, night)
    _tag(study, night, log, [study.folder / night.id / "gate.md"])
    if problem := notify(study, night):
        log(problem)
        night = replace(night, note=problem)
        write_night(study.folder, night)
    log(f"{title(night)}\n\n{say('said', night)}")
    if night.findings:
        open_console().print(terminal_table(night))
    return night


def _tag(study: Study, night: Night, log: Log, files: Sequence[Path] = ()) -> None:
    """Tag the sweep's MLflow run with the verdict, and add the files."""
    if not night.run_id:
        return
    tags = {"nightly.study": study.name, "nightly.night": night.id, "nightly.verdict": str(night.verdict)}
    tags |= {"nightly.baseline": night.baseline} if night.baseline else {}
    tags |= {"nightly.regressions": regressions_line(night)[:5000]} if night.regressions else {}
    tags |= {f"nightly.accepted_{key}": value for key, value in (night.accepted or {}).items()}
    with _logged("the verdict did not reach MLflow", log):
        # what differs first: MLflow's page shows a dozen letters
        annotate(study.config.tracking, night.run_id, tags, files, name=f"{night.verdict} {night.id} {study.name}")


def notify(study: Study, night: Night) -> str | None:
    """POST the verdict as JSON to the address in the environment, if there is one.

    Returns:
        the problem, without the address, whose path or query may be the secret; None if there was none.
    """
    address = os.environ.get(WEBHOOK)
    if not address:
        return None
    content = {
        "study": study.name,
        "night": night.id,
        "folder": str(study.folder / night.id),
        "regressions": [asdict(finding) | {"text": " ".join(row(finding))} for finding in night.regressions],
        **{name: getattr(night, name) for name in ("verdict", "baseline", "changed", "origin", "run_id")},
    }
    request = Request(address, json.dumps(content).encode(), {"Content-Type": "application/json"})
    try:
        with urlopen(request, timeout=_WEBHOOK_S):
            return None
    except Exception as error:  # noqa: BLE001 - a night is not lost over a webhook, whatever it does
        reason = getattr(error, "code", None) or getattr(error, "reason", None) or type(error).__name__
        host = urlsplit(address).netloc
        return f"{WEBHOOK}: {host} did not accept the verdict ({reason}); gate.md and MLflow have it"


def _write_page(study: Study, nights: Sequence[Night], log: Log) -> None:
    with _logged("the page of the nights could not be written", log):
        write_text(study.folder / "nights.html", nights_page(study.name, nights, study.config.nightly.tolerance))


def _prune(study: Study, nights: Sequence[Night], log: Log) -> None:
    """Remove the checkpoints and models of all but the newest `nightly.keep` nights; metrics stay."""
    from fsdp_lab.sweep.store.checkpoints import drop_checkpoints

    with _logged("the checkpoints of old nights could not be removed", log):
        for night in nights[: -study.config.nightly.keep]:
            sweep = study.folder / night.id / "sweep"
            if sweep.exists() and not (sweep / ".pruned").exists():  # there is none of a night that was refused
                drop_checkpoints(sweep)
                write_text(sweep / ".pruned", "")


@contextmanager
def _logged(problem: str, log: Log) -> Iterator[None]:
    """Log an error in a step without which the night still has its verdict."""
    try:
        yield
    except (OSError, UserError) as error:
        log(f"{problem}: {error}")
