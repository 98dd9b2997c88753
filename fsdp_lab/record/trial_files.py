"""The files in a trial's folder, and how they are read: the interface between its processes and the driver.

| file | who writes it | what |
| --- | --- | --- |
| `facts.json` | Ray Train's controller | device, data digest, notes, as rank 0 reports them when training starts |
| `places.json` | Ray Train's controller | the node of each rank, by Ray's name and its address |
| `progress.json` | rank 0 | the current phase or step, and when it started |
| `metrics.jsonl` | Ray Train's controller | a line of metrics an epoch, as rank 0 reports them |
| `error.txt` | the trial's own process | the traceback and the end of the log, if the reason does not say it all |
| `failures/rank<r>.json` | the trial's own process | reason, traceback; `failures.<n>/`: those of an earlier attempt |
| `outcome.json` | the trial's own process, or the driver | its result: how it ended, and why |
| `forecast.json` | the driver | its forecast |
| `logs/rank<r>.log` | every rank | its output |
| `logs/stuck.rank<r>.txt` | every rank | its stacks, if a phase or a step took longer than `trial_timeout_s` |
| `memory_*_rank<r>.*` | every rank | the profile of a step: peaks, with `timeline` also a page and a snapshot |
| `trace_rank0.json.gz` | rank 0 | with `profile_trace=true` three steps, for Perfetto or chrome://tracing |
| `.alive` | every rank | locked while a process of the trial lives |
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fsdp_lab.config import UserError
from fsdp_lab.config.metrics import FORECAST_WORDS
from fsdp_lab.config.status import TrialStatus
from fsdp_lab.record.reasons import Reason
from fsdp_lab.storage.files import RESTORE, append_line, read_lines, read_object, sync, whole, write_json, write_text
from fsdp_lab.storage.locks import InUse, exclusive, share_until_exit

_OF_OUTCOME = f"{RESTORE}: a resume then ends the trial from its last checkpoint"
_OF_FORECAST = f"{RESTORE}: the trial then has no forecast"
_OF_FACTS = f"{RESTORE}: its device and data are then not known"
_OF_METRICS = f"{RESTORE} and outcome.json: a resume then ends the trial from its last checkpoint"


ENDED = "ended"  # a phase: all ranks have trained to the end


@dataclass(frozen=True)
class Outcome:
    """How a trial ended.

    Attributes:
        reason: why it did not finish; None: it did, or the scheduler stopped it.
        seconds: from its begin to its end; None: not known.
        ended: when, in seconds since 1970; None: not known.
    """

    status: TrialStatus
    reason: Reason | None = None
    seconds: float | None = None
    ended: float | None = None


def write_forecast(folder: Path, figures: dict[str, float], words: dict[str, str]) -> None:
    """Write the forecast of a trial, if there is one; see `read_forecast`."""
    if figures:
        with suppress(OSError):  # a full disk ends a trial where it loses results, not here
            write_json(folder / "forecast.json", {**figures, **words}, parents=False)


def read_forecast(folder: Path) -> tuple[dict[str, float], dict[str, str]]:
    """Return the forecast of a trial: its figures, and its `FORECAST_WORDS`; both empty without a forecast."""
    words: dict[str, Any] = dict.fromkeys(FORECAST_WORDS, str | None)
    figures = read_object(folder / "forecast.json", _OF_FORECAST, float, **words) or {}
    return figures, {key: figures.pop(key) for key in FORECAST_WORDS if key in figures}


def read_metrics(folder: Path) -> Iterator[dict[str, float]]:
    """Yield each line of `metrics.jsonl`. An epoch that was reported twice comes once, with its last values.

    Raises:
        UserError: a line cannot be read.
    """
    lines = read_lines(folder / "metrics.jsonl", _OF_METRICS, float, epoch=int)
    epochs = {metrics["epoch"]: metrics for metrics in lines}
    yield from (epochs[epoch] for epoch in sorted(epochs))


def write_outcome(folder: Path, outcome: Outcome) -> None:
    """Write how a trial ended. The first outcome stays: its own process and the driver may both have one."""
    path = folder / "outcome.json"
    if path.exists():
        return
    if (folder / "metrics.jsonl").exists():  # before the outcome, which says that its epochs are there
        sync(folder / "metrics.jsonl")
    with whole(path, durable=True, parents=False, replace=False) as making:
        making.write_text(json.dumps(asdict(outcome), indent=1), encoding="utf-8")


def read_outcome(folder: Path) -> Outcome | None:
    """Return how a trial ended; None if it has not.

    Raises:
        UserError: the file cannot be read.
    """
    path = folder / "outcome.json"
    content = read_object(path, _OF_OUTCOME, status=str, seconds=float | None, ended=float | None)
    if content is None:
        return None
    status = content["status"]
    if status not in TrialStatus.__members__ or not TrialStatus(status).is_result:
        raise UserError(f"{path} cannot be read (status={status} is not a result); {_OF_OUTCOME}.")
    reason = Reason.read(content.get("reason"))
    return Outcome(TrialStatus(status), reason, content.get("seconds"), content.get("ended"))


class TrialWriter:
    """Writes what rank 0 reports into the trial's folder: the facts, and each epoch once, in order.

    A trial that resumes from a checkpoint reports earlier epochs again.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._file = folder, folder / "metrics.jsonl"
        self._reported: dict[int, dict[str, float]] | None = None

    def receive(self, content: dict[str, Any]) -> None:
        """Write a report: `facts`, or the `metrics` of an epoch as a new line or in place of its line; or the end.

        Raises:
            FileNotFoundError: the folder was removed. Ray may have made it again: it holds no `facts.json` then.
        """
        if "facts" in content:
            write_json(self._folder / "facts.json", content["facts"], parents=False)
        elif "metrics" in content:
            self._epoch(content["metrics"])
        else:
            ProgressFile(self._folder).write(phase=ENDED)

    def _epoch(self, metrics: dict[str, float]) -> None:
        (self._folder / "facts.json").stat()
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


