"""What was stopped continues as if it had not been; what is damaged is skipped or refused."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from fsdp_lab.training.checkpoint_place import Place
from fsdp_lab.training.checkpoint_source import check_meta, trial_identity
from fsdp_lab.training.model_state import CheckpointError
from fsdp_lab.workloads.examples.language.llama import Llama
from tests.ranks import config, run_ranks, selected
from tests.training.checkpoints import ASYNC, SMALL, STEPS, SYNC, Job, Reported, cut, names, names_in, train_in
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
    "own_with_modes": [SYNC, "optimizer.lr=0.3", "optimizer._target_=tests.workloads.user.optim.ScheduleFree"],
    "in_bfloat16": [*ADAM, "precision=bf16_pure", "training.max_grad_norm=0.5"],
    "own_master_in_bfloat16": [
        SYNC, "precision=bf16_pure", "optimizer._target_=tests.workloads.user.optim.Master", "optimizer.lr=0.001",
    ],
    "async": [ASYNC, "optimizer=adamw", "lr_schedule=step", "lr_schedule.gamma=0.5"],
    "fp16_mixed_offload": [ASYNC, "precision=fp16_mixed", "offload=cpu", "init=rank0", "sharding=root"],
    "ddp": [*ADAM, "sharding=ddp"],
    "fsdp1_fp16_offload": [
        ASYNC, *SCALER, "sharding.api=fsdp1", "sharding=per_layer", "offload=cpu", "reshard_after_forward=never",
        "training.max_grad_norm=0.5", "optimizer=adamw",
    ],
}  # fmt: skip
COSINE_LAYERS = [*ADAM, "sharding=per_layer", *COSINE]  # is resumed on other numbers of ranks
FOUR_STEPS = [*ADAM, *COSINE, "training.global_batch_size=16", "training.epochs=2", "training.max_grad_norm=1"]
# Seven epochs of one step; each epoch's learning rate is four times the last one's.
WORSE = [SYNC, "training.epochs=7", "data.num_train=32", "lr_schedule=step", "lr_schedule.gamma=4",
         "checkpoint.keep_last=2"]  # fmt: skip
KEEP_TWO = [*ADAM, "checkpoint.keep_last=2", "checkpoint.keep_best=false"]
FIVE = "training.epochs=5"
LATE = ["optimizer._target_=tests.workloads.user.optim.Late", "optimizer.lr=0.05"]
LARGER = [SYNC, "training.global_batch_size=64", "optimizer.lr=0.003", "optimizer.weight_decay=0.1",
          "sharding=per_layer", "training.timing_warmup_steps=0"]  # fmt: skip

NARROWER = [SYNC, "precision=bf16_pure", "optimizer.lr=1e-300", "training.epochs=4",
            "sharding=per_layer"]  # fmt: skip


# What is done to the copy of a trial's folder.
def cut_both(folder: Path) -> None:
    for name in names(2, 4):
        cut(folder / f"checkpoints/{name}.json")


def lose_shard(folder: Path) -> None:
    (shard,) = folder.glob("checkpoints/step_00000004.*/__1_0.distcp")
    shard.unlink()


def age(folder: Path) -> None:
    marker = folder / "checkpoints/step_00000006.json"
    marker.write_text(marker.read_text().replace(torch.__version__, "2.4.1"))


def time_fifty_steps(folder: Path) -> None:
    marker = folder / "checkpoints/step_00000002.json"
    content = json.loads(marker.read_text())
    content["history"][-1].update({"perf/timed_steps": 50.0, "perf/timed_s": 1.0})
    marker.write_text(json.dumps(content))


def later_jobs(folder: Path) -> dict[str, Job]:
    """What follows the runs of `adam`, and the run `kept`, which has two checkpoints."""
    kept, source = f"{folder}/kept", f"checkpoint.resume_from={folder}"
    larger = [*LARGER, f"{source}/adam_whole/checkpoints"]
    return {
        "best": Job(f"{folder}/best", WORSE),
        "kept": Job(kept, [*KEEP_TWO, "training.max_steps=4"]),
        "larger batch": Job(f"{folder}/larger batch", [*larger, FIVE]),
        "larger batch, resumed": Job(f"{folder}/larger batch", [*larger, "training.epochs=6"]),
        "narrower": Job(f"{folder}/narrower", [*NARROWER, f"{source}/adam_whole/checkpoints"]),
        "late": Job(f"{folder}/late", [*LATE, SYNC]),
        "late, larger batch": Job(f"{folder}/late, larger", [*LATE, *LARGER, f"{source}/late/checkpoints", FIVE]),
        "in one": Job(f"{folder}/in one", FOUR_STEPS),
        "cut": Job(f"{folder}/in two", [*FOUR_STEPS, "training.max_steps=3"]),
        "the rest": Job(f"{folder}/in two", FOUR_STEPS),
        "longer": Job(f"{folder}/in two", [*FOUR_STEPS, "training.epochs=3", "training.max_steps=9"]),
        "from nowhere": Job(f"{folder}/nowhere", [SYNC, f"{source}/empty"]),
        "other model": Job(f"{folder}/adam", [SYNC, "model.num_layers=3"]),
        "other pytorch": Job(f"{folder}/aged", ADAM, f"{folder}/adam_whole", age),
        "any pytorch": Job(f"{folder}/aged", [*ADAM, "checkpoint.any_torch_version=true"]),
        "no shard": Job(f"{folder}/no shard", [*KEEP_TWO, ASYNC], kept, lose_shard),
        "anew": Job(f"{folder}/anew", KEEP_TWO, kept, cut_both),
    }


Runs = tuple[Path, dict[str, Reported]]  # the folder of all jobs, and what each of them reported


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Runs:
    """Everything that needs two ranks, in one process group."""
    folder = tmp_path_factory.mktemp("checkpoints")
    jobs: dict[str, Job] = {}
    for name in dict.fromkeys(["adam", "cosine_layers", *selected(request, "same")]):
        words = SAME_RANKS.get(name, COSINE_LAYERS)
        jobs[f"{name} whole"] = Job(f"{folder}/{name}_whole", words)
        jobs[f"{name} stopped"] = Job(f"{folder}/{name}", [*words, f"training.max_steps={STEPS}"])
        if name in SAME_RANKS:
            jobs[f"{name} resumed"] = Job(f"{folder}/{name}", words)
    jobs |= later_jobs(folder)
    results = run_ranks(2, train_in, list(jobs.values()))
    for name, first, second in zip(jobs, *results, strict=True):
        assert first.losses == second.losses and first.error == second.error, name
    return folder, dict(zip(jobs, results[0], strict=True))


@pytest.mark.parametrize(
    "same",
    ["adam", "own_lion_fp16_cosine", "own_with_modes", "in_bfloat16", "own_master_in_bfloat16",
     *(pytest.param(name, marks=pytest.mark.ci) for name in [*SAME_RANKS][5:])],
)  # fmt: skip
def test_stopped_and_resumed_is_uninterrupted(runs: Runs, same: str) -> None:
    whole, stopped, resumed = (runs[1][f"{same} {part}"] for part in ("whole", "stopped", "resumed"))
    assert len(whole.losses) == 3 * STEPS
    assert stopped.losses == whole.losses[:STEPS]
    assert resumed.losses == whole.losses[STEPS:]  # to the bit
    assert Path(resumed.facts["resumed_from"]).name == "step_00000002"
    assert [e["epoch"] for e in resumed.epochs] == [1, 2, 3]  # the first one is reported again
    for key in ("train/loss", "val/loss", "val/accuracy", "train/lr", "train/loss_scale", "train/skipped_steps"):
        assert [e.get(key) for e in resumed.epochs] == [e.get(key) for e in whole.epochs], key
    if same == "own_lion_fp16_cosine":  # before the stop one step was skipped, and one made the optimizer's state
        assert whole.epochs[0]["train/skipped_steps"] == 1
        assert len({e["train/loss_scale"] for e in whole.epochs}) > 1


@pytest.mark.parametrize("ranks", [1, pytest.param(4, marks=pytest.mark.ci)])
def test_resumed_on_another_number_of_workers(runs: Runs, ranks: int) -> None:
    folder, on_two = runs
    job = Job(f"{folder}/on {ranks}", COSINE_LAYERS, f"{folder}/cosine_layers", time_fifty_steps)
    (reported,) = run_ranks(ranks, train_in, [job])[0]
    assert not reported.error
    assert apart(reported.losses, on_two["cosine_layers whole"].losses[STEPS:]) <= 1e-5
    stopped = on_two["cosine_layers stopped"].epochs[0]
    assert reported.epochs[0].items() >= {k: v for k, v in stopped.items() if "checkpoint" not in k}.items()
    assert reported.epochs[-1]["perf/timed_steps"] <= 2 * STEPS, "a speed is of one number of workers"


@pytest.mark.ci
def test_continued_with_another_tensor_parallel_degree(tmp_path: Path) -> None:
    sizes = {"num_heads": 4, "num_kv_heads": 4, "dim": 32, "ffn_dim": 48}
    model = ("data.num_train=64", "task=language", "model=lm_tiny", "data=pydoc", "data.seq_len=16",
             *(f"model.{name}={size}" for name, size in sizes.items()))  # fmt: skip
    words = [*ADAM, "sharding=per_block"]
    typed = ",".join(f'"{modules}":{style}' for modules, style in Llama._tp_plan.items())
    degrees = {1: ["sharding.tp=1"], 2: ["sharding.tp=2", f"model.tp_plan={{{typed}}}"], 4: ["sharding.tp=4"]}
    jobs = [Job(f"{tmp_path}/{tp}", [*words, *degrees[tp]], trial=model) for tp in (1, 2)]
    for saved, tp in (1, 1), (1, 2), (2, 1), (2, 4):
        source = f"checkpoint.resume_from={tmp_path}/{saved}/checkpoints"
        jobs.append(Job(f"{tmp_path}/{saved} to {tp}", [*words, *degrees[tp], source], trial=model))
    plain, divided, expected, *continued = run_ranks(4, train_in, jobs)[0]
    assert apart(divided.losses, plain.losses) <= 1e-5
    assert expected.losses[0] < plain.losses[0] - 0.1, "it goes on from the checkpoint"
    for reported in continued:
        assert not reported.error and apart(reported.losses, expected.losses) <= 1e-5


def test_the_best_and_the_last_two_are_kept_and_nothing_else(runs: Runs) -> None:
    best = min(runs[1]["best"].epochs, key=lambda e: e["val/loss"])
    assert best["step"] < 6, "the case has to have its best epoch before the last two"
    assert names_in(runs[0] / "best/checkpoints") == names(int(best["step"]), 6, 7)


def test_what_a_save_took_is_reported(runs: Runs) -> None:
    epochs = runs[1]["adam whole"].epochs
    assert all(e["checkpoint/save_s"] >= e["checkpoint/blocked_s"] > 0 for e in epochs)
    on_disk = sum(f.stat().st_size for f in runs[0].glob(f"adam_whole/checkpoints/{names(6)[0]}.*/*"))
    weights = sum(weight.numel() * 4 for weight in first_model(config(*SMALL)).parameters())
    assert epochs[-1]["checkpoint/bytes"] == on_disk > weights * 3, "they and Adam's two moments"


def continued(*words: str) -> list[float]:
    """The losses of plain PyTorch: three epochs with these words, then `larger batch` with the same optimizer."""
    first, then = config("training.epochs=3", *SMALL, *words), config("training.epochs=5", *SMALL)
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


def test_another_run_gives_its_weights_and_optimizer_state(runs: Runs) -> None:
    """And nothing else: not its history, its times, its learning rate, its weight decay, or its position."""
    reported, resumed = runs[1]["larger batch"], runs[1]["larger batch, resumed"]
    assert not reported.error
    assert apart(reported.losses, continued(*ADAM)) <= 1e-5
    assert [each["epoch"] for each in reported.epochs] == [each["step"] for each in reported.epochs] == [1, 2, 3, 4, 5]
    timed = [each.get("perf/timed_steps", 0) for each in reported.epochs]
    assert timed == [0, 0, 1, 2, 3], "the first two steps are not timed"
    assert [each["epoch"] for each in resumed.epochs] == [1, 2, 3, 4, 5, 6] and resumed.epochs[:5] == reported.epochs


def test_weights_in_float32_continue_in_bfloat16(runs: Runs) -> None:
    """A rate of 1e-300 changes no weight: the loss is that of the float32 weights, rounded."""
    reported = runs[1]["narrower"]
    assert not reported.error
    before, after = (runs[1][name].epochs[-1]["val/loss"] for name in ("adam whole", "narrower"))
    assert after == pytest.approx(before, rel=0.02) and after != before


def test_optimizer_state_of_later_steps_is_loaded_and_the_rate_is_the_trials(runs: Runs) -> None:
    reported = runs[1]["late, larger batch"]
    assert not reported.error and apart(reported.losses, continued(*LATE)) <= 1e-5


def test_an_epoch_in_two_parts_is_one(runs: Runs) -> None:
    """Its means are over all its steps, and the first steps keep their figures."""
    (first, second), (cut,), rest = (runs[1][name].epochs for name in ("in one", "cut", "the rest"))
    assert (cut["epoch"], cut["step"]) == (1, 3) and rest[0] == cut
    for whole, parts in zip((first, second), rest[1:], strict=True):
        same = {key: value for key, value in whole.items() if not key.startswith(("perf/", "checkpoint/"))}
        assert {key: parts.get(key) for key in same} == pytest.approx(same, rel=1e-6)
    assert first.keys() >= {"check/change_norm", "train/early_loss", "train/grad_norm"}


def test_a_longer_training_steps_by_its_own_schedule(runs: Runs) -> None:
    """From the first step after the resume, which the schedule before would have taken at a rate of 0."""
    rates = [epoch["train/lr"] for epoch in (runs[1]["the rest"].epochs[-1], runs[1]["longer"].epochs[-1])]
    assert rates[0] == pytest.approx(0.01 * (1 + math.cos(math.pi * 5 / 6)) / 2), "of the eighth of eight steps"
    assert rates[1] == pytest.approx(0.01 * (1 + math.cos(math.pi * 6 / 10)) / 2), "of the ninth of twelve"


@pytest.mark.parametrize(
    ("job", "words"),
    [
        ("from nowhere", ("checkpoint.resume_from={folder}/empty", "no complete checkpoint", "step_<number>.json")),
        ("other model", ("model.num_layers=2 in the checkpoint, 3 now",)),
        (
            "other pytorch",
            (f"written by PyTorch 2.4.1, and this is {torch.__version__}", "checkpoint.any_torch_version=true"),
        ),
    ],
)
def test_what_cannot_be_resumed_is_refused_on_every_rank(runs: Runs, job: str, words: tuple[str, ...]) -> None:
    error = runs[1][job].error
    assert error.startswith("CheckpointError: ") and "\n" not in error
    assert [text for text in words if text.format(folder=runs[0]) not in error] == []


def test_a_checkpoint_of_other_heads_or_another_optimizer_is_refused() -> None:
    """Its weights have the same shapes, so that nothing else would notice. How a model is divided changes none."""
    words = ["task=language", "model=lm_tiny"]

    def check(there: str, here: str) -> None:
        wrote, loads = config(*words, *there.split()), config(*words, *here.split())
        kind = wrote.optimizer.kind
        meta = {"torch_version": torch.__version__, "optimizer": kind, "trial": trial_identity(wrote)}
        check_meta(meta, "x", loads)

    check("optimizer.lr=1", "optimizer.lr=2 model.block_classes=[Block] training.global_batch_size=64")
    with pytest.raises(CheckpointError, match=r"another model .*: model\.num_heads=4 in the checkpoint, 2 now; model"):
        check("model.num_heads=4", "model.num_heads=2 model.num_kv_heads=1")
    with pytest.raises(CheckpointError, match=r"another model or optimizer: optimizer=\w+ in the checkpoint, sgd now"):
        check("optimizer=adam", "optimizer=sgd")


def test_any_torch_version_resumes_and_a_whole_run_is_done(runs: Runs) -> None:
    reported = runs[1]["any pytorch"]
    assert (reported.error, reported.losses, len(reported.epochs)) == ("", [], 3)


def test_a_damaged_checkpoint_is_skipped_for_the_one_before(runs: Runs) -> None:
    folder, reported_by = runs
    reported = reported_by["no shard"]
    assert not reported.error
    assert reported.losses == reported_by["adam whole"].losses[STEPS:]
    assert Path(reported.facts["resumed_from"]).name == "step_00000002"
    (note,) = [note for note in reported.facts["notes"] if "damaged" in note]
    assert "step_00000004: its __1_0.distcp is missing" in note and "step_00000002" in note
    place = folder / "no shard/checkpoints"
    assert names_in(place) == names(4, 6) and all(each.damage is None for each in Place(str(place)).saved())


def test_without_a_whole_one_training_starts_anew_and_reports_it(runs: Runs) -> None:
    reported = runs[1]["anew"]
    assert reported.losses == runs[1]["adam whole"].losses
    assert sum("training starts from step 0" in note for note in reported.facts["notes"]) == 2
