"""Steps per second of a trial, and of its core without Ray, against a bare script of the same configuration.

python -m benchmarks.throughput [most starts]

All three train side by side on one machine, but only one of them at a time: the others are stopped, all their
processes, Ray's too. A round is a few seconds of each, in an order that turns. What changes on the machine from one
minute to the next is so the same for all.

Starts of one program differ by more than the noise of their rounds explains; why is not known. So all three are
started anew after some rounds, and the interval is that of the starts' means, by Student's t. It goes on until the 95
% interval of the trial's ratio is narrower than 0.02. The first half second of every turn is left out. The CPU time of
a step is that of the two processes which train.
"""

from __future__ import annotations

import json
import math
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import psutil
from scipy import stats

LEAST_RATIO = 0.95
WIDTH = 0.02  # of the 95 % interval
_TURN_S = 4.0
_LEFT_OUT_S = 0.5  # of each turn
_ROUNDS = 4  # of each start
_FEWEST_STARTS, _MOST_STARTS = 4, 12
_RANKS = ("bare.py", "benchmarks.core")  # in the command line of a process that trains; a trial's are called rank<r>
_START_S = 180.0
_HERE = Path(__file__).parent
_COPIES = 100  # of the data: an epoch lasts a minute
_STEPS = 1437 * _COPIES // 64  # of an epoch
_TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
_TRIAL = [
    "sharding=per_block",
    "precision=fp32",
    "checkpoint.mode=off",
    "data=synthetic",
    f"data.num_train={1437 * _COPIES}",
    "training.epochs=1000",
]


