"""The files in a trial's folder, and how they are read: the interface between its processes and the driver.

| file | who writes it | what |
| --- | --- | --- |
| `facts.json` | the trial's own process | device, data digest, notes, as rank 0 reports them when training starts |
| `places.json` | the trial's own process | the node of each rank, by Ray's name and its address |
| `progress.json` | the trial's own process | the current phase or step, and when it started, updated once a second |
| `metrics.jsonl` | the trial's own process | a line of metrics an epoch, as rank 0 reports them |
| `error.txt` | the trial's own process | the traceback and the end of the log, if the reason does not say it all |
| `failures/rank<r>.json` | the trial's own process | reason, traceback; `failures.<n>/`: those of an earlier attempt |
| `outcome.json` | the trial's own process, or the driver | its result: how it ended, and why |
| `forecast.json` | the driver | its forecast |
| `logs/rank<r>.log` | every rank | its output; its stacks, if a phase or a step lasted unusually long |
| `memory_*_rank<r>.*` | every rank | the profile of a step: peaks, with `timeline` also a page and a snapshot |
| `trace_rank0.json.gz` | rank 0 | with `profile_trace=true` three steps, for Perfetto or chrome://tracing |
| `.alive` | every rank | locked while a process of the trial lives |
"""

from __future__ import annotations

import errno
import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from math import isfinite
from pathlib import Path
from typing import Any

from fsdp_lab.files import read_json, report_damaged, sync, write_json, write_text
from fsdp_lab.locks import InUse, exclusive, share_until_exit
from fsdp_lab.metrics import FORECAST_WORDS
from fsdp_lab.record.reasons import Code, Reason
from fsdp_lab.status import TrialStatus

_ENDS_AGAIN = "the trial counts as unfinished; a resume finishes it from its last checkpoint"


@dataclass(frozen=True)
class Outcome:
    """How a trial ended.

    Attributes:
        status: its last one.
        reason: why it did not finish; None: it did, or the scheduler stopped it.
        seconds: from its begin to its end; None: not known.
        epochs: the last epoch in `metrics.jsonl` at the end; None: not known.
    """

    status: TrialStatus
    reason: Reason | None = None
    seconds: float | None = None
    epochs: int | None = None


def append_line(path: Path, text: str) -> None:
    """Append a line. A partial line that a kill left becomes a line of its own, which readers skip."""
    with path.open("ab+") as lines:
        if lines.tell() > 0:
            lines.seek(-1, os.SEEK_END)
            text = text if lines.read(1) == b"\n" else f"\n{text}"
        lines.write(f"{text}\n".encode())


def read_object(path: Path, what_now: str = "it is treated as missing", **required: Any) -> dict[str, Any] | None:
    """Return the object in a file; None for no file, or, with a warning, for a damaged one.

    Args:
        path: of the JSON file.
        what_now: the consequence of damage, for the warning.
        **required: the keys that it must have, with the types of their values, as `isinstance` takes them.
    """
    content = read_json(path, what_now)
    if content is None:
        return None
    if not isinstance(content, dict):
        report_damaged(path, "it is not a JSON object", what_now)
        return None
    if wrong := [key for key, types in required.items() if not isinstance(content.get(key), types)]:
        report_damaged(path, f"it has no valid `{wrong[0]}`", what_now)
        return None
    return content


def write_forecast(folder: Path, figures: dict[str, float], words: dict[str, str]) -> None:
    """Write the forecast of a trial, if there is one; see `read_forecast`."""
    if figures:
        with suppress(OSError):  # a full disk ends a trial where it loses results, not here
            write_json(folder / "forecast.json", {**figures, **words}, parents=False)


def read_forecast(folder: Path) -> tuple[dict[str, float], dict[str, str]]:
    """Return the forecast of a trial: its figures, and its `FORECAST_WORDS`; both empty without a forecast."""
    path = folder / "forecast.json"
    figures = read_object(path) or {}
    words = {key: figures.pop(key) for key in FORECAST_WORDS if isinstance(figures.get(key), str)}
    if not _are_numbers(figures):
        report_damaged(path, "it holds values that are not numbers")
        return {}, {}
    return figures, words


def _are_numbers(content: dict[str, Any]) -> bool:
    return all(isinstance(value, (int, float)) for value in content.values())


