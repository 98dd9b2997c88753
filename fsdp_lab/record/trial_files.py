"""The files in a trial's folder, and their readers: the interface between its processes and the driver.

| file | who writes it | what |
| --- | --- | --- |
| `trial.json` | the driver, its process, Ray's controller | forecast, facts, nodes, failures; how it ended, and why |
| `metrics.jsonl` | Ray Train's controller | one line of metrics per epoch, as rank 0 reports them |
| `error.txt` | its own process, or the driver | a traceback and the end of the log, if the reason does not say it all |
| `out_of_memory.txt` | the driver | which tensor asked for the memory that a GPU lacked, and settings that fit |
| `progress.json` | rank 0 | the current phase or step, and when it started |
| `logs/rank<r>.log` | every rank | its output |
| `logs/stuck.rank<r>.txt` | every rank | its stacks, if a phase or a step took longer than `trial_timeout_s` |
| `memory_*_rank<r>.*` | every rank | the profile of a step: peaks, with `timeline` also a page and a snapshot |
| `trace_rank0.json.gz` | rank 0 | with `profile_trace=true` three steps, for Perfetto or chrome://tracing |
| `.alive` | every rank | locked while a process of the trial lives |
| `.trial.lock` | who writes `trial.json` | locked while it is changed |
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from fsdp_lab.config import UserError
from fsdp_lab.record.trial import EXPLAINED
from fsdp_lab.record.trial_json import changing
from fsdp_lab.storage.files import RESTORE, append_line, read_lines, read_object, write_text
from fsdp_lab.storage.locks import InUse, exclusive

_OF_METRICS = f"{RESTORE} and trial.json: a resume then ends the trial from its last checkpoint"
ENDED = "ended"  # a phase: all ranks have finished training


def read_metrics(folder: Path) -> Iterator[dict[str, float]]:
    """Yield each line of `metrics.jsonl`. An epoch that was reported twice is yielded once, with its last values.

    Raises:
        UserError: a line cannot be read.
    """
    lines = read_lines(folder / "metrics.jsonl", _OF_METRICS, float, epoch=int)
    epochs = {metrics["epoch"]: metrics for metrics in lines}
    yield from (epochs[epoch] for epoch in sorted(epochs))


class TrialWriter:
    """Writes what rank 0 reports into the trial's folder: the facts, and each epoch once, in order.

    A trial that resumes from a checkpoint reports earlier epochs again.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._file = folder, folder / "metrics.jsonl"
        self._reported: dict[int, dict[str, float]] | None = None

    def receive(self, content: dict[str, Any]) -> None:
        """Write a report: `facts`, the `metrics` of an epoch (replacing its line if there is one), or the end.

        Raises:
            FileNotFoundError: the folder was removed. If Ray has created it again, it has no `trial.json`.
        """
        if "facts" in content:
            with changing(self._folder) as trial:
                trial.facts = content["facts"]
        elif "metrics" in content:
            self._epoch(content["metrics"])
        else:
            with (self._folder / "progress.json").open("w") as file:
                write_progress(file, phase=ENDED)

    def _epoch(self, metrics: dict[str, float]) -> None:
        (self._folder / "trial.json").stat()
        if self._reported is None:
            self._reported = {int(metrics["epoch"]): metrics for metrics in read_metrics(self._folder)}
        epoch = int(metrics["epoch"])
        is_new, is_known = epoch > max(self._reported, default=0), self._reported.get(epoch) == metrics
        self._reported[epoch] = metrics
        if is_new:
            append_line(self._file, json.dumps(metrics))
        elif not is_known:
            lines_now = (json.dumps(self._reported[known]) for known in sorted(self._reported))
            write_text(self._file, "".join(f"{line}\n" for line in lines_now), parents=False)


def write_progress(file: IO[str], **doing: str | int) -> None:
    """Write the `phase` or `step` (from 1) that starts into `progress.json`; in place, because every step does it."""
    text = json.dumps({**doing, "time": time.time()}).encode()
    with suppress(OSError):  # a full disk fails a trial where results would be lost, not here
        os.pwrite(file.fileno(), text, 0)
        os.ftruncate(file.fileno(), len(text))


def read_progress(folder: Path) -> dict[str, Any]:
    """Return the `phase` or the `step` of rank 0, and the `time` when it started, in seconds since 1970.

    It is empty before the first one, and while one is being written.
    """
    with suppress(UserError):
        return read_object(folder / "progress.json") or {}
    return {}


def write_error(folder: Path, text: str) -> None:
    with suppress(OSError):  # the outcome cannot be written either, and the driver logs why
        write_text(folder / "error.txt", text, parents=False)


def wait_until_alone(folder: Path, limit_s: float) -> None:
    """Wait until no process works in the folder: processes of an earlier run may end late.

    Raises:
        TimeoutError: one still works there after the limit.
    """
    try:
        with suppress(FileNotFoundError), exclusive(folder / ".alive", limit_s, parents=False):
            return
    except InUse as error:
        raise TimeoutError(f"another run's processes still work in {folder} after {limit_s:.0f} s; end them") from error


def exported(folder: Path) -> Path | None:
    """Return the exported model of a trial: a file, or a folder in the model's own format; None without one."""
    return next((path for path in (folder / "model.pt", folder / "model") if path.exists()), None)


@dataclass(frozen=True)
class TrialFile:
    """Files of a trial, by a pattern of their names in its folder.

    Attributes:
        pattern: a glob for the names.
        of_ranks: ranks write them, and put them into object storage if the sweep has any.
        artifact: their folder among the artifacts of the run; "": the same as in the trial's folder; None: not logged.
    """

    pattern: str
    of_ranks: bool = False
    artifact: str | None = None


# Removed in reverse order, `trial.json` first: a trial with an outcome has all other files. Checkpoints are not listed:
# a trial resumes from them or rejects them.
TRIAL_FILES = (
    TrialFile("model.pt", of_ranks=True, artifact="model"),
    TrialFile("model/*", of_ranks=True, artifact=""),
    TrialFile("logs/*rank*", of_ranks=True),
    TrialFile("memory_*_rank*", of_ranks=True, artifact="memory"),
    TrialFile("trace_rank*", of_ranks=True, artifact="trace"),
    TrialFile("metrics.jsonl", artifact=""),
    TrialFile("progress.json", of_ranks=True),
    TrialFile("error.txt", artifact=""),
    TrialFile(EXPLAINED),
    TrialFile("trial.json", artifact=""),
)


def clear_attempt(folder: Path) -> None:
    """Prepare a trial's folder for a resume: reported results stay, files about earlier processes are removed.

    Its facts become `facts_before`: a resume compares the data with them.
    """
    with changing(folder) as trial:
        trial.facts, trial.facts_before = None, trial.any_facts
        trial.outcome = None
    for name in ("progress.json", "error.txt", EXPLAINED):
        (folder / name).unlink(missing_ok=True)


def clear_left_over(folder: Path) -> None:
    """Remove the files of an earlier trial in its folder, which would be mistaken for this trial's."""
    for kind in reversed(TRIAL_FILES):
        for path in folder.glob(kind.pattern):
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)
    for inner in ("model", "logs"):
        with suppress(OSError):  # it holds other files
            (folder / inner).rmdir()
