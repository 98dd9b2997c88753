"""One night: run the study's sweep, compare it with the nights before, keep its document, deliver the verdict.

| path below `nightly.folder`/<study> | what |
| --- | --- |
| `<night>.json` | the night: its trials, its verdict, and what it was compared with |
| `<night>/sweep/` | its sweep, like any other |
| `<night>/gate.md` | the verdict and the table of changes |
| `nights.html` | the last thirty nights |
| `.lock` | locked while a night runs here |
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fsdp_lab.config import ConfigError, NightlyConfig, UserError, from_dict
from fsdp_lab.config.serialize import value_text
from fsdp_lab.config.source_code import code_digest, user_digest
from fsdp_lab.config.status import ExitCode, TrialStatus
from fsdp_lab.config.wording import count
from fsdp_lab.config.words import quoted
from fsdp_lab.machine.hardware import cpu_name, gpus
from fsdp_lab.nightly.gate import STATUS, Night, Verdict, changes, judge, judged_columns, since_accepted
from fsdp_lab.nightly.texts import WEBHOOK, markdown, nights_page, notify, regressions_line, row, say, terminal_table
from fsdp_lab.report.terminal import open_console
from fsdp_lab.storage.files import write_text
from fsdp_lab.tracking import annotate, find_sweep_run
from fsdp_lab.tracking.tags import machine_tags

if TYPE_CHECKING:
    import pandas as pd

_STATUS = {Verdict.regression: 3, Verdict.failed: ExitCode.failed}
_DOCUMENTS = "[0-9][0-9][0-9][0-9]-??-??T??-??-??Z.json"
_LIBC = ctypes.CDLL(None)  # loaded here: not allowed between fork and exec
_END_LIMIT_S = 60.0  # for a sweep to end after SIGTERM, which takes some seconds


@dataclass(frozen=True)
class Study:
    """The sweep that runs every night.

    Attributes:
        folder: its own, below `nightly.folder`.
        config: of its first setting.
        arguments: of its sweep. They name all axes, the repeats first, so that repeats are as far apart in time as
            possible.
        settings: those that all its trials share.
    """

    name: str
    folder: Path
    config: NightlyConfig
    arguments: list[str]
    settings: dict[str, Any]

    def machine(self, measured_on: Iterable[str] = ()) -> str:
        """Return text with the devices of trials, or else of this machine, and the workers.

        Equal text means equal speeds. A host's name is not part of it: in a cluster it changes every night.
        """
        devices = set(measured_on) - {"", "cpu"} or {gpu.name for gpu in gpus()} or {cpu_name()}
        return f"{' and '.join(sorted(devices))}, {count(self.settings['workers'], 'worker')}"

    def differences(self, night: Night) -> list[str]:
        """Return the differences from a night's study, such as `training.epochs was 3 and is 2`."""
        here, there = self.settings, night.study
        # a key that only one of them has comes from other code, unless it is an axis
        keys = [k for k in sorted(here.keys() | there.keys()) if (k in here and k in there) or k.startswith("axis ")]
        return [
            f"{k} was {value_text(there.get(k, 'one value'))} and is {value_text(here.get(k, 'one value'))}"
            for k in keys
            if there.get(k) != here.get(k)
        ]


def log(text: str) -> None:
    print(text, flush=True)


def night_id(moment: float) -> str:
    """Return the name of a night that starts at this time, in UTC."""
    return datetime.fromtimestamp(moment, UTC).strftime("%Y-%m-%dT%H-%M-%SZ")


def read_nights(folder: Path) -> list[Night]:
    """Return all nights of a study that started, in the order in which they ran, whatever their clocks.

    Raises:
        UserError: a document cannot be read.
    """
    return sorted(map(_night_in, folder.glob(_DOCUMENTS)), key=lambda night: night.number)


