"""Predicted against measured steps on this machine's CPU: calibrate, predict all settings, then run them in turn.

python -m benchmarks.speed [--device <file>] [--rounds 3] [--small] [--out outputs/bench_speed]

Two models, neither of which the calibration trains: a vision transformer of other sizes, and a GPT of another
architecture. Every prediction is written down before the first trial runs. A trial is a real one, in two processes
without Ray. Prints Spearman's rank correlation, the errors, how many are inside their intervals, and how the setting
that should be fastest compares with the one that is.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, fields
from pathlib import Path
from statistics import median

import numpy as np
from scipy.stats import spearmanr

from benchmarks.keep import Keep
from fsdp_lab.calibrate.rank import SMALL
from fsdp_lab.calibrate.steps import trace_all
from fsdp_lab.cpu_contention import Others
from fsdp_lab.files import whole
from fsdp_lab.speed.device import load_device
from fsdp_lab.speed.predict import Speed, predict

WORKERS = 2
_STEPS = 12  # of a trial, the first two not timed
_LIMIT_S = 120.0  # for the other worker

GPT = (
    "model=custom", "model._target_=benchmarks.published.decoders.Mpt", "model.vocab_size=1024", "model.dim=160",
    "model.num_layers=3", "model.num_heads=5", "model.max_seq_len=96", "data=synthetic_tokens", "data.seq_len=96",
    "task=language",
)  # fmt: skip
VIT = (
    "model=vit_tiny", "model.hidden_dim=256", "model.num_layers=5", "model.num_heads=8", "model.mlp_dim=640",
    "data=synthetic",
)  # fmt: skip
MODELS = {"gpt": GPT, "vit": VIT}


@dataclass(frozen=True)
class Case:
    model: str
    sharding: str
    reshard: str
    precision: str
    checkpointing: str
    accumulate: int
    batch: int

    @property
    def words(self) -> list[str]:
        return [
            *MODELS[self.model], f"sharding={self.sharding}", f"reshard_after_forward={self.reshard}",
            f"precision={self.precision}", f"activation_checkpointing={self.checkpointing}",
            f"training.grad_accum_steps={self.accumulate}", f"training.global_batch_size={self.batch}",
        ]  # fmt: skip


def cases(small: bool = False) -> list[Case]:
    """Return 48 settings, or 6 whose speeds lie far apart."""
    plain, again = ("none", 1, 16), ("full", 1, 16)
    larger, accumulated = ("none", 1, 48), ("none", 2, 32)
    variants = {
        ("ddp", "default"): (plain, larger, accumulated),
        ("root", "always"): (plain, again, larger),
        ("per_block", "always"): (plain, again, larger, accumulated),
        ("per_block", "never"): (plain, accumulated),
    }
    if small:
        variants = {("ddp", "default"): (larger,), ("per_block", "always"): (("full", 1, 4), again)}
    precisions = ("fp32",) if small else ("fp32", "bf16_mixed")
    return [
        Case(model, sharding, reshard, precision, *variant)
        for model, precision in itertools.product(MODELS, precisions)
        for (sharding, reshard), some in variants.items()
        for variant in some
    ]


def _rank(rank: int, folder: str, settings: list[list[str]], rounds: int) -> None:
    """Train each setting in turn, as many times, and leave the median seconds of each run's steps."""
    import torch

    from fsdp_lab.training import train
    from fsdp_lab.training.__main__ import read_config
    from fsdp_lab.training.distributed import join_by_file_store

    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(WORKERS))
    torch.set_num_threads(1)
    join_by_file_store(f"{folder}/store", "gloo", rank, WORKERS, _LIMIT_S)
    seconds: list[list[float]] = [[] for _ in settings]
    for number in range(rounds):
        begun = time.time()
        for words, times in zip(settings, seconds, strict=True):
            config = read_config(None, [*SMALL, *words])
            last = Keep()
            with tempfile.TemporaryDirectory() as own:
                train(config, Path(own), last)
            times.append(last.metrics["perf/step_time_p50_s"])
        if rank == 0:
            print(f"round {number + 1} of {rounds}: {time.time() - begun:.0f} s", flush=True)
    Path(folder, f"{rank}.json").write_text(json.dumps(seconds))
    torch.distributed.barrier()
    os._exit(0)


def measure(some: list[Case], rounds: int) -> list[list[float]]:
    """Return the median seconds of a step, of each run of each setting."""
    import torch.multiprocessing as mp

    length = [[f"data.num_train={case.batch * _STEPS}", "training.timing_warmup_steps=2"] for case in some]
    settings = [[*case.words, *more] for case, more in zip(some, length, strict=True)]
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(_rank, (folder, settings, rounds), nprocs=WORKERS, start_method="spawn")
        return [list(times) for times in json.loads(Path(folder, "0.json").read_text())]


