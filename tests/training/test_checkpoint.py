"""What was stopped goes on as if it had not been; what is not a checkpoint is never taken for one."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch

from fsdp_lab.config import UserError
from fsdp_lab.training.checkpoint import CheckpointError, check_meta
from fsdp_lab.training.checkpoint_files import discard, latest, outdated, publish, whole
from tests.ranks import Memo, config, run_ranks
from tests.training.reference import apart

STEPS = 2  # in an epoch
# Two blocks: what is saved, loaded and gathered costs by the block, and there has to be more than one.
SMALL = ("data.num_train=64", "model.num_layers=2")
NUM_PARAMS = 139_018 - 2 * 33_472


@dataclass
class Reported:
    """What one training told: losses of its steps, metrics of its epochs, facts, and the error that ended it."""

    losses: list[float]
    epochs: list[dict[str, float]]
    facts: dict[str, Any]
    error: str


def train_in(jobs: list[tuple[str, list[str]]]) -> list[Reported]:
    """Train each `(folder, overrides)` in turn."""
    from fsdp_lab.training import train

    results = []
    for folder, overrides in jobs:
        losses: list[float] = []
        memo, error = Memo(), ""
        try:
            train(config("training.epochs=3", *SMALL, *overrides), Path(folder), memo, losses.extend)
        except UserError as raised:
            error = f"{type(raised).__name__}: {raised}"
        results.append(Reported(losses, memo.reported, memo.known, error))
    return results


SYNC = "checkpoint.mode=sync"
ASYNC = "checkpoint.mode=async"
STOP = f"training.max_steps={STEPS}"
COSINE = ("lr_schedule=cosine", "lr_schedule.warmup_steps=2")
# The first step overflows, and the scale then grows after every second good one.
SCALER = ("precision=fp16", "precision.init_scale=1e7", "precision.growth_interval=2")
SAME_RANKS: dict[str, list[str]] = {
    "adam": [SYNC, "optimizer.lr=0.01"],
    "async": [ASYNC, "optimizer=adamw", "lr_schedule=step", "lr_schedule.gamma=0.5"],
    "sgd_momentum": [SYNC, "optimizer=sgd", "sharding=per_layer", "precision=bf16"],
    "cosine_accumulate_clip": [SYNC, *COSINE, "training.grad_accum_steps=2", "training.max_grad_norm=0.5"],
    "fp16_scaler_cosine": [SYNC, *SCALER, *COSINE, "activation_checkpointing=full"],
    "fp16_mixed_offload": [ASYNC, "precision=fp16_mixed", "offload=cpu", "init=meta", "sharding=root"],
    "ddp": [SYNC, "sharding=ddp", "optimizer.lr=0.01"],
    "narrow_moments": [SYNC, "optimizer.state_dtype=bf16", "optimizer.lr=0.01"],
}
OTHER_RANKS: dict[str, list[str]] = {
    "per_layer_cosine": [SYNC, "sharding=per_layer", "optimizer.lr=0.01", *COSINE],
    "momentum_async": [ASYNC, "optimizer=sgd", "optimizer.lr=0.01"],
    "ddp": [SYNC, "sharding=ddp", "optimizer.lr=0.01"],
}
FIVE = "training.epochs=5"
SEVEN = ("training.epochs=7", "data.num_train=32")  # seven epochs of one step
WORSE = ("lr_schedule=step", "lr_schedule.gamma=4")  # each epoch's learning rate is four times the last one's
KEEP: dict[str, tuple[list[str], list[int]]] = {  # overrides, steps of the checkpoints that are left
    "last_1": (["checkpoint.keep_last=1", "checkpoint.keep_best=false"], [7]),
    "last_3": (["checkpoint.keep_last=3", "checkpoint.keep_best=false"], [5, 6, 7]),
    "every_2": (["checkpoint.every_epochs=2", "checkpoint.keep_last=9"], [2, 4, 6, 7]),
    "best": ([*WORSE, "checkpoint.keep_last=2"], []),  # empty: the best and the last two
    "best_async": ([*WORSE, "checkpoint.keep_last=2", ASYNC], []),
}


@dataclass
class Runs:
    folder: Path
    two: dict[str, Reported]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Everything that needs two ranks, in one process group: job name -> what it told."""
    folder = tmp_path_factory.mktemp("checkpoints")
    jobs: dict[str, tuple[str, list[str]]] = {}
    for name, overrides in SAME_RANKS.items():
        jobs[f"{name} whole"] = (f"{folder}/{name}_whole", overrides)
        jobs[f"{name} stopped"] = (f"{folder}/{name}", [*overrides, STOP])
        jobs[f"{name} resumed"] = (f"{folder}/{name}", overrides)
    for name, overrides in OTHER_RANKS.items():
        jobs[f"other {name} whole"] = (f"{folder}/other_{name}_whole", overrides)
        jobs[f"other {name} stopped"] = (f"{folder}/other_{name}", [*overrides, STOP])
    for name, (overrides, _) in KEEP.items():
        jobs[f"keep {name}"] = (f"{folder}/keep_{name}", [SYNC, *SEVEN, *overrides])
    adam = f"{folder}/adam_whole/checkpoints"
    lr = "optimizer.lr=0.01"
    jobs |= {
        "again": (f"{folder}/adam", [SYNC, lr]),
        "from folder": (f"{folder}/from_folder", ["checkpoint.mode=off", lr, f"checkpoint.resume_from={adam}"]),
        "from nowhere": (f"{folder}/nowhere", [SYNC, f"checkpoint.resume_from={folder}/empty"]),
        "other model": (f"{folder}/adam", [SYNC, "model.num_layers=3"]),
        "other optimizer": (f"{folder}/adam", [SYNC, "optimizer=sgd"]),
        "scaled from unscaled": (f"{folder}/scaled", ["precision=fp16", FIVE, f"checkpoint.resume_from={adam}"]),
    }
    results = run_ranks(2, train_in, list(jobs.values()))
    for name, first, second in zip(jobs, *results, strict=True):
        assert first.losses == second.losses, name
        assert first.error == second.error, name
    return Runs(folder, dict(zip(jobs, results[0], strict=True)))