def _night_in(path: Path) -> Night:
    try:
        night = from_dict(Night, json.loads(path.read_bytes()))
        if path.stem != night.id:  # which becomes the name of a folder
            raise ValueError(f"it is the document of night {night.id!r}")
    except (ValueError, TypeError, AttributeError) as error:
        raise UserError(
            f"{path} cannot be read ({error}); fix it, or move it away to compare with an older night."
        ) from None
    return night


def write_night(folder: Path, night: Night) -> None:
    """Write the document of a night into its study's folder, durably."""
    write_text(folder / f"{night.id}.json", json.dumps(asdict(night), indent=1), durable=True)


def run_night(study: Study, now: Callable[[], float] = time.time) -> int:
    """Run a night to its end.

    Returns:
        0: good; 1: nothing finished; 2: the sweep was refused; 3: regression.

    Raises:
        UserError: the baseline is of another study.
        KeyboardInterrupt: the night stays incomplete.
    """
    nights = read_nights(study.folder)
    past = good_nights(study, nights)
    log_dates(nights)
    if nights and nights[-1].verdict is Verdict.incomplete:
        log(f"night {nights[-1].id} was interrupted, and stays incomplete")
    moment, number = now(), nights[-1].number + 1 if nights else 1
    night = Night(night_id(moment), moment, study=study.settings, origin=_origin(study), number=number)
    write_night(study.folder, night)
    _write_page(study, [*nights, night])  # incomplete, which it stays if it is interrupted
    log(f"night {night.id} begins")
    return _end(study, [*nights, night], past, run_sweep(study.arguments, _sweep_of(study, night)))


def judge_night(study: Study) -> int:
    """Judge the last night, if its sweep has ended but its verdict could not be written. Returns as `run_night`.

    Raises:
        UserError: there is no such night, or it or its baseline is of another study.
    """
    nights = read_nights(study.folder)
    if not nights or nights[-1].verdict is not Verdict.incomplete:
        which = f"night {nights[-1].id} is {nights[-1].verdict}" if nights else f"{study.folder} has no night"
        raise UserError(f"--judge: {which}, so there is nothing to judge; run one with --once.")
    night = nights[-1]
    past = good_nights(study, nights[:-1])
    if others := study.differences(night):
        raise UserError(f"--judge: night {night.id} is of another study: {'; '.join(others[:5])}. Restore that study.")
    statuses = _statuses(_frame_of(_sweep_of(study, night)))
    if not statuses or not all(each.is_result for each in statuses):
        raise UserError(
            f"--judge: night {night.id} has trials without a result, so it stays incomplete; run another with --once."
        )
    return _end(study, nights, past, ExitCode.finished)


def _sweep_of(study: Study, night: Night) -> Path:
    return study.folder / night.id / "sweep"


def _statuses(frame: pd.DataFrame) -> list[TrialStatus]:
    return [TrialStatus(each) for each in frame[STATUS]]


def _end(study: Study, nights: list[Night], past: Sequence[Night], status: int) -> int:
    """Judge the last night after its sweep has ended with a status."""
    night = nights.pop()
    folder = _sweep_of(study, night)
    frame = _frame_of(folder)
    ended = _statuses(frame)
    complete = bool(ended) and all(each.is_result for each in ended)
    if not complete:
        log(f"the night's sweep ended with status {status}, and trials without a result")
    night = _with_run(study, night, folder)
    if status == ExitCode.refused or not complete or TrialStatus.finished not in ended:
        night = replace(night, verdict=Verdict.failed)
    else:
        night = _judged(study, night, past, frame)
    night = _deliver(study, night)
    nights.append(night)
    _write_page(study, nights)
    _prune(study, nights)
    log(f"night {night.id}: {night.verdict}   page: {study.folder / 'nights.html'}")
    return ExitCode.refused if status == ExitCode.refused else _STATUS.get(night.verdict, 0)


