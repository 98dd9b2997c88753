"""What the allocator of a GPU held at its peak, against the forecast; samples/s and MFU beside it.

python -m benchmarks.memory_gpu [--models vit_b_16 vit_l_16] [--batch 32] [--steps 12] [--only 4] [--out FOLDER]

Needs torch and torchvision: no Ray, no MLflow. One worker on one GPU, then all GPUs of the machine where
there are more. Each setting trains some steps on synthetic images by `fsdp_lab.training.train` itself, in one
process a GPU for all settings. Writes gpu.csv and gpu.md, and ends with 1 when a forecast is off by more than 10 %.
`--device cpu` runs the same on two CPU workers, to see the command work.
"""

from __future__ import annotations

import argparse
import csv
import gc
import itertools
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.keep import Keep
from fsdp_lab.config import TrialConfig, check_trial
from fsdp_lab.config.schema import Dtype
from fsdp_lab.forecast.fits import gpu_memory
from fsdp_lab.forecast.run import Request, forecast_all
from fsdp_lab.training.__main__ import read_config

WORST_ERROR = 0.10
GOAL = 0.05
_LIMIT_S = 3000
_AXES = {
    "sharding": ("ddp", "root", "per_block"),
    "precision": ("fp32", "bf16_mixed", "fp16"),
    "offload": ("none", "cpu"),
    "reshard_after_forward": ("always", "never"),
    "activation_checkpointing": ("none", "full"),
}
_MATRIX = 8192
_DTYPES = {Dtype.float32: torch.float32, Dtype.bfloat16: torch.bfloat16, Dtype.float16: torch.float16}
_COLUMNS = (
    "model", *_AXES, "workers", "active_peak_bytes", "forecast_bytes", "error", "reserved_bytes", "tracker_bytes",
    "host_bytes", "forecast_host_bytes", "samples_per_s", "mfu",
)  # fmt: skip


def settings(models: list[str]) -> Iterator[dict[str, str]]:
    """Every combination that has a meaning and differs from the others."""
    for model, *values in itertools.product(models, *_AXES.values()):
        case = {"model": model, **dict(zip(_AXES, values, strict=True))}
        if case["sharding"] == "ddp" and (case["offload"] != "none" or case["reshard_after_forward"] != "always"):
            continue
        yield case


def config_of(case: dict[str, str], batch: int, steps: int, workers: int) -> TrialConfig:
    """A trial of `steps` optimizer steps of `batch` synthetic images a worker."""
    words = [f"{key}={value}" for key, value in case.items()]
    total = batch * workers
    words += ["data=synthetic", f"data.num_train={total * steps}", f"data.num_val={total}", "data.loader_workers=2"]
    words += [f"training.global_batch_size={total}", "training.epochs=1", f"training.max_steps={steps}"]
    words += ["checkpoint.mode=off", "export=false", "init=meta", f"cluster.num_workers={workers}"]
    config = read_config(None, words)
    check_trial(config, workers)
    return config


