"""The exported file needs nothing of the sharded run: plain PyTorch reads it, and it scores the same."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from fsdp_lab.config import UserError
from fsdp_lab.training.export import load_exported
from tests.ranks import Memo, config, run_ranks
from tests.training.reference import Run, digits, resize, train_unsharded

# Not Adam: it would blow up the rounding in the bias of the attention's keys, whose gradient is zero.
VIT = ["optimizer=sgd", "optimizer.lr=0.05", "training.epochs=2"]
MLP = ["model=mlp", "optimizer=sgd", "optimizer.lr=0.05"]
CASES = {
    "per_block_checkpointed": ["sharding=per_block", "activation_checkpointing=full", *VIT],
    "per_layer_offloaded": ["sharding=per_layer", "offload=cpu", *VIT],
    "ddp": ["sharding=ddp", *VIT],
    "size_based_mlp": ["sharding=size_based", "sharding.min_num_params=20000", "init=meta", *MLP],
}


@dataclass
class Exported:
    path: Path
    accuracy: float
    loss: float


def train_and_export(folder: str) -> dict[str, Exported]:
    from fsdp_lab.training import train

    results = {}
    for name, overrides in CASES.items():
        memo = Memo()
        Path(folder, name).mkdir(exist_ok=True)
        train(config("export=true", *overrides), Path(folder, name), memo)
        reported = memo.reported[-1]
        results[name] = Exported(Path(folder, name, "model.pt"), reported["val/accuracy"], reported["val/loss"])
    return results


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Exported]:
    return run_ranks(2, train_and_export, str(tmp_path_factory.mktemp("export")))[0]


@pytest.fixture(scope="module")
def unsharded() -> dict[str, Run]:
    vit, mlp = train_unsharded(config(*VIT)), train_unsharded(config(*MLP))
    return {name: mlp if "mlp" in name else vit for name in CASES}


@pytest.mark.parametrize("name", CASES)
def test_weights_are_the_unsharded_runs(exported: dict[str, Exported], unsharded: dict[str, Run], name: str) -> None:
    content = torch.load(exported[name].path, weights_only=True)
    assert set(content) == {"format", "torch_version", "model", "data", "state_dict"}
    expected = unsharded[name].weights
    assert content["state_dict"].keys() == expected.keys()
    for key, value in expected.items():
        got = content["state_dict"][key]
        assert (got.dtype, got.device.type) == (torch.float32, "cpu")
        assert (got - value).abs().max() <= 1e-5, key


def test_the_weights_have_moved(unsharded: dict[str, Run]) -> None:
    """The comparison above is worth something: training moved every tensor by more than ten times its tolerance."""
    from tests.training.reference import first_weights

    start = first_weights(config(*VIT))
    moved = {k: float((v - start[k]).abs().max()) for k, v in unsharded["ddp"].weights.items()}
    assert min(moved.values()) > 1e-4, moved


@pytest.mark.parametrize("name", CASES)
def test_the_loaded_model_scores_what_training_reported(exported: dict[str, Exported], name: str) -> None:
    loaded = load_exported(exported[name].path)
    images, labels = digits()[1]
    images, labels = resize(images[:30], loaded.model.image_size), labels[:30]
    with torch.no_grad():
        logits = loaded.module(images)
    accuracy = (logits.argmax(1) == labels).double().mean().item()
    assert accuracy == pytest.approx(exported[name].accuracy, abs=1e-12)
    assert torch.nn.functional.cross_entropy(logits, labels).item() == pytest.approx(exported[name].loss, abs=1e-5)
    assert not loaded.module.training
    assert loaded.data.name == "digits"


def test_only_one_file_is_written(exported: dict[str, Exported]) -> None:
    for one in exported.values():
        assert [f.name for f in one.path.parent.iterdir()] == ["model.pt"]


@pytest.mark.parametrize(
    "content",
    [b"", b"this is not a model", b"PK\x03\x04 cut short", b"\x80\x04garbage"],
    ids=["empty", "text", "half a zip", "half a pickle"],
)
def test_garbage_is_reported(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "model.pt"
    path.write_bytes(content)
    with pytest.raises(UserError, match=str(path)):
        load_exported(path)


@pytest.mark.parametrize("content", [{}, {"format": 99}, [1, 2], torch.zeros(3)], ids=str)
def test_another_file_of_pytorch_is_reported(tmp_path: Path, content: object) -> None:
    path = tmp_path / "model.pt"
    torch.save(content, path)
    with pytest.raises(UserError, match="was not exported by this version"):
        load_exported(path)


def test_a_missing_file_is_reported(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"nowhere\.pt: no such file; give the path"):
        load_exported(tmp_path / "nowhere.pt")


def test_a_file_cut_short_is_reported(exported: dict[str, Exported], tmp_path: Path) -> None:
    whole = exported["ddp"].path.read_bytes()
    path = tmp_path / "model.pt"
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UserError, match="is not an exported model"):
        load_exported(path)
