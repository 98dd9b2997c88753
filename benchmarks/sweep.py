"""A sweep of four trials against four bare scripts, one after another.

python -m benchmarks.sweep [rounds]

Reference: `sharding=per_block precision=fp16` on digits, two epochs, two workers. The sweep is the whole command, with
Ray's start, forecasts, checkpoints, exports and MLflow; the bare scripts have none of that. The sweep runs three times:
as it is, without the plain loop of the user's code, and without the shortcut through Ray's private names. In turn,
round after round, each in a new folder, so that no plain loop is one of an earlier sweep.
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

MOST_RATIOS = (1.25, 1.10, 2.0)  # sweep / bare, sweep / check=off, public / bare
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


def sweep(*words: str, public: bool = False) -> float:
    """Seconds of the command with these words; `public`: without the shortcut through Ray's private names."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "fsdp_lab", "-m", "sharding=per_block", "precision=fp16", *_AXES, *words]
        begun = time.perf_counter()
        environment = {**os.environ, **({"FSDP_LAB_PUBLIC_RAY": "1"} if public else {})}
        subprocess.run(command, check=True, timeout=_LIMIT_S, stdout=subprocess.DEVNULL, env=environment, cwd=folder)
        return time.perf_counter() - begun


def main() -> int:
    rounds = int((*sys.argv[1:], "3")[0])
    kinds: list[Callable[[], float]] = [bare, sweep, partial(sweep, "check=off"), partial(sweep, public=True)]
    ratios: list[list[float]] = []
    print("| round | 4 scripts, s | sweep, s | sweep / bare | check=off, s | sweep / off | public, s | public / bare |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |", flush=True)
    for number in range(rounds):
        order = [(number + place) % len(kinds) for place in range(len(kinds))]
        by_kind = dict(zip(order, [kinds[kind]() for kind in order], strict=True))
        scripts, whole, unchecked, public = (by_kind[kind] for kind in range(len(kinds)))
        ratios.append([whole / scripts, whole / unchecked, public / scripts])
        columns = zip((whole, unchecked, public), ratios[-1], strict=True)
        shown = " | ".join(f"{seconds:.1f} | {ratio:.2f}" for seconds, ratio in columns)
        print(f"| {number + 1} | {scripts:.1f} | {shown} |", flush=True)
    medians = [statistics.median(column) for column in zip(*ratios, strict=True)]
    print("| median | | " + " | ".join(f"| **{median:.2f}**" for median in medians) + " |")
    print(f"\nat most {MOST_RATIOS} are asked for\n")
    print(
        f"{os.cpu_count()} cores ({platform.machine()}), Python {platform.python_version()}, torch "
        f"{version('torch')}, ray {version('ray')}, mlflow {version('mlflow')}"
    )
    return 0 if all(ratio <= most for ratio, most in zip(medians, MOST_RATIOS, strict=True)) else 1


if __name__ == "__main__":
    sys.exit(main())