def forecast_all(some: list[Case], device: Path) -> list[Speed]:
    sheet = load_device(device)
    programs = trace_all([case.words for case in some], WORKERS)
    return [predict(program, sheet)[0] for program in programs]


def calibrate(folder: Path, limit_s: int) -> Path:
    command = [sys.executable, "-m", "fsdp_lab.calibrate", f"workers={WORKERS}", "name=here", f"limit_s={limit_s}"]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)}
    subprocess.run([*command, "device=cpu"], cwd=folder, check=True, timeout=10 * limit_s + 300, env=environment)
    return folder / "outputs/devices/here.yaml"


@dataclass(frozen=True)
class Judged:
    """`spearman`, and errors as `predicted / measured - 1`, over all settings; `chosen`: model -> the speed of the
    setting that should be fastest, over that of the one that is; `level`: the median of predicted / measured - 1, by
    which the machine may have changed, and `rest_error` the median error without it. `in_order`: model -> whether the
    measured speeds have the predicted order."""

    spearman: float
    median_error: float
    p90_error: float
    inside: float
    chosen: dict[str, float]
    level: float
    rest_error: float
    in_order: dict[str, bool]


def judge(some: list[Case], speeds: list[Speed], measured: list[float]) -> Judged:
    predicted = np.array([speed.step_s for speed in speeds])
    taken = np.array(measured)
    errors = np.abs(predicted / taken - 1)
    inside = [speed.low_s <= one <= speed.high_s for speed, one in zip(speeds, measured, strict=True)]
    batches = np.array([case.batch for case in some])
    chosen, in_order = {}, {}
    for model in sorted({case.model for case in some}):
        own = np.array([case.model == model for case in some])
        rates, expected = (batches / taken)[own], (batches / predicted)[own]
        chosen[model] = float(rates[expected.argmax()] / rates.max())
        in_order[model] = bool((rates.argsort() == expected.argsort()).all())
    rank = float(spearmanr(batches / predicted, batches / taken).statistic)
    ratio = predicted / taken
    level = float(np.median(ratio))
    return Judged(
        rank, float(np.median(errors)), float(np.quantile(errors, 0.9)), float(np.mean(inside)), chosen, level - 1,
        float(np.median(np.abs(ratio / level - 1))), in_order,
    )  # fmt: skip


def write(file: Path, some: list[Case], speeds: list[Speed], measured: list[list[float]] | None = None) -> None:
    """Write the table; without `measured` what is known before."""
    with whole(file) as making, making.open("w", newline="") as opened:
        table = csv.writer(opened)
        names = [field.name for field in fields(Case)]
        table.writerow([*names, "predicted_s", "low_s", "high_s", *(["measured_s", "error"] if measured else [])])
        for number, (case, speed) in enumerate(zip(some, speeds, strict=True)):
            row = [getattr(case, name) for name in names] + [
                f"{s:.5f}" for s in (speed.step_s, speed.low_s, speed.high_s)
            ]
            if measured:
                taken = median(measured[number])
                row += [f"{taken:.5f}", f"{speed.step_s / taken - 1:+.3f}"]
            table.writerow(row)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", type=Path, help="a calibration of this machine; without it, it is calibrated first")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--small", action="store_true", help="6 settings whose speeds lie far apart")
    parser.add_argument("--calibrate-s", type=int, default=120)
    parser.add_argument("--out", type=Path, default=Path("outputs/bench_speed"))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    some = cases(options.small)
    device = options.device or calibrate(options.out, options.calibrate_s)
    speeds = forecast_all(some, device)
    write(options.out / "predicted.csv", some, speeds)
    print(f"predicted {len(some)} settings: {options.out / 'predicted.csv'}; now they run", flush=True)
    with Others() as others:
        measured = measure(some, options.rounds)
    write(options.out / "speed.csv", some, speeds, measured)
    judged = judge(some, speeds, [median(times) for times in measured])
    spread = median(max(times) / min(times) - 1 for times in measured)
    print(
        f"{len(some)} settings, {options.rounds} rounds; slowest over fastest round, the median: +{spread:.1%}; "
        f"others had {others.share:.1%} of the cores"
    )
    print(f"Spearman {judged.spearman:.3f}; error: median {judged.median_error:.1%}, p90 {judged.p90_error:.1%}")
    print(f"inside their intervals: {judged.inside:.1%}")
    print(
        f"common to all: {judged.level:+.1%}, as where the machine changed; without it, median {judged.rest_error:.1%}"
    )
    for model, share in judged.chosen.items():
        print(f"{model}: the setting that should be fastest has {share:.1%} of the speed of the fastest")
    if options.small:
        print(
            f"in the predicted order: {', '.join(model for model, same in judged.in_order.items() if same) or 'none'}"
        )
    print(f"table: {options.out / 'speed.csv'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