class Runner:
    """A program that trains, stopped but for its turns."""

    def __init__(self, command: list[str], folder: Path, progress: Path) -> None:
        self.progress = progress
        self.log = folder / "log"
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                command, cwd=folder, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
                env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(_HERE.parent)},
            )  # fmt: skip

    def reached(self) -> tuple[int, float] | None:
        """The step that has begun and when, in seconds since 1970; None before the first."""
        with suppress(OSError, ValueError, KeyError):
            progress = json.loads(self.progress.read_text())
            return int(progress["step"]), float(progress["time"])
        return None

    def steps(self) -> int:
        """The steps so far."""
        reached = self.reached()
        return reached[0] if reached else 0

    def wait_for_step(self, step: int) -> None:
        end = time.monotonic() + _START_S
        while (reached := self.reached()) is None or reached[0] < step:
            if self.process.poll() is not None or time.monotonic() > end:
                raise SystemExit(f"no step {step} within {_START_S:.0f} s: {self.log.read_text()[-2000:]}")
            time.sleep(0.1)

    def steps_per_s(self, seconds: float) -> float | None:
        """Let it train for so long; None where an epoch ended meanwhile."""
        self.signal(signal.SIGCONT)
        begun = time.time()
        seen = []
        while time.time() - begun < seconds:
            time.sleep(0.02)
            if (reached := self.reached()) and reached[1] > begun + _LEFT_OUT_S and reached not in seen:
                seen.append(reached)
        self.signal(signal.SIGSTOP)
        if len(seen) < 2:
            raise SystemExit(f"no progress in {seconds} s: {self.log.read_text()[-2000:]}")
        if (seen[0][0] - 1) // _STEPS != (seen[-1][0] - 1) // _STEPS:
            return None
        return (seen[-1][0] - seen[0][0]) / (seen[-1][1] - seen[0][1])

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the program and all that it has started."""
        for process in self.processes():
            with suppress(psutil.NoSuchProcess):
                process.send_signal(number)

    def processes(self) -> list[psutil.Process]:
        """The program and all that it has started."""
        with suppress(psutil.NoSuchProcess):
            program = psutil.Process(self.process.pid)
            return [program, *program.children(recursive=True)]
        return []

    def cpu_s(self) -> float:
        """The CPU seconds so far of the processes that train."""
        total = 0.0
        for process in self.processes():
            with suppress(psutil.NoSuchProcess):
                words = " ".join(process.cmdline())
                named = any(name in words for name in _RANKS) and "torch.distributed.run" not in words
                if named or process.name().startswith("rank"):
                    times = process.cpu_times()
                    total += times.user + times.system
        return total


@contextmanager
def training(command: list[str], folder: Path, progress: Path) -> Iterator[Runner]:
    """A program that has begun to train, and is stopped."""
    folder.mkdir()
    runner = Runner(command, folder, progress)
    try:
        runner.wait_for_step(20)
        runner.signal(signal.SIGSTOP)
        yield runner
    finally:
        runner.signal(signal.SIGKILL)
        runner.process.wait()


def interval(ratios: list[float]) -> tuple[float, float]:
    """The mean of the starts' ratios and half of its 95 % interval, by Student's t."""
    half = stats.t.ppf(0.975, len(ratios) - 1) * statistics.stdev(ratios) / math.sqrt(len(ratios))
    return statistics.fmean(ratios), float(half)


def commands(root: Path) -> dict[str, tuple[list[str], Path]]:
    """The command of each, and the file that says how far it is."""
    bare, core, trial = root / "bare.json", root / "core" / "files", root / "trial" / "run"
    return {
        "bare": ([*_TORCHRUN, str(_HERE / "bare.py"), "1000", "fp32", str(_COPIES), str(bare)], bare),
        "core": ([*_TORCHRUN, "-m", "benchmarks.core", str(core), *_TRIAL], core / "progress.json"),
        "trial": (
            [sys.executable, "-m", "fsdp_lab", *_TRIAL, f"hydra.run.dir={trial}", "forecast.enabled=false",
             f"tracking.uri=sqlite:///{root}/m.db"],
            trial / "progress.json",
        ),
    }  # fmt: skip


@dataclass
class Start:
    """The means over the rounds of one start, by program.

    Attributes:
        steps_per_s: of each.
        cpu_ms: of a step.
    """

    steps_per_s: dict[str, float]
    cpu_ms: dict[str, float]


def measure(runners: dict[str, Runner]) -> Start:
    """Let each of the programs train in turn, for some rounds."""
    names, rounds = list(runners), list[dict[str, float]]()
    begun = {name: (runners[name].cpu_s(), runners[name].steps()) for name in names}
    while len(rounds) < _ROUNDS:
        names = [*names[1:], names[0]]
        speeds = {name: runners[name].steps_per_s(_TURN_S) for name in names}
        if all(speed is not None for speed in speeds.values()):  # else an epoch ended meanwhile
            rounds.append({name: speed for name, speed in speeds.items() if speed is not None})
    cpu_ms = {}
    for name, (cpu_s, steps) in begun.items():
        cpu_ms[name] = 1000 * (runners[name].cpu_s() - cpu_s) / (runners[name].steps() - steps)
    return Start({name: statistics.fmean(one[name] for one in rounds) for name in names}, cpu_ms)


def main() -> int:
    most = max(2, int(sys.argv[1])) if len(sys.argv) > 1 else _MOST_STARTS
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # what it has stopped is not to stay behind
    ratios: dict[str, list[float]] = {"core": [], "trial": []}
    cpu: dict[str, list[float]] = {"core": [], "trial": []}
    print(
        "| start | bare steps/s | core / bare | trial / bare | CPU of a step: bare, ms | core / bare | trial / bare |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- |", flush=True)
    for number in range(most):
        with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
            root, runners = Path(folder), {}
            for name, (command, progress) in commands(root).items():
                runners[name] = stack.enter_context(training(command, root / name, progress))
            start = measure(runners)
        for name in ratios:
            ratios[name].append(start.steps_per_s[name] / start.steps_per_s["bare"])
            cpu[name].append(start.cpu_ms[name] / start.cpu_ms["bare"])
        speeds = " | ".join(f"{ratios[name][-1]:.3f}" for name in ratios)
        costs = " | ".join(f"{cpu[name][-1]:.3f}" for name in ratios)
        print(
            f"| {number + 1} | {start.steps_per_s['bare']:.1f} | {speeds} | {start.cpu_ms['bare']:.1f} | {costs} |",
            flush=True,
        )
        if number + 1 >= _FEWEST_STARTS and 2 * interval(ratios["trial"])[1] < WIDTH:
            break
    means = [f"{mean:.3f} ± {half:.3f}" for mean, half in map(interval, [*ratios.values(), *cpu.values()])]
    print(f"| mean | | {means[0]} | **{means[1]}** | | {means[2]} | {means[3]} |\n")
    trial, half = interval(ratios["trial"])
    print(
        f"{os.cpu_count()} cores ({platform.machine()}), Python {platform.python_version()}, torch {version('torch')}, "
        f"ray {version('ray')}; {len(ratios['trial'])} starts of {_ROUNDS} rounds of {_TURN_S:.0f} s each; ± is half "
        "of the 95 % interval."
    )
    holds = trial >= LEAST_RATIO and 2 * half < WIDTH
    print(f"at least {LEAST_RATIO}, known to {WIDTH}, is asked for: {'holds' if holds else 'DOES NOT HOLD'}")
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