@pytest.mark.parametrize("name", SAME_RANKS)
def test_stopped_and_resumed_is_uninterrupted(runs: Runs, name: str) -> None:
    whole_run, stopped, resumed = (runs.two[f"{name} {part}"] for part in ("whole", "stopped", "resumed"))
    assert len(whole_run.losses) == 3 * STEPS
    assert stopped.losses == whole_run.losses[:STEPS]
    assert resumed.losses == whole_run.losses[STEPS:]  # to the bit
    assert Path(resumed.facts["resumed_from"]).name == "step_00000002"
    assert [e["epoch"] for e in resumed.epochs] == [1, 2, 3]  # the first one is told again
    for key in ("train/loss", "val/loss", "val/accuracy", "train/lr", "train/loss_scale", "train/skipped_steps"):
        assert [e.get(key) for e in resumed.epochs] == [e.get(key) for e in whole_run.epochs], key


def test_the_scaler_case_does_scale(runs: Runs) -> None:
    """The case above is worth something: steps were skipped before the stop, and the scale grew after it."""
    epochs = runs.two["fp16_scaler_cosine whole"].epochs
    assert epochs[0]["train/skipped_steps"] > 0
    assert len({e["train/loss_scale"] for e in epochs}) > 1


@pytest.mark.parametrize("world_size", [1, 4])
def test_resumed_on_another_number_of_workers(runs: Runs, world_size: int) -> None:
    jobs = []
    for name, overrides in OTHER_RANKS.items():
        copy = f"{runs.folder}/other_{name}_{world_size}"
        jobs.append((shutil.copytree(f"{runs.folder}/other_{name}", copy), overrides))
    for name, reported in zip(OTHER_RANKS, run_ranks(world_size, train_in, jobs)[0], strict=True):
        assert not reported.error
        expected = runs.two[f"other {name} whole"].losses[STEPS:]
        assert apart(reported.losses, expected) <= 1e-5, f"{name}: {reported.losses} {expected}"
        stopped = runs.two[f"other {name} stopped"].epochs[0]
        assert reported.epochs[0].items() >= {k: v for k, v in stopped.items() if "checkpoint" not in k}.items()