def read_metrics(folder: Path) -> Iterator[dict[str, float]]:
    """Yield each whole line of `metrics.jsonl`. An epoch that was reported twice comes once, with its last values."""
    path = folder / "metrics.jsonl"
    lines = path.read_text(errors="replace").splitlines() if path.exists() else []
    epochs = {int(metrics["epoch"]): metrics for metrics in map(metrics_in, lines) if metrics is not None}
    yield from (epochs[epoch] for epoch in sorted(epochs))


def metrics_in(line: str | bytes) -> dict[str, float] | None:
    """Return the metrics in a line of `metrics.jsonl`; None for one that a kill cut short."""
    try:
        metrics = json.loads(line)
    except ValueError:
        return None
    known = isinstance(metrics, dict) and "epoch" in metrics and _are_numbers(metrics)
    return metrics if known and isfinite(metrics["epoch"]) else None


def write_outcome(folder: Path, outcome: Outcome) -> None:
    """Write how a trial ended, with the last epoch that it has reported."""
    epochs = [int(metrics["epoch"]) for metrics in read_metrics(folder)]
    if epochs:  # before the outcome, which says that they are there
        sync(folder / "metrics.jsonl")
    content = asdict(replace(outcome, epochs=max(epochs, default=0)))
    write_json(folder / "outcome.json", content, durable=True, parents=False)


def read_outcome(folder: Path) -> Outcome | None:
    """Return how a trial ended; None if it has not, or, with a warning, if that cannot be read."""
    path = folder / "outcome.json"
    content = read_object(path, _ENDS_AGAIN, status=str)
    if content is None:
        return None
    status = str(content["status"])
    if status not in TrialStatus.__members__ or not TrialStatus(status).is_result:
        report_damaged(path, f"status={status} is not a result", _ENDS_AGAIN)
        return None
    others: dict[str, Any] = {"seconds": (int, float), "epochs": int}
    known = {key: content[key] for key, types in others.items() if isinstance(content.get(key), types)}
    return Outcome(TrialStatus(status), Reason.read(content.get("reason")), **known)


def read_whole_outcome(folder: Path) -> Outcome | None:
    """Return how a trial ended; None also for one that finished and lacks epochs in `metrics.jsonl`, or lacks all.

    Its last checkpoint has them, and a resume from it writes them again.
    """
    outcome = read_outcome(folder)
    if outcome is None:
        return None
    reported = {int(metrics["epoch"]) for metrics in read_metrics(folder)}
    last = max(outcome.epochs or 0, *reported, 0)
    missing = [str(epoch) for epoch in range(1, 1 + last) if epoch not in reported]
    if not missing:
        return outcome
    what = f"it lacks epoch {', '.join(missing)} of a trial that had {last}"
    if outcome.status is TrialStatus.finished or not reported:
        report_damaged(folder / "metrics.jsonl", what, "a resume restores it from the last checkpoint")
        return None
    report_damaged(folder / "metrics.jsonl", what, "this trial's figures are those of its other epochs")
    return outcome


