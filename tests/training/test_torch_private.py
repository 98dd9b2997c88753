"""Private names of PyTorch: each is there in this version, does what we think, and can be missed."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from fsdp_lab.forecast import torch_private as of_forecasts
from fsdp_lab.forecast.fake import HOST, fake_world
from fsdp_lab.forecast.forecast import forecast_step
from fsdp_lab.training import torch_private
from fsdp_lab.training.blocks import find_block_classes
from fsdp_lab.training.distributed import build_parallel_dims
from fsdp_lab.training.parallelize import apply_fully_shard, sharding_units
from fsdp_lab.workloads.build import build_model_spec
from tests.ranks import config


def test_pytorch_has_the_names_as_we_use_them():
    names = (*torch_private.NAMES, *of_forecasts.NAMES)
    lacks = [f"{name.module}: {name.lacks()}" for name in names if name.lacks() is not None]
    assert lacks == [], "see fsdp_lab/training/torch_private.py and fsdp_lab/forecast/torch_private.py"


def groups_made(num_layers: int, *words: str) -> int:
    """How many process groups one of 8 workers makes when it shards a ViT of so many blocks."""
    trial = config(f"model.num_layers={num_layers}", "sharding=per_block", *words)
    made = []
    make = dist.distributed_c10d._new_process_group_helper
    spy = mock.Mock(side_effect=lambda *args, **kwargs: made.append(1) or make(*args, **kwargs))
    with fake_world(8, HOST) as ranks:
        spec = build_model_spec(trial.model)
        with torch.device("meta"):
            model = spec.build()
        mesh = build_parallel_dims(trial.sharding, ranks).mesh
        with mock.patch.object(dist.distributed_c10d, "_new_process_group_helper", spy):
            units = sharding_units(model, find_block_classes(model), trial.sharding)
            apply_fully_shard(model, units, trial, mesh)
    return len(made)


TO_SIZE = ("reshard_after_forward=to_size", "reshard_after_forward.size=2")


def test_resharding_to_a_smaller_mesh_takes_no_more_groups_for_more_blocks():
    assert groups_made(8, *TO_SIZE) == groups_made(2, *TO_SIZE) == 4 + 2, "pairs of workers, and their counterparts"
    assert groups_made(8, "reshard_after_forward=always") == 0


def test_workspaces_are_what_the_allocator_gets_back(monkeypatch: pytest.MonkeyPatch):
    """Stands for a GPU's allocator, which cannot be had here: its requested bytes before and after."""
    monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: stats.pop(0), raising=False)
    stats = [{"requested_bytes.all.current": 100.0}, {"requested_bytes.all.current": 36.0}]
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: stats[0])
    assert torch_private.free_cublas_workspaces(torch.device("cuda", 0)) == 64


def test_a_step_has_the_names_that_a_trace_looks_for(monkeypatch: pytest.MonkeyPatch):
    seen: set[str] = set()
    look = torch_private.Ranges.see

    def noted(self: torch_private.Ranges, func: Any, args: Any) -> str:
        began = look(self, func, args)
        seen.update((str(func.overloadpacket), began))
        return began

    monkeypatch.setattr(torch_private.Ranges, "see", noted)
    forecast_step(config("sharding=per_block", "sharding.dp_replicate=2"), 4, cuda=True, traced=True)
    assert {of_forecasts.ALL_GATHER, of_forecasts.REDUCE_SCATTER} <= seen
    passes = (*torch_private.FSDP_STARTS_PASS, torch_private.FSDP_ENDS_FORWARD)
    marks = (torch_private.FSDP_GATHERS, torch_private.FSDP_COPIES_OUT, torch_private.FSDP_REDUCES, *passes)
    assert [mark for mark in marks if not any(name.startswith(mark) for name in seen)] == []
