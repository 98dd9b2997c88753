"""What it costs to measure memory, and to forecast it.

python -m benchmarks.memory [rounds]

The step time with memory_profile=peaks against off: both in turn, round after round, in the same two worker
processes; the figure is the median of the rounds' ratios. The seconds of a forecast: in a process of its own,
imports left out, the first and the median of those after it.
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
from pathlib import Path
from typing import Any

from benchmarks.keep import Keep

MOST_STEP_TIME = 1.01
MOST_SECONDS = {"vit_tiny": 1.5, "vit_l_16": 8.0}
_STEPS = 60
_LIMIT_S = 900
_FORECASTS = {"vit_tiny": 7, "vit_l_16": 3}


def step_times(rounds: int) -> list[tuple[float, float]]:
    """On a worker, under torchrun: the median step time without and with the profile, in seconds, of each round."""
    from fsdp_lab.training import train
    from fsdp_lab.training.__main__ import read_config

    def run(profile: str) -> float:
        keep = Keep()
        words = ["checkpoint.mode=off", "export=false", f"training.max_steps={_STEPS}", "training.epochs=9"]
        words += ["training.global_batch_size=64", "data.num_train=3840", "data=synthetic", "data.num_val=64"]
        with tempfile.TemporaryDirectory() as folder:
            train(read_config(None, [*words, f"memory_profile={profile}"]), Path(folder), keep)
        return keep.metrics["perf/step_time_p50_s"]

    run("off")  # the first of a process is slower
    return [
        (run("off"), run("peaks")) if number % 2 == 0 else (run("peaks"), run("off"))[::-1] for number in range(rounds)
    ]


def forecast_seconds(model: str, count: int) -> list[float]:
    """In this process: the seconds of each of `count` forecasts of different precision."""
    from fsdp_lab.forecast.forecast import forecast_profile
    from fsdp_lab.training.__main__ import read_config

    precisions = ("fp32", "bf16_mixed", "fp16", "bf16", "fp16_mixed", "grad_bf16", "fp32")
    seconds = []
    for precision in precisions[:count]:
        config = read_config(None, [f"model={model}", f"precision={precision}", "training.global_batch_size=64"])
        begun = time.perf_counter()
        forecast_profile(config, 2, cuda=False)
        seconds.append(time.perf_counter() - begun)
    return seconds


def ask(*words: str, ranks: int = 0) -> Any:
    """The JSON that this file prints last when it is started with these words."""
    start = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks else []
    command = [sys.executable, *start, "-m", "benchmarks.memory", *words]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=_LIMIT_S, env=environment)
    return json.loads(done.stdout.strip().splitlines()[-1])


def main() -> int:
    if sys.argv[1:2] == ["--steps"]:
        pairs = step_times(int(sys.argv[2]))
        if os.environ["RANK"] == "0":
            print(json.dumps(pairs))
        return 0
    if sys.argv[1:2] == ["--forecast"]:
        print(json.dumps(forecast_seconds(sys.argv[2], int(sys.argv[3]))))
        return 0
    rounds = int(sys.argv[1]) if sys.argv[1:] else 9
    holds = True
    pairs = ask("--steps", str(rounds), ranks=2)
    ratio = statistics.median(peaks / off for off, peaks in pairs)
    off, peaks = (statistics.median(column) * 1000 for column in zip(*pairs, strict=True))
    holds &= ratio <= MOST_STEP_TIME
    print("| what | figure | asked for |\n| --- | --- | --- |")
    print(f"| step time, memory_profile=off | {off:.2f} ms | |\n| step time, memory_profile=peaks | {peaks:.2f} ms | |")
    print(f"| peaks / off, median of {rounds} rounds | **{ratio:.3f}** | at most {MOST_STEP_TIME} |", flush=True)
    for model, count in _FORECASTS.items():
        first, *others = ask("--forecast", model, str(count))
        holds &= max(first, *others) <= MOST_SECONDS[model]
        print(
            f"| forecast of {model}: the first of a process, median of {len(others)} more "
            f"| **{first:.2f} s**, **{statistics.median(others):.2f} s** | under {MOST_SECONDS[model]:g} s |",
            flush=True,
        )
    machine = f"{os.cpu_count()} cores ({platform.machine()}), Python {platform.python_version()}"
    print(
        f"\n{machine}, torch {version('torch')}; step times: {_STEPS} steps of vit_tiny, per-block fp32, two gloo ranks"
    )
    print("holds" if holds else "DOES NOT HOLD")
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