def names(*steps: int) -> list[str]:
    return [f"step_{step:08d}" for step in steps]


def names_in(folder: Path) -> list[str]:
    return sorted(f.name for f in folder.iterdir())


@pytest.mark.parametrize("name", KEEP)
def test_retention(runs: Runs, name: str) -> None:
    """Exactly the expected folders are left: nothing half-written, nothing in the bin."""
    expected = KEEP[name][1]
    reported = runs.two[f"keep {name}"].epochs
    if not expected:
        best = min(reported, key=lambda e: e["val/loss"])
        assert best["step"] < 6, "the case has to have its best epoch before the last two"
        expected = [int(best["step"]), 6, 7]
    assert names_in(runs.folder / f"keep_{name}" / "checkpoints") == names(*expected)


def test_save_figures(runs: Runs) -> None:
    for name in ("adam", "async", "ddp"):
        epochs = runs.two[f"{name} whole"].epochs
        assert all(e["checkpoint/blocked_s"] > 0 for e in epochs)
        last = epochs[-1]
        assert last["checkpoint/save_s"] >= last["checkpoint/blocked_s"]
        newest = latest(runs.folder / f"{name}_whole" / "checkpoints")
        assert newest is not None
        on_disk = sum(f.stat().st_size for f in newest.iterdir() if f.name != "meta.json")
        assert last["checkpoint/bytes"] == on_disk > NUM_PARAMS * 4 * 3  # weights and Adam's two moments
    assert "checkpoint/blocked_s" not in runs.two["from folder"].epochs[-1] or not runs.two["from folder"].losses


def test_a_finished_run_trains_no_further(runs: Runs) -> None:
    again = runs.two["again"]
    assert (again.losses, len(again.epochs)) == ([], 3)


def test_resume_from_another_folder(runs: Runs) -> None:
    reported = runs.two["from folder"]
    assert reported.losses == []
    assert reported.facts["resumed_from"].endswith("adam_whole/checkpoints/step_00000006")


def test_resume_from_nowhere(runs: Runs) -> None:
    error = runs.two["from nowhere"].error
    for words in (
        "CheckpointError",
        f"checkpoint.resume_from={runs.folder}/empty",
        "no complete checkpoint",
        "meta.json",
    ):
        assert words in error


def test_another_model_or_optimizer_is_refused(runs: Runs) -> None:
    assert "model.num_layers=2 in the checkpoint, 3 now" in runs.two["other model"].error
    assert "optimizer=adam in the checkpoint, sgd now" in runs.two["other optimizer"].error
    assert all(runs.two[name].error.startswith("CheckpointError") for name in ("other model", "other optimizer"))


def test_loss_scaling_can_start_at_a_resume(runs: Runs) -> None:
    reported = runs.two["scaled from unscaled"]
    assert not reported.error
    assert len(reported.losses) == 2 * STEPS
    assert reported.epochs[-1]["train/loss_scale"] > 0


def test_another_pytorch_is_refused(runs: Runs) -> None:
    source = latest(runs.folder / "adam" / "checkpoints")
    assert source is not None
    meta = json.loads((source / "meta.json").read_text())
    trial = config(*SMALL)
    check_meta(meta, source, trial)
    meta["torch_version"] = "2.4.1"
    with pytest.raises(CheckpointError, match=r"written by PyTorch 2\.4\.1, and this is") as caught:
        check_meta(meta, source, trial)
    assert torch.__version__ in str(caught.value)
    assert "checkpoint.any_torch_version=true" in str(caught.value)
    check_meta(meta, source, config(*SMALL, "checkpoint.any_torch_version=true"))


def make(folder: Path, step: int, val_loss: float | None = None) -> Path:
    checkpoint = folder / f"step_{step:08d}"
    checkpoint.mkdir(parents=True)
    history = [] if val_loss is None else [{"val/loss": val_loss}]
    (checkpoint / "meta.json").write_text(json.dumps({"history": history}))
    return checkpoint