def measure_all(configs: list[TrialConfig], out: Path) -> None:
    """Under torchrun, on each rank: train every config, and on rank 0 append its metrics to `out`, a line each."""
    import torch.distributed as dist

    from fsdp_lab.training import train

    for number, config in enumerate(configs):
        keep = Keep()
        with tempfile.TemporaryDirectory() as folder:
            try:
                train(config, Path(folder), keep)
                metrics: dict[str, Any] = keep.metrics
            except torch.OutOfMemoryError as error:
                metrics = {"error": str(error).splitlines()[0]}
        if dist.get_rank() == 0:
            with out.open("a") as lines:
                lines.write(json.dumps(metrics) + "\n")
            print(f"measured {number + 1} of {len(configs)}", file=sys.stderr, flush=True)
        if "error" in metrics and dist.get_world_size() > 1:
            sys.exit(1)  # the others wait for this rank in a collective: torchrun ends them
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def launch(configs: list[TrialConfig], workers: int, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """The metrics of each config, from `workers` processes; what they did not come to has `error`."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "metrics.jsonl")
        words = ["--worker", str(out), "--workers", str(workers), "--batch", str(arguments.batch)]
        words += ["--steps", str(arguments.steps), "--models", *arguments.models]
        words += ["--only", str(arguments.only)] if arguments.only else []
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(workers)]
        environment = {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "4")}
        command += ["-m", "benchmarks.memory_gpu", *words]
        with subprocess.Popen(command, env=environment, start_new_session=True) as process:
            try:
                process.wait(timeout=_LIMIT_S)
            except (subprocess.TimeoutExpired, KeyboardInterrupt):  # no worker may keep a GPU
                os.killpg(process.pid, signal.SIGKILL)
                print(f"stopped after {_LIMIT_S} s at most; what was measured by then is shown", file=sys.stderr)
        found = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
        return found + [{"error": "not measured"}] * (len(configs) - len(found))


def matrix_rates() -> dict[Dtype, float]:
    """FLOP/s of a large matrix product of this device, by dtype: the median of five timed ones."""
    rates = {}
    for name, dtype in _DTYPES.items():
        a, b = (torch.randn(_MATRIX, _MATRIX, device="cuda", dtype=dtype) for _ in range(2))
        seconds = []
        for _ in range(8):
            begun, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begun.record()
            a @ b
            ended.record()
            torch.cuda.synchronize()
            seconds.append(begun.elapsed_time(ended) / 1000)
        rates[name] = 2 * _MATRIX**3 / sorted(seconds[3:])[2]
        del a, b
    torch.cuda.empty_cache()  # to those who measure
    return rates


def row(
    case: dict[str, str], config: TrialConfig, workers: int, metrics: dict[str, Any], found: Any, rate: float | None
) -> dict[str, Any]:
    """One line of the table."""
    # the allocator's active bytes have the workspaces of cuBLAS in them
    foretold = found.peak_bytes + found.allowances.get("kernel workspaces", 0)
    line: dict[str, Any] = {**case, "workers": workers, "forecast_bytes": foretold}
    line["forecast_host_bytes"] = found.peaks.get("host", {}).get("total", 0)
    if "error" in metrics:
        said = ", as forecast" if found.fits is False else ""
        return {**line, "error": f"{metrics['error']}{said}"}
    measured = metrics["memory/peak_bytes"]
    line.update(
        active_peak_bytes=int(measured),
        error=foretold / measured - 1,
        reserved_bytes=int(metrics.get("memory/reserved_bytes", 0)),
        tracker_bytes=int(measured - metrics.get("memory/other_bytes", 0)),
        host_bytes=int(metrics.get("memory/host_peak_bytes", 0)),
        samples_per_s=metrics.get("perf/samples_per_s", ""),
    )
    if rate and line["samples_per_s"]:
        from fsdp_lab.training.speed import train_flops_per_sample

        line["mfu"] = line["samples_per_s"] * train_flops_per_sample(config.model) / (rate * workers)
    return line


def write(out: Path, lines: list[dict[str, Any]], about: str) -> str:
    """gpu.csv with every figure, and gpu.md, the table for people, which is returned."""
    out.mkdir(parents=True, exist_ok=True)
    with (out / "gpu.csv").open("w", newline="") as file:
        rows = csv.DictWriter(file, _COLUMNS)
        rows.writeheader()
        rows.writerows(lines)
    head = ["model", *_AXES, "workers", "active MiB", "forecast MiB", "error", "reserved MiB", "samples/s", "MFU"]
    text = [about, "", f"| {' | '.join(head)} |", f"| {' | '.join('---' for _ in head)} |"]
    for line in lines:
        cells = [str(line[key]) for key in ("model", *_AXES, "workers")]
        if isinstance(line["error"], str):
            cells += ["", f"{line['forecast_bytes'] / 2**20:.1f}", line["error"], "", "", ""]
        else:
            cells += [f"{line['active_peak_bytes'] / 2**20:.1f}", f"{line['forecast_bytes'] / 2**20:.1f}"]
            cells += [f"{line['error']:+.2%}", f"{line['reserved_bytes'] / 2**20:.1f}"]
            cells += [f"{line['samples_per_s']:.1f}" if line["samples_per_s"] else "", f"{line.get('mfu') or 0:.3f}"]
        text.append(f"| {' | '.join(cells)} |")
    table = "\n".join(text)
    (out / "gpu.md").write_text(table + "\n")
    return table


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["vit_b_16", "vit_l_16"])
    parser.add_argument("--batch", type=int, default=32, help="images a worker takes at once")
    parser.add_argument("--steps", type=int, default=12, help="optimizer steps; the first three are not timed")
    parser.add_argument("--only", type=int, help="only each n-th setting")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--out", type=Path, default=Path("experiments/forecast_accuracy/results"))
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--workers", type=int, default=1, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    cases = list(settings(arguments.models))[:: arguments.only or 1]

    def configs(workers: int) -> list[TrialConfig]:
        return [config_of(case, arguments.batch, arguments.steps, workers) for case in cases]

    if arguments.worker:
        measure_all(configs(arguments.workers), arguments.worker)
        return 0
    cuda = arguments.device == "cuda"
    if cuda and not torch.cuda.is_available():
        print("no GPU here: this command needs one (--device cpu shows that it works)", file=sys.stderr)
        return 2
    rates = matrix_rates() if cuda else {}
    sizes = sorted({1, torch.cuda.device_count()}) if cuda else [2]
    lines = []
    for workers in sizes:
        trials = configs(workers)
        found = forecast_all([Request(config, workers, cuda, gpu_memory() if cuda else None) for config in trials])
        wrong = [forecast.error for forecast in found if forecast.error]
        if wrong:
            print(f"no forecast: {wrong[0]}", file=sys.stderr)
            return 1
        measured = launch(trials, workers, arguments)
        for case, config, metrics, forecast in zip(cases, trials, measured, found, strict=True):
            rate = rates.get(config.precision.param_dtype)
            lines.append(row(case, config, workers, metrics, forecast, rate))
    name = torch.cuda.get_device_name(0) if cuda else f"CPU ({platform.machine()}, {os.cpu_count()} cores)"
    about = (
        f"{name}, {max(sizes)} at most, torch {torch.__version__}, CUDA {torch.version.cuda}, Python "
        f"{platform.python_version()}; batch {arguments.batch} a worker, {arguments.steps} steps. "
        + "  ".join(f"{dtype.name} matrix product {rate / 1e12:.0f} TFLOP/s." for dtype, rate in rates.items())
    )
    print(write(arguments.out, lines, about))
    # out of memory where a fit was forecast is as wrong as can be
    errors = [
        1.0 if isinstance(line["error"], str) else abs(line["error"])
        for line in lines
        if not str(line["error"]).endswith("as forecast")
    ]
    worst = max(errors, default=1.0)
    close = sum(error <= GOAL for error in errors)
    verdict = "holds" if worst <= WORST_ERROR else "DOES NOT HOLD"
    print(f"\n{len(lines)} settings, {close} within {GOAL:.0%}")
    print(f"worst error {worst:.2%}, at most {WORST_ERROR:.0%}: {verdict}")
    return 0 if worst <= WORST_ERROR else 1


if __name__ == "__main__":
    sys.exit(main())
