"""Samples per second of a trial against a bare script of the same configuration.

python -m benchmarks.throughput [rounds] [epochs]

Both run in turn, round after round, on the same machine; the figure is the median of the rounds, and the
ratio the median of the rounds' own ratios. Each run's first epoch is left out of both.
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
from pathlib import Path

LEAST_RATIO = 0.97
_LIMIT_S = 300
_HERE = Path(__file__).parent


def bare(epochs: int) -> float:
    """Median samples/s over the epochs of one run of the script."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    out = subprocess.run(
        [*command, str(_HERE / "bare.py"), str(epochs)],
        capture_output=True,
        text=True,
        check=True,
        timeout=_LIMIT_S,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    ).stdout
    return statistics.median(json.loads(out.strip().splitlines()[-1]))


def trial(epochs: int) -> float:
    """Median samples/s over the epochs of one trial, Ray, MLflow and all."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "fsdp_lab", "sharding=per_block", "precision=fp32", "checkpoint.mode=off"]
        command += [f"training.epochs={epochs}", f"hydra.run.dir={folder}/run", f"tracking.uri=sqlite:///{folder}/m.db"]
        subprocess.run(command, check=True, timeout=_LIMIT_S, stdout=subprocess.DEVNULL)
        lines = (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()
    return statistics.median(json.loads(line)["perf/samples_per_s"] for line in lines[1:])


def main() -> int:
    rounds, epochs = (int(a) for a in (*sys.argv[1:], *("5", "8")[len(sys.argv) - 1 :]))
    pairs = []
    print("| round | bare samples/s | trial samples/s | trial / bare |\n| --- | --- | --- | --- |")
    for number in range(rounds):
        pair = (bare(epochs), trial(epochs)) if number % 2 == 0 else (trial(epochs), bare(epochs))[::-1]
        pairs.append(pair)
        print(f"| {number + 1} | {pair[0]:.0f} | {pair[1]:.0f} | {pair[1] / pair[0]:.3f} |", flush=True)
    ratio = statistics.median(t / b for b, t in pairs)
    medians = [statistics.median(column) for column in zip(*pairs, strict=True)]
    print(f"| median | {medians[0]:.0f} | {medians[1]:.0f} | **{ratio:.3f}** |\n")
    print(
        f"{os.cpu_count()} cores ({platform.machine()}), Python {platform.python_version()}, torch {version('torch')}, "
        f"ray {version('ray')}; {rounds} rounds, {epochs} epochs each, the first left out."
    )
    print(f"at least {LEAST_RATIO} is asked for: {'holds' if ratio >= LEAST_RATIO else 'DOES NOT HOLD'}")
    return 0 if ratio >= LEAST_RATIO else 1


if __name__ == "__main__":
    sys.exit(main())
