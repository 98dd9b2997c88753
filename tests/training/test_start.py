"""How a trial starts: its ranks and their group, its first weights, the order of its data; by torchrun alone, too."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fsdp_lab.config import UserError
from fsdp_lab.config.parallel import OffloadConfig
from fsdp_lab.config.training import Init, TrainingConfig
from fsdp_lab.forecast.fake import ACCELERATOR, HOST, fake_world
from fsdp_lab.forecast.forecast import forecast_profile
from fsdp_lab.training import build as build_module
from fsdp_lab.training import data as data_module
from fsdp_lab.training import distributed
from fsdp_lab.training.__main__ import main
from fsdp_lab.training.data import TrainOrder, build_loader, val_order
from fsdp_lab.training.distributed import ParallelDims, build_parallel_dims
from fsdp_lab.training.weights import init_weights
from fsdp_lab.workloads.construct import Blueprint
from tests.conftest import ROOT
from tests.parity import SHARDINGS, WORKLOADS
from tests.ranks import config, run_ranks
from tests.training.reference import first_weights

PLATFORM = ("ray", "hydra", "omegaconf", "mlflow")
# Python runs it at the start of a rank: the rank's end is then preceded by a look at what it has imported.
SITECUSTOMIZE = f"""
import os, sys
leave = os._exit
def look_and_leave(status):
    brought = sorted({{name.split(".")[0] for name in sys.modules}} & set({PLATFORM!r}))
    print("brought", *brought, flush=True)
    leave(status)
