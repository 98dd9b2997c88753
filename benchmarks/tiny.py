"""Many trials that do almost nothing, in this process: what is left is what the driver costs.

python -m benchmarks.tiny <trials> <folder>

Prints `[[seconds a trial, resident MiB], ...]` of each hundred trials. A trial trains for one step, and the time that
it takes itself is left out. What is left is composing and checking it (done for all before the first, and shared out
evenly here), its folder, MLflow and the table.
"""

from __future__ import annotations

import json
import os
import sys
import time
from unittest import mock

import psutil

from fsdp_lab.__main__ import main
from fsdp_lab.engine import inline
from fsdp_lab.sweep import multirun, start


def run(count: int, folder: str) -> list[tuple[float, float]]:
    marks: list[float] = []
    before: list[float] = []
    inside = 0.0
    resident: list[float] = []
    train = inline.train_rank

    def timed(*args: object, **named: object) -> None:
        nonlocal inside
        begun = time.perf_counter()
        train(*args, **named)  # type: ignore[arg-type]
        inside += time.perf_counter() - begun
        marks.append(time.perf_counter() - inside)
        resident.append(psutil.Process().memory_info().rss / 2**20)

    sys.argv = ["fsdp_lab", "-m", "engine=inline", "model=mlp", "data=synthetic", "data.num_train=8", "data.num_val=8"]
    sys.argv += ["training.global_batch_size=8", "training.max_steps=1", "checkpoint.mode=off", "export=false"]
    sys.argv += ["memory_profile=off", "forecast.enabled=false", "sharding=ddp", "precision=fp32", "offload=none"]
    sys.argv += ["reshard_after_forward=default", f"training.seed=range({count})", f"hydra.sweep.dir={folder}/out"]
    sys.argv += [f"tracking.uri=sqlite:///{folder}/m.db"]
    plan = multirun.plan_sweep

    def timed_plan(*args: object, **kwargs: object) -> object:
        before.append(time.perf_counter())
        return plan(*args, **kwargs)  # type: ignore[arg-type]

    start_sweep = start.start_sweep

    def timed_start(plan: object) -> int:
        before.append(time.perf_counter())
        return start_sweep(plan)  # type: ignore[arg-type]

    with (
        mock.patch.object(inline, "train_rank", timed),
        mock.patch.object(multirun, "plan_sweep", timed_plan),
        mock.patch.object(start, "start_sweep", timed_start),
    ):
        main()
    planned = (before[1] - before[0]) / count
    hundreds = [range(start, min(start + 100, count) - 1) for start in range(0, count, 100)]
    return [(planned + (marks[h[-1] + 1] - marks[h[0]]) / len(h), resident[h[-1]]) for h in hundreds]


if __name__ == "__main__":
    out = run(int(sys.argv[1]), sys.argv[2])
    print(json.dumps(out))
    sys.stdout.flush()
    os._exit(0)