def run_sweep(arguments: Sequence[str], folder: Path) -> int:
    """Run the sweep in another process, which ends with this one, and return its exit status."""
    from fsdp_lab.sweep.names import OF_A_NIGHT

    # A new session: this process gets Ctrl-C and ends the sweep. The sweep ends with this process, however that ends.
    process = subprocess.Popen(
        [sys.executable, "-m", "fsdp_lab", "-m", *arguments, "hydra.sweep.dir=" + quoted(folder.absolute())],
        start_new_session=True, preexec_fn=_end_with_parent, env={**os.environ, OF_A_NIGHT: "true"},
    )  # fmt: skip
    try:
        return process.wait()
    except BaseException:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(_END_LIMIT_S)
        process.kill()
        process.wait()
        raise


def _end_with_parent() -> None:
    with suppress(OSError, AttributeError):  # only Linux has it
        _LIBC.prctl(1, signal.SIGTERM)


def _frame_of(folder: Path) -> pd.DataFrame:
    """Return the sweep in a folder, one row per trial with the name of its setting; empty without a sweep.

    A trial whose model differs from that of a plain loop of the user's code counts as failed.
    """
    import pandas as pd

    from fsdp_lab.report.answer import settings_of
    from fsdp_lab.sweep.record import record_of, sweep_in

    try:
        sweep = record_of(sweep_in(folder))
    except UserError:
        return pd.DataFrame(columns=[STATUS, "slow_rank"])
    settings, frame = settings_of(sweep), sweep.frame()
    names = {number: setting.name for number, setting in settings.of_trial.items()}
    frame.loc[[*settings.plain.different], STATUS] = TrialStatus.failed  # its model differs from a plain loop's
    return frame.assign(setting=frame.index.map(names), slow_rank=frame.index.map(sweep.slow_ranks()))