os._exit = look_and_leave
"""
SMALL = ["sharding=per_block", "precision=bf16", "data.num_train=128", "data.num_val=30", "training.epochs=1"]


@pytest.mark.ci
@pytest.mark.documents("torchrun --nproc-per-node 2 -m fsdp_lab.training sharding=root")
def test_torchrun_end_to_end(tmp_path: Path) -> None:
    """From another working directory: metrics on rank 0 only, a checkpoint, a model; status 0, nothing of the platform
    imported."""
    (tmp_path / "sitecustomize.py").write_text(SITECUSTOMIZE)
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{tmp_path}:{ROOT}"}
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*launch, "-m", "fsdp_lab.training", *SMALL, "--folder", str(tmp_path / "out")]
    ran = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert ran.returncode == 0, ran.stderr
    assert [line for line in ran.stdout.splitlines() if line.startswith("brought")] == ["brought"] * 2
    facts, epoch = (json.loads(line) for line in ran.stdout.splitlines() if line.startswith("{"))
    assert (facts["world_size"], facts["num_params"], facts["data_num_train"]) == (2, 139_018, 128)
    assert 0 < epoch["train/loss"] < 3
    assert epoch["memory/rank1/peak_bytes"] > 0
    assert (tmp_path / "out/checkpoints/step_00000002.json").is_file()  # 128 images, 64 a step
    weights = torch.load(tmp_path / "out/model.pt", weights_only=True)["state_dict"]
    assert sum(w.numel() for w in weights.values()) == 139_018


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("training.epoch=3", "training.epoch is not a key"),
        ("training.global_batch_size=63", "training.global_batch_size=63 is not divisible by cluster.num_workers=1"),
    ],
)
def test_bad_input_without_torchrun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], override: str, words: str
) -> None:
    """A group of one: status 1, one message."""
    arguments = [override, "training.grad_accum_steps=2", "--folder", str(tmp_path / "out")]
    monkeypatch.setattr(sys, "argv", ["fsdp_lab.training", *arguments])
    try:
        assert main() == 1
    finally:
        if dist.is_initialized():  # it would end with a process of its own
            dist.destroy_process_group()
    (message,) = capsys.readouterr().err.splitlines()
    assert message.startswith("fsdp_lab.training: ") and words in message


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


@pytest.mark.parametrize(("offload", "expected"), [("none", ACCELERATOR), ("cpu", HOST)])
def test_the_loss_scale_is_made_where_the_gradients_are(
    offload: str, expected: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []
    build_scaler = build_module.build_scaler
    monkeypatch.setattr(build_module, "build_scaler", lambda p, device: made.append(device) or build_scaler(p, device))
    forecast_profile(config("model=mlp", "precision=fp16", f"offload={offload}"), 2, cuda=True)
    assert made == [expected]


@pytest.mark.parametrize(("device", "given", "workers"), [("cuda", None, 3), ("cpu", None, 0), ("cuda", 1, 1)])
def test_a_loader_takes_the_processes_and_the_pinning_of_its_device(
    device: str, given: int | None, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, Any] = {}
    monkeypatch.setattr(data_module, "DataLoader", lambda source, **options: asked.update(options))
    monkeypatch.setattr(data_module, "worker_cpus", lambda: 4.0)
    monkeypatch.setattr("fsdp_lab.machine.hardware.shared_memory", lambda: 2**30)
    build_loader(None, None, given, torch.device(device))  # type: ignore[arg-type]
    assert asked["num_workers"] == workers and asked["pin_memory"] is (device == "cuda")


INITS = [init.value for init in Init]


def initial_weights(cases: list[list[str]]) -> list[tuple[dict[str, torch.Tensor], int]]:
    """`(full first weights, number of parameters whose values this rank built)` of each case."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    from fsdp_lab.training.build import build
    from fsdp_lab.training.distributed import setup_distributed
    from fsdp_lab.training.weights import init_weights
    from fsdp_lab.workloads.build import build_model_spec

    values, given = Blueprint.values, [0]

    def counted(blueprint: Blueprint, *device: torch.device) -> Iterator[tuple[str, torch.Tensor]]:
        for name, value in values(blueprint, *device):
            given[0] += 1
            yield name, value

    Blueprint.values = counted  # type: ignore[method-assign]
    ranks, results = setup_distributed(), []
    for case in cases:
        given[0] = 0
        trial = config(*case)
        spec, dims = build_model_spec(trial.model), build_parallel_dims(trial.sharding, ranks)
        init = partial(init_weights, config=trial, device=ranks.device)
        state = build(spec, trial, dims, ranks.device, materialize=init)
        full = get_model_state_dict(state.model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        results.append((dict(full), given[0]))
    return results


def test_every_sharding_and_init_starts_from_the_same_bits() -> None:
    """Each sharding with one `init` in turn, then each `init` with recomputed blocks and offloaded parameters."""
    pairs = zip(SHARDINGS, cycle(INITS), strict=False)
    cases = [[*SHARDINGS[sharding], f"init={init}", "model.num_layers=2"] for sharding, init in pairs]
    more = ("training.seed=7", "activation_checkpointing=full", "offload=cpu", *WORKLOADS["mlp"].words)
    cases += [["sharding=per_block", f"init={init}", *more] for init in INITS]
    first, second = run_ranks(2, initial_weights, cases)
    for case, (got, built_first), (_, built_second) in zip(cases, first, second, strict=True):
        expected = first_weights(config(*case))
        assert got.keys() == expected.keys(), case
        assert all(torch.equal(got[key], expected[key]) for key in expected), case
        assert built_first == len(expected), case
        assert built_second == (0 if "init=rank0" in case else len(expected)), case


def test_with_init_device_the_constructor_computes_where_the_model_does() -> None:
    """`meta` stands for a GPU. The first call, which gives no values, is on the host."""
    gpu, seen = torch.device("meta"), dict[str, list[str]]()
    for init in INITS:
        devices = seen[init] = list[str]()

        def constructor(devices: list[str] = devices) -> torch.nn.Module:
            devices.append(torch.empty(0).device.type)
            return torch.nn.Linear(4, 3)

        with fake_world(2, gpu):
            blueprint = Blueprint(constructor, seed=0)
            init_weights(blueprint.model, blueprint, config(f"init={init}", "sharding=ddp"), gpu)
    assert seen == {"rank0": ["cpu", "cpu"], "meta": ["cpu", "cpu"], "device": ["cpu", "meta"]}


def dims_of(world_size: int) -> list[ParallelDims]:
    return [ParallelDims(dp_shard=world_size, rank=rank) for rank in range(world_size)]


def global_batches(world_size: int, accumulate: int, seed: int = 0, epoch: int = 0) -> list[list[int]]:
    """The images of every optimizer step, all ranks and microbatches together."""
    training = TrainingConfig(global_batch_size=24, grad_accum_steps=accumulate, seed=seed)
    steps: list[list[int]] = [[] for _ in range(100 // 24)]
    for dims in dims_of(world_size):
        order = TrainOrder(100, training, dims)
        order.epoch = epoch
        microbatches = list(order)
        assert len(microbatches) == len(order) == 4 * accumulate
        assert all(len(m) == 24 // world_size // accumulate for m in microbatches)
        for i, microbatch in enumerate(microbatches):
            steps[i // accumulate] += microbatch.tolist()
    return [sorted(step) for step in steps]


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("accumulate", [1, 2, 3])
def test_a_step_sees_the_same_images_on_any_number_of_workers(world_size: int, accumulate: int) -> None:
    steps = global_batches(world_size, accumulate, seed=3, epoch=2)
    order = torch.randperm(100, generator=torch.Generator().manual_seed(3 * 1_000_003 + 2)).tolist()
    assert steps == [sorted(order[i * 24 : (i + 1) * 24]) for i in range(4)]
    assert len({image for step in steps for image in step}) == 96  # none twice in an epoch


def test_a_batch_larger_than_the_data_is_reported() -> None:
    with pytest.raises(UserError, match=r"global_batch_size=64 .* 50 training samples; use at most 50"):
        TrainOrder(50, TrainingConfig(global_batch_size=64), dims_of(1)[0])


@pytest.mark.parametrize(("count", "world_size", "batch"), [(10, 4, 2), (3, 4, 8), (12, 3, 4)])
def test_validation_counts_each_image_once(count: int, world_size: int, batch: int) -> None:
    orders = [list(val_order(count, batch, dims)) for dims in dims_of(world_size)]
    assert len({len(order) for order in orders}) == 1  # all ranks step together
    seen = [i for order in orders for microbatch in order for i in microbatch.tolist() if i >= 0]
    assert sorted(seen) == list(range(count))
    assert all(len(microbatch) <= batch for order in orders for microbatch in order)
