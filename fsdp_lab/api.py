"""Sweeps, forecasts and reports from Python: each function takes the words of its command and returns typed results.

    from fsdp_lab.api import forecast, report, sweep

    result = sweep("sharding=ddp,per_block", "precision=fp32", "offload=none", "reshard_after_forward=always")
    print(result.sentence, result.recommended.metrics["perf/samples_per_s"])

A sweep and a forecast run in a separate process, as on the command line, so they leave nothing in yours. Importing this
module imports no library.
"""

from __future__ import annotations

import csv
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from fsdp_lab.config import ConfigError, UserError
from fsdp_lab.status import ExitCode, TrialStatus

if TYPE_CHECKING:
    from fsdp_lab.report.data import TrialRow

__all__ = ["ForecastResult", "SweepResult", "TrialResult", "UserError", "forecast", "report", "sweep"]

_END_S = 60.0  # for a command to end by itself after an interrupt
_LAST_WORDS_S = 5.0  # for the rest of its output, once it has ended


@dataclass(frozen=True)
class TrialResult:
    """A trial of a sweep."""

    number: int
    """Its place in the sweep, from 0."""
    setting: Mapping[str, str]
    """The value of each axis, as it is typed."""
    status: TrialStatus
    """How it ended, such as `finished`, `oom` or `failed`."""
    metrics: Mapping[str, float]
    """Metric -> its last value, in the units of the reference: bytes, seconds, samples/s."""
    epochs: Sequence[Mapping[str, float]]
    """The metrics of each epoch, in order."""
    error: str | None
    """Why it failed; None if it did not fail."""


@dataclass(frozen=True)
class SweepResult:
    """A sweep, and the answer of its report."""

    folder: Path
    """Absolute; it has `report.html`, `results.csv` and a folder for each trial."""
    axes: Sequence[str]
    """The keys that differ between trials."""
    trials: Sequence[TrialResult]
    """In their order."""
    recommended: TrialResult | None
    """A trial of the recommended setting; None if no setting qualifies."""
    sentence: str
    """The recommendation with its reason, or why there is none."""
    comparison: Sequence[str]
    """Costs and gains of each other setting, a line each."""
    notes: Sequence[str]
    """Notes about what the figures do not show."""
    command: str
    """The command that trains the recommended setting; "" without one."""


@dataclass(frozen=True)
class ForecastResult:
    """The predicted memory and speed of one worker of a configuration."""

    setting: Mapping[str, str]
    """The value of each axis, as it is typed, without `cluster.num_workers`."""
    num_workers: int
    """The number of workers of a trial."""
    peak_bytes: int | None
    """The highest memory of all tensors, in bytes; None without a forecast."""
    parts: Mapping[str, int]
    """The parts of the peak, in bytes: params, optimizer, grads, gathered, activations, rest."""
    needed_bytes: int | None
    """The bytes that a device needs: the peak, the allocator's cache and libraries; None without a forecast."""
    fits: str
    """`true`, `tight`, `upper bound` (only that exceeds the capacity) or `false`; "" if no capacity is known."""
    step_s: float | None
    """Seconds of an optimizer step; None if no speed is predicted."""
    samples_per_s: float | None
    """Of all workers together; None as for `step_s`."""
    tokens_per_s: float | None
    """Of all workers together; None as for `step_s`, and without tokens."""
    bound: str
    """The resource that limits the step most; "" without a speed."""
    error: str
    """Why there is no forecast; "" if there is one."""


def sweep(*words: str, folder: Path | str | None = None, quiet: bool = False) -> SweepResult:
    """Run `python -m fsdp_lab -m <words>` and return its results.

    Args:
        *words: as on the command line: `"sharding=ddp,per_block"`.
        folder: where it writes; None: a new folder below `outputs/multirun`.
        quiet: do not print what the command prints.

    Raises:
        UserError: invalid words, with the message of the command; or no trial has finished.
        KeyboardInterrupt: it was interrupted, and can be resumed: `python -m fsdp_lab resume=last`.
    """
    chosen = Path(folder) if folder is not None else _new_folder("outputs/multirun")
    _run("fsdp_lab", ["-m", *words, f"hydra.sweep.dir={chosen}"], quiet)
    return report(chosen)


