"""What is saved and exported: the unsharded run's weights, the best epoch's, and what modules keep besides."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

from fsdp_lab.config import UserError
from fsdp_lab.training.export import load_exported
from fsdp_lab.training.model_state import AsSaved, CheckpointError, load_model_state, model_state
from tests.ranks import config, run_ranks, selected
from tests.training.checkpoints import ASYNC, SYNC, Job, Reported, train_in
from tests.training.reference import Script, apart, digits, resize, train_unsharded
from tests.workloads.user import unusual

# Not Adam: it would blow up the rounding in the bias of the attention's keys, whose gradient is zero.
VIT = ["optimizer=sgd", "optimizer.lr=0.05", "training.epochs=2", "model.num_layers=2"]
MLP = ["model=mlp", "optimizer=sgd", "optimizer.lr=0.05", "training.epochs=1"]
CASES = {
    "per_block_checkpointed": (["sharding=per_block", "activation_checkpointing=full"], VIT),
    "size_based_mlp": (["sharding=size_based", "sharding.min_num_params=20000", "init=rank0", "offload=cpu"], MLP),
}
# Each epoch's learning rate is four times the last one's, so that the last epochs are worse than those before.
WORSE = ["training.epochs=6", "lr_schedule=step", "lr_schedule.gamma=4", "data.num_train=32", "model.num_layers=2"]
BEST = {
    "every_4": ["sharding=per_block", SYNC, "checkpoint.every_epochs=4"],
    "async": ["sharding=per_layer", ASYNC, "activation_checkpointing=full"],
    "ddp": ["sharding=ddp", SYNC],
}


def job(folder: Path, *words: str) -> Job:
    return Job(str(folder), ["export=true", *words], trial=())


def exported(folder: Path) -> dict[str, Tensor]:
    return torch.load(folder / "model.pt", weights_only=True)["state_dict"]  # type: ignore[no-any-return]


Trained = tuple[Path, dict[str, Reported]]  # where each case has its folder, and what it reported


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Trained:
    """What the selected tests need, trained on two ranks."""
    folder = tmp_path_factory.mktemp("export")
    words = {name: [*CASES[name][0], *CASES[name][1]] for name in selected(request, "name")}
    words |= {name: [*WORSE, *BEST[name], "checkpoint.export_best=true"] for name in selected(request, "best")}
    results = run_ranks(2, train_in, [job(folder / name, *each) for name, each in words.items()])[0]
    return folder, dict(zip(words, results, strict=True))


@pytest.mark.parametrize("name", ["per_block_checkpointed", pytest.param("size_based_mlp", marks=pytest.mark.ci)])
def test_the_exported_model_is_the_unsharded_runs(trained: Trained, name: str) -> None:
    """It has its weights, and scores what training reported."""
    path, reported = trained[0] / name / "model.pt", trained[1][name].epochs[-1]
    assert set(torch.load(path, weights_only=True)) == {"format", "torch_version", "model", "data", "state_dict"}
    weights, expected = exported(path.parent), train_unsharded(config(*CASES[name][1])).weights
    assert weights.keys() == expected.keys()
    for key, value in expected.items():
        assert (weights[key].dtype, weights[key].device.type) == (torch.float32, "cpu")
        assert (weights[key] - value).abs().max() <= 1e-5, key
    content, loaded = torch.load(path, weights_only=True), load_exported(path)
    images, labels = digits()[1]
    images, labels = resize(images[:30], content["model"]["image_size"]), labels[:30]
    with torch.no_grad():
        logits = loaded(images)
    accuracy = (logits.argmax(1) == labels).double().mean().item()
    assert accuracy == pytest.approx(reported["val/accuracy"], abs=1e-12)
    assert nn.functional.cross_entropy(logits, labels).item() == pytest.approx(reported["val/loss"], abs=1e-5)
    assert not loaded.training and content["data"]["_target_"].endswith("digits.Digits")


@pytest.mark.parametrize("best", ["every_4", *(pytest.param(each, marks=pytest.mark.ci) for each in [*BEST][1:])])
def test_the_weights_of_the_best_epoch_are_exported(trained: Trained, best: str, tmp_path: Path) -> None:
    """To the bit those of a run, on as many ranks, that ends with the epoch of the least validation loss."""
    losses = [epoch["val/loss"] for epoch in trained[1][best].epochs]
    epoch = losses.index(min(losses)) + 1  # of one step each
    assert epoch <= 3 < len(losses) == len(set(losses)), "neither the last one nor one of every four is the best"
    run_ranks(2, train_in, [job(tmp_path, *WORSE, *BEST[best], f"training.max_steps={epoch}")])
    chosen, expected = exported(trained[0] / best), exported(tmp_path)
    assert chosen.keys() == expected.keys()
    assert all(torch.equal(chosen[key], expected[key]) for key in expected)


def test_an_exported_file_runs_no_code_that_it_holds(tmp_path: Path) -> None:
    """Reading a path calls its class. Other files are reported, too."""
    file = tmp_path / "model.pt"
    for saved, says in (
        ({"format": 1, "state_dict": tmp_path}, "only tensors and plain values"),
        ({"format": 99}, "was not exported by this version"),
        ([1, 2], "was not exported by this version"),
    ):
        torch.save(saved, file)
        with pytest.raises(UserError, match=f"{file} .*{says}"):
            load_exported(file)
    for content in (b"", b"this is not a model", b"PK\x03\x04 cut short"):
        file.write_bytes(content)
        with pytest.raises(UserError, match=f"{file} is not an exported model"):
            load_exported(file)


def test_an_exported_file_names_no_code_that_is_called_but_a_module(tmp_path: Path) -> None:
    """The file may be anybody's."""
    file = tmp_path / "model.pt"
    linear = {"_target_": "torch.nn.Linear", "in_features": 2, "out_features": 1}
    content = {"format": 1, "model": linear, "state_dict": nn.Linear(2, 1).state_dict()}
    for model in (linear, {**linear, "block_classes": ["torch.nn.Linear"]}):
        torch.save({**content, "model": model}, file)
        assert torch.equal(load_exported(file).weight, content["state_dict"]["weight"])  # type: ignore[arg-type,index]
    command = {"_target_": "os.system", "command": f"touch {tmp_path}/called"}
    for model in (command, {**linear, "bias": command}):
        torch.save({**content, "model": model}, file)
        with pytest.raises(UserError, match=rf"_target_={model['_target_']}, which is not called"):
            load_exported(file)
    assert not (tmp_path / "called").exists()


