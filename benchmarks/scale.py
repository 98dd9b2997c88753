"""What the driver of a large sweep costs a trial, and how busy it keeps a large cluster.

python -m benchmarks.scale cost [trials]
python -m benchmarks.scale slots [side by side]

The whole command runs: Hydra, Ray Tune, the trials' folders, MLflow (SQLite), forecasts, the progress bar,
`results.csv` and the report. `pretend` replaces Ray Train and its workers: it writes what a trial writes, and sleeps.
The driver's own CPU seconds are counted: other work on the machine matters less than to a clock.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any
from unittest import mock

import psutil

from fsdp_lab.config.status import TrialStatus
from fsdp_lab.engine.job import Job
from fsdp_lab.record.trial_files import TrialWriter, write_progress
from fsdp_lab.record.trial_json import Outcome, write_outcome

MOST_COST_MS = 250.0
MOST_GROWTH_MIB = 300.0
LEAST_BUSY = 0.95
_BLOCK = 250
_LIMIT_S = 7200
_SLEEP = "FSDP_LAB_PRETEND_S"  # seconds of each trial, reaches Ray's processes by the environment
_ROUNDS = 6  # trials of each slot
_PLACES = 16  # of `cost`: Tune takes half a second to begin and end a trial, so several wait for that side by side


def pretend(config: dict[str, Any]) -> None:
    """What Ray Tune calls in the place of a trial: write its files as rank 0 would, train nothing."""
    from ray import tune

    job = Job(**json.loads(config["job"]))
    folder, begun = Path(job.folder), time.time()
    random = Random(job.folder)
    facts = {
        "device": "cpu", "world_size": job.num_workers, "num_params": 1000, "torch": version("torch"),
        "data_digest": "0" * 16, "data_num_train": 1024, "data_num_val": 256, "data": "digits", "num_steps": 1,
        "resumed_from": None, "notes": [],
    }  # fmt: skip
    TrialWriter(folder).receive({"facts": facts})
    with (folder / "progress.json").open("w") as file:
        write_progress(file, step=1)
    time.sleep(float(os.environ[_SLEEP]) * random.uniform(0.75, 1.25))
    speed = 1000 * random.lognormvariate(0, 0.1)
    metrics = {
        "epoch": 1, "step": 10, "train/loss": 1.0, "val/loss": random.uniform(1, 1.02), "val/accuracy": 0.5,
        "perf/samples_per_s": speed, "perf/timed_steps": 8, "perf/timed_s": 1.0, "perf/speed_error": 0.02,
        "perf/others_cpu": 0.0, "perf/step_time_p50_s": 64 / speed, "perf/step_time_p95_s": 70 / speed,
        "memory/peak_bytes": 9_000_000, "memory/param_bytes": 3_000_000, "memory/grad_bytes": 3_000_000,
        "memory/activation_bytes": 3_000_000, "train/lr": 0.001, "train/step": 10,
    }  # fmt: skip
    TrialWriter(folder).receive({"metrics": metrics})
    tune.report(metrics)
    write_outcome(folder, Outcome(TrialStatus.finished, None, time.time() - begun))


class Marks:
    """Keeps the driver's CPU seconds and memory, at the beginning and after each block of trials."""

    def __init__(self, sweep: Any, to: Path) -> None:
        self._sweep, self._to, self._process, self._ended = sweep, to, psutil.Process(), 0
        self.marks: dict[str, Any] = {"planned": None, "blocks": [], "spans": []}

    def opened(self) -> None:
        self.marks["planned"] = self._now()
        self.marks["trials"] = len(self._sweep.trials)
        self.marks["blocks"].append(self._now())

    def ended(self, number: int) -> None:
        self._ended += 1
        if self._ended == 1:
            self.marks["first"] = self._now()
        self.marks["spans"].append((self._sweep.trials[number].begun, time.time()))
        if self._ended % _BLOCK == 0:
            self.marks["blocks"].append(self._now())
            self._to.write_text(json.dumps(self.marks))

    def closed(self, ending: Any) -> None:
        self.marks["finish"] = self._now()
        self._to.write_text(json.dumps(self.marks))

    def _now(self) -> tuple[float, float]:
        times = self._process.cpu_times()
        return times.user + times.system, self._process.memory_info().rss / 2**20


def run(folder: Path, cpus: int, arguments: list[str]) -> None:
    """A sweep in this process whose trials pretend; leaves `marks.json`."""
    from fsdp_lab.commands.main import main
    from fsdp_lab.sweep import runner, tuner

    run_sweep = runner.run_sweep

    def watched(sweep: Any, execute: Any, outputs: Any) -> Any:
        marks = Marks(sweep, folder / "marks.json")
        for event in ("opened", "ended", "closed"):
            setattr(outputs, event, after(getattr(outputs, event), getattr(marks, event)))
        return run_sweep(sweep, execute, outputs)

    def after(first: Any, then: Any) -> Any:
        return lambda *details: (first(*details), then(*details))

    sys.argv = ["fsdp_lab", "-m", *arguments, f"hydra.sweep.dir={folder}/out", f"tracking.uri=sqlite:///{folder}/m.db"]
    with (
        mock.patch.object(tuner, "trial_function", pretend),
        mock.patch.object(runner, "run_sweep", watched),
        mock.patch("fsdp_lab.machine.hardware.num_cpus", return_value=cpus),
    ):
        main()


