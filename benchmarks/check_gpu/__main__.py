"""Check on a GPU what the tests can only check on a CPU, and write one table.

python -m benchmarks.check_gpu [--limit 480] [--only PATTERN ...] [--thorough] [--again] [--out FOLDER]

Needs torch and torchvision only. Takes at most `--limit` seconds; a second start goes on with what has no result
for this device, driver, PyTorch and these sources. Exit status: 0 all passed, 1 a line failed, 3 none failed but some
were not measured, 2 wrong usage or no GPU. `--device cpu` runs the same on two CPU workers and small models.
"""

from __future__ import annotations

import argparse
import importlib.util
import signal
import sys
import threading
import time
from fnmatch import fnmatch
from pathlib import Path

from benchmarks.check_gpu import table
from benchmarks.check_gpu.launch import Launcher
from benchmarks.check_gpu.lines import Bench, Line, Result
from benchmarks.check_gpu.machine import ROOT, ask, digest
from benchmarks.check_gpu.state import State, key_of
from benchmarks.check_gpu.subjects import all_lines

_TABLE_S = 10.0  # of the limit, kept for ending processes and writing the table
_CPU_WORKERS = 2


def main(arguments: list[str] | None = None) -> int:
    options = read_arguments(arguments)
    deadline = time.monotonic() + options.limit - _TABLE_S
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends as Ctrl-C does
    if importlib.util.find_spec("torch") is None:
        print(
            f"check_gpu: {sys.executable} has no PyTorch; use a Python with torch and torchvision, for example: make "
            "check-gpu PYTHON=.venv/bin/python",
            file=sys.stderr,
        )
        return 2
    machine = ask(options.device)
    if machine is None:
        print("check_gpu: PyTorch sees no GPU; --device cpu runs the command without one", file=sys.stderr)
        return 2
    workers = options.workers or machine.devices or _CPU_WORKERS
    bench = Bench(machine, workers, options.thorough, str(options.out.absolute()), digest(ROOT))
    groups = {group: chosen for group, lines in all_lines(bench).items() if (chosen := selected(lines, options.only))}
    if not groups:
        print(f"check_gpu: no line matches --only {' '.join(options.only)}", file=sys.stderr)
        return 2
    state = State(options.out, key_of(bench))
    if options.again:
        state.forget({line.id for lines in groups.values() for line in lines})
    run_all(groups, bench, state, deadline)
    rows = table.rows([line for lines in groups.values() for line in lines], state.results())
    print(table.write(rows, bench, options.out))
    print(f"check_gpu: {table.summary(rows)}", file=sys.stderr)
    return table.exit_status(rows)


def run_all(groups: dict[tuple[str, int], list[Line]], bench: Bench, state: State, deadline: float) -> None:
    """Measure what has no result yet, until the deadline or Ctrl-C."""
    every = [line for lines in groups.values() for line in lines]
    known = state.results()
    progress = Progress(len(every), sum(line.id in known for line in every))
    interrupted = threading.Event()

    def interrupt(*_: object) -> None:
        interrupted.set()
        raise KeyboardInterrupt

    def show(result: Result) -> None:
        progress.show(result)
        if interrupted.is_set():  # Python loses an exception that is raised within a destructor
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, interrupt)
    launcher = Launcher(bench, state, deadline, show)
    try:
        for (batch, _), lines in groups.items():
            left = [line for line in lines if line.id not in known]
            if left and not launcher.late:
                launcher.run(batch, left)
                table.write(table.rows(every, state.results()), bench, Path(bench.folder))
    except KeyboardInterrupt:
        print("check_gpu: interrupted; the same command resumes here", file=sys.stderr)
    finally:
        signal.signal(signal.SIGINT, before)


class Progress:
    """Prints each result as it becomes known."""

    def __init__(self, total: int, done: int) -> None:
        self.total, self.done = total, done
        if done:
            print(f"check_gpu: {done} of {total} checks already have a result (--again repeats them)", file=sys.stderr)

    def show(self, result: Result) -> None:
        self.done += 1
        text = f"[{self.done}/{self.total}] {result.verdict} {result.id}: {result.measured} ({result.seconds:.1f} s)"
        print(text, file=sys.stderr, flush=True)


def selected(lines: list[Line], patterns: list[str]) -> list[Line]:
    """The lines whose id begins with, or matches, one of the patterns; all of them without any."""
    return [line for line in lines if not patterns or any(fnmatch(line.id, f"{pattern}*") for pattern in patterns)]


def positive(text: str) -> int:
    """A whole number of 1 or more."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number of 1 or more")
    return int(text)


def read_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "benchmarks.check_gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--limit", type=positive, default=480.0, help="seconds for everything (480)")
    parser.add_argument(
        "--only",
        nargs="+",
        default=[],
        metavar="PATTERN",
        help="only checks whose name starts with a pattern: 'parity:*fp16'",
    )
    parser.add_argument("--thorough", action="store_true", help="all 108 forecasts of two models; raise --limit")
    parser.add_argument("--again", action="store_true", help="forget the results of these lines first")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="where to run (cuda)")
    parser.add_argument("--workers", type=positive, help="default: all GPUs, or two on a CPU")
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("outputs/check_gpu"),
        help="folder of results, logs and the table (outputs/check_gpu)",
    )
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
