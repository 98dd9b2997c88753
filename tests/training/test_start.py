"""How a trial starts: its ranks and their group, and the order of its data; by torchrun alone, too."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fsdp_lab.config import UserError
from fsdp_lab.config.training import TrainingConfig
from fsdp_lab.training import distributed
from fsdp_lab.training.data import SeededOrder, TrainOrder, val_order
from fsdp_lab.training.distributed import ParallelDims
from tests import forked
from tests.conftest import ROOT
from tests.ranks import config, run_ranks, train_all

# Python runs it at the start of a rank, which then cannot import these.
SITECUSTOMIZE = 'import sys\nsys.modules.update(dict.fromkeys(["ray", "hydra", "omegaconf", "mlflow"]))\n'
SMALL = ["sharding=per_block", "precision=bf16", "data.num_train=128", "data.num_val=30", "training.epochs=1"]


@pytest.mark.ci
@pytest.mark.documents("torchrun --nproc-per-node 2 -m fsdp_lab.training sharding=root")
def test_torchrun_end_to_end(tmp_path: Path) -> None:
    """From another working directory, without the platform: metrics on rank 0 only, a checkpoint, a model."""
    (tmp_path / "sitecustomize.py").write_text(SITECUSTOMIZE)
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{tmp_path}:{ROOT}"}
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*launch, "-m", "fsdp_lab.training", *SMALL, "--folder", str(tmp_path / "out")]
    ran = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert ran.returncode == 0, ran.stderr
    facts, epoch, compared = (json.loads(line) for line in ran.stdout.splitlines() if line.startswith("{"))
    assert (facts["world_size"], facts["num_params"], facts["data_num_train"]) == (2, 139_018, 128)
    assert 0 < epoch["train/loss"] < 3
    assert epoch["memory/rank1/peak_bytes"] > 0
    assert compared["plain_loop"]["steps"] == 2 and compared["plain_loop"]["apart"] < 4 * 2.0**-7
    assert (tmp_path / "out/checkpoints/step_00000002.json").is_file()  # 128 images, 64 a step
    weights = torch.load(tmp_path / "out/model.pt", weights_only=True)["state_dict"]
    assert sum(w.numel() for w in weights.values()) == 139_018


def test_bad_input_is_one_message(tmp_path: Path) -> None:
    """Without torchrun, in a group of one."""
    done = forked.run(tmp_path, "fsdp_lab.training", "training.global_batch_size=63", "training.grad_accum_steps=2")
    (message,) = done.stderr.splitlines()
    assert done.returncode == 1
    assert message.startswith("fsdp_lab.training: training.global_batch_size=63 is not divisible by")


# On a GPU: gloo is there where tensors on the host are reduced.
BACKENDS = {"none": "nccl", "cpu": "cpu:gloo,cuda:nccl", "cpu_unpinned": "cpu:gloo,cuda:nccl"}


def test_a_group_is_bound_to_the_gpu_that_the_rank_computes_on(monkeypatch: pytest.MonkeyPatch):
    """Ray gives GPU "10" to its second worker if it sorts texts, so that LOCAL_RANK is not the GPU."""
    current, made = [0], dict[str, Any]()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: current.append(torch.device("cuda", device).index))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[-1])
    for name, answer in {"is_initialized": False, "get_rank": 0, "get_world_size": 12}.items():
        monkeypatch.setattr(dist, name, lambda answer=answer: answer)
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **given: made.update(given, backend=backend))
    monkeypatch.setenv("LOCAL_RANK", "1")
    for world_size in ("1", "12"):  # torchrun: the GPU is the local rank
        monkeypatch.setenv("WORLD_SIZE", world_size)
        for offload, backend in BACKENDS.items():
            ranks = distributed.setup_distributed(config(f"offload={offload}").offload)
            assert ranks.device == made["device_id"] == torch.device("cuda", 1) and made["backend"] == backend
    distributed.choose_gpu(10)
    distributed.join_process_group("nccl")
    assert made["device_id"] == torch.device("cuda", 10)
    distributed.join_process_group("gloo")
    assert made["device_id"] is None
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for offload in BACKENDS:
        distributed.setup_distributed(config(f"offload={offload}").offload)
        assert (made["backend"], made["device_id"]) == ("gloo", None)


@pytest.mark.parametrize(("world_size", "accumulate"), [(1, 1), (1, 3), (2, 1), (2, 2), (4, 3)])
def test_a_step_sees_the_same_images_on_any_number_of_workers(world_size: int, accumulate: int) -> None:
    """24 of 100 images in each of four steps, by seed 3 and epoch 2; all ranks and microbatches together."""
    training = TrainingConfig(global_batch_size=24, grad_accum_steps=accumulate, seed=3)
    steps: list[list[int]] = [[] for _ in range(4)]
    for rank in range(world_size):
        order = TrainOrder(100, training, ParallelDims(dp_shard=world_size, rank=rank))
        order.go_to(2, 0)
        microbatches = [microbatch.tolist() for microbatch in order]
        assert [len(each) for each in microbatches] == [24 // world_size // accumulate] * len(order)
        for i, microbatch in enumerate(microbatches):
            steps[i // accumulate] += microbatch
    images = torch.randperm(100, generator=torch.Generator().manual_seed(3 * 1_000_003 + 2)).tolist()
    assert [sorted(step) for step in steps] == [sorted(images[i * 24 : (i + 1) * 24]) for i in range(4)]


def test_an_item_draws_anew_in_each_epoch() -> None:
    """And with each seed: also an item that is a batch of its own, in every epoch. On two workers it draws the same."""
    drawn = []
    for epoch, world_size, seed in ((0, 1, 3), (0, 2, 3), (1, 1, 3), (0, 1, 4)):
        seeds: dict[int, int] = {}
        for rank in range(world_size):
            training = TrainingConfig(global_batch_size=2, grad_accum_steps=2 // world_size)
            order = TrainOrder(4, training, ParallelDims(dp_shard=world_size, rank=rank))
            order.go_to(epoch, 0)
            seeds |= {int(item): own for own, item in SeededOrder(order, seed)}
        drawn.append(seeds)
    first, by_two, later, of_another_seed = drawn
    assert first == by_two and len({*first.values()}) == 4
    assert not {*first.values()} & {*later.values(), *of_another_seed.values()}


def test_a_batch_larger_than_the_data_is_reported() -> None:
    with pytest.raises(UserError, match=r"global_batch_size=64 .* 50 training samples; use at most 50"):
        TrainOrder(50, TrainingConfig(global_batch_size=64), ParallelDims())


@pytest.mark.parametrize(("count", "world_size", "batch"), [(10, 4, 2), (3, 4, 8), (12, 3, 4)])
def test_validation_counts_each_image_once(count: int, world_size: int, batch: int) -> None:
    orders = [list(val_order(count, batch, ParallelDims(dp_shard=world_size, rank=rank))) for rank in range(world_size)]
    assert len({len(order) for order in orders}) == 1  # all ranks step together
    seen = [i for order in orders for microbatch in order for i in microbatch.tolist() if i >= 0]
    assert sorted(seen) == list(range(count))
    assert all(len(microbatch) <= batch for order in orders for microbatch in order)


def on_two_nodes() -> str:
    """What a rank says that shares layers with one of another node."""
    os.environ["NODE_RANK"] = os.environ["RANK"]
    with pytest.raises(UserError) as error:
        train_all([["model=vit_tiny", "sharding.tp=2"]])
    return str(error.value)


@pytest.mark.ci
def test_ranks_of_two_nodes_share_no_layers():
    first, second = run_ranks(2, on_two_nodes)
    assert first == second and "ranks 0 to 1 divide each layer among them, but are on 2 nodes" in first