def in_process(folder: Path, cpus: int, sleep_s: float, arguments: list[str]) -> dict[str, Any]:
    """What `run` finds in a process of its own, whose output goes to `out.txt` as to a terminal."""
    # Ray would start a process a CPU before anybody asks for one.
    settings = {_SLEEP: str(sleep_s), "RAY_prestart_worker_first_driver": "0", "FORCE_COLOR": "1", "COLUMNS": "160"}
    command = [sys.executable, "-m", "benchmarks.scale", "run", str(folder), str(cpus), *arguments]
    with (folder / "out.txt").open("wb") as out:
        subprocess.run(command, check=True, timeout=_LIMIT_S, stdout=out, env={**os.environ, **settings})
    marks: dict[str, Any] = json.loads((folder / "marks.json").read_text())
    return marks


def cost(count: int, folder: Path) -> int:
    """Print the driver's CPU a trial by blocks, its memory, and what is left behind."""
    half = max(1, count // 100)
    grid = [
        f"optimizer.lr=range(0.0001,{0.0001 * (half + 0.5):.6f},0.0001)",
        f"training.max_steps=range(1,{min(count, 100) + 1})",
    ]
    where = ["sharding=per_block", "precision=fp32", "offload=none", "reshard_after_forward=default"]
    marks = in_process(folder, _PLACES, 1.0, [*grid, *where, "cluster.num_workers=1"])
    planned = marks["planned"][0] / marks["trials"]
    print(f"{marks['trials']} trials; composing, checking and writing them down: {planned * 1000:.0f} ms of CPU each\n")
    print("| trials | driver, ms of CPU a trial | resident, MiB |\n| --- | --- | --- |")
    blocks = marks["blocks"]
    costs = []
    for number, (before, after) in enumerate(pairwise(blocks)):
        costs.append(1000 * ((after[0] - before[0]) / _BLOCK + planned))
        print(f"| {number * _BLOCK + 1} to {(number + 1) * _BLOCK} | {costs[-1]:.0f} | {after[1]:.0f} |")
    growth = max(after[1] for after in blocks) - marks["first"][1]
    rest = marks["finish"][0] - blocks[-1][0]
    print(f"\nthe rest, with the report: {rest:.1f} s of CPU; at most {growth:.0f} MiB more than after the first trial")
    for name in ("results.csv", "report.html"):
        path = folder / "out" / name
        print(f"{name}: {path.stat().st_size / 2**20:.1f} MiB" if path.exists() else f"{name}: none")
    print(f"asked for: at most {MOST_COST_MS:.0f} ms a trial and {MOST_GROWTH_MIB:.0f} MiB")
    return 0 if costs and max(costs) <= MOST_COST_MS and growth <= MOST_GROWTH_MIB else 1


def slots(side: int, folder: Path) -> int:
    """Print the share of a simulated cluster's slots that trials of a minute keep busy, once all were busy at once."""
    grid = [f"optimizer.lr=range(0.0001,{0.0001 * (_ROUNDS * side + 0.5):.6f},0.0001)", "training.max_steps=1"]
    where = ["sharding=per_block", "precision=fp32", "offload=none", "reshard_after_forward=default"]
    in_process(folder, 4 * side, 60.0, [*grid, *where, "cluster.num_workers=1", "cluster.cpus_per_worker=4"])
    # a trial's own times: what Ray and Tune take before and after counts as idle
    times = [json.loads(path.read_text()) for path in (folder / "out").glob("*/progress.json")]
    spans = sorted((t["first_step"], t["reported"]) for t in times)
    begins = [begin for begin, _ in spans]
    running = [sum(b <= begin < e for b, e in spans) for begin in begins]
    # processes start one after another, which takes longer than a trial: the 64th trial is not the first full load
    start, end = begins[running.index(max(running))], begins[-1]
    busy = sum(max(0.0, min(e, end) - max(b, start)) for b, e in spans) / (side * (end - start))
    print(f"{len(spans)} trials of 45 to 75 s, {side} side by side on {4 * side} CPUs that are not there:")
    print(f"{max(running)} ran side by side after {start - begins[0]:.0f} s, in which the trials' processes started")
    print(f"the slots were busy for {busy:.1%} of the {end - start:.0f} s from then until the last trial started")
    print(f"asked for: at least {LEAST_BUSY:.0%}")
    return 0 if busy >= LEAST_BUSY else 1


def main() -> int:
    what, *rest = sys.argv[1:] or ["cost"]
    if what == "run":
        run(Path(rest[0]), int(rest[1]), rest[2:])
        return 0
    with tempfile.TemporaryDirectory() as made:
        folder = Path(os.environ.get("FSDP_LAB_KEEP") or made)
        folder.mkdir(exist_ok=True)
        code = slots(int((*rest, "64")[0]), folder) if what == "slots" else cost(int((*rest, "500")[0]), folder)
    where = f"{os.cpu_count()} cores ({platform.machine()}), Python {platform.python_version()}"
    print(f"\n{where}, ray {version('ray')}, mlflow {version('mlflow')}")
    return code


if __name__ == "__main__":
    sys.exit(main())
