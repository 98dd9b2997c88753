"""Sweeps, forecasts and reports from Python: each function takes the overrides of its command and returns its record.

    from fsdp_lab.api import forecast, report, sweep

    result = sweep("sharding=ddp,per_block", {"precision": "fp32", "offload": "none", "optimizer.lr": [1e-3, 1e-2]})
    print(result.recommendation.sentence)
    result.frame()

A sweep runs in its own process, which starts and stops Ray. A forecast runs in this process, and leaves nothing behind
in a notebook. Importing this module imports neither PyTorch, Ray nor MLflow.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fsdp_lab.config import ConfigError, UserError
from fsdp_lab.config.serialize import value_text
from fsdp_lab.config.status import ExitCode
from fsdp_lab.config.words import quoted
from fsdp_lab.record.sweep import SweepRecord

if TYPE_CHECKING:
    from torch import nn

    from fsdp_lab.forecast.answer import ForecastResult
    from fsdp_lab.report.answer import Answer

_END_S = 60.0  # in which a command may end after an interrupt, before it is killed

__all__ = ["UserError", "forecast", "load_exported", "report", "sweep"]


@dataclass(frozen=True, repr=False)
class SweepResult(SweepRecord):
    """The record of a sweep, with its recommendation. As text it is the last lines that the command prints."""

    @cached_property
    def recommendation(self) -> Answer:
        from fsdp_lab.report.answer import answer

        return answer(self)

    def plot(self) -> Any:
        """Return the report's main chart, speed against peak memory, as a Plotly figure; None if no trial has both."""
        from fsdp_lab.report.plots import main_chart

        main = main_chart(self, self.recommendation)
        return main.figure if main else None

    def __repr__(self) -> str:
        from fsdp_lab.report.answer import plain_text

        return "\n".join(plain_text(self.recommendation))


def sweep(*overrides: Any, folder: Path | str | None = None, quiet: bool = False) -> SweepResult:
    """Run a sweep as `python -m fsdp_lab -m <overrides>` does, and return its record.

    Args:
        *overrides: strings as on the command line, lists of them, or dictionaries: key -> value, or a list of values.
        folder: where the sweep writes; None: a new folder below `outputs/multirun`.
        quiet: do not print what the command prints.

    Raises:
        UserError: the command line is rejected, or no trial has finished.
        RuntimeError: the sweep crashed or was killed. The message has the end of its output.
        KeyboardInterrupt: it was interrupted, and can be resumed: `python -m fsdp_lab resume=last`.
    """
    chosen = Path(folder) if folder is not None else _new_folder("outputs/multirun")
    words = _words(overrides)
    if "dry_run=true" in words:
        raise ConfigError("dry_run=true runs no trial, so there is no record to return; leave it out.")
    _run("fsdp_lab", ["-m", *words, f"hydra.sweep.dir={quoted(chosen)}"], quiet)
    return report(chosen)


def forecast(*overrides: Any, folder: Path | str | None = None, quiet: bool = False) -> ForecastResult:
    """Forecast what `python -m fsdp_lab.forecast -m <overrides>` does, and return the forecasts with their answer.

    Args:
        *overrides: as for `sweep`; the configurations are those of the sweep with these overrides.
        folder: where its pages go; None: a new folder below `outputs/forecast`.
        quiet: do not print what the command prints.

    Raises:
        UserError: the overrides are rejected, or no forecast can be made.
        KeyboardInterrupt: it was interrupted. The folder has the forecasts that were made.
    """
    from fsdp_lab.commands.forecast import forecast_grid
    from fsdp_lab.commands.forecast_cells import hydra_as_it_was, plan_forecasts
    from fsdp_lab.commands.messages import explain
    from fsdp_lab.report.terminal import open_console

    chosen = Path(folder) if folder is not None else _new_folder("outputs/forecast")
    console = open_console()
    console.quiet = quiet
    try:
        with hydra_as_it_was():
            plan, swept = plan_forecasts([*_words(overrides), f"forecast.folder={quoted(chosen)}"], multirun=True)
        result = forecast_grid(plan, swept, console)
    except Exception as error:
        if isinstance(error, UserError) or (message := explain(error, "forecast.folder")) is None:
            raise
        raise ConfigError(message) from error
    if result.missing:
        raise KeyboardInterrupt
    if not result.answers:
        raise UserError("; ".join(result.reasons))
    return result


def report(which: Path | str = "last", *, trust: bool = False) -> SweepResult:
    """Read the record of a sweep. Writes nothing.

    Args:
        which: the sweep's folder, or `last`.
        trust: also read a folder that belongs to another user.

    Raises:
        UserError: there is no such sweep, or none of its trials has finished.
    """
    from fsdp_lab.sweep.record import record_of, require_results, sweep_in
    from fsdp_lab.sweep.store.find import find_trusted

    folder, _ = find_trusted(str(which), "sweep", trust)
    record = record_of(sweep_in(folder))
    require_results(record, str(which))
    return SweepResult(**vars(record))


def load_exported(path: Path | str) -> nn.Module:
    """Build the model of an exported `model.pt`, and load its weights: in eval mode, on the CPU.

    The file's `model._target_` is imported. It is called if it is a class of modules, or a `ModelSource`.

    Raises:
        UserError: no trial exported this file, or its `model._target_` is not called.
    """
    from fsdp_lab.training.export import load_exported

    return load_exported(Path(path))


def _words(overrides: Any) -> list[str]:
    if isinstance(overrides, str):
        return [overrides]
    if isinstance(overrides, Mapping):
        return [f"{key}={_value(key, value)}" for key, value in overrides.items()]
    if isinstance(overrides, (list, tuple)):
        return [word for one in overrides for word in _words(one)]
    raise ConfigError(f"{overrides!r} is no override; give strings, lists or dictionaries: {{'sharding': 'root'}}.")


def _value(key: Any, value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return ",".join(_value(key, each) for each in value)
    if isinstance(key, str) and (value is None or isinstance(value, str | Real | Enum | Path)):
        return value_text(value)
    raise ConfigError(
        f"{{{key!r}: {value!r}}} is no override; a key is a string, a value a string, a number or a list."
    )


def _run(module: str, words: list[str], quiet: bool) -> None:
    """Run a command to its end. Print its output where Python prints: in a notebook, below the cell."""
    printed: list[str] = []
    command = [sys.executable, "-m", module, *words]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    ) as process:
        try:
            _pass_on(process, printed, quiet)
        except KeyboardInterrupt:
            process.send_signal(signal.SIGINT)
            limit = threading.Timer(_END_S, process.kill)
            limit.start()
            _pass_on(process, printed, quiet)  # how to resume
            limit.cancel()
            raise
    if process.returncode == ExitCode.interrupted:
        raise KeyboardInterrupt
    if process.returncode in (ExitCode.finished, ExitCode.failed):
        return
    refusals = [line.removeprefix(f"{module}: ") for line in printed if line.startswith(f"{module}: ")]
    if process.returncode == ExitCode.refused and refusals:
        raise ConfigError(refusals[-1].strip())
    raise RuntimeError("\n".join([f"{module} ended with {process.returncode}:", *printed[-20:]]))


def _pass_on(process: subprocess.Popen[str], printed: list[str], quiet: bool) -> None:
    for line in process.stdout or ():
        printed.append(line.rstrip("\n"))
        if not quiet:
            print(line, end="", flush=True)


def _new_folder(below: str) -> Path:
    return Path(below, f"{time.strftime('%Y-%m-%d/%H-%M-%S')}-{uuid.uuid4().hex[:4]}")