class Keeps(nn.Linear):
    """A block that adds all that it keeps to its output, so that forgetting it changes the loss: a buffer that grows,
    one that is made later, and extra state of any kind."""

    seen: Tensor
    last: Tensor | None

    def __init__(self) -> None:
        super().__init__(unusual.WIDTH, unusual.WIDTH)
        self.register_buffer("seen", torch.zeros(1))
        self.register_buffer("last", None)
        self.kept: dict[str, Any] = {"calls": 0, "means": []}

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.kept["calls"] += 1
            self.kept[f"call {self.kept['calls']}"] = torch.full((self.kept["calls"],), 0.5)
            self.kept["means"].append(float(self.kept["calls"]))
            self.seen = torch.cat([self.seen, self.seen[-1:] + 1])
            self.last = self.seen[-1:] / 10
        known = sum(value.sum() for name, value in self.kept.items() if name.startswith("call "))
        out = super().forward(x).tanh() + self.seen.mean() / 100 + known / 100
        return out if self.last is None else out + self.last / 100

    def get_extra_state(self) -> dict[str, Any]:
        return self.kept

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.kept = state


def keeping() -> unusual.Layers:
    return unusual.Layers(Keeps(), Keeps())


KEEPS = (
    f"model._target_={__name__}.keeping", f"model.block_classes=[{__name__}.Keeps]",
    f"data._target_={unusual.__name__}.Rows", f"task.loss={unusual.__name__}.loss", "data.num_train=null",
    "data.num_val=null", "optimizer.lr=0.01", "training.epochs=3", "export=true",
)  # fmt: skip


def test_it_is_resumed_and_exported_as_plain_pytorch_has_it(tmp_path: Path) -> None:
    """64 rows, of which a step takes 32: the stop is after step 3 of 6."""
    settings = {"blocks": [ASYNC], "ddp": [SYNC, "sharding=ddp", "activation_checkpointing=none"]}
    jobs = [
        Job(f"{tmp_path}/{name}", [*words, ends], trial=KEEPS)
        for name, words in settings.items()
        for ends in ("training.max_steps=3", "checkpoint.export_best=true")
    ]
    done = run_ranks(2, train_in, jobs)[0]
    plain = Script(keeping, unusual.Rows, unusual.loss).train(config(*KEEPS))
    for name, stopped, resumed in zip(settings, done[::2], done[1::2], strict=True):
        assert not resumed.error
        assert apart(stopped.losses + resumed.losses, plain.losses) <= 1e-5, "nothing that a block keeps was forgotten"
        assert min(resumed.epochs, key=lambda e: e["val/loss"]) is resumed.epochs[-1], "the best is the last"
        fresh: Any = keeping()
        for block in fresh.blocks:
            block.seen, block.last = torch.zeros(7), torch.zeros(1)
        fresh.load_state_dict(exported(tmp_path / name))
        assert unusual.loss(fresh.eval(), unusual.Rows("val").rows).item() == pytest.approx(plain.val_loss, abs=1e-5)
        for block in fresh.blocks:
            assert [*block.kept] == ["calls", "means", *(f"call {n}" for n in range(1, 7))]
            assert block.kept["means"] == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]


class Holds(nn.Linear):
    def __init__(self, value: Any, size: int = 2) -> None:
        super().__init__(2, size)
        self.value = value

    def get_extra_state(self) -> Any:
        return self.value

    def set_extra_state(self, state: Any) -> None:
        self.value = state


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
    saved, model = nn.Sequential(Holds(1), nn.Linear(2, 2)), nn.Sequential(Holds(1, size=3), nn.LayerNorm(2))
    dcp.save({"train": {"model": model_state(saved)}}, checkpoint_id=tmp_path, no_dist=True)
    planner = AsSaved(model, torch.device("cpu"), "x")
    with pytest.raises(dcp.CheckpointException) as caught:
        dcp.load({"train": {"model": model_state(model)}}, checkpoint_id=tmp_path, planner=planner, no_dist=True)
    ((error, _),) = caught.value.failures.values()
    assert isinstance(error, CheckpointError)
    assert "x is of another model: 0.weight is [2, 2] there and [3, 2] in the model; 0.bias is [2] there" in str(error)
