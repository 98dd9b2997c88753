"""A trial's step beside the same step as a bare script, in turn."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import Subset

from fsdp_lab.workloads.build import build_workload
from tests.gpu import bare
from tests.gpu.conftest import Machine
from tests.gpu.ranks import Ranks
from tests.ranks import Memo, config

pytestmark = pytest.mark.gpu

STEPS, WARMUP, ROUNDS = {"cuda": 24, "cpu": 5}, {"cuda": 8, "cpu": 2}, {"cuda": 2, "cpu": 1}
GOAL = 0.98  # of the bare script's samples a second
MODELS = {"vit_l_16": ("data=synthetic", 64), "llama3_1b": ("data.seq_len=2048", 2)}  # with samples of a rank
ON_A_CPU = {"vit_tiny": ("data=synthetic", 8), "lm_tiny": ("data.seq_len=32 data=synthetic_tokens", 4)}


def settings_of(machine: Machine) -> dict[str, tuple[str, int]]:
    return MODELS if machine.cuda else ON_A_CPU


def trial_of(name: str, device: str) -> Any:
    words, each = {**MODELS, **ON_A_CPU}[name]
    batch = each * dist.get_world_size()
    sizes = (f"training.global_batch_size={batch}", f"data.num_train={batch * STEPS[device]}", "data.num_val=2")
    return config(
        f"model={name}", *words.split(), *sizes, "sharding=per_block", "precision=bf16_mixed", "memory_profile=off",
        f"compile={str(device == 'cuda').lower()}", "init=device", f"training.timing_warmup_steps={WARMUP[device]}",
        f"data.loader_workers={4 if device == 'cuda' else 0}", "optimizer.implementation=fused",
    )  # fmt: skip


def ours(name: str, device: str) -> dict[str, float]:
    from fsdp_lab.training.train import train

    memo = Memo()
    with tempfile.TemporaryDirectory() as folder:
        train(trial_of(name, device), Path(folder), memo)
    return memo.reported[-1]


def by_hand(name: str, device: str) -> float:
    """Return the median seconds of a step."""
    trial, rank, world_size = trial_of(name, device), dist.get_rank(), dist.get_world_size()
    workload = build_workload(trial.model, trial.data, trial.task)
    items: Any = workload.data.load().train
    torch.compiler.reset()
    with torch.device(device):
        model: Any = workload.model.build()
    blocks = [module for module in model.modules() if type(module).__name__ in model._no_split_modules]
    mine = Subset(items.items, range(rank, len(items), world_size))
    each = trial.training.global_batch_size // world_size
    times = bare.step_times(model, blocks, mine, each, trial.data.loader_workers, device)
    return statistics.median(times[WARMUP[device] :])


def test_a_step_is_as_fast_as_a_bare_script(
    setting: str, machine: Machine, ranks: Ranks, figures: Callable[..., None]
) -> None:
    """On a CPU, whose cores are shared, it is only reported."""
    trials, scripts = [], []
    for _ in range(ROUNDS[machine.device]):
        trials.append(ranks.run(ours, setting, machine.device, seconds=150)[0])
        scripts.append(ranks.run(by_hand, setting, machine.device, seconds=150)[0])
    steps = [each["perf/step_time_p50_s"] for each in trials]
    ratio = statistics.median(scripts) / statistics.median(steps)
    figures(ratio=ratio, ours_s=statistics.median(steps), by_hand_s=statistics.median(scripts), rounds=len(steps))
    if machine.cuda:
        figures(mfu=trials[-1].get("perf/mfu"))
        assert ratio >= GOAL
