"""Ranks that made other modules, values or data than another end with its name, before a tensor of one meets another's.

What a rank writes into buffers while it trains has a note.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fsdp_lab.config import UserError
from fsdp_lab.training.alike import check_model
from fsdp_lab.training.train import train
from tests.conftest import ROOT
from tests.ranks import SMALL, Memo, config, run_ranks
from tests.workloads.user import unlike

HERE = unlike.__name__
SHARDINGS = ("sharding=ddp", "sharding=per_block", "sharding=per_layer", "sharding=per_block sharding.api=fsdp1")
# What differs: what the message says of it. `L` is the last rank.
MODELS = {
    "Heads": r"rank 0 has parameter heads\.(\w+)\.weight \(1x8 float32, trained\) where rank \d has parameter "
    r"heads\.(?!\1\.)\w+\.weight .*sorted",
    "Order": r"rank 0 has parameter up\.weight \(8x8 float32, trained\) where rank L has parameter down\.weight ",
    "Frozen": r"rank 0 has parameter head\.bias \(1 float32, trained\) where rank L has parameter head\.bias "
    r"\(1 float32, frozen\)",
    "Activations": r"rank 0 has module last\.\d \((\w+)\(.*\)\) where rank \d has module last\.\d \((?!\1)\w+\(",
    "Drawn": r"buffer directions has other values on rank 0 than on rank 1\. .*default_rng",
}
DATA = {
    "Vocabulary": r"rank 0 has the data's items .* of train .* where rank \d has the data's items .* train .*sort what",
    "Shorter": r"rank 0 has the data's split val \(24 items\) where rank L has the data's split val \(23 items\)\. ",
    "OwnShare": r"rank 0 has the data's (items .* of train|order) .* where rank 1 has .*fsdp_lab divides the samples",
}


def words(sharding: str, model: str = "Net", data: str = "Rows") -> list[str]:
    return [f"model._target_={HERE}.{model}", f"data._target_={HERE}.{data}", f"task.loss={HERE}.loss",
            "training.global_batch_size=16", *sharding.split()]  # fmt: skip


def refusals(cases: list[list[str]]) -> list[str]:
    """What each ends with on this rank."""
    found = []
    for case in cases:
        with tempfile.TemporaryDirectory() as folder:
            try:
                train(config(*case), Path(folder), Memo())
                found.append("it trained")
            except UserError as error:
                found.append(str(error))
    return found


@pytest.mark.parametrize("world_size", [2, 4])
def test_what_ranks_made_differently_ends_them_with_its_name(world_size: int) -> None:
    kinds = {**{name: (name, "Rows") for name in MODELS}, **{name: ("Net", name) for name in DATA}}
    cases = [(name, sharding) for name in kinds for sharding in SHARDINGS]
    of_ranks = run_ranks(world_size, refusals, [words(sharding, *kinds[name]) for name, sharding in cases])
    assert all(found == of_ranks[0] for found in of_ranks), "every rank raises the same"
    for case, found in zip(cases, of_ranks[0], strict=True):
        expected = {**MODELS, **DATA}[case[0]].replace("rank L", f"rank {world_size - 1}")
        assert re.match(f"ranks are not alike: {expected}", found), f"{case}: {found}"


@pytest.mark.ci
def test_processes_without_a_hash_seed_are_told_to_have_one(tmp_path: Path) -> None:
    """Twenty words in one order by chance: once in 20! starts."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m",
               "fsdp_lab.training", *SMALL, *words(SHARDINGS[1], "Heads"), "model.plain=true"]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    environment.pop("PYTHONHASHSEED", None)
    ends = [
        subprocess.run(command, cwd=tmp_path, env=environment | seed, capture_output=True, text=True, check=False)
        for seed in ({}, {"PYTHONHASHSEED": "7"})
    ]
    assert [done.returncode for done in ends] == [1, 0], ends
    assert "ranks are not alike: rank 0 has parameter heads." in ends[0].stderr
    assert "set PYTHONHASHSEED=0 in the environment of torchrun" in ends[0].stderr


