"""Seconds from the last report of a trial to the first step of the next one, where a core is free.

python -m benchmarks.turnaround [rounds]

One worker with one thread trains, on a machine with at least two cores.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path

MOST_S = 2.0
_TRIALS = 5
_LIMIT_S = 1800


def sweep() -> list[float]:
    """Return the turnaround of each trial but the first."""
    command = [sys.executable, "-m", "fsdp_lab", "-m", "sharding=per_block", "precision=fp32", "offload=none"]
    command += ["reshard_after_forward=default", f"training.seed=range({_TRIALS})", "training.epochs=6"]
    command += ["cluster.num_workers=1", f"cluster.cpus_per_worker={os.cpu_count()}"]
    # as on a machine with GPUs (`engine/cluster.py`): the trial leaves a core for the imports of the next one
    ahead = {"RAY_preload_python_modules": "torchvision.models,fsdp_lab.training"}
    environment = {**os.environ, **ahead, "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        command += [f"hydra.sweep.dir={folder}/out", f"tracking.uri=sqlite:///{folder}/m.db"]
        subprocess.run(command, check=True, timeout=_LIMIT_S, stdout=subprocess.DEVNULL, env=environment)
        return turnarounds(Path(folder, "out"))


def turnarounds(folder: Path) -> list[float]:
    """Return the turnaround of each trial but the first, of a sweep whose trials ran one after another."""
    read = (json.loads(path.read_text()) for path in folder.glob("*/progress.json"))
    trials = sorted(read, key=lambda progress: progress["first_step"])
    return [after["first_step"] - before["reported"] for before, after in pairwise(trials)]


def main() -> int:
    rounds = int((*sys.argv[1:], "3")[0])
    print("| round | turnaround, s: least | median | most |\n| --- | --- | --- | --- |")
    found: list[float] = []
    for number in range(rounds):
        seconds = sweep()
        found += seconds
        cells = (f"{min(seconds):.2f}", f"{statistics.median(seconds):.2f}", f"{max(seconds):.2f}")
        print(f"| {number + 1} | " + " | ".join(cells) + " |", flush=True)
    median = statistics.median(found)
    print(f"\nmedian of {len(found)}: {median:.2f} s; asked for: at most {MOST_S:g} s")
    where = f"{os.cpu_count()} cores ({platform.machine()}), Python {platform.python_version()}"
    print(f"{where}, torch {version('torch')}, ray {version('ray')}")
    return 0 if median <= MOST_S else 1


if __name__ == "__main__":
    sys.exit(main())