def test_what_is_half_written_is_not_taken(tmp_path: Path) -> None:
    good = make(tmp_path, 4)
    make(tmp_path, 8).rename(tmp_path / ".step_00000008.making")
    make(tmp_path, 12).rename(tmp_path / ".step_00000012.trash")
    (tmp_path / "step_00000016").mkdir()
    (tmp_path / "notes").mkdir()
    assert latest(tmp_path) == latest(good) == good
    assert not whole(tmp_path / ".step_00000008.making")
    assert latest(tmp_path / "step_00000016") is None
    assert latest(tmp_path / "absent") is None


@pytest.mark.parametrize(
    ("losses", "keep_last", "keep_best", "left"),
    [
        ([3, 2, 1], 1, True, [2]),
        ([1, 2, 3], 1, True, [0, 2]),
        ([1, 2, 3], 1, False, [2]),
        ([2, 1, 3, 4], 2, True, [1, 2, 3]),
        ([1, 2], 5, True, [0, 1]),
        ([None, 2, 3], 1, True, [1, 2]),
        ([], 1, True, []),
    ],
)
def test_outdated(tmp_path: Path, losses: list[float | None], keep_last: int, keep_best: bool, left: list[int]) -> None:
    made = [make(tmp_path, i, loss) for i, loss in enumerate(losses)]
    gone = outdated(tmp_path, keep_last, keep_best)
    assert [i for i, f in enumerate(made) if f not in gone] == left


def hang_at_second_call(
    sender: Connection,
    owner: Any,
    name: str,
    first: Callable[..., Any] = lambda *a, **k: None,
    counts: Callable[..., bool] = lambda *a: True,
) -> None:
    """Stop for ever in the second call that counts, and say so."""
    real, calls = getattr(owner, name), []

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        calls.extend([1] if counts(*args) else [])
        if len(calls) < 2 or not counts(*args):
            return real(*args, **kwargs)
        first(real, args, kwargs)
        sender.send("hangs")
        time.sleep(600)

    setattr(owner, name, wrapper)


def train_and_hang(where: str, folder: Path, sender: Connection) -> None:
    """A real training that stops for ever inside its second save, where the test kills it."""
    import fsdp_lab.training.checkpoint as module
    import fsdp_lab.training.checkpoint_files as files
    from fsdp_lab.training import train

    def write(real: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return real(*args, **kwargs)

    torch.set_num_threads(1)
    if where == "written":
        hang_at_second_call(sender, module.dcp, "save", write)
    if where == "async":
        hang_at_second_call(sender, module.dcp, "async_save", lambda *call: write(*call).result())
    if where == "published":
        hang_at_second_call(sender, files, "outdated")
    if where == "pruning":
        hang_at_second_call(sender, files.shutil, "rmtree", counts=lambda path, *a: path.name.endswith("trash"))
    mode = "async" if where == "async" else "sync"
    keep = ("checkpoint.keep_best=false", f"checkpoint.mode={mode}")
    train(config("training.epochs=4", *SMALL, *keep), folder, Memo())


# Where it was killed -> the step of the checkpoint that the next start has to find.
KILLED = {"written": 2, "async": 2, "published": 4, "pruning": 6}


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Reported]]:
    folder = tmp_path_factory.mktemp("killed")
    for where in KILLED:
        receiver, sender = multiprocessing.Pipe(duplex=False)
        process = multiprocessing.get_context("spawn").Process(
            target=train_and_hang, args=(where, folder / where, sender)
        )
        process.start()
        sender.close()
        try:
            assert receiver.poll(100), f"{where}: no second save within 100 s"
            assert receiver.recv() == "hangs"  # EOFError: it ended before its second save
        finally:
            process.kill()
            process.join()
        assert process.exitcode == -signal.SIGKILL, where
        result = latest(folder / where / "checkpoints")
        assert result is not None, where
        assert int(result.name.removeprefix("step_")) == KILLED[where], where
    jobs = [(str(folder / where), [SYNC, "training.epochs=4", "checkpoint.keep_best=false"]) for where in KILLED]
    jobs.append((str(folder / "whole"), [SYNC, "training.epochs=4"]))
    return folder, dict(zip([*KILLED, "whole"], run_ranks(1, train_in, jobs)[0], strict=True))