class ProgressFile:
    """Writes `progress.json`: in place, as every step writes it."""

    def __init__(self, folder: Path) -> None:
        self._file = (folder / "progress.json").open("w")
        self._longest = 0

    def write(self, **doing: str | int) -> None:
        """Write the `phase` or the `step` (from 1) that begins."""
        text = json.dumps({**doing, "time": time.time()})
        self._longest = max(self._longest, len(text))
        with suppress(OSError):  # a full disk ends a trial where it loses results, not here
            os.pwrite(self._file.fileno(), text.ljust(self._longest).encode(), 0)


@dataclass(frozen=True)
class TrialProgress:
    """What a trial is doing, as its rank 0 reports; None is what is not known yet.

    Attributes:
        phase: work other than a step; None: it is in a step.
        step: the optimizer step, from 1.
        time: when the phase or the step began, in seconds since 1970.
    """

    phase: str | None = None
    step: int | None = None
    time: float | None = None


def read_progress(folder: Path) -> TrialProgress:
    content: dict[str, Any] = {}
    with suppress(UserError):  # it is being written
        content = read_object(folder / "progress.json") or {}
    return TrialProgress(**{name: content[name] for name in TrialProgress.__annotations__ if name in content})


def write_places(folder: Path, nodes: Sequence[Mapping[str, str]]) -> None:
    """Write `places.json`.

    Args:
        nodes: that of each rank: its `node`, which is Ray's name, and its `address`.
    """
    content = {"nodes": [node["node"] for node in nodes], "addresses": [node["address"] for node in nodes]}
    write_json(folder / "places.json", content, parents=False)


def read_places(folder: Path) -> list[tuple[str, str]]:
    """Return the node of each rank, by Ray's name and its address; empty: not known."""
    content = read_object(folder / "places.json", nodes=list[str], addresses=list[str])
    return list(zip(content["nodes"], content["addresses"], strict=True)) if content else []


def write_error(folder: Path, text: str) -> None:
    with suppress(OSError):  # the outcome cannot be written either, and the driver logs why
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
    return read_facts(folder) or read_facts(folder, "facts.before.json")


def read_facts(folder: Path, name: str = "facts.json") -> dict[str, Any] | None:
    """Return the facts of the last start; None if it did not write any."""
    return read_object(folder / name, _OF_FACTS, notes=list[str] | None)