def model_of(rank: int, kind: str) -> nn.Module:
    """Four ranks: some have parameters on `meta`; what differs is on rank 3, or on rank 2 with rank 1 on `meta`."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(100, 300), nn.BatchNorm1d(300))
    if kind == "meta" or (kind == "some on meta" and rank == 1):
        for module in model:
            for name, parameter in list(module.named_parameters()):
                setattr(module, name, nn.Parameter(parameter.to("meta")))
    with torch.no_grad():
        if kind in ("a last value", "some on meta") and rank == 2:
            model[0].weight[-1, -1] += 1
        if kind == "rounding" and rank == 1:
            model[0].weight *= 1 + 1e-6
            model[1].running_var[0] = torch.nan
        elif kind == "rounding":
            model[1].running_var[0] = torch.nan
        if kind in ("a buffer", "meta") and rank == 3:
            model[1].num_batches_tracked += 1
        if kind == "sparse":
            model.register_buffer("edges", torch.eye(3).to_sparse() * (1 + rank // 3))
    if kind == "tied":
        model.append(nn.Linear(100, 300))
        if rank < 2:
            model[2].weight = model[0].weight
    return model


MADE = {
    "alike": "",
    "rounding": "",
    "a last value": "parameter 0.weight has other values on rank 0 than on rank 2",
    "some on meta": "parameter 0.weight has other values on rank 0 than on rank 2",
    "a buffer": "buffer 1.num_batches_tracked has other values on rank 0 than on rank 3",
    "meta": "buffer 1.num_batches_tracked has other values on rank 0 than on rank 3",
    "sparse": "buffer edges has other values on rank 0 than on rank 3",
    "tied": "rank 0 has parameter 2.weight (300x100 float32, trained, the same as 0.weight) where rank 2 has parameter "
    "2.weight (300x100 float32, trained)",
}


def made() -> dict[str, str]:
    found = {}
    for kind in MADE:
        try:
            check_model(model_of(dist.get_rank(), kind))
            found[kind] = ""
        except UserError as error:
            found[kind] = str(error).removeprefix("ranks are not alike: ").partition(". ")[0]
    return found


def test_values_are_compared_where_they_are_real() -> None:
    assert run_ranks(4, made) == [MADE] * 4


def moving(cases: list[list[str]]) -> list[tuple[dict[str, Any], dict[str, float], float]]:
    """For each: the facts, the metrics of the epochs, and the validation loss of the exported model."""
    results = []
    for case in cases:
        memo = Memo()
        with tempfile.TemporaryDirectory() as folder:
            train(config(*case), Path(folder), memo)
            if dist.get_rank():
                results.append((memo.known, memo.reported[-1], 0.0))
                continue
            model = unlike.Moving()
            model.load_state_dict(torch.load(Path(folder, "model.pt"), weights_only=True)["state_dict"])
        results.append((memo.known, memo.reported[-1], val_loss([model.eval()])))
    return results


def val_loss(ranks: list[nn.Module]) -> float:
    """The mean over the validation split, whose rows are dealt to the ranks in turn."""
    rows, total = unlike.Rows("val"), 0.0
    for i in range(len(rows)):
        x, y = (value.unsqueeze(0) for value in rows[i].values())
        total += unlike.loss(ranks[i % len(ranks)], {"x": x, "y": y}).item()
    return total / len(rows)


def trained_apart() -> list[nn.Module]:
    """Plain PyTorch: the models of two ranks, which share gradients and no buffers. One epoch of four steps."""
    torch.manual_seed(0)
    models = [unlike.Moving()]
    models.append(unlike.Moving())
    models[1].load_state_dict(models[0].state_dict())
    optimizers = [torch.optim.Adam(model.parameters(), lr=0.01) for model in models]
    rows = unlike.Rows("train")
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))
    for step in order.split(16):
        for model, part in zip(models, step.chunk(2), strict=True):
            x, y = (torch.stack([rows[i][name] for i in part.tolist()]) for name in "xy")
            model.zero_grad()
            unlike.loss(model, {"x": x, "y": y}).backward()
        for one, other in zip(*(model.parameters() for model in models), strict=True):
            one.grad = other.grad = (one.grad + other.grad) / 2
        for optimizer in optimizers:
            optimizer.step()
    return [model.eval() for model in models]


def test_buffers_that_each_rank_writes_have_a_note() -> None:
    """val/loss is of each rank's own buffers and the exported model has rank 0's, as the note says: in plain loops."""
    own = "optimizer.lr=0.01 training.seed=0 export=true"
    cases = [words(f"{sharding} {own}", "Moving") for sharding in SHARDINGS]
    *found, averaged = run_ranks(2, moving, [*cases, [*cases[0], "model.averaged=true"]])[0]
    plain = trained_apart()
    for known, metrics, exported in found:
        (note,) = [note for note in known["notes"] if "buffers" in note]
        assert note.startswith("Ranks differ in the buffers mean: ") and known["dp_degree_of_losses"] == 2
        assert metrics["val/loss"] == pytest.approx(val_loss(plain), abs=1e-5)
        assert exported == pytest.approx(val_loss(plain[:1]), abs=1e-5)
    assert abs(val_loss(plain) - val_loss(plain[:1])) > 1e-3
    assert not [note for note in averaged[0]["notes"] if "buffers" in note]
    assert averaged[1]["val/loss"] == pytest.approx(averaged[2], abs=1e-5)
