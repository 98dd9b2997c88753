"""What the allocator held at its peak, against the forecast: a ViT by the product's own training loop."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from benchmarks.check_gpu.lines import Bench, Line, Measured
from benchmarks.check_gpu.run import run_trial
from benchmarks.check_gpu.settings import Setting, trial, words
from fsdp_lab.config.conf import CALIBRATIONS
from fsdp_lab.files import write_json

LIMIT, GOAL = 0.10, 0.05  # of the peak
RESERVED_LIMIT = 0.15
_CALIBRATE_S, _CALIBRATE_LIMIT_S = 60, 240.0  # to measure, and in all
AXES: dict[str, tuple[str, ...]] = {
    "sharding": ("ddp", "root", "per_block"),
    "precision": ("fp32", "bf16_mixed", "fp16"),
    "offload": ("none", "cpu"),
    "reshard_after_forward": ("always", "never"),
    "activation_checkpointing": ("none", "full"),
}
# Every so many of the combinations; a test shows that on a GPU every two values of different axes still meet.
_STRIDE, _CPU_STRIDE = 3, 5
# DDP compresses gradients on the wire, and NCCL may hold several compressed buckets: reported, without a limit.
NARROW: tuple[Setting, ...] = tuple({"sharding": "ddp", "precision": p} for p in ("grad_bf16", "bf16", "fp16"))


def combinations() -> Iterator[Setting]:
    """Every combination that is valid and differs from the others."""
    for values in itertools.product(*AXES.values()):
        case = dict(zip(AXES, values, strict=True))
        if case["sharding"] != "ddp" or (case["offload"] == "none" and case["reshard_after_forward"] == "always"):
            yield case


def lines(bench: Bench) -> list[Line]:
    models = ("vit_b_16", "vit_l_16") if bench.cuda and bench.thorough else ("vit_b_16" if bench.cuda else "vit_tiny",)
    cases = [{"model": model, **case} for model in models for case in combinations()]
    chosen = cases if bench.thorough else cases[:: _STRIDE if bench.cuda else _CPU_STRIDE]
    usual = f"peak within {LIMIT:.0%} (goal {GOAL:.0%}) of the forecast, reserved within {RESERVED_LIMIT:.0%}"
    expected = usual if bench.cuda else "peak as forecast, to the byte"
    planned = [
        Line("memory", words(case), workers, expected, case)
        for workers in dict.fromkeys((bench.workers, 1) if bench.cuda else (bench.workers,))
        for case in chosen
    ]
    if bench.cuda:
        narrow = [{"model": models[0], **case} for case in NARROW]
        planned += [Line("memory", f"narrow: {words(c)}", bench.workers, "reported", c) for c in narrow]
    return planned


def setting_of(line: Line, bench: Bench) -> Setting:
    """Some steps of 32 images a worker, eight on a CPU."""
    batch, steps = (32 if bench.cuda else 8) * line.workers, 8 if bench.cuda else 2
    return {
        **line.case,
        "training.global_batch_size": batch,
        "training.max_steps": steps,
        "data.num_train": batch * steps,
        "data.num_val": batch,
        "memory_profile": "peaks",
    }


def prepare(lines: Sequence[Line], bench: Bench) -> None:
    """Forecast every line, in processes of their own."""
    from fsdp_lab.forecast.run import Request, forecast_all

    capacity = bench.machine.memory_bytes
    sheet = _sheet(bench)
    requests = [
        Request(trial(setting_of(line, bench)), line.workers, bench.cuda, capacity, sheet=sheet) for line in lines
    ]
    forecasts = {}
    for line, forecast in zip(lines, forecast_all(requests), strict=True):
        forecasts[line.id] = {"error": forecast.error}
        if forecast.error is None:
            forecasts[line.id] = {
                "error": None,
                "peak_bytes": forecast.peak_bytes,
                "reserved_bytes": getattr(forecast, "reserved_bytes", None),
                "host_bytes": forecast.peaks.get("host", {}).get("total", 0),
                "fits": forecast.fits,
                "samples_per_s": forecast.speed and forecast.speed.samples_per_s,
            }
    write_json(_file(bench, lines[0].workers), forecasts)


def _sheet(bench: Bench) -> Any:
    """What to predict speeds by: a calibration of this GPU, made here, or its data sheet; None where there is neither,
    or where what reads them is not installed."""
    from fsdp_lab.forecast.devices import sheet_of

    try:
        return (_calibrated(bench) or sheet_of(bench.machine.name)) if bench.cuda else None
    except ImportError:
        return None


def _calibrated(bench: Bench) -> Any:
    """Calibrate in a process of its own, which gives the GPUs back."""
    from fsdp_lab.speed.device import load_device

    name = f"here_x{bench.workers}"
    file = bench.prepared / CALIBRATIONS / f"{name}.yaml"
    if file.is_file():
        return load_device(file)
    command = [sys.executable, "-m", "fsdp_lab.calibrate", f"workers={bench.workers}", "device=cuda", f"name={name}"]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    try:
        run_group([*command, f"limit_s={_CALIBRATE_S}"], bench.prepared, environment, _CALIBRATE_LIMIT_S)
    except (OSError, subprocess.SubprocessError) as error:
        print(f"speeds are predicted by the data sheet: the calibration failed: {error}", flush=True)
        return None
    return load_device(file)


def run_group(command: list[str], folder: Path, environment: dict[str, str], limit_s: float) -> None:
    """Run a command to its end, and end all of its processes when it takes longer: a rank that is left holds a GPU.

    Raises:
        SubprocessError: it failed, or took too long.
    """
    with subprocess.Popen(command, cwd=folder, env=environment, start_new_session=True) as process:
        try:
            code = process.wait(limit_s)
        except BaseException:  # an interrupt, too: the terminal sends it to this process's group alone
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            raise
    if code:
        raise subprocess.CalledProcessError(code, command)


def _file(bench: Bench, workers: int) -> Path:
    return bench.prepared / f"forecasts_x{workers}.json"


def forecast_of(line: Line, bench: Bench) -> dict[str, Any]:
    return json.loads(_file(bench, line.workers).read_text())[line.id]


def measure(line: Line, bench: Bench) -> Measured:
    forecast = forecast_of(line, bench)
    if forecast["error"]:
        return Measured(False, f"no forecast: {forecast['error']}")
    metrics = run_trial(setting_of(line, bench)).metrics
    measured = judge(metrics, forecast, bench.cuda)
    speed = metrics.get("perf/samples_per_s")
    text = measured.text + (f"; {speed:.0f} samples/s" if speed else "")
    if speed and (predicted := forecast.get("samples_per_s")):
        measured.figures["speed_forecast_error"] = speed / predicted - 1  # of the seconds of a step
        text += f", predicted {predicted:.0f} (step {speed / predicted - 1:+.1%})"
    text += f", MFU {metrics['perf/mfu']:.2f}" if "perf/mfu" in metrics else ""
    return Measured(measured.passed or line.expected == "reported", text, {**metrics, **measured.figures})


def judge(metrics: dict[str, float], forecast: dict[str, Any], cuda: bool) -> Measured:
    """Compare peaks, and on CUDA what the allocator reserved where that is forecast."""
    peak, reserved = metrics["memory/peak_bytes"], metrics.get("memory/reserved_bytes")
    error = forecast["peak_bytes"] / peak - 1
    figures = {"forecast": forecast, "peak_error": error}
    text = f"peak {_mib(peak)}, forecast {_mib(forecast['peak_bytes'])} MiB ({error:+.2%})"
    if not cuda:
        return Measured(forecast["peak_bytes"] == peak, text, figures)
    passed = abs(error) <= LIMIT
    if reserved:
        text += f"; reserved {_mib(reserved)}"
        if forecast["reserved_bytes"] is not None:
            figures["reserved_error"] = forecast["reserved_bytes"] / reserved - 1
            text += f", forecast {_mib(forecast['reserved_bytes'])} MiB ({figures['reserved_error']:+.2%})"
            passed = passed and abs(figures["reserved_error"]) <= RESERVED_LIMIT
    return Measured(passed, text, figures)


def on_error(line: Line, bench: Bench, error: Exception) -> Measured | None:
    """Out of memory is right where the forecast says that the trial does not fit; None for other errors."""
    if type(error).__name__ != "OutOfMemoryError":
        return None
    forecast = forecast_of(line, bench)
    predicted = "not to fit" if forecast["fits"] is False else "to fit"
    text = f"out of memory, forecast {predicted} ({_mib(forecast['peak_bytes'])} MiB at the peak)"
    return Measured(forecast["fits"] is False, text, {"forecast": forecast})


def _mib(num_bytes: float) -> str:
    return f"{num_bytes / 2**20:.1f}"
