"""Whole steps of trials, in a forecast and measured here."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from concurrent.futures import Future
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from fsdp_lab.config import TrialConfig, UserError, part
from fsdp_lab.forecast.forecast import forecast_step
from fsdp_lab.forecast.pool import NoAnswerError, Pool
from fsdp_lab.forecast.speed.costs import in_tf32
from fsdp_lab.forecast.speed.device import Device, DeviceKind
from fsdp_lab.forecast.speed.program import Operator
from fsdp_lab.probe.timer import Timed
from fsdp_lab.training.checkpoint import Metrics
from fsdp_lab.training.distributed import DistributedContext
from fsdp_lab.training.train import train

_LIMIT_S = 120.0  # limit of one forecast
COMPILES_S = 40.0  # seconds that compiling a small step may take
_STEPS, _WARMUP = 30, 10
_QUIET = ("checkpoint.mode=off", "export=false", "memory_profile=off", "check.name=off", "data.loader_workers=0",
          "sharding=per_block", f"training.max_steps={_STEPS}", f"training.timing_warmup_steps={_WARMUP}")  # fmt: skip
_OWN = {"cuda": ("precision=bf16_mixed",), "cpu": ("precision=fp32",)}
_BLOCKS = ("model=vit_tiny", "model.num_layers=8", "data=synthetic")
_MODELS = {
    "cuda": {"ViT-B/16": ("model=vit_b_16", "data=synthetic"),
             "Llama 1B, 4 blocks": ("model=llama3_1b", "model.num_layers=4", "data.seq_len=1024", "init=meta")},
    "cpu": {"small ViT": ("model=vit_tiny", "model.image_size=64", "model.patch_size=8", "model.hidden_dim=192",
                          "model.mlp_dim=768", "model.num_heads=3", "data=synthetic"),
            "small Llama": ("model=lm_tiny", "model.dim=256", "model.ffn_dim=704", "model.num_layers=4",
                            "data=synthetic_tokens", "data.seq_len=128")},
}  # fmt: skip
_KINDS = {"eager": (), "compiled": ("compile=true",), "checkpointed": ("activation_checkpointing=full",)}
# Each kind with both microbatches, and eager steps of both models with both.
_CHECKED = ((0, "eager", 1), (0, "eager", 8), (0, "compiled", 1), (0, "checkpointed", 8),
            (1, "eager", 1), (1, "eager", 8), (1, "compiled", 8), (1, "checkpointed", 1))  # fmt: skip


# How long other ranks wait while the first rank forecasts the checked steps, in the worst case one by one.
WAIT = timedelta(seconds=len(_CHECKED) * _LIMIT_S + 300)

# The operators of a step; empty on all ranks but the first; or why the step has no forecast.
Program = list[Operator] | str


class Step(NamedTuple):
    """A step of a trial: its name, and its overrides without sizes."""

    name: str
    words: tuple[str, ...]
    microbatch: int

    @property
    def needs_s(self) -> float:
        """The seconds that its compiler may need."""
        return COMPILES_S if "compile=true" in self.words else 0.0

    def config(self, ranks: int) -> TrialConfig:
        batch = self.microbatch * ranks
        sizes = (f"training.global_batch_size={batch}", f"data.num_train={batch * _STEPS}", f"data.num_val={ranks}")
        from fsdp_lab.config.without_hydra import read_config  # needs a YAML reader, unlike forecasts

        return part(read_config(None, [*_QUIET, *self.words, *sizes]), TrialConfig)


def launch_steps(kind: str) -> dict[str, Step]:
    """Return steps that launches bound, by the figure that they set: small blocks under FSDP2, eager and compiled."""
    words = (*_BLOCKS, *_OWN[kind])
    return {"launch_s": Step("eager", words, 1), "compiled_launch_s": Step("compiled", (*words, "compile=true"), 1)}


def checked_steps(kind: str) -> list[Step]:
    """Return the eight steps of `--steps`, which set no figure but the errors."""
    models = [*_MODELS[kind].items()]
    return [Step(f"{models[at][0]}, {how}, microbatch {size}", (*models[at][1], *_OWN[kind], *_KINDS[how]), size)
            for at, how, size in _CHECKED]  # fmt: skip


def programs(steps: Sequence[Step], device: Device, ranks: DistributedContext) -> list[Program]:
    """Return the operators of forecast steps, made in separate processes; the other ranks wait."""
    answers: list[Program] = [[] for _ in steps]
    if ranks.is_first:
        with Pool(_follow, max(1, min(len(steps), (os.cpu_count() or 2) // 2)), _LIMIT_S) as pool:
            asked = [pool.submit((step.config(ranks.world_size), ranks.world_size, device)) for step in steps]
            answers = [_result(future) for future in asked]
    dist.barrier()
    return answers


def _result(future: Future[Program]) -> Program:
    try:
        return future.result()
    except NoAnswerError as error:
        return f"the process of its forecast {error}"


def _follow(question: tuple[TrialConfig, int, Device]) -> Program:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    torch.set_num_threads(1)
    config, ranks, device = question
    cuda = device.kind is DeviceKind.cuda
    try:
        program = forecast_step(config, ranks, cuda, sheet=device if cuda else None, traced=True).program
        return in_tf32(program, device, config.precision.tf32)
    except UserError as error:
        return str(error)


def run_step(step: Step, ranks: int) -> Timed:
    """Return the seconds of a step, without the wait for data; every rank calls this."""
    last = _Last()
    with tempfile.TemporaryDirectory() as folder:
        train(step.config(ranks), Path(folder), last)
    seconds = last.metrics["perf/step_time_p50_s"] * (1 - last.metrics["perf/data_wait_share"])
    return Timed(seconds, last.metrics.get("perf/speed_error", 0.0))


class _Last:
    """Keeps the metrics of the last epoch."""

    def facts(self, facts: dict[str, Any]) -> None: ...
    def phase(self, name: str) -> None: ...
    def step(self, step: int) -> None: ...

    def epoch(self, metrics: Metrics) -> None:
        self.metrics = metrics
