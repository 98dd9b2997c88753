"""A sweep of four trials against four bare scripts, one after another.

python -m benchmarks.sweep [rounds]

Reference: `sharding=per_block precision=fp16` on digits, two epochs, two workers. The sweep is the whole command, with
Ray's start, forecasts, checkpoints, exports and MLflow; the bare scripts have none of that. In turn, round after round.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path

MOST_RATIO = 1.2
_LIMIT_S = 900
_HERE = Path(__file__).parent
_AXES = ["offload=none,cpu", "reshard_after_forward=always,never"]


def bare() -> float:
    """Seconds of four scripts."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    begun = time.perf_counter()
    for _ in range(4):
        done = subprocess.run(
            [*command, str(_HERE / "bare.py"), "2", "fp16"],
            check=False,
            timeout=_LIMIT_S,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        if done.returncode:
            raise SystemExit(f"bare.py ended with status {done.returncode}: {done.stderr[-4000:]}")
    return time.perf_counter() - begun


def sweep() -> tuple[float, float]:
    """Seconds of the command, and the median turnaround of its trials."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "fsdp_lab", "-m", "sharding=per_block", "precision=fp16", *_AXES]
        command += [f"hydra.sweep.dir={folder}/out", f"tracking.uri=sqlite:///{folder}/m.db"]
        begun = time.perf_counter()
        subprocess.run(command, check=True, timeout=_LIMIT_S, stdout=subprocess.DEVNULL)
        seconds = time.perf_counter() - begun
        return seconds, statistics.median(turnarounds(Path(folder, "out")))


def turnarounds(folder: Path) -> list[float]:
    """Seconds from the last report of each trial to the first step of the next one."""
    read = (json.loads(path.read_text()) for path in folder.glob("*/progress.json"))
    trials = sorted(read, key=lambda progress: progress["first_step"])
    return [after["first_step"] - before["reported"] for before, after in pairwise(trials)]


def main() -> int:
    rounds = int((*sys.argv[1:], "3")[0])
    pairs = []
    print("| round | 4 bare scripts, s | sweep of 4, s | sweep / bare | turnaround, s |")
    print("| --- | --- | --- | --- | --- |", flush=True)
    for number in range(rounds):
        first = bare() if number % 2 == 0 else None
        seconds, turnaround = sweep()
        alone = first or bare()
        pairs.append((alone, seconds))
        figures = f"{alone:.1f} | {seconds:.1f} | {seconds / alone:.2f} | {turnaround:.1f}"
        print(f"| {number + 1} | {figures} |", flush=True)
    ratio = statistics.median(s / b for b, s in pairs)
    print(f"| median | | | **{ratio:.2f}** | |\n\nat most {MOST_RATIO} is asked for\n")
    print(
        f"{os.cpu_count()} cores ({platform.machine()}), Python {platform.python_version()}, torch "
        f"{version('torch')}, ray {version('ray')}, mlflow {version('mlflow')}"
    )
    return 0 if ratio <= MOST_RATIO else 1


if __name__ == "__main__":
    sys.exit(main())
