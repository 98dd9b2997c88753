"""How the ranks meet, and how they divide the work."""

from __future__ import annotations

import ast
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fsdp_lab.config.parallel import OffloadConfig
from fsdp_lab.forecast.fake import HOST, fake_world
from fsdp_lab.training import distributed
from fsdp_lab.training.distributed import ParallelDims, build_parallel_dims
from tests.conftest import ROOT
from tests.ranks import config


@pytest.mark.parametrize(
    ("words", "replicate", "shard", "axes"),
    [
        (["sharding=per_block"], 1, 8, ("dp_shard",)),
        (["sharding=per_block", "sharding.dp_replicate=2"], 2, 4, ("dp_replicate", "dp_shard")),
        (["sharding=per_block", "sharding.dp_replicate=8"], 8, 1, ("dp_replicate", "dp_shard")),
        (["sharding=ddp"], 8, 1, ("dp_replicate",)),
    ],
)
def test_a_mesh_has_the_axes_that_are_divided(words: list[str], replicate: int, shard: int, axes: tuple[str, ...]):
    with fake_world(8, HOST, rank=3) as ranks:
        dims = build_parallel_dims(config(*words).sharding, ranks)
        assert dims.mesh is not None and dims.mesh.mesh_dim_names == axes
    assert dims == ParallelDims(replicate, shard, tp=1, rank=3)
    assert (dims.dp_degree, dims.dp_rank) == (8, 3)


class Joined:
    """Stands for CUDA and for PyTorch's process group, and notes how the group was made."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, gpus: int = 12) -> None:
        self.current, self.made = 0, dict[str, Any]()
        for name, stand_in in {
            "is_available": lambda: True,
            "device_count": lambda: gpus,
            "set_device": lambda device: setattr(self, "current", torch.device("cuda", device).index),
            "current_device": lambda: self.current,
        }.items():
            monkeypatch.setattr(torch.cuda, name, stand_in)
        for name, answer in {"is_initialized": False, "get_rank": 0, "get_world_size": 12}.items():
            monkeypatch.setattr(dist, name, lambda answer=answer: answer)
        monkeypatch.setattr(dist, "init_process_group", self.make)

    def make(self, backend: str, **options: Any) -> None:
        self.made = {"backend": backend, **options}


def test_a_group_is_bound_to_the_gpu_that_the_rank_computes_on(monkeypatch: pytest.MonkeyPatch):
    """Ray gives GPU "10" to its second worker if it sorts texts, so that LOCAL_RANK is not the GPU."""
    monkeypatch.setenv("LOCAL_RANK", "1")
    nccl = OffloadConfig().backend(cuda=True)
    for world_size in ("1", "12"):  # torchrun: the GPU is the local rank
        joined = Joined(monkeypatch)
        monkeypatch.setenv("WORLD_SIZE", world_size)
        assert distributed.setup_distributed().device == joined.made["device_id"] == torch.device("cuda", 1)
    joined = Joined(monkeypatch)
    distributed.choose_gpu(10)
    distributed.join_process_group(nccl)
    assert joined.made["device_id"] == torch.device("cuda", 10)
    joined = Joined(monkeypatch)
    distributed.join_process_group("gloo")
    assert joined.made["device_id"] is None


@pytest.mark.parametrize(
    ("words", "gpus", "expected"),
    [
        ([], 8, {"cuda": "nccl"}),
        (["checkpoint.mode=async"], 8, {"cuda": "nccl"}),  # it has a group of its own
        (["offload=cpu"], 8, {"cpu": "gloo", "cuda": "nccl"}),
        (["offload=cpu_unpinned"], 8, {"cpu": "gloo", "cuda": "nccl"}),
        (["offload=cpu"], 0, {"cpu": "gloo"}),
    ],
)
def test_gloo_is_there_where_tensors_on_the_host_are_reduced(
    words: list[str], gpus: int, expected: dict[str, str], monkeypatch: pytest.MonkeyPatch
):
    joined = Joined(monkeypatch)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    distributed.setup_distributed(config(*words).offload)
    backends = dist.distributed_c10d.BackendConfig(joined.made["backend"]).get_device_backend_map()
    assert expected.items() <= backends.items() and (gpus == 0 or backends.keys() == expected.keys())


def test_no_other_code_makes_a_group_on_a_gpu():
    """Each call gives a device, or names a backend that has none."""
    calls = []
    texts = {path: path.read_text() for folder in ("fsdp_lab", "benchmarks") for path in (ROOT / folder).rglob("*.py")}
    for file, text in texts.items():
        for node in ast.walk(ast.parse(text)) if "init_process_group(" in text else ():
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("init_process_group"):
                bound = any(keyword.arg == "device_id" for keyword in node.keywords)
                backend = ast.literal_eval(node.args[0]) if isinstance(node.args[0], ast.Constant) else ""
                calls.append((file.relative_to(ROOT), bound or backend in ("gloo", "fake")))
    assert len(calls) >= 3 and all(bound for _, bound in calls), calls