@pytest.mark.parametrize("where", KILLED)
def test_killed_while_saving(killed: tuple[Path, dict[str, Reported]], where: str) -> None:
    """A real SIGKILL inside a save: the next start goes on from the last whole checkpoint and leaves no litter."""
    folder, observed = killed
    assert not observed[where].error
    assert observed[where].losses == observed["whole"].losses[KILLED[where] :]
    assert names_in(folder / where / "checkpoints") == names(8)


def ahead_of_saving(folder: str) -> list[str]:
    """Train with asynchronous checkpoints where the saving thread takes this machine for one with GPUs; what it asked
    to be copied ahead on a stream."""
    import torch
    from torch.distributed.checkpoint import filesystem

    from fsdp_lab.training import train

    asked = []
    main = threading.current_thread()

    class Asked(filesystem._OverlappingCpuLoader):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            asked.append(threading.current_thread().name)
            raise RuntimeError("a stream of GPU 0 was asked for")

    torch.cuda.is_available = lambda: threading.current_thread() is not main
    filesystem._OverlappingCpuLoader = Asked
    with contextlib.suppress(RuntimeError):
        train(config("checkpoint.mode=async"), Path(folder), Memo())
    return [*asked, *names_in(Path(folder, "checkpoints"))]


def test_the_thread_that_saves_asks_for_no_stream_of_a_gpu(tmp_path: Path) -> None:
    """It has no device of its own: its current stream would be GPU 0's, where every rank would open a context."""
    (seen,) = run_ranks(1, ahead_of_saving, str(tmp_path))
    assert seen == names(4)


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def overwrite(file: Path) -> None:
    """Other bytes, as many."""
    file.write_bytes(b"\x5a" * file.stat().st_size)


DAMAGED = {  # what happens to which file of the newest checkpoint, and what is said of it
    "cut meta": (cut, "meta.json", "meta.json cannot be read"),
    "cut shard": (cut, "__1_0.distcp", "__1_0.distcp has"),
    "no shard": (Path.unlink, "__0_0.distcp", "__0_0.distcp cannot be read (No such file or directory)"),
    "cut metadata": (cut, ".metadata", ".metadata has"),
    "cut meta, async": (cut, "meta.json", "meta.json cannot be read"),
}
UNREADABLE = {"shard": "__1_0.distcp", "metadata": ".metadata"}


@pytest.fixture(scope="module")
def damaged(runs: Runs) -> dict[str, Reported]:
    """The run of three epochs in `adam_whole` keeps its last one; these keep two, and the newer is damaged."""
    jobs, whole_run = {}, Path(runs.folder, "kept")
    keep = [SYNC, "optimizer.lr=0.01", "checkpoint.keep_last=2", "checkpoint.keep_best=false"]
    results = run_ranks(2, train_in, [(str(whole_run), [*keep, "training.max_steps=4"])])
    assert names_in(whole_run / "checkpoints") == names(2, 4) and not results[0][0].error
    for name, (harm, file, _) in DAMAGED.items():
        copy = shutil.copytree(whole_run, runs.folder / f"damaged {name}")
        harm(copy / "checkpoints" / names(4)[0] / file)
        jobs[name] = (str(copy), [*keep, *([ASYNC] if "async" in name else [])])
    for name, file in UNREADABLE.items():
        copy = shutil.copytree(whole_run, runs.folder / f"unreadable {name}")
        overwrite(copy / "checkpoints" / names(4)[0] / file)
        jobs[f"unreadable {name}"] = (str(copy), keep)
    source = shutil.copytree(whole_run, runs.folder / "both damaged") / "checkpoints"
    for name in names(2, 4):
        cut(source / name / "meta.json")
    jobs["anew"] = (str(source.parent), keep)
    elsewhere = shutil.copytree(runs.folder / "damaged cut meta" / "checkpoints", runs.folder / "elsewhere")
    jobs["from"] = (str(runs.folder / "from damaged"), [*keep, f"checkpoint.resume_from={elsewhere}"])
    last = elsewhere / names(4)[0]
    jobs["from the damaged one"] = (str(runs.folder / "refused"), [*keep, f"checkpoint.resume_from={last}"])
    first, second = run_ranks(2, train_in, list(jobs.values()))
    for name, one, other in zip(jobs, first, second, strict=True):
        assert (one.losses, one.error) == (other.losses, other.error), name
    return dict(zip(jobs, first, strict=True))


