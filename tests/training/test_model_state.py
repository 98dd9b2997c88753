"""What modules keep besides parameters: buffers that grow or are made later, and extra state of any kind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from fsdp_lab.training.checkpoint_source import check_meta, trial_identity
from fsdp_lab.training.model_state import AsSaved, CheckpointError, load_model_state, model_state
from tests.ranks import config, run_ranks
from tests.training import kept
from tests.training.checkpoints import ASYNC, SYNC, Job, train_in
from tests.training.reference import apart, batches, build_optimizer

HERE = kept.__name__
WORDS = [
    f"model._target_={HERE}.Keeps", f"data._target_={HERE}.Rows", f"task.loss={HERE}.loss", "data.num_train=null",
    "data.num_val=null", "optimizer.lr=0.01", "training.epochs=3", "export=true",
]  # fmt: skip


def test_it_is_resumed_and_exported_as_plain_pytorch_has_it(tmp_path: Path) -> None:
    jobs = [
        job
        for name, words in {"blocks": [ASYNC], "ddp": [SYNC, "sharding=ddp", "activation_checkpointing=none"]}.items()
        for job in (
            Job(f"{tmp_path}/{name}", [*WORDS, *words, "training.max_steps=3"]),
            Job(f"{tmp_path}/{name}", [*WORDS, *words, "checkpoint.export_best=true"]),
        )
    ]
    done = run_ranks(2, train_in, jobs)[0]
    torch.manual_seed(0)
    model, trial, rows, losses = kept.Keeps(), config(*WORDS), kept.Rows("train"), list[float]()
    optimizer = build_optimizer(model, trial)
    for indices in batches(trial, 64):
        optimizer.zero_grad()
        loss = kept.loss(model, [rows.x[indices], rows.x[indices].sum(1, keepdim=True)])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    for name, (stopped, resumed) in {"blocks": done[:2], "ddp": done[2:]}.items():
        assert not resumed.error
        assert apart(stopped.losses + resumed.losses, losses) <= 1e-5, "nothing that a block keeps was forgotten"
        assert min(resumed.epochs, key=lambda e: e["val/loss"]) is resumed.epochs[-1], "the best is the last"
        check_exported(torch.load(tmp_path / name / "model.pt", weights_only=True)["state_dict"], model)


def check_exported(exported: dict[str, Any], model: kept.Keeps) -> None:
    fresh = kept.Keeps()
    for block in fresh.blocks:
        block.seen, block.last = torch.zeros(7), torch.zeros(1)
    fresh.load_state_dict(exported)
    x = kept.Rows("val").x
    assert (fresh.eval()(x) - model.eval()(x)).abs().max() <= 1e-5
    for ours, theirs in zip(fresh.blocks, model.blocks, strict=True):
        assert ours.kept.keys() == theirs.kept.keys() and ours.kept["means"] == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]


class Holds(nn.Linear):
    def __init__(self, value: Any, size: int = 2) -> None:
        super().__init__(2, size)
        self.value = value

    def get_extra_state(self) -> Any:
        return self.value

    def set_extra_state(self, state: Any) -> None:
        self.value = state


@pytest.mark.parametrize("value", [None, 7, "text", (1, 2), {1: {"a": [2, b"3"]}}, {4, 5}, torch.float16, {}])
def test_extra_state_of_any_kind_is_loaded(value: Any) -> None:
    loaded = Holds({"another": "kind"})
    load_model_state(loaded, model_state(Holds(value)))
    assert loaded.value == value and type(loaded.value) is type(value)


def test_a_model_that_compiles_a_part_itself_is_loaded(tmp_path: Path) -> None:
    """DCP saves the part's names as if it were not compiled. `seen` has grown since the model was built."""

    def built(size: int) -> tuple[nn.Module, Holds]:
        holds = Holds(size)
        holds.register_buffer("seen", torch.full((size,), 7.0))
        return nn.ModuleList([torch.compile(nn.Sequential(holds, nn.Linear(2, 2)), backend="eager")]), holds

    (saved, _), loaded, read = built(3), built(1), built(1)
    load_model_state(loaded[0], model_state(saved))
    dcp.save({"train": {"model": model_state(saved)}}, checkpoint_id=tmp_path, no_dist=True)
    state = {"train": {"model": model_state(read[0])}}
    dcp.load(state, checkpoint_id=tmp_path, planner=AsSaved(read[0], torch.device("cpu"), "x"), no_dist=True)
    load_model_state(read[0], state["train"]["model"])
    for model, holds in (loaded, read):
        assert all(torch.equal(p, q) for p, q in zip(model.parameters(), saved.parameters(), strict=True))
        assert holds.value == 3 and torch.equal(holds.seen, torch.full((3,), 7.0))


def test_a_checkpoint_of_other_parameters_is_not_called_damaged(tmp_path: Path) -> None:
    """As after a change of the model's code."""
    dcp.save(
        {"train": {"model": model_state(nn.Sequential(Holds(1), nn.Linear(2, 2)))}},
        checkpoint_id=tmp_path,
        no_dist=True,
    )
    model = nn.Sequential(Holds(1, size=3), nn.LayerNorm(2))
    planner, state = AsSaved(model, torch.device("cpu"), "x"), {"train": {"model": model_state(model)}}
    with pytest.raises(dcp.CheckpointException) as caught:
        dcp.load(state, checkpoint_id=tmp_path, planner=planner, no_dist=True)
    ((error, _),) = caught.value.failures.values()
    assert isinstance(error, CheckpointError)
    assert str(error).startswith(
        "the checkpoint x is of another model: 0.weight is [2, 2] there and [3, 2] in the model; 0.bias is [2] there "
        "and [3] in the model; 1.weight is [2, 2] there and [2] in the model; use the code that it was saved with"
    )


def test_a_checkpoint_of_other_keys_is_refused_though_its_weights_would_fit() -> None:
    trial = config("model.num_heads=2")
    meta = {"trial": trial_identity(config("model.num_heads=4")), "optimizer": trial.optimizer.kind}
    with pytest.raises(CheckpointError, match=r"model\.num_heads=4 in the checkpoint, 2 now"):
        check_meta(meta, "x", trial)
