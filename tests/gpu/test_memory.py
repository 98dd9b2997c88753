"""What the allocator held in a step, and how long the step took, against the forecast.

On a GPU of the settings in `_ON_A_GPU`; on a CPU of small ones, whose forecasts for a GPU are made, too.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import combinations
from typing import Any

import pytest
import torch

from fsdp_lab.forecast.devices import sheet_of
from fsdp_lab.forecast.request import Request
from fsdp_lab.forecast.run import forecast_all
from fsdp_lab.memory.profile import CATEGORIES
from tests.gpu.conftest import Machine
from tests.gpu.ranks import Ranks
from tests.ranks import config, train_all

pytestmark = pytest.mark.gpu

VIT_B, VIT_L = ("model=vit_b_16 data=synthetic", 32), ("model=vit_l_16 data=synthetic", 32)  # of a rank
LLAMA = ("model=llama3_1b data.seq_len=2048 init=meta", 2)
_ON_A_GPU = {
    f"{words} {cell}": each
    for (words, each), cell in (
        (VIT_L, "sharding=per_block precision=bf16_mixed reshard_after_forward=always"),
        (LLAMA, "sharding=per_block precision=bf16_mixed reshard_after_forward=always"),
        (VIT_B, "sharding=per_block precision=bf16_mixed offload=cpu"),
        (VIT_B, "sharding=ddp precision=fp16"),
        (LLAMA, "sharding=per_block precision=bf16_mixed compile=true"),
        (LLAMA, "sharding=per_block precision=bf16_pure"),
        (VIT_L, "sharding=per_block precision=bf16_mixed compile=true"),
        (VIT_L, "sharding=root precision=fp16 activation_checkpointing=full"),
        (LLAMA, "sharding=per_block precision=bf16 activation_checkpointing=selective optimizer=adamw"),
        (VIT_B, "sharding=per_layer precision=fp32 training.grad_accum_steps=2 training.max_grad_norm=1"),
        (LLAMA, "sharding=per_block precision=bf16_mixed activation_checkpointing=full task.loss_chunks=8"),
        (LLAMA, "sharding=ddp precision=bf16_mixed"),
        (LLAMA, "sharding=per_block precision=bf16_mixed activation_offload=cpu"),
        (VIT_B, "sharding=size_based sharding.min_num_params=5000000 precision=fp16_mixed offload=cpu_unpinned"),
    )
}
SETTINGS = {  # with samples of a rank
    "cuda": _ON_A_GPU,
    "cpu": {
        "model=vit_tiny data=synthetic sharding=per_block precision=bf16_mixed": 4,
        "model=lm_tiny data.seq_len=32 sharding=root precision=fp32 offload=cpu": 4,
        "model=vit_tiny data=synthetic sharding=ddp precision=fp16": 4,
        "model=lm_tiny data.seq_len=32 sharding=per_block precision=bf16_mixed activation_offload=cpu": 4,
    },
}
CUDA_STEPS, CPU_STEPS = 12, 3
RESERVED, COMPILED = 0.05, 0.02
# Following a step holds one small gradient longer than training does, in a step whose peak is at its end.
HELD_LONGER = 8192
CPU_SHEET = "NVIDIA H100 80GB HBM3"  # for forecasts that no measurement is compared with
MEASURED: dict[str, dict[str, float]] = {}  # by setting
ENOUGH = 0.1  # two predicted steps that differ by less have no order


def trial_of(machine: Machine, words: str) -> list[str]:
    batch = SETTINGS[machine.device][words] * machine.ranks * (2 if "grad_accum_steps=2" in words else 1)
    steps = CUDA_STEPS if machine.cuda else CPU_STEPS
    sizes = [f"training.global_batch_size={batch}", f"training.max_steps={steps}", f"data.num_train={batch * steps}"]
    rest = ["memory_profile=peaks", f"data.num_val={machine.ranks}", "training.timing_warmup_steps=3"]
    return [*words.split(), *sizes, *rest]


def measure(words: list[str], cuda: bool) -> dict[str, float]:
    """On one rank: the metrics of a few steps, and what the process holds on the GPU outside of the allocator."""
    ((_, epochs),) = train_all([words])
    if not cuda:
        return epochs[-1]
    free, total = torch.cuda.mem_get_info()
    return {**epochs[-1], "context_bytes": float(total - free - torch.cuda.memory_reserved())}


class Forecasts:
    """The forecasts of all settings, made in processes of their own while the losses are compared."""

    def __init__(self, machine: Machine) -> None:
        sheet = sheet_of(torch.cuda.get_device_properties(0).name if machine.cuda else CPU_SHEET)
        asked = {(name, cuda): Request(config(*trial_of(machine, name)), machine.ranks, cuda, 79 * 2**30,
                                       sheet=sheet if cuda else None)
                 for name in SETTINGS[machine.device] for cuda in {machine.cuda, True}}  # fmt: skip
        self._names = list(asked)
        self._made = ThreadPoolExecutor(1).submit(forecast_all, list(asked.values()))

    def of(self, name: str, cuda: bool) -> Any:
        forecast = self._made.result(300)[self._names.index((name, cuda))]
        assert forecast.error is None, f"{forecast.error}\n{forecast.traceback}"
        return forecast


def test_a_step_holds_what_was_forecast(
    setting: str, machine: Machine, ranks: Ranks, forecasts: Forecasts, figures: Callable[..., None]
) -> None:
    words = trial_of(machine, setting)
    metrics = MEASURED[setting] = ranks.run(measure, words, machine.cuda, seconds=180)[0]
    forecast = forecasts.of(setting, machine.cuda)
    peak, wanted = metrics["memory/peak_bytes"], forecast.peaks["device"]["total"]
    left = peak - wanted - (scalar_bytes(words) if machine.cuda else 0)
    on_device, on_host = (differences(metrics, forecast, place) for place in ("device", "host"))
    figures(peak_bytes=peak, forecast_bytes=wanted, unexplained_bytes=left, differs="; ".join(on_device + on_host))
    if "offload=cpu" in words:
        assert not on_host
    if not machine.cuda:
        assert left == 0 and not on_device
        return
    reserved, room = metrics["memory/reserved_bytes"], forecast.allowances.get("compressed gradients", 0)
    figures(reserved_bytes=reserved, reserved_error=forecast.reserved_bytes / reserved - 1)
    figures(workspace_bytes=metrics["memory/workspace_bytes"], context_bytes=metrics["context_bytes"])
    step, speed = metrics["perf/step_time_p50_s"], forecast.speed
    figures(step_s=step, predicted_s=speed.step_s, in_range=speed.low_s <= step <= speed.high_s)
    figures(mfu=metrics.get("perf/mfu"), waited=metrics["perf/data_wait_share"])
    if "compile=true" in words:
        assert wanted == pytest.approx(peak, rel=COMPILED)
    else:  # NCCL's copies of compressed gradients are freed at any time, and of one more parameter
        assert -HELD_LONGER <= left <= 1.01 * room, on_device
    assert (1 - RESERVED) * reserved - room <= forecast.reserved_bytes <= (1 + RESERVED) * reserved


def scalar_bytes(words: Sequence[str]) -> int:
    """Return what an epoch keeps on the GPU: the loss of each step, and the norm of the gradients where it is taken."""
    a_step = 8 if any(word.startswith(("model=llama", "training.max_grad_norm")) for word in words) else 4
    return a_step * (CUDA_STEPS - 1)


def differences(metrics: dict[str, float], forecast: Any, place: str) -> list[str]:
    """Return the categories of which the step that was followed held other bytes at its peak, in words."""
    prefix, found = "memory/host_" if place == "host" else "memory/", []
    for name in CATEGORIES:
        held, wanted = metrics.get(f"{prefix}{name}_bytes", 0), forecast.peaks.get(place, {}).get(name, 0)
        if held != wanted and (place in forecast.peaks or held):
            found.append(f"{place} {name} {held:.0f}, forecast {wanted}")
    return found


def test_a_forecast_for_a_gpu_is_made_on_any_machine(setting: str, forecasts: Forecasts) -> None:
    forecast = forecasts.of(setting, True)
    assert 0 < forecast.peak_bytes <= forecast.reserved_bytes < forecast.needed_bytes
    assert forecast.speed is None or 0 < forecast.speed.low_s < forecast.speed.step_s < forecast.speed.high_s
    if " offload=cpu" in setting:
        assert forecast.peaks["host"]["param"] > 0 == forecast.peaks["device"]["param"]
    if "activation_offload=cpu" in setting:
        assert forecast.peaks["host"]["activation"] > 0


def test_faster_settings_are_predicted_to_be_faster(
    machine: Machine, forecasts: Forecasts, figures: Callable[..., None]
) -> None:
    """Among the settings of one model."""
    if not machine.cuda:
        pytest.skip("needs a GPU: the sheet of a CPU is not part of the product")
    known = {name: m["perf/step_time_p50_s"] for name, m in MEASURED.items() if "perf/step_time_p50_s" in m}
    pairs = [(a, b) for a, b in combinations(known, 2) if a.split()[0] == b.split()[0]]
    ratios = {(a, b): forecasts.of(a, True).speed.step_s / forecasts.of(b, True).speed.step_s for a, b in pairs}
    apart = [pair for pair in pairs if abs(ratios[pair] - 1) > ENOUGH]
    right = [(a, b) for a, b in apart if (known[a] < known[b]) == (ratios[a, b] < 1)]
    errors = [abs(forecasts.of(name, True).speed.step_s / step - 1) for name, step in known.items()]
    figures(pairs=len(apart), right=len(right), median_error=statistics.median(errors), largest_error=max(errors))
    figures(wrong="; ".join(f"{a} | {b}" for a, b in apart if (a, b) not in right))
    assert apart and len(right) >= 0.8 * len(apart)
