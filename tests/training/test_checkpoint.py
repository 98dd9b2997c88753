"""What was stopped goes on as if it had not been; what is damaged is skipped or refused."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from fsdp_lab.training.checkpoint_place import Place
from fsdp_lab.training.checkpoint_source import check_meta, trial_identity
from fsdp_lab.training.model_state import CheckpointError
from tests.ranks import config, run_ranks, selected
from tests.training.checkpoints import ASYNC, SMALL, STEPS, SYNC, Job, Reported, cut, data_of, names, names_in, train_in
from tests.training.reference import apart, batches, build_optimizer, digits, first_model

COSINE = ("lr_schedule=cosine", "lr_schedule.warmup_steps=2")
# The first step overflows, and the scale then grows after every second good one.
SCALER = ("precision=fp16", "precision.init_scale=4e5", "precision.growth_interval=2")
ADAM = [SYNC, "optimizer.lr=0.01", "training.timing_warmup_steps=0"]
SAME_RANKS: dict[str, list[str]] = {
    "adam": ADAM,
    "own_lion_fp16_cosine": [
        SYNC, *SCALER, *COSINE, "activation_checkpointing=full", "optimizer.lr=0.001",
        "optimizer._target_=tests.workloads.user.optim.Lion",
    ],
    "async": [ASYNC, "optimizer=adamw", "lr_schedule=step", "lr_schedule.gamma=0.5"],
    "fp16_mixed_offload": [ASYNC, "precision=fp16_mixed", "offload=cpu", "init=meta", "sharding=root"],
    "ddp": [*ADAM, "sharding=ddp"],
}  # fmt: skip
OTHER_RANKS: dict[str, list[str]] = {
    "per_layer_cosine": [*ADAM, "sharding=per_layer", *COSINE],
    "own_adagrad": [SYNC, "optimizer._target_=torch.optim.Adagrad", "optimizer.lr=0.01", "sharding=per_layer"],
}
# Seven epochs of one step; each epoch's learning rate is four times the last one's.
WORSE = ("training.epochs=7", "data.num_train=32", "lr_schedule=step", "lr_schedule.gamma=4", "checkpoint.keep_last=2")
KEEP_TWO = [*ADAM, "checkpoint.keep_last=2", "checkpoint.keep_best=false"]


@dataclass
class Runs:
    folder: Path
    two: dict[str, Reported]

    def last(self, name: str) -> Path:
        """The newest checkpoint of a folder."""
        found = Place(f"{self.folder / name}/checkpoints").find_latest()[0]
        assert found is not None
        return Path(found.name)


def later_jobs(folder: Path) -> dict[str, Job]:
    """What follows the runs of `adam`, and the run `kept`, which has two checkpoints."""
    kept, last, source = f"{folder}/kept", f"checkpoints/{names(4)[0]}", "checkpoint.resume_from="
    shard, both = f"{last}.*/__1_0.distcp", [f"checkpoints/{n}.json" for n in names(2, 4)]
    whole = f"{source}{folder}/adam_whole/checkpoints"
    unsaved = ["checkpoint.mode=off", "optimizer.lr=0.01", "training.epochs=5", whole, "precision=fp16"]
    other = [
        "training.global_batch_size=64", "training.epochs=5", "optimizer.lr=0.003", "optimizer.weight_decay=0.1",
        "sharding=per_layer", "training.timing_warmup_steps=0", SYNC,
    ]  # fmt: skip
    return {
        "best": Job(f"{folder}/best", [SYNC, *WORSE]),
        "kept": Job(kept, [*KEEP_TWO, "training.max_steps=4"]),
        "again": Job(f"{folder}/adam", ADAM),
        "larger batch": Job(f"{folder}/larger batch", [*other, whole]),
        "larger batch, resumed": Job(f"{folder}/larger batch", [*other[:1], "training.epochs=6", *other[2:]]),
        "scaled from unscaled": Job(f"{folder}/scaled", unsaved),
        "from nowhere": Job(f"{folder}/nowhere", [SYNC, f"{source}{folder}/empty"]),
        "other model": Job(f"{folder}/adam", [SYNC, "model.num_layers=3"]),
        "other optimizer": Job(f"{folder}/adam", [SYNC, "optimizer=sgd"]),
        "cut meta": Job(f"{folder}/cut meta", KEEP_TWO, kept, [(cut, f"{last}.json")]),
        "no shard": Job(f"{folder}/no shard", [*KEEP_TWO, ASYNC], kept, [(Path.unlink, shard)]),
        "anew": Job(f"{folder}/anew", KEEP_TWO, kept, [(cut, file) for file in both]),
    }


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Runs:
    """Everything that needs two ranks, in one process group: job name -> what it told."""
    folder = tmp_path_factory.mktemp("checkpoints")
    others = {name: OTHER_RANKS[name] for name in selected(request, "other")}
    jobs: dict[str, Job] = {}
    for name, words in ({name: SAME_RANKS[name] for name in ["adam", *selected(request, "same")]} | others).items():
        jobs[f"{name} whole"] = Job(f"{folder}/{name}_whole", words)
        jobs[f"{name} stopped"] = Job(f"{folder}/{name}", [*words, f"training.max_steps={STEPS}"])
        if name not in others:
            jobs[f"{name} resumed"] = Job(f"{folder}/{name}", words)
    jobs |= later_jobs(folder)
    results = run_ranks(2, train_in, list(jobs.values()))
    for name, first, second in zip(jobs, *results, strict=True):
        assert first.losses == second.losses and first.error == second.error, name
    return Runs(folder, dict(zip(jobs, results[0], strict=True)))


@pytest.mark.parametrize(
    "same",
    ["adam", "own_lion_fp16_cosine",
     *(pytest.param(name, marks=pytest.mark.ci) for name in ("async", "ddp", "fp16_mixed_offload"))],
)  # fmt: skip
def test_stopped_and_resumed_is_uninterrupted(runs: Runs, same: str) -> None:
    whole_run, stopped, resumed = (runs.two[f"{same} {part}"] for part in ("whole", "stopped", "resumed"))
    assert len(whole_run.losses) == 3 * STEPS
    assert stopped.losses == whole_run.losses[:STEPS]
    assert resumed.losses == whole_run.losses[STEPS:]  # to the bit
    assert Path(resumed.facts["resumed_from"]).name == "step_00000002"
    assert [e["epoch"] for e in resumed.epochs] == [1, 2, 3]  # the first one is told again
    for key in ("train/loss", "val/loss", "val/accuracy", "train/lr", "train/loss_scale", "train/skipped_steps"):
        assert [e.get(key) for e in resumed.epochs] == [e.get(key) for e in whole_run.epochs], key
    if same == "own_lion_fp16_cosine":  # before the stop one step was skipped, and one made the optimizer's state
        assert whole_run.epochs[0]["train/skipped_steps"] == 1
        assert len({e["train/loss_scale"] for e in whole_run.epochs}) > 1


@pytest.mark.parametrize(
    ("other", "ranks"),
    [("per_layer_cosine", 1), *(pytest.param(name, 4, marks=pytest.mark.ci) for name in OTHER_RANKS)],
)
def test_resumed_on_another_number_of_workers(runs: Runs, other: str, ranks: int) -> None:
    folder = f"{runs.folder}/{other} on {ranks}"
    job = Job(folder, OTHER_RANKS[other], f"{runs.folder}/{other}", [(say_timed, f"checkpoints/{names(2)[0]}.json")])
    (reported,) = run_ranks(ranks, train_in, [job])[0]
    assert not reported.error
    expected = runs.two[f"{other} whole"].losses[STEPS:]
    assert apart(reported.losses, expected) <= 1e-5, f"{reported.losses} {expected}"
    stopped = runs.two[f"{other} stopped"].epochs[0]
    assert reported.epochs[0].items() >= {k: v for k, v in stopped.items() if "checkpoint" not in k}.items()
    if ADAM[-1] in OTHER_RANKS[other]:
        assert reported.epochs[-1]["perf/timed_steps"] <= 2 * STEPS, "a speed is of one number of workers"


def say_timed(meta: Path) -> None:
    """Let a checkpoint tell of fifty timed steps."""
    content = json.loads(meta.read_text())
    content["history"][-1].update({"perf/timed_steps": 50.0, "perf/timed_s": 1.0})
    meta.write_text(json.dumps(content))


def test_the_best_and_the_last_two_are_kept_and_nothing_else(runs: Runs) -> None:
    best = min(runs.two["best"].epochs, key=lambda e: e["val/loss"])
    assert best["step"] < 6, "the case has to have its best epoch before the last two"
    assert names_in(runs.folder / "best/checkpoints") == names(int(best["step"]), 6, 7)


def test_what_a_save_took_is_reported(runs: Runs) -> None:
    epochs = runs.two["adam whole"].epochs
    assert all(e["checkpoint/save_s"] >= e["checkpoint/blocked_s"] > 0 for e in epochs)
    on_disk = sum(f.stat().st_size for f in data_of(runs.last("adam_whole")).iterdir())
    weights = sum(weight.numel() * 4 for weight in first_model(config(*SMALL)).parameters())
    assert epochs[-1]["checkpoint/bytes"] == on_disk > weights * 3, "they and Adam's two moments"


def test_a_finished_run_trains_no_further(runs: Runs) -> None:
    assert (runs.two["again"].losses, len(runs.two["again"].epochs)) == ([], 3)


def test_resume_from_another_folder_without_saving(runs: Runs) -> None:
    """Five epochs more, of which no figure tells of a save; loss scaling can start there."""
    reported = runs.two["scaled from unscaled"]
    assert reported.facts["resumed_from"].endswith("adam_whole/checkpoints/step_00000006")
    assert len(reported.losses) == 5 * STEPS
    assert [epoch["epoch"] for epoch in reported.epochs] == [1, 2, 3, 4, 5], "the other run's are not this one's"
    assert [key for epoch in reported.epochs for key in epoch if key.startswith("checkpoint/")] == []
    assert reported.epochs[-1]["train/loss_scale"] > 0


def continued() -> list[float]:
    """The losses of plain PyTorch: the steps of `adam`, then those of `larger batch` with the same optimizer."""
    first, then = config("training.epochs=3", *SMALL, *ADAM), config("training.epochs=5", *SMALL)
    then.training.global_batch_size = 64
    model, (images, labels) = first_model(first), digits()[0]
    optimizer, losses = build_optimizer(model, first), []
    for number, indices in enumerate(batches(first, 1437) + batches(then, 1437)):
        if number == 3 * STEPS:
            optimizer.param_groups[0].update(lr=0.003, weight_decay=0.1)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images[indices]), labels[indices])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses[3 * STEPS :]


def test_another_run_gives_its_weights_and_optimizer_state_and_nothing_else(runs: Runs) -> None:
    """Not its history, its times, its learning rate, its weight decay, or its position."""
    reported, resumed = runs.two["larger batch"], runs.two["larger batch, resumed"]
    assert not reported.error
    assert apart(reported.losses, continued()) <= 1e-5
    assert [each["epoch"] for each in reported.epochs] == [each["step"] for each in reported.epochs] == [1, 2, 3, 4, 5]
    timed = [each.get("perf/timed_steps", 0) for each in reported.epochs]
    assert timed == [0, 0, 1, 2, 3], "the first two steps are not timed"
    assert [each["epoch"] for each in resumed.epochs] == [1, 2, 3, 4, 5, 6] and resumed.epochs[:5] == reported.epochs


@pytest.mark.parametrize(
    ("job", "words"),
    [
        ("from nowhere", ("checkpoint.resume_from={folder}/empty", "no complete checkpoint", "step_<number>.json")),
        ("other model", ("model.num_layers=2 in the checkpoint, 3 now",)),
        ("other optimizer", ("optimizer=adam in the checkpoint, sgd now",)),
    ],
)
def test_what_cannot_be_resumed_is_refused_on_every_rank(runs: Runs, job: str, words: tuple[str, ...]) -> None:
    error = runs.two[job].error
    assert error.startswith(("CheckpointError: ", "CombinationError: ")) and "\n" not in error
    assert [text for text in words if text.format(folder=runs.folder) not in error] == []


def test_another_pytorch_and_other_keys_are_refused(runs: Runs) -> None:
    source = runs.last("adam")
    meta = json.loads(source.with_suffix(".json").read_text())
    trial = config(*SMALL)
    check_meta(meta, str(source), trial)
    meta["torch_version"] = "2.4.1"
    with pytest.raises(CheckpointError, match=r"written by PyTorch 2\.4\.1, and this is") as caught:
        check_meta(meta, str(source), trial)
    assert torch.__version__ in str(caught.value)
    assert "checkpoint.any_torch_version=true" in str(caught.value)
    check_meta(meta, str(source), config(*SMALL, "checkpoint.any_torch_version=true"))
    four_heads = {"trial": trial_identity(config("model.num_heads=4")), "optimizer": trial.optimizer.kind}
    with pytest.raises(CheckpointError, match=r"model\.num_heads=4 in the checkpoint, 2 now"):
        check_meta(four_heads, "x", config("model.num_heads=2"))  # its weights would fit


@pytest.mark.parametrize(
    ("job", "words"),
    [("cut meta", "step_00000004.json cannot be read"), ("no shard", "__1_0.distcp is missing")],
)
def test_a_damaged_checkpoint_is_passed_over_for_the_one_before(runs: Runs, job: str, words: str) -> None:
    reported = runs.two[job]
    assert not reported.error
    assert reported.losses == runs.two["adam whole"].losses[STEPS:]
    assert Path(reported.facts["resumed_from"]).name == names(2)[0]
    (note,) = [note for note in reported.facts["notes"] if "damaged" in note]
    assert names(4)[0] in note and names(2)[0] in note and words in note
    folder = runs.folder / job / "checkpoints"
    assert names_in(folder) == names(4, 6) and all(each.damage is None for each in Place(str(folder)).saved())


def test_without_a_whole_one_training_starts_anew_and_says_so(runs: Runs) -> None:
    reported = runs.two["anew"]
    assert reported.losses == runs.two["adam whole"].losses
    assert sum("training starts from step 0" in note for note in reported.facts["notes"]) == 2
