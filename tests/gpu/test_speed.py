"""A probe, which has to predict eight steps; and a trial's step beside the same step as a bare script, in turn."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.data import DataLoader, Subset

from fsdp_lab.forecast.devices import sheet_of
from fsdp_lab.probe.measure import Checked, check_steps, device_here, measure
from fsdp_lab.training.distributed import setup_distributed
from fsdp_lab.workloads.build import build_workload
from tests.gpu.conftest import Machine
from tests.gpu.ranks import Ranks
from tests.ranks import config, train_all

pytestmark = pytest.mark.gpu

STEPS, WARMUP, ROUNDS = {"cuda": 24, "cpu": 5}, {"cuda": 8, "cpu": 2}, {"cuda": 2, "cpu": 1}
GOAL = 0.98  # of the bare script's samples a second
SETTINGS = {  # models, with words and samples of a rank
    "cuda": {"vit_l_16": ("data=synthetic", 64), "llama3_1b": ("data.seq_len=2048", 2)},
    "cpu": {"vit_tiny": ("data=synthetic", 8), "lm_tiny": ("data.seq_len=32 data=synthetic_tokens", 4)},
}


MOST_OFF = {"compiled": 0.2, "": 0.15}  # of a forecast by the figures of a probe, by the name of a step


def probed(cuda: bool) -> tuple[dict[str, float], dict[str, str], list[Checked]]:
    """Return the figures that a probe measures here, what it leaves, and on a GPU the eight steps that it runs."""
    ranks = setup_distributed()
    measured = measure(ranks, *device_here(ranks, sheet_of))
    checked = check_steps(measured, ranks, lambda _: None) if cuda else []
    return {figure.name: figure.value for figure in measured.figures}, measured.left, checked


def test_a_probe_predicts_steps(machine: Machine, ranks: Ranks, figures: Callable[..., None]) -> None:
    """On a CPU, whose cores are shared, launches may be left, and tests/probe/test_probe.py has the steps."""
    found, left, checked = ranks.run(probed, machine.cuda, seconds=420)[0]
    figures(**{name.replace(".", "_"): f"{value:.3g}" for name, value in found.items()}, left="; ".join(left))
    figures(**{one.name: f"{one.forecast_s:.4g}/{one.measured_s:.4g}" for one in checked})
    launches = {"launch_s", "compiled_launch_s"}
    without = set() if machine.cuda else {name for name in launches & set(left) if "without launches" in left[name]}
    assert {"reached.matmul", "efficiency.memory"} | launches <= set(found) | without, left
    off = {one.name: one.error for one in checked}
    wrong = {name: e for name, e in off.items() if abs(e) > MOST_OFF["compiled" if "compiled" in name else ""]}
    assert not wrong and len(checked) == 8 * machine.cuda, wrong


def trial_of(name: str, device: str) -> list[str]:
    words, each = SETTINGS[device][name]
    batch = each * dist.get_world_size()
    sizes = (f"training.global_batch_size={batch}", f"data.num_train={batch * STEPS[device]}", "data.num_val=2")
    return [
        f"model={name}", *words.split(), *sizes, "sharding=per_block", "precision=bf16_mixed", "memory_profile=off",
        f"compile={str(device == 'cuda').lower()}", f"training.timing_warmup_steps={WARMUP[device]}",
        f"data.loader_workers={4 if device == 'cuda' else 0}", "optimizer.implementation=fused",
    ]  # fmt: skip


def ours(name: str, device: str) -> dict[str, float]:
    """Return the metrics of the trial."""
    ((_, epochs),) = train_all([trial_of(name, device)])
    return epochs[-1]


def by_hand(name: str, device: str) -> float:
    """Return the median seconds of a step, loading included, of what an engineer writes by hand for this setting.

    The model and its items are the trial's, and nothing else of ours is in it.
    """
    trial, rank, world_size = config(*trial_of(name, device)), dist.get_rank(), dist.get_world_size()
    workload = build_workload(trial.model, trial.data, trial.task)
    items: Any = workload.data.load().train
    torch.compiler.reset()
    with torch.device(device):
        model: Any = workload.model.build()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    mesh = init_device_mesh(device, (world_size,))
    for block in [module for module in model.modules() if type(module).__name__ in model._no_split_modules]:
        if device == "cuda":
            block.compile()
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)
    mine, batch = Subset(items.items, range(rank, len(items), world_size)), trial.training.global_batch_size
    workers = trial.data.loader_workers
    loader = DataLoader(mine, batch // world_size, num_workers=workers, pin_memory=device == "cuda", drop_last=True)
    marks = [_mark(device)]
    for got in loader:
        _loss(model, got, device).backward()
        optimizer.step()
        optimizer.zero_grad()
        marks.append(_mark(device))
    return statistics.median(_seconds(marks)[WARMUP[device] :])


def _loss(model: nn.Module, got: Any, device: str) -> Tensor:
    if isinstance(got, Tensor):
        rows = got.to(device, non_blocking=True)
        return F.cross_entropy(model(rows[:, :-1]).float().flatten(0, 1), rows[:, 1:].flatten())
    images, labels = (each.to(device, non_blocking=True) for each in got)
    return F.cross_entropy(model(images).float(), labels)


def _mark(device: str) -> Any:
    if device == "cpu":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _seconds(marks: list[Any]) -> list[float]:
    if isinstance(marks[0], float):
        return [ended - begun for begun, ended in itertools.pairwise(marks)]
    torch.cuda.synchronize()
    return [begun.elapsed_time(ended) / 1000 for begun, ended in itertools.pairwise(marks)]


def test_a_step_is_as_fast_as_a_bare_script(
    setting: str, machine: Machine, ranks: Ranks, figures: Callable[..., None]
) -> None:
    """On a CPU, whose cores are shared, it is only reported."""
    trials, scripts = [], []
    for _ in range(ROUNDS[machine.device]):
        trials.append(ranks.run(ours, setting, machine.device, seconds=150)[0])
        scripts.append(ranks.run(by_hand, setting, machine.device, seconds=150)[0])
    step_s, by_hand_s = statistics.median(each["perf/step_time_p50_s"] for each in trials), statistics.median(scripts)
    figures(ratio=by_hand_s / step_s, ours_s=step_s, by_hand_s=by_hand_s, rounds=len(trials))
    if machine.cuda:
        figures(mfu=trials[-1].get("perf/mfu"))
        assert by_hand_s / step_s >= GOAL
