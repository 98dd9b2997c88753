"""What a step of a configuration does, to print, to keep as a file, and to check in CI. Needs no GPU.

python -m fsdp_lab.plan model=llama3_1b sharding=per_block cluster.num_workers=64            print it
python -m fsdp_lab.plan model=llama3_1b sharding=per_block cluster.num_workers=64 lock=plan.lock.json
python -m fsdp_lab.plan check=plan.lock.json        forecast again with the file's overrides, and those that follow
python -m fsdp_lab.plan diff old.lock.json plan.lock.json                 --markdown: for a comment of a pull request

Prints the sharding units, the collectives of the second optimizer step in order, its FLOPs, and what is held at the
peak; with a device (forecast.device=h100_sxm) also the predicted time. Without one it is for GPUs. -m: every cell of a
grid, in one file. Everything else is an override of fsdp_lab, as of python -m fsdp_lab.forecast. Its own keys:
  lock         write the plan to this file; if it is there, with its overrides, and those that follow
  check        compare the plan with this file
  plan.peak, plan.sent, plan.units, plan.flops   with check, relative changes to ignore, such as 1% (0): of the peak, of
               the bytes of collectives and of units, and of FLOPs
  plan.step    the same, of the predicted time (1%)
Exits with 0: done, or nothing has changed; 1: a setting has no plan; 2: bad input; 3: what has changed is printed, the
largest first; 130: interrupted.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict
from itertools import starmap
from pathlib import Path
from typing import NoReturn

from rich.console import Console

from fsdp_lab.commands.forecast_cells import plan_forecasts
from fsdp_lab.commands.messages import explain
from fsdp_lab.config import ConfigError, UserError
from fsdp_lab.config.describe import docstring
from fsdp_lab.config.launcher import leave_launcher
from fsdp_lab.config.serialize import value_text
from fsdp_lab.config.status import ExitCode
from fsdp_lab.config.suggest import did_you_mean
from fsdp_lab.config.words import with_overrides
from fsdp_lab.forecast import plan_lock
from fsdp_lab.forecast.plan import StepPlan, answer, make_plan, request_of
from fsdp_lab.forecast.plan_lock import TOLERANCES, Lock, compared, figures, size_text
from fsdp_lab.forecast.pool import NoAnswerError, Pool
from fsdp_lab.forecast.run import LIMIT_S
from fsdp_lab.machine.hardware import num_cpus
from fsdp_lab.machine.output import outlast_reader
from fsdp_lab.report.terminal import Column, FittingTable, open_console
from fsdp_lab.sweep.names import setting
from fsdp_lab.sweep.plan import Plan

CHANGED = 3
_BYTES, _FIGURES = ("sharded", "gathered", "bytes"), ("before", "after", "change")  # columns
_UNSHOWN = ("weights", "trained")
_FEW = 4  # settings per process, which first imports PyTorch


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; the options are -m, --config-dir, --markdown and --help, all else is key=value.")


def main() -> int:
    """Do what the command line says, and return the exit status; see the module."""
    outlast_reader()
    parser = _Parser(add_help=False, allow_abbrev=False)
    for names in (("-h", "--help"), ("-m", "--multirun"), ("--markdown",)):
        parser.add_argument(*names, action="store_true")
    parser.add_argument("--config-dir", "-cd")
    parser.add_argument("words", nargs="*")
    try:
        asked = parser.parse_intermixed_args()
        if asked.help:
            print(docstring(sys.modules[__name__]))
            return ExitCode.finished
        if asked.words[:1] == ["diff"]:
            return show_difference([Path(word) for word in asked.words[1:]], asked.markdown)
        leave_launcher()
        own = {key: value for key, _, value in (word.partition("=") for word in asked.words) if key in _KEYS}
        overrides = [word for word in asked.words if word.partition("=")[0] not in own]
        if asked.config_dir is not None:
            overrides.insert(0, f"--config-dir={asked.config_dir}")
        return run(own, overrides, asked.multirun)
    except KeyboardInterrupt:
        print("fsdp_lab.plan: interrupted; nothing was written", file=sys.stderr)
        return ExitCode.interrupted
    except Exception as error:
        message = explain(error, "lock")
        if message is None:
            raise
        print(f"fsdp_lab.plan: {message}", file=sys.stderr)
        return ExitCode.refused


_KEYS = ("lock", "check", *TOLERANCES)


def run(own: Mapping[str, str], overrides: list[str], multirun: bool) -> int:
    """Make plans; print, write or check them.

    Args:
        own: the typed values of this command's keys.

    Raises:
        Exception: bad input, as `explain` knows it.
    """
    if empty := [key for key, text in own.items() if not text]:
        raise ConfigError(f"{empty[0]}= is empty; leave it out, or give a file or a share, such as 1%.")
    for key in (key for word in overrides if (key := word.partition("=")[0]).startswith("plan.")):
        meant = did_you_mean(key, [*TOLERANCES])
        raise ConfigError(f"{key} is not a key of plan. {meant}They are: {', '.join(TOLERANCES)}.")
    file, before = own.get("lock"), plan_lock.read_lock(Path(own["check"])) if "check" in own else None
    if before is None and (useless := [key for key in own if key in TOLERANCES]):
        raise ConfigError(f"{useless[0]}={own[useless[0]]} has an effect with check=<a lock> only; leave it out.")
    if before is not None and file is not None:
        raise ConfigError(f"lock={file} with check={own['check']}: a check writes nothing; use one of them.")
    typed, kept = overrides, before or _kept(file)
    if kept is not None:
        overrides, multirun = with_overrides(kept.overrides, overrides), multirun or kept.multirun
    allowed = TOLERANCES | {key: _share(key, text) for key, text in own.items() if key in TOLERANCES}
    source = f"check={own['check']}" if before else f"lock={file}, which has {' '.join(kept.overrides)}" if kept else ""
    plan, swept = _planned(overrides, multirun, source)
    if file is not None and any(trial.config.cluster.num_workers is None for trial in plan.trials):
        raise ConfigError(
            f"lock={file} needs cluster.num_workers: without it, it is this machine's GPUs, and the file is checked on "
            "others; set for example cluster.num_workers=8."
        )
    console = open_console()
    for line in plan.notes():
        console.print(line, highlight=False, markup=False)
    plans = make_plans(plan, swept)
    if failed := [f"{name}: {one}".removeprefix(": ") for name, one in plans.items() if isinstance(one, UserError)]:
        print(*(f"fsdp_lab.plan: {text}" for text in failed), sep="\n", file=sys.stderr)
        return ExitCode.failed
    made = [one for one in plans.values() if isinstance(one, StepPlan)]
    after = plan_lock.lock_of(made, overrides, multirun)
    if before is not None:
        accept = " ".join(["python -m fsdp_lab.plan", f"lock={own['check']}", *map(shlex.quote, typed)])
        return show_changes(own["check"], before, after, allowed, accept)
    for one in made:
        show(console, one)
    if file is not None:
        plan_lock.write_lock(Path(file), after)
        if kept is not None:
            differs = (f"differs: {text}" for text in plan_lock.origins(kept, after))
            console.print(*differs, *plan_lock.changes(kept, after), sep="\n", highlight=False, markup=False)
        console.print(f"written: {file}", highlight=False, markup=False)
    return ExitCode.finished


def _kept(file: str | None) -> Lock | None:
    """Return the lock in a file that will be written again; None: there is no such file.

    Raises:
        UserError: it cannot be read, so its overrides would be lost.
    """
    return plan_lock.read_lock(Path(file)) if file is not None and Path(file).is_file() else None


def _planned(overrides: list[str], multirun: bool, source: str) -> tuple[Plan, list[str]]:
    """Return the configurations, and the keys that differ between them. An error names the overrides' `source`."""
    try:
        return plan_forecasts(overrides, multirun)
    except Exception as error:
        message = explain(error) if source else None
        if message is None:
            raise
        raise UserError(f"{source}: {message}") from error


