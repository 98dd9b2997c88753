"""The exported file needs nothing of the sharded run: plain PyTorch reads it, and it scores the same."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from fsdp_lab.config import UserError
from fsdp_lab.training.export import load_exported
from tests.ranks import Memo, config, run_ranks, selected
from tests.training.reference import Run, digits, resize, train_unsharded

# Not Adam: it would blow up the rounding in the bias of the attention's keys, whose gradient is zero.
VIT = ["optimizer=sgd", "optimizer.lr=0.05", "training.epochs=2", "model.num_layers=2"]
MLP = ["model=mlp", "optimizer=sgd", "optimizer.lr=0.05"]
CASES = {
    "per_block_checkpointed": ["sharding=per_block", "activation_checkpointing=full", *VIT],
    "ddp": ["sharding=ddp", *VIT],
    "per_layer_offloaded": ["sharding=per_layer", "offload=cpu", *VIT],
    "size_based_mlp": ["sharding=size_based", "sharding.min_num_params=20000", "init=meta", *MLP],
}
# Each epoch's learning rate is four times the last one's, so that the last epochs are worse than those before.
WORSE = [
    "training.epochs=6", "lr_schedule=step", "lr_schedule.gamma=4", "data.num_train=32", "model.num_layers=2",
    "export=true",
]  # fmt: skip
BEST = {
    "sync": ["sharding=per_block", "activation_checkpointing=full", "checkpoint.mode=sync"],
    "every_4": ["sharding=per_block", "checkpoint.mode=sync", "checkpoint.every_epochs=4"],
    "async": ["sharding=per_layer", "checkpoint.mode=async"],
    "ddp": ["sharding=ddp", "checkpoint.mode=sync"],
}


@dataclass
class Exported:
    path: Path
    accuracy: float
    loss: float


@dataclass
class Best:
    """The best epoch, and the weights of `export_best`, of the last step, and of a run that ends with that epoch."""

    epoch: int
    best: dict[str, torch.Tensor]
    last: dict[str, torch.Tensor]
    there: dict[str, torch.Tensor]


def train_and_export(folder: str, cases: list[str], best: list[str]) -> tuple[dict[str, Exported], dict[str, Best]]:
    """Train the named ones of `CASES`, and of `BEST`."""

    def train_case(name: str, words: list[str]) -> tuple[Path, list[dict[str, float]]]:
        from fsdp_lab.training.train import train

        memo, own = Memo(), Path(folder, name)
        own.mkdir(exist_ok=True)
        train(config(*words), own, memo)
        dist.barrier()  # the first rank has written it
        return own / "model.pt", memo.reported

    def weights(name: str, words: list[str]) -> tuple[list[float], dict[str, torch.Tensor]]:
        path, reported = train_case(name, [*WORSE, *words])
        return [epoch["val/loss"] for epoch in reported], torch.load(path, weights_only=True)["state_dict"]

    exported: dict[str, Exported] = {}
    of_best: dict[str, Best] = {}
    for name in cases:
        path, reported = train_case(name, ["export=true", *CASES[name]])
        exported[name] = Exported(path, reported[-1]["val/accuracy"], reported[-1]["val/loss"])
    for name in best:
        losses, chosen = weights(f"best_{name}", [*BEST[name], "checkpoint.export_best=true"])
        epoch = losses.index(min(losses))
        _, last = weights(f"last_{name}", BEST[name])
        _, there = weights(f"there_{name}", [*BEST[name], f"training.max_steps={epoch + 1}"])
        of_best[name] = Best(epoch, chosen, last, there)
    return exported, of_best


Trained = tuple[dict[str, Exported], dict[str, Best]]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Trained:
    """What the selected tests need, trained on two ranks."""
    cases, best = selected(request, "name"), selected(request, "best")
    return run_ranks(2, train_and_export, str(tmp_path_factory.mktemp("export")), cases, best)[0]


@pytest.fixture(scope="module")
def exported(trained: Trained) -> dict[str, Exported]:
    return trained[0]


@pytest.fixture(scope="module")
def unsharded(exported: dict[str, Exported]) -> dict[str, Run]:
    runs = {words: train_unsharded(config(*words)) for words in {tuple(unsharded_words(name)) for name in exported}}
    return {name: runs[tuple(unsharded_words(name))] for name in exported}


def unsharded_words(name: str) -> list[str]:
    return MLP if "mlp" in name else VIT


NAMES = ["per_block_checkpointed", *(pytest.param(n, marks=pytest.mark.ci) for n in [*CASES][1:])]


@pytest.mark.parametrize("name", NAMES)
def test_weights_are_the_unsharded_runs(exported: dict[str, Exported], unsharded: dict[str, Run], name: str) -> None:
    content = torch.load(exported[name].path, weights_only=True)
    assert set(content) == {"format", "torch_version", "model", "data", "state_dict"}
    expected = unsharded[name].weights
    assert content["state_dict"].keys() == expected.keys()
    for key, value in expected.items():
        got = content["state_dict"][key]
        assert (got.dtype, got.device.type) == (torch.float32, "cpu")
        assert (got - value).abs().max() <= 1e-5, key


@pytest.mark.parametrize("name", NAMES)
def test_the_loaded_model_scores_what_training_reported(exported: dict[str, Exported], name: str) -> None:
    loaded = load_exported(exported[name].path)
    images, labels = digits()[1]
    images, labels = resize(images[:30], loaded.model.sizes()["image_size"]), labels[:30]
    with torch.no_grad():
        logits = loaded.module(images)
    accuracy = (logits.argmax(1) == labels).double().mean().item()
    assert accuracy == pytest.approx(exported[name].accuracy, abs=1e-12)
    assert torch.nn.functional.cross_entropy(logits, labels).item() == pytest.approx(exported[name].loss, abs=1e-5)
    assert not loaded.module.training
    assert loaded.data.name == "digits"


def test_other_files_are_reported(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    for content in (b"", b"this is not a model", b"PK\x03\x04 cut short", b"\x80\x04garbage"):
        path.write_bytes(content)
        with pytest.raises(UserError, match=str(path)):
            load_exported(path)
    for saved in ({}, {"format": 99}, [1, 2], torch.zeros(3)):
        torch.save(saved, path)
        with pytest.raises(UserError, match="was not exported by this version"):
            load_exported(path)


@pytest.mark.parametrize(
    "best", ["sync", "every_4", *(pytest.param(name, marks=pytest.mark.ci) for name in ("async", "ddp"))]
)
def test_the_weights_of_the_best_epoch_are_exported(trained: Trained, best: str) -> None:
    """To the bit those of a run, on as many ranks, that ends with the epoch of the least validation loss."""
    one = trained[1][best]
    assert 0 <= one.epoch < 3, "an epoch that is neither the last nor one of every four is the best"
    assert one.best.keys() == one.there.keys()
    assert all(torch.equal(one.best[key], one.there[key]) for key in one.there)
    assert not all(torch.equal(one.best[key], one.last[key]) for key in one.last)