class TrialWriter:
    """Writes what rank 0 reports into the trial's folder: the facts, and each epoch once, in order.

    A trial that resumes from a checkpoint reports earlier epochs again, and a kill may have cut a line.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._file = folder, folder / "metrics.jsonl"
        self._reported: dict[int, dict[str, float]] | None = None
        self._is_whole = True

    def facts(self, facts: dict[str, Any]) -> None:
        """Write `facts.json`."""
        write_json(self._folder / "facts.json", facts, parents=False)

    def epoch(self, metrics: dict[str, float]) -> None:
        """Append the metrics of an epoch, or replace its line.

        Raises:
            FileNotFoundError: the folder was removed. Ray may have made it again: it holds no `facts.json` then.
        """
        (self._folder / "facts.json").stat()
        if self._reported is None:
            self._reported = {int(metrics["epoch"]): metrics for metrics in read_metrics(self._folder)}
            lines = self._file.read_bytes().splitlines() if self._file.exists() else []
            self._is_whole = len(lines) == len(self._reported)
        epoch = int(metrics["epoch"])
        is_new, is_known = epoch > max(self._reported, default=0), self._reported.get(epoch) == metrics
        self._reported[epoch] = metrics
        if is_new and self._is_whole:
            append_line(self._file, json.dumps(metrics))
        elif not (is_known and self._is_whole):
            lines_now = (json.dumps(self._reported[known]) for known in sorted(self._reported))
            write_text(self._file, "".join(f"{line}\n" for line in lines_now), parents=False)
            self._is_whole = True


class Progress:
    """What a rank is doing: its current phase or step, and when that started.

    Attributes:
        content: what `progress.json` holds, see `read_progress`; replaced, never changed, as another thread reads it.
    """

    def __init__(self) -> None:
        self.content: dict[str, float | str] = {}

    def phase(self, name: str) -> None:
        """Record the beginning of work other than a step."""
        self.content = {**self.content, "phase": name, "time": time.time()}

    def step(self, step: int) -> None:
        """Record the beginning of an optimizer step, counted from 1."""
        before = {key: value for key, value in self.content.items() if key != "phase"}
        self.content = {**before, "step": step, "time": time.time()}

    def reported(self) -> None:
        """Record that an epoch is reported."""
        now = time.time()
        self.content = {**self.content, "reported": now, "time": now}


def write_progress(folder: Path, content: dict[str, Any]) -> None:
    """Write `progress.json`."""
    with suppress(OSError):  # a full disk ends a trial where it loses results, not here
        write_json(folder / "progress.json", content, parents=False)


@dataclass(frozen=True)
class TrialProgress:
    """What a trial is doing, as its rank 0 reports; None is what is not known yet.

    Attributes:
        phase: work other than a step; None: it is in a step.
        step: the optimizer step, from 1.
        time: when the phase or the step began, in seconds since 1970.
        stuck: which rank others wait for, and where it is, while something lasts unusually long.
    """

    phase: str | None = None
    step: int | None = None
    time: float | None = None
    stuck: dict[str, Any] | None = None


def read_progress(folder: Path) -> TrialProgress:
    """Return the progress of a trial."""
    content = read_object(folder / "progress.json") or {}
    types: dict[str, Any] = {"phase": str, "step": int, "time": (int, float), "stuck": dict}
    known = {key: content[key] for key, type_ in types.items() if isinstance(content.get(key), type_)}
    if wrong := [key for key in types if key in content and key not in known]:
        report_damaged(folder / "progress.json", f"it has no valid `{wrong[0]}`")
    return TrialProgress(**known)


def write_places(folder: Path, nodes: Sequence[Mapping[str, str]]) -> None:
    """Write `places.json`.

    Args:
        folder: the trial's.
        nodes: that of each rank: its `node`, which is Ray's name, and its `address`.
    """
    content = {"nodes": [node["node"] for node in nodes], "addresses": [node["address"] for node in nodes]}
    write_json(folder / "places.json", content, parents=False)


def read_places(folder: Path) -> list[str]:
    """Return the node of each rank, by Ray's name; empty: not known."""
    content = read_object(folder / "places.json", nodes=list)
    return content["nodes"] if content else []


def write_error(folder: Path, text: str) -> None:
    """Write `error.txt`."""
    with suppress(OSError):  # the driver looks at the disk when it finds no outcome
        write_text(folder / "error.txt", text, parents=False)


def hold_alive(folder: Path) -> None:
    """Show other processes that this one works in the folder, until it ends."""
    share_until_exit(folder / ".alive")


def wait_until_alone(folder: Path, limit_s: float) -> None:
    """Wait until no process works in the folder: those of an earlier run may end late.

    Raises:
        TimeoutError: one does so for longer than the limit.
    """
    try:
        with suppress(FileNotFoundError), exclusive(folder / ".alive", limit_s, parents=False):
            return
    except InUse as error:
        raise TimeoutError(f"another run's processes still work in {folder} after {limit_s:.0f} s; end them") from error


def exported(folder: Path) -> Path | None:
    """Return the exported model of a trial: a file, or a folder in its own format; None if there is none yet."""
    return next((path for path in (folder / "model.pt", folder / "model") if path.exists()), None)


def read_any_facts(folder: Path) -> dict[str, Any] | None:
    """Return the facts of the last start that wrote some; None if none did."""
    return read_facts(folder) or read_object(folder / "facts.before.json")


def read_facts(folder: Path) -> dict[str, Any] | None:
    """Return the facts of the last start; None if it did not write any."""
    return read_object(folder / "facts.json")


def why_unwritten(folder: Path) -> Reason:
    """Return why a trial left no outcome.

    Its folder is gone or cannot be written, the disk is full, or its process was killed.
    """
    if not folder.exists():
        return Reason.of(Code.folder_gone, folder=str(folder))
    probe = folder / f".probe.{os.getpid()}"
    try:
        probe.write_bytes(b"\0" * 4096)
        probe.unlink()
    except OSError as error:
        with suppress(OSError):
            probe.unlink()
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return Reason.of(Code.disk_full, folder=str(folder))
        return Reason.of(Code.unwritable, folder=str(folder), error=error.strerror)
    return Reason.of(Code.no_outcome)