def _share(key: str, text: str) -> float:
    """Return a tolerance, typed as `1%` or `0.01`."""
    try:
        value = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise ConfigError(f"{key}={text} is not a share; use a number of 0 or more, such as 1% or 0.01.")
    return value


def make_plans(plan: Plan, swept: Sequence[str]) -> dict[str, StepPlan | UserError]:
    """Return the plan of each setting, or why there is none. One setting runs here, several in other processes."""
    names = [" ".join(f"{key}={value_text(setting(trial, key))}" for key in swept) for trial in plan.trials]
    questions = [(request_of(trial.config), name) for trial, name in zip(plan.trials, names, strict=True)]
    if len(questions) == 1:
        return dict(zip(names, starmap(make_plan, questions), strict=True))
    with Pool(answer, min(num_cpus(), -(-len(questions) // _FEW)), LIMIT_S) as pool:
        return dict(zip(names, map(_result, [pool.submit(question) for question in questions]), strict=True))


def _result(made: Future[StepPlan | UserError]) -> StepPlan | UserError:
    try:
        return made.result()
    except NoAnswerError as error:
        return UserError(f"its process {error}")


def show(console: Console, plan: StepPlan) -> None:
    """Print a plan."""
    lines = [f"{plan.setting or 'the second step'}, rank 0 of {plan.workers:,}, for {plan.device}"]
    for title, rows in (
        ("units", plan.units),
        ("collectives", plan.collectives),
        ("largest at the peak", plan.largest),
    ):
        console.print(*lines, table(title, [asdict(row) for row in rows]), sep="\n", highlight=False, markup=False)
        lines = []
    for peak in plan.peaks:
        parts = (f"{c.category} {size_text(c.bytes)}" for c in plan.categories if c.place == peak.place)
        lines.append(f"peak of the {peak.place}: {size_text(peak.bytes)} {peak.where}: {', '.join(parts)}")
    lines += [f"{name}: {text}" for name, (_, text) in figures(plan).items() if not name.startswith("peak")]
    lines += [f"no predicted time: {plan.no_time}"] if plan.no_time else []
    console.print(*lines, sep="\n", highlight=False, markup=False)


def table(title: str, rows: Sequence[Mapping[str, object]]) -> FittingTable:
    columns = []
    for name in [name for name in rows[0] if name not in _UNSHOWN] if rows else ():
        cells = [_cell(name, row[name]) for row in rows]
        is_text = isinstance(rows[0][name], str) and name not in _FIGURES
        columns.append(Column(name, cells, justify="left" if is_text else "right"))
    return FittingTable(columns, title)


def _cell(name: str, value: object) -> str:
    if not isinstance(value, int):
        return str(value)
    return size_text(value) if name in _BYTES else f"{value:,}"


def show_changes(
    file: str, before: Lock, after: Lock, allowed: Mapping[str, float] = TOLERANCES, accept: str = ""
) -> int:
    """Print what has changed since a lock, and the command that accepts it; return the exit status."""
    found = plan_lock.changes(before, after, allowed)
    for line in (*(f"differs: {text}" for text in plan_lock.origins(before, after)), *found):
        print(line)
    if found and before.torch != after.torch:
        print(f"some of this may come from PyTorch: a check with {before.torch}, which wrote the file, shows the rest")
    if found and accept:
        print(f"to accept this, and for the next check: {accept}")
    beyond = " ".join(f"{key}={share:g}" for key, share in allowed.items() if share > TOLERANCES[key])
    print(f"{file}: {'changed' if found else 'nothing has changed'}{f' beyond {beyond}' if beyond else ''}")
    return CHANGED if found else ExitCode.finished


def show_difference(files: Sequence[Path], as_markdown: bool) -> int:
    """Print how two locks differ.

    Raises:
        UserError: there are not two, or one cannot be read.
    """
    if len(files) != 2:
        raise ConfigError("diff needs two locks, as in diff old.lock.json plan.lock.json.")
    before, after = map(plan_lock.read_lock, files)
    if as_markdown:
        print(plan_lock.markdown([file.name for file in files], before, after))
        return ExitCode.finished
    open_console().print(table("", [dict(zip(("", *_FIGURES), row, strict=True)) for row in compared(before, after)]))
    show_changes(str(files[1]), before, after)
    return ExitCode.finished