def forecast(*words: str, folder: Path | str | None = None, quiet: bool = False) -> list[ForecastResult]:
    """Run `python -m fsdp_lab.forecast -m <words>` and return what it predicts, in the recommended order.

    Args:
        *words: as for `sweep`; the configurations are those of the sweep with these words.
        folder: where its pages go; None: a new folder below `outputs/forecast`.
        quiet: do not print what the command prints.

    Raises:
        UserError: invalid words, with the message of the command.
        KeyboardInterrupt: it was interrupted.
    """
    chosen = Path(folder) if folder is not None else _new_folder("outputs/forecast")
    _run("fsdp_lab.forecast", ["-m", *words, f"forecast.folder={chosen}"], quiet)
    with (chosen / "forecast.csv").open(newline="") as rows:
        return [_forecast_of(row) for row in csv.DictReader(rows)]


def report(which: Path | str = "last", *, trust: bool = False) -> SweepResult:
    """Read a sweep and return the answer of its report. Writes nothing.

    Args:
        which: the sweep's folder, an address in object storage, the id of its parent run, or `last`.
        trust: read a folder that is another user's.

    Raises:
        UserError: there is no such sweep, or none of its trials has finished.
    """
    from fsdp_lab.config.sweep import TrackingConfig
    from fsdp_lab.report.answer import answer, plainest
    from fsdp_lab.sweep.store.trust import find_trusted
    from fsdp_lab.sweep.sweep_data import require_results, sweep_in

    folder, _ = find_trusted(str(which), "sweep", TrackingConfig(), trust)
    read, _, _ = sweep_in(folder)
    require_results(read, str(which))
    report = answer(read)
    trials = {trial.number: _trial_of(trial) for trial in read.trials}
    return SweepResult(
        folder,
        read.axes,
        list(trials.values()),
        trials[plainest(report.setting).number] if report.setting else None,
        report.head + report.sentence,
        [line.replace("`", "") for line in report.lines],
        [note.replace("`", "") for note in report.notes],
        report.command,
    )


def _trial_of(trial: TrialRow) -> TrialResult:
    return TrialResult(trial.number, trial.setting, trial.status, trial.figures, list(trial.epochs), trial.error)


def _forecast_of(row: Mapping[str, str]) -> ForecastResult:
    """Return a row of `forecast.csv`, whose first columns are the axes."""
    from fsdp_lab.forecast.table import COLUMNS

    columns = list(row)
    axes = columns[: columns.index("device")]
    return ForecastResult(
        {axis: row[axis] for axis in axes if axis != "cluster.num_workers"},
        int(row["cluster.num_workers"]),
        _whole(row["peak_bytes"]),
        {part: sum(int(row[f"{name}_bytes"] or 0) for name in names) for part, names in COLUMNS.items()},
        _whole(row["needed_bytes"]),
        row["fits"],
        _number(row["step_s"]),
        _number(row["samples_per_s_of_all"]),
        _number(row["tokens_per_s_of_all"]),
        row["bound"],
        row["no_forecast"],
    )


def _whole(text: str) -> int | None:
    return int(text) if text else None


def _number(text: str) -> float | None:
    return float(text) if text else None


def _new_folder(below: str) -> Path:
    return Path(below, f"{time.strftime('%Y-%m-%d/%H-%M-%S')}-{uuid.uuid4().hex[:4]}")


def _run(module: str, words: Sequence[str], quiet: bool) -> None:
    """Run a command to its end, and print its output where Python prints: in a notebook, below the cell.

    Raises:
        UserError: it refused its words.
        KeyboardInterrupt: it, or this process, was interrupted.
    """
    printed: list[str] = []
    command = [sys.executable, "-m", module, *words]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    reader = threading.Thread(target=_pass_on, args=(process, printed, quiet), daemon=True)
    reader.start()
    try:
        code = process.wait()
    except KeyboardInterrupt:
        process.send_signal(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            process.wait(_END_S)
        process.kill()
        raise
    reader.join(_LAST_WORDS_S)
    if code == ExitCode.interrupted:
        raise KeyboardInterrupt
    if code not in (ExitCode.finished, ExitCode.failed):
        refusals = [line for line in printed if line.startswith(f"{module}: ")]
        message = refusals[-1].removeprefix(f"{module}: ") if refusals else "\n".join(printed[-20:])
        raise ConfigError(message.strip() or f"{module} ended with {code}")


def _pass_on(process: subprocess.Popen[str], printed: list[str], quiet: bool) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        printed.append(line.rstrip("\n"))
        if not quiet:
            print(line, end="", flush=True)