def good_nights(study: Study, nights: Sequence[Night]) -> list[Night]:
    """Check that the next night can start, and return the nights to compare it with, the baseline last.

    Raises:
        UserError: the baseline is of another study, or the webhook in the environment is no address. The message does
            not show the webhook, because it may be a secret.
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


def accept(study: Study, reason: str) -> None:
    """Make the last night the baseline, whatever its verdict.

    Raises:
        UserError: there is no night with results.
    """
    nights = read_nights(study.folder)
    ended = [night for night in nights if night.verdict is not Verdict.incomplete]
    log_dates(ended)
    if not ended or not ended[-1].trials:
        which = f"night {ended[-1].id} has no results" if ended else f"no night has ended in {study.folder}"
        raise UserError(f"--accept: {which}, so there is nothing to accept; run one with --once.")
    night = ended[-1]
    if others := study.differences(night):
        log(f"note: night {night.id} is of another study than this command's: {'; '.join(others[:5])}.")
    for text in map(row, night.regressions):
        log(f"accepts: {text.setting}: {text.metric} {text.before} -> {text.tonight} {text.change}".rstrip())
    accepted = {"reason": reason.strip(), "by": machine_tags()["mlflow.user"], "at": night_id(time.time())}
    night = replace(night, verdict=Verdict.accepted, accepted=accepted)
    _tag(study, night)
    write_night(study.folder, night)
    _write_page(study, [night if each.id == night.id else each for each in nights])
    log(f"night {night.id} is the baseline from now on: {accepted['reason']}")


def log_dates(nights: Sequence[Night]) -> None:
    """Log which nights are dated in the future."""
    if ahead := ", ".join(night.id for night in nights if night.begun > time.time()):
        log(f"note: dated in the future, by a clock that was wrong: night {ahead}; the order is that of the runs")


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
        slow=list(frame["slow_rank"].dropna()),
        verdict=Verdict.regression if any(finding.is_regression for finding in findings) else Verdict.good,
    )


def _origin(study: Study) -> dict[str, str]:
    """Return the current machine, code and libraries."""
    tags = machine_tags()
    changed = " with uncommitted changes" if tags.get("git.dirty") == "true" else ""
    return {
        "machine": study.machine(),
        "commit": tags.get("mlflow.source.git.commit", "unknown")[:10] + changed,
        "code": code_digest([]),
        **{key.replace("version.", "library "): tags[key] for key in tags if key.startswith("version.")},
    }


def _with_run(study: Study, night: Night, folder: Path) -> Night:
    """Return the night with the digests of the user's code in its sweep, and with the sweep's run in MLflow."""
    from fsdp_lab.record.sweep_json import read_start

    try:
        record = read_start(folder, "sweep")
    except UserError:  # the sweep was refused
        return night
    packages = record.user_packages
    # if the code changed during the sweep, this night must differ from the nights before and after
    is_same = record.code == code_digest(packages)
    user_code = {f"user code {name}": user_digest(name) if is_same else record.code for name in packages}
    night = replace(night, origin=night.origin | user_code)
    with _logged("the run of this night was not found in MLflow"):
        night = replace(night, run_id=find_sweep_run(study.config.tracking, record.id))
    return night


def _deliver(study: Study, night: Night) -> Night:
    """Deliver the verdict, to the disk first, and return the night, with a note if the webhook failed."""
    unwritten = None
    try:
        write_night(study.folder, night)
    except OSError as error:
        unwritten = error
    with _logged("gate.md could not be written"):
        write_text(study.folder / night.id / "gate.md", markdown(night))
    _tag(study, night, [study.folder / night.id / "gate.md"])
    if problem := notify(study.name, study.folder, night):
        log(problem)
        night = replace(night, note=problem)
        with _logged("the note could not be written"):
            write_night(study.folder, night)
            unwritten = None
    log(f"{say('title', night)}\n\n{say('said', night)}")
    if night.findings:
        open_console().print(terminal_table(night))
    if unwritten is not None:
        raise UserError(
            f"night {night.id}: {night.verdict}, but {unwritten.filename} cannot be written ({unwritten.strerror}), so "
            "the night stays incomplete; free the disk of nightly.folder, then judge it with --judge."
        )
    return night


def _tag(study: Study, night: Night, files: Sequence[Path] = ()) -> None:
    """Tag the sweep's MLflow run with the verdict, and add the files."""
    if not night.run_id:
        return
    tags = {"nightly.study": study.name, "nightly.night": night.id, "nightly.verdict": str(night.verdict)}
    tags |= {"nightly.baseline": night.baseline} if night.baseline else {}
    tags |= {"nightly.regressions": regressions_line(night)[:5000]} if night.regressions else {}
    tags |= {f"nightly.accepted_{key}": value for key, value in (night.accepted or {}).items()}
    with _logged("the verdict did not reach MLflow"):
        # the verdict first: MLflow's page shows a dozen letters
        annotate(study.config.tracking, night.run_id, tags, files, name=f"{night.verdict} {night.id} {study.name}")


def _write_page(study: Study, nights: Sequence[Night]) -> None:
    with _logged("the page of the nights could not be written"):
        write_text(study.folder / "nights.html", nights_page(study.name, nights, study.config.nightly.tolerance))


def _prune(study: Study, nights: Sequence[Night]) -> None:
    """Remove the checkpoints and models of all but the newest `nightly.keep` nights; metrics stay."""
    from fsdp_lab.sweep.store.checkpoints import drop_checkpoints

    with _logged("the checkpoints of old nights could not be removed"):
        for night in nights[: -study.config.nightly.keep]:
            sweep = study.folder / night.id / "sweep"
            if sweep.exists() and not (sweep / ".pruned").exists():  # a rejected night has no sweep
                drop_checkpoints(sweep)
                write_text(sweep / ".pruned", "")


@contextmanager
def _logged(problem: str) -> Iterator[None]:
    """Log an error in a step that the verdict does not need."""
    try:
        yield
    except (OSError, UserError) as error:
        log(f"{problem}: {error}")
