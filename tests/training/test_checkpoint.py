"""What was stopped goes on as if it had not been; what is damaged is skipped or refused."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from fsdp_lab.training.checkpoint_place import Place
from fsdp_lab.training.checkpoint_source import check_meta, trial_identity
from fsdp_lab.training.model_state import CheckpointError
from tests.ranks import config, run_ranks, selected
from tests.training.checkpoints import (
    ASYNC,
    SMALL,
    STEPS,
    SYNC,
    Job,
    Reported,
    cut,
    data_of,
    names,
    names_in,
    overwrite,
    train_in,
)
from tests.training.reference import apart, batches, build_optimizer, digits, first_model

STOP = f"training.max_steps={STEPS}"
COSINE = ("lr_schedule=cosine", "lr_schedule.warmup_steps=2")
# The first step overflows, and the scale then grows after every second good one.
SCALER = ("precision=fp16", "precision.init_scale=1e7", "precision.growth_interval=2")
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
    "ddp": [*ADAM, "sharding=ddp"],
    "own_adagrad": [SYNC, "optimizer._target_=torch.optim.Adagrad", "optimizer.lr=0.01", "sharding=per_layer"],
}
# Seven epochs of one step; each epoch's learning rate is four times the last one's.
SEVEN = ("training.epochs=7", "data.num_train=32")
WORSE = (*SEVEN, "lr_schedule=step", "lr_schedule.gamma=4", "checkpoint.keep_last=2")
KEEP: dict[str, tuple[list[str], list[int]]] = {  # overrides, steps of the checkpoints that are left
    "best": ([SYNC, *WORSE], []),  # empty: the best and the last two
    "every_2": ([SYNC, *SEVEN, "checkpoint.every_epochs=2", "checkpoint.keep_last=9"], [2, 4, 6, 7]),
}
KEEP_TWO = [*ADAM, "checkpoint.keep_last=2", "checkpoint.keep_best=false"]


def cases(test: list[str], ci: list[str]) -> list[Any]:
    """Parameters for `make test`, and for `make ci`."""
    return [*test, *(pytest.param(case, marks=pytest.mark.ci) for case in ci)]


@dataclass
class Runs:
    folder: Path
    two: dict[str, Reported]

    def last(self, name: str) -> Path:
        """The newest checkpoint of a folder."""
        found = Place(f"{self.folder / name}/checkpoints").find_latest()[0]
        assert found is not None
        return Path(found.name)


def stopped_jobs(folder: Path, name: str, overrides: list[str]) -> dict[str, Job]:
    """A whole run, and one that is stopped after the first epoch."""
    return {
        f"{name} whole": Job(f"{folder}/{name}_whole", overrides),
        f"{name} stopped": Job(f"{folder}/{name}", [*overrides, STOP]),
    }


def later_jobs(folder: Path) -> dict[str, Job]:
    """What follows the runs of `adam`, and the run `kept`, which has two checkpoints."""
    kept, last, source = f"{folder}/kept", f"checkpoints/{names(4)[0]}", "checkpoint.resume_from="
    shard, both = f"{last}.*/__1_0.distcp", [f"checkpoints/{n}.json" for n in names(2, 4)]
    whole = f"{source}{folder}/adam_whole/checkpoints"
    unsaved = ["checkpoint.mode=off", "optimizer.lr=0.01", "training.epochs=5", whole]
    other = [
        "training.global_batch_size=64", "training.epochs=5", "optimizer.lr=0.003", "optimizer.weight_decay=0.1",
        "sharding=per_layer", "training.timing_warmup_steps=0", SYNC,
    ]  # fmt: skip
    return {
        "again": Job(f"{folder}/adam", ADAM),
        "larger batch": Job(f"{folder}/larger batch", [*other, whole]),
        "larger batch, resumed": Job(f"{folder}/larger batch", [*other[:1], "training.epochs=6", *other[2:]]),
        "scaled from unscaled": Job(f"{folder}/scaled", [*unsaved, "precision=fp16"]),
        "from nowhere": Job(f"{folder}/nowhere", [SYNC, f"{source}{folder}/empty"]),
        "other model": Job(f"{folder}/adam", [SYNC, "model.num_layers=3"]),
        "other optimizer": Job(f"{folder}/adam", [SYNC, "optimizer=sgd"]),
        "cut meta": Job(f"{folder}/cut meta", KEEP_TWO, kept, [(cut, f"{last}.json")]),
        "no shard": Job(f"{folder}/no shard", [*KEEP_TWO, ASYNC], kept, [(Path.unlink, shard)]),
        "other bytes": Job(f"{folder}/other bytes", KEEP_TWO, kept, [(overwrite, shard)]),
        "anew": Job(f"{folder}/anew", KEEP_TWO, kept, [(cut, file) for file in both]),
    }


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Runs:
    """Everything that needs two ranks, in one process group: job name -> what it told."""
    folder = tmp_path_factory.mktemp("checkpoints")
    jobs: dict[str, Job] = {}
    for name in dict.fromkeys(["adam", *selected(request, "same")]):
        jobs |= stopped_jobs(folder, name, SAME_RANKS[name])
        jobs[f"{name} resumed"] = Job(f"{folder}/{name}", SAME_RANKS[name])
    for name in dict.fromkeys(other.partition(" ")[0] for other in selected(request, "other")):
        jobs |= stopped_jobs(folder, f"other {name}", OTHER_RANKS[name])
    for name in selected(request, "kept"):
        jobs[f"keep {name}"] = Job(f"{folder}/keep {name}", KEEP[name][0])
    jobs["kept"] = Job(f"{folder}/kept", [*KEEP_TWO, "training.max_steps=4"])
    jobs |= {name: job for name, job in later_jobs(folder).items() if name in selected(request, "job")}
    results = run_ranks(2, train_in, list(jobs.values()))
    for name, first, second in zip(jobs, *results, strict=True):
        assert first.losses == second.losses, name
        assert first.error == second.error, name
    return Runs(folder, dict(zip(jobs, results[0], strict=True)))


@pytest.mark.parametrize(
    "same",
    cases(["adam", "own_lion_fp16_cosine"], ["async", "ddp", "fp16_mixed_offload"]),
)
def test_stopped_and_resumed_is_uninterrupted(runs: Runs, same: str) -> None:
    whole_run, stopped, resumed = (runs.two[f"{same} {part}"] for part in ("whole", "stopped", "resumed"))
    assert len(whole_run.losses) == 3 * STEPS
    assert stopped.losses == whole_run.losses[:STEPS]
    assert resumed.losses == whole_run.losses[STEPS:]  # to the bit
    assert Path(resumed.facts["resumed_from"]).name == "step_00000002"
    assert [e["epoch"] for e in resumed.epochs] == [1, 2, 3]  # the first one is told again
    for key in ("train/loss", "val/loss", "val/accuracy", "train/lr", "train/loss_scale", "train/skipped_steps"):
        assert [e.get(key) for e in resumed.epochs] == [e.get(key) for e in whole_run.epochs], key
    if same == "own_lion_fp16_cosine":  # it is worth something: steps were skipped before the stop, and the scale grew
        assert whole_run.epochs[0]["train/skipped_steps"] > 0
        assert len({e["train/loss_scale"] for e in whole_run.epochs}) > 1


@pytest.mark.parametrize(
    "other",
    cases(["per_layer_cosine on 1"], ["per_layer_cosine on 4", "ddp on 4", "own_adagrad on 4"]),
)
def test_resumed_on_another_number_of_workers(on_others: dict[str, Reported], runs: Runs, other: str) -> None:
    reported, name = on_others[other], other.partition(" ")[0]
    assert not reported.error
    expected = runs.two[f"other {name} whole"].losses[STEPS:]
    assert apart(reported.losses, expected) <= 1e-5, f"{reported.losses} {expected}"
    stopped = runs.two[f"other {name} stopped"].epochs[0]
    assert reported.epochs[0].items() >= {k: v for k, v in stopped.items() if "checkpoint" not in k}.items()
    if ADAM[-1] in OTHER_RANKS[name]:
        assert reported.epochs[-1]["perf/timed_steps"] <= 2 * STEPS, "a speed is of one number of workers"


@pytest.fixture(scope="module")
def on_others(runs: Runs, request: pytest.FixtureRequest) -> dict[str, Reported]:
    """The stopped runs of two ranks, resumed on one and on four."""
    results: dict[str, Reported] = {}
    for size in (1, 4):
        jobs = {}
        for other in selected(request, "other"):
            name, _, number = other.partition(" on ")
            if int(number) == size:
                meta = f"checkpoints/{names(2)[0]}.json"
                copied = Job(f"{runs.folder}/{other}", OTHER_RANKS[name], f"{runs.folder}/other {name}")
                jobs[other] = replace(copied, harmed=[(say_timed, meta)])
        if jobs:
            results |= zip(jobs, run_ranks(size, train_in, list(jobs.values()))[0], strict=True)
    return results


@pytest.mark.parametrize("kept", cases(["best"], ["every_2"]))
def test_retention(runs: Runs, kept: str) -> None:
    """Exactly the expected folders are left: nothing half-written, nothing in the bin."""
    expected = KEEP[kept][1]
    reported = runs.two[f"keep {kept}"].epochs
    if not expected:
        best = min(reported, key=lambda e: e["val/loss"])
        assert best["step"] < 6, "the case has to have its best epoch before the last two"
        expected = [int(best["step"]), 6, 7]
    assert names_in(runs.folder / f"keep {kept}" / "checkpoints") == names(*expected)


@pytest.mark.parametrize("same", cases(["adam"], ["async"]))
def test_what_a_save_took_is_reported(runs: Runs, same: str) -> None:
    epochs = runs.two[f"{same} whole"].epochs
    assert all(e["checkpoint/blocked_s"] > 0 for e in epochs)
    last = epochs[-1]
    assert last["checkpoint/save_s"] >= last["checkpoint/blocked_s"]
    on_disk = sum(f.stat().st_size for f in data_of(runs.last(f"{same}_whole")).iterdir())
    weights = sum(weight.numel() * 4 for weight in first_model(config(*SMALL)).parameters())
    assert last["checkpoint/bytes"] == on_disk > weights * 3, "they and Adam's two moments"


@pytest.mark.parametrize("job", ["again"])
def test_a_finished_run_trains_no_further(runs: Runs, job: str) -> None:
    again = runs.two[job]
    assert (again.losses, len(again.epochs)) == ([], 3)


@pytest.mark.parametrize("job", ["scaled from unscaled"])
def test_resume_from_another_folder_without_saving(runs: Runs, job: str) -> None:
    """Five epochs more, of which no figure tells of a save; loss scaling can start there."""
    reported = runs.two[job]
    assert not reported.error
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


@pytest.mark.parametrize("job", ["larger batch"])
def test_another_run_gives_its_weights_and_optimizer_state_and_nothing_else(runs: Runs, job: str) -> None:
    """Not its history, its times, its learning rate, its weight decay, or its position."""
    reported = runs.two[job]
    assert not reported.error
    assert apart(reported.losses, continued()) <= 1e-5
    assert [each["epoch"] for each in reported.epochs] == [each["step"] for each in reported.epochs] == [1, 2, 3, 4, 5]
    timed = [each.get("perf/timed_steps", 0) for each in reported.epochs]
    assert timed == [0, 0, 1, 2, 3], "the first two steps are not timed"


@pytest.mark.parametrize("job", ["larger batch, resumed"])
def test_what_began_with_another_run_resumes_its_own_history(runs: Runs, job: str) -> None:
    assert [each["epoch"] for each in runs.two[job].epochs] == [1, 2, 3, 4, 5, 6]
    assert runs.two[job].epochs[:5] == runs.two["larger batch"].epochs


def say_timed(meta: Path) -> None:
    """Let a checkpoint tell of fifty timed steps."""
    content = json.loads(meta.read_text())
    content["history"][-1].update({"perf/timed_steps": 50.0, "perf/timed_s": 1.0})
    meta.write_text(json.dumps(content))


DAMAGED = "checkpoints/step_00000004"


@pytest.mark.parametrize(
    ("job", "words"),
    [
        ("from nowhere", ("checkpoint.resume_from={folder}/empty", "no complete checkpoint", "step_<number>.json")),
        ("other model", ("model.num_layers=2 in the checkpoint, 3 now",)),
        ("other optimizer", ("optimizer=adam in the checkpoint, sgd now",)),
        # only the reader finds bytes that are damaged
        ("other bytes", ("the checkpoint {folder}/other bytes/" + DAMAGED, "move it away")),
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
    [
        ("cut meta", "step_00000004.json cannot be read"),
        ("no shard", "__1_0.distcp is missing"),
    ],
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


@pytest.mark.parametrize("job", ["anew"])
def test_without_a_whole_one_training_starts_anew_and_says_so(runs: Runs, job: str) -> None:
    reported = runs.two[job]
    assert reported.losses == runs.two["adam whole"].losses
    assert sum("training starts from step 0" in note for note in reported.facts["notes"]) == 2