@pytest.mark.parametrize("name", [*DAMAGED, "from"])
def test_a_damaged_checkpoint_is_passed_over_for_the_one_before(
    runs: Runs, damaged: dict[str, Reported], name: str
) -> None:
    reported = damaged[name]
    assert not reported.error
    assert reported.losses == runs.two["adam whole"].losses[STEPS:]
    assert Path(reported.facts["resumed_from"]).name == names(2)[0]
    (note,) = [note for note in reported.facts["notes"] if "damaged" in note]
    assert names(4)[0] in note and names(2)[0] in note and DAMAGED.get(name, DAMAGED["cut meta"])[2] in note
    folder = runs.folder / ("from damaged" if name == "from" else f"damaged {name}") / "checkpoints"
    assert names_in(folder) == names(4, 6) and all(whole(folder / each) for each in names(4, 6))


def test_without_a_whole_one_training_starts_anew_and_says_so(runs: Runs, damaged: dict[str, Reported]) -> None:
    reported = damaged["anew"]
    assert reported.losses == runs.two["adam whole"].losses
    assert sum("training starts from step 0" in note for note in reported.facts["notes"]) == 2


def test_a_damaged_checkpoint_to_resume_from_is_an_error_that_says_what_is_wrong(damaged: dict[str, Reported]) -> None:
    error = damaged["from the damaged one"].error
    assert error.startswith("CheckpointError") and "meta.json cannot be read" in error


@pytest.mark.parametrize("name", UNREADABLE)
def test_bytes_that_only_the_reader_finds_damaged_are_an_error_on_every_rank(
    runs: Runs, damaged: dict[str, Reported], name: str
) -> None:
    error = damaged[f"unreadable {name}"].error
    assert error.startswith(f"CheckpointError: the checkpoint {runs.folder}/unreadable {name}/checkpoints/")
    assert names(4)[0] in error and "move it away" in error and "\n" not in error


def test_a_checkpoint_of_before_sizes_were_written_is_whole(runs: Runs) -> None:
    source = latest(runs.folder / "adam" / "checkpoints")
    assert source is not None
    copy = shutil.copytree(source, runs.folder / "old" / source.name)
    meta = json.loads((copy / "meta.json").read_text())
    sizes = meta.pop("files")
    assert sizes == {f.name: f.stat().st_size for f in source.iterdir() if f.name != "meta.json"}
    (copy / "meta.json").write_text(json.dumps(meta))
    assert latest(copy.parent) == copy


def test_older_checkpoints_are_removed_when_the_new_one_is_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In this order: the names in the new folder synced, the folder renamed, its name synced, the old one removed."""
    done = []
    real = {"fsync": os.fsync, "rename": Path.rename}

    def fsync(handle: int) -> None:
        done.append(f"sync {Path(os.readlink(f'/proc/self/fd/{handle}')).name}")
        real["fsync"](handle)

    def rename(path: Path, target: Path) -> Path:
        done.append(f"rename {path.name}")
        return real["rename"](path, target)

    make(tmp_path, 1)
    making = tmp_path / ".step_00000002.making"
    making.mkdir()
    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(Path, "rename", rename)
    publish(making, tmp_path / "step_00000002", {"history": []})
    discard(outdated(tmp_path, keep_last=1, keep_best=False))
    assert done == [
        "sync meta.json",
        "sync .step_00000002.making",
        "rename .step_00000002.making",
        f"sync {tmp_path.name}",
        "rename step_00000001",
    ]
    assert names_in(tmp_path) == names(2)


def test_a_damaged_one_stays_until_a_newer_one_is_whole(tmp_path: Path) -> None:
    made = [make(tmp_path, step) for step in (1, 2, 3)]
    for broken in (made[0], made[2]):
        cut(broken / "meta.json")
    assert outdated(tmp_path, keep_last=1, keep_best=True) == [made[0]]
    assert outdated(tmp_path / "none", keep_last=1, keep_best=True) == []
