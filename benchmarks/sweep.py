"""A sweep of four trials against four bare scripts, one after another.

python -m benchmarks.sweep [rounds]

Reference: `sharding=per_block precision=fp16` on digits, two epochs, two workers. The sweep is the whole command, with
Ray's start, forecasts, checkpoints, exports and MLflow; the bare scripts have none of that. The sweep runs twice,
with the shortcut through Ray's private names and without it. In turn, round after round.
"""

from __future__ import annotations

import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from pathlib import Path

MOST_RATIOS = (1.25, 2.0)
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


def sweep(public: bool = False) -> float:
    """Seconds of the command; `public`: without the shortcut through Ray's private names."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "fsdp_lab", "-m", "sharding=per_block", "precision=fp16", *_AXES]
        command += [f"hydra.sweep.dir={folder}/out", f"tracking.uri=sqlite:///{folder}/m.db"]
        begun = time.perf_counter()
        environment = {**os.environ, **({"FSDP_LAB_PUBLIC_RAY": "1"} if public else {})}
        subprocess.run(command, check=True, timeout=_LIMIT_S, stdout=subprocess.DEVNULL, env=environment)
        return time.perf_counter() - begun


def main() -> int:
    rounds = int((*sys.argv[1:], "3")[0])
    kinds: list[Callable[[], float]] = [bare, sweep, partial(sweep, public=True)]
    ratios: list[list[float]] = []
    print("| round | 4 bare scripts, s | sweep of 4, s | sweep / bare | public names only, s | public / bare |")
    print("| --- | --- | --- | --- | --- | --- |", flush=True)
    for number in range(rounds):
        order = [(number + place) % 3 for place in range(3)]
        seconds = dict(zip(order, [kinds[kind]() for kind in order], strict=True))
        ratios.append([seconds[kind] / seconds[0] for kind in (1, 2)])
        shown = f"{seconds[1]:.1f} | {ratios[-1][0]:.2f} | {seconds[2]:.1f} | {ratios[-1][1]:.2f}"
        print(f"| {number + 1} | {seconds[0]:.1f} | {shown} |", flush=True)
    medians = [statistics.median(column) for column in zip(*ratios, strict=True)]
    print(f"| median | | | **{medians[0]:.2f}** | | **{medians[1]:.2f}** |\n\nat most {MOST_RATIOS} are asked for\n")
    print(
        f"{os.cpu_count()} cores ({platform.machine()}), Python {platform.python_version()}, torch "
        f"{version('torch')}, ray {version('ray')}, mlflow {version('mlflow')}"
    )
    return 0 if all(ratio <= most for ratio, most in zip(medians, MOST_RATIOS, strict=True)) else 1


if __name__ == "__main__":
    sys.exit(main())
