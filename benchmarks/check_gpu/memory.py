"""What the allocator held at its peak, against the forecast: a ViT and a Llama by the product's own training loop."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.check_gpu.lines import Bench, Line, Measured
from benchmarks.check_gpu.run import run_trial
from benchmarks.check_gpu.settings import Setting, trial, words
from fsdp_lab.files import write_json

LIMIT, GOAL = 0.10, 0.05  # of the peak
RESERVED_LIMIT = 0.15
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
# Llama with 124 million parameters on a GPU, and lm_tiny itself on a CPU.
LLAMA: Setting = {"model": "lm_tiny", "model.vocab_size": 32000, "model.dim": 768, "model.num_layers": 12,
                  "model.num_heads": 12, "model.ffn_dim": 2048, "data.seq_len": 1024}  # fmt: skip
TINY_LLAMA: Setting = {"model": "lm_tiny", "data.seq_len": 32}
LLAMA_CASES: tuple[Setting, ...] = (
    {"sharding": "per_block", "precision": "bf16_mixed", "reshard_after_forward": "always"},
    {"sharding": "per_block", "precision": "bf16_mixed", "activation_checkpointing": "full"},
    {"sharding": "per_block", "precision": "bf16_mixed", "task.loss_chunks": 8},
    {"sharding": "root", "precision": "fp32"},
    {"sharding": "per_block", "precision": "fp32", "offload": "cpu", "reshard_after_forward": "never"},
)


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
    llama = LLAMA if bench.cuda else TINY_LLAMA
    planned += [
        Line("memory", f"llama: {words(case)}", bench.workers, expected, {**llama, **case}) for case in LLAMA_CASES
    ]
    if bench.cuda:
        narrow = [{"model": models[0], **case} for case in NARROW]
        planned += [Line("memory", f"narrow: {words(c)}", bench.workers, "reported", c) for c in narrow]
    return planned


def setting_of(line: Line, bench: Bench) -> Setting:
    """Some steps of 32 images or four rows of tokens a worker, of eight and two on a CPU."""
    images, rows = (32, 4) if bench.cuda else (8, 2)
    each, steps = rows if line.case["model"] == "lm_tiny" else images, 8 if bench.cuda else 2
    batch = each * line.workers
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
    from fsdp_lab.forecast.words import no_forecast_text

    capacity = bench.machine.memory_bytes
    sheet = _sheet(bench)
    requests = [
        Request(trial(setting_of(line, bench)), line.workers, bench.cuda, capacity, sheet=sheet) for line in lines
    ]
    forecasts = {}
    for line, forecast in zip(lines, forecast_all(requests), strict=True):
        forecasts[line.id] = {"error": no_forecast_text(forecast.error)}
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
    """What to predict speeds by: the GPU's data sheet; None where there is none, or what reads it is not installed."""
    from fsdp_lab.forecast.devices import sheet_of

    try:
        return sheet_of(bench.machine.name) if bench.cuda else None
    except ImportError:
        return None


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
