"""Real sweeps on this machine's GPUs, with Ray and MLflow, and whether they end as they should.

python -m benchmarks.check_gpu_ray [--device cpu] [--limit 480] [--only NAME ...] [--again] [--out FOLDER]

Three sweeps through `python -m fsdp_lab`, on all GPUs of the machine:
  readme   the four trials of README.md: outcomes, device, losses, forecast error
  repeats  one setting eight times: outcomes, equal peak memory, no process left, GPU memory returned
  oom      a trial that runs out of memory between two that do not: finished, oom, finished

`--device cpu` runs the same on two CPU workers. What the limit cuts off is measured by the next call: finished
measurements are kept in FOLDER/state.jsonl for the same device, versions and sources (`--again` measures anew). The
table is FOLDER/check_gpu_ray.md, each sweep's output FOLDER/<name>.log and its folder FOLDER/<name>.
Exit status: 0 all passed, 1 a line failed (named), 2 usage or no GPU, 3 not everything was measured.
"""

from __future__ import annotations

import argparse
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path
from types import FrameType

from benchmarks.check_gpu_ray import children
from benchmarks.check_gpu_ray.lines import Line, State, Verdict, exit_status, write_table
from benchmarks.check_gpu_ray.machine import ROOT, Machine, environment_of, look, used_bytes
from benchmarks.check_gpu_ray.sweeps import GPU_MEMORY_TOLERANCE, Left, PlannedSweep, all_sweeps

NAMES = ("readme", "repeats", "oom")
_SETTLE_S = 15.0  # for the driver to return GPU memory


def run_sweep(
    sweep: PlannedSweep, machine: Machine, environment: dict[str, str], out: Path, limit_s: float
) -> list[Line]:
    """Run the sweep in a fresh folder and judge what it left."""
    folder = out / sweep.name
    shutil.rmtree(folder, ignore_errors=True)
    before = used_bytes(environment) if machine.gpus else None
    with tempfile.TemporaryDirectory(prefix="check_gpu_ray.") as store:
        command = [sys.executable, "-m", "fsdp_lab", "-m", *sweep.words]
        command += [f"hydra.sweep.dir={folder}", f"tracking.uri=sqlite:///{store}/mlflow.db"]
        ran = children.run(command, environment, out / f"{sweep.name}.log", limit_s, sweep.memory_limit)
    if ran.status is None:
        return sweep.not_measured(f"ended by the limit after {ran.seconds:.0f} s")
    growth = gpu_growth(before, environment) if before else None
    return sweep.judge(Left(ran.status, folder, tuple(ran.left), growth), machine, ran.seconds)


def gpu_growth(before: list[int], environment: dict[str, str]) -> int:
    """By how much more memory is in use than before, on the GPU where it is most; waits a little for less."""
    until = time.monotonic() + _SETTLE_S
    while True:
        growth = max(now - then for now, then in zip(used_bytes(environment), before, strict=True))
        if growth <= GPU_MEMORY_TOLERANCE or time.monotonic() > until:
            return growth
        time.sleep(1.0)


def run_all(
    sweeps: list[PlannedSweep], state: State, machine: Machine, environment: dict[str, str], out: Path, until: float
) -> list[Line]:
    """The lines of all sweeps, those that were measured before among them. The table is written after each sweep."""
    known = state.read()
    lines = {name: known.get(name, line) for sweep in sweeps for name, line in _unmeasured(sweep).items()}
    for sweep in sweeps:
        if all(name in known for name in sweep.names):
            print(f"{sweep.name}: measured before", file=sys.stderr)
            continue
        left_s = until - time.monotonic()
        if left_s < sweep.needs_s:
            print(f"{sweep.name}: not begun, {max(0, left_s):.0f} s are left of the limit", file=sys.stderr)
            continue
        print(f"{sweep.name}: begins, {left_s:.0f} s left", file=sys.stderr, flush=True)
        for line in run_sweep(sweep, machine, environment, out, left_s):
            lines[line.name] = line
            if line.verdict is not Verdict.not_measured:
                state.add(line)
            print(f"{line.name}: {line.verdict}: {line.measured}", file=sys.stderr, flush=True)
        write_table(out / "check_gpu_ray.md", machine.about, lines.values())
    return list(lines.values())


def _unmeasured(sweep: PlannedSweep) -> dict[str, Line]:
    return {line.name: line for line in sweep.not_measured("")}


def parse(words: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "python -m benchmarks.check_gpu_ray", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--limit", type=float, default=480.0, help="seconds for everything")
    parser.add_argument("--only", nargs="+", choices=NAMES, default=NAMES, help="only these sweeps")
    parser.add_argument("--again", action="store_true", help="measure again what was measured before")
    parser.add_argument("--out", type=Path, default=ROOT / "outputs" / "check_gpu_ray")
    arguments = parser.parse_args(words)
    if arguments.limit <= 0:
        parser.error(f"--limit {arguments.limit:g}: use more than 0")
    return arguments


def end(signum: int, frame: FrameType | None) -> None:
    """Take the way out of Ctrl-C, which ends the children."""
    raise KeyboardInterrupt


def main(words: list[str] | None = None) -> int:
    begun = time.monotonic()
    arguments = parse(words)
    environment = environment_of(arguments.device)
    try:
        machine = look(arguments.device, environment)
    except RuntimeError as error:
        print(error, file=sys.stderr)
        return 2
    if arguments.device == "cuda" and not machine.gpus:
        print("check_gpu_ray: no GPU here; --device cpu runs the command without one", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, end)
    out = arguments.out.absolute()
    state = State(out / "state.jsonl", machine.key)
    sweeps = [sweep for sweep in all_sweeps(machine) if sweep.name in arguments.only]
    if arguments.again:
        state.forget([name for sweep in sweeps for name in sweep.names])
    print(machine.about, file=sys.stderr, flush=True)
    try:
        lines = run_all(sweeps, state, machine, environment, out, begun + arguments.limit)
    except KeyboardInterrupt:
        print("interrupted; what was measured is kept", file=sys.stderr)
        return 130
    print(write_table(out / "check_gpu_ray.md", machine.about, lines))
    for line in lines:
        if line.verdict is not Verdict.passed:
            print(f"{line.verdict}: {line.name}: expected {line.expected}; {line.measured}", file=sys.stderr)
    return exit_status(lines)
