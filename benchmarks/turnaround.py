"""Seconds from the last report of a trial to the first step of the next one, with and without early imports.

python -m benchmarks.turnaround [rounds]

One worker with one thread trains. The speeds show what early imports cost the trial that trains.
"""

from __future__ import annotations

import csv
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

MOST_S = 2.0
_TRIALS = 5
_LIMIT_S = 1800


def sweep(early: bool) -> tuple[float, float]:
    """The medians of turnaround and speed. The last trial is left out: nothing is imported while it trains."""
    command = [sys.executable, "-m", "fsdp_lab", "-m", "sharding=per_block", "precision=fp32", "offload=none"]
    command += ["reshard_after_forward=default", f"training.seed=range({_TRIALS})", "training.epochs=6"]
    command += ["cluster.num_workers=1", f"cluster.cpus_per_worker={os.cpu_count()}", f"cluster.early_imports={early}"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        command += [f"hydra.sweep.dir={folder}/out", f"tracking.uri=sqlite:///{folder}/m.db"]
        subprocess.run(command, check=True, timeout=_LIMIT_S, stdout=subprocess.DEVNULL, env=environment)
        with Path(folder, "out", "results.csv").open() as file:
            rows = list(csv.DictReader(file))
    turnaround = statistics.median(float(row["turnaround_s"]) for row in rows if row["turnaround_s"])
    return turnaround, statistics.median(float(row["perf/samples_per_s"]) for row in rows[:-1])


def main() -> int:
    rounds = int((*sys.argv[1:], "3")[0])
    columns = (
        "round",
        "early imports: turnaround, s",
        "samples/s",
        "without: turnaround, s",
        "samples/s",
        "speed ratio",
    )
    print("| " + " | ".join(columns) + " |\n|" + " --- |" * len(columns))
    found = []
    for number in range(rounds):
        early, late = sweep(early=True), sweep(early=False)
        found.append(early)
        cells = (f"{early[0]:.2f}", f"{early[1]:.0f}", f"{late[0]:.2f}", f"{late[1]:.0f}", f"{early[1] / late[1]:.2f}")
        print(f"| {number + 1} | " + " | ".join(cells) + " |", flush=True)
    median = statistics.median(turnaround for turnaround, _ in found)
    print(f"\nmedian turnaround with early imports: {median:.2f} s; asked for: at most {MOST_S:g} s")
    where = f"{os.cpu_count()} cores ({platform.machine()}), Python {platform.python_version()}"
    print(f"{where}, torch {version('torch')}, ray {version('ray')}")
    return 0 if median <= MOST_S else 1


if __name__ == "__main__":
    sys.exit(main())
