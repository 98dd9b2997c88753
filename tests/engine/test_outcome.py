"""How a trial's end is told from what its workers left."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from ray.exceptions import OutOfMemoryError, RayActorError
from ray.train import TrainingFailedError

from fsdp_lab.config import TrialConfig, UserError
from fsdp_lab.engine import job
from fsdp_lab.engine.failures import code_of
from fsdp_lab.engine.files_of_ranks import at_end, scratch_folder
from fsdp_lab.engine.hang import stacks_file
from fsdp_lab.engine.inline import run_inline
from fsdp_lab.engine.job import Epochs, Job, train_with_retries
from fsdp_lab.engine.outcome import is_final, log_sizes, note_deaths
from fsdp_lab.engine.rank import RankReporter, check_gpu
from fsdp_lab.record.reasons import Code, Reason
from fsdp_lab.record.trial_files import TrialWriter, clear_left_over, read_metrics, read_progress
from fsdp_lab.record.trial_json import RankFailure, changing, read_trial, set_aside_failures
from fsdp_lab.report.render import reason_text
from fsdp_lab.storage.files import append_line
from fsdp_lab.storage.objects import StorageAway
from tests.conftest import ROOT, FakeGpus


def reporter_of(folder: Path) -> RankReporter:
    """What a rank reports, written into the folder."""
    return RankReporter(TrialWriter(folder).receive, (folder / "progress.json").open("w"))


def cause_in(folder: Path) -> RankFailure:
    cause = read_trial(folder).cause
    assert cause is not None
    return cause


def test_a_damaged_line_is_named_and_one_cut_by_a_kill_dropped(tmp_path: Path):
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"epoch": 1, "loss": NaN}\n{"epoch": 2')
    assert [metrics["epoch"] for metrics in read_metrics(tmp_path)] == [1]
    append_line(file, '{"epoch": 3}')
    assert [metrics["epoch"] for metrics in read_metrics(tmp_path)] == [1, 3]
    for line in ("{}", "[1]", '{"epoch": 4', ""):
        file.write_text(f'{{"epoch": 1}}\n{line}\n{{"epoch": 3}}\n')
        with pytest.raises(UserError, match=f"{file}: line 2 cannot be read .*; restore it from a copy, or remove it"):
            list(read_metrics(tmp_path))


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB"), "out_of_memory"),
        (MemoryError(), "out_of_memory"),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: 9 bytes"), "out_of_memory"),
        (RuntimeError("CUDA error: out of memory"), "out_of_memory"),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), "out_of_memory"),
        (RuntimeError("Connection closed by peer [127.0.0.1]:9"), "peer_lost"),
        (ValueError("out of memory of what I said"), "error"),
    ],
)
def test_kinds_of_failure(error: BaseException, code: str):
    assert code_of(error) == code


@pytest.mark.parametrize(
    ("counted", "seen", "words"),
    [
        (True, False, r"rank 1 on .* was given a GPU and PyTorch sees none: .*, CUDA_VISIBLE_DEVICES=2,3; .*"),
        (False, True, r"PyTorch sees GPUs on .*NVIDIA_DRIVER_CAPABILITIES="),
        (True, True, ""),
        (False, False, ""),
    ],
)
def test_a_gpu_that_ray_and_pytorch_count_differently_is_reported(
    counted: bool, seen: bool, words: str, monkeypatch: pytest.MonkeyPatch
):
    """Before NCCL fails on it, or the trial trains on the CPU in a machine with GPUs."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: seen)
    with pytest.raises(UserError, match=words) if words else nullcontext():
        check_gpu(1, counted)


def test_an_inline_trial_asks_whether_pytorch_sees_the_gpu(
    fake_gpus: FakeGpus, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    fake_gpus(1)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    run_inline(TrialConfig(), tmp_path, lambda metrics: None)
    outcome = read_trial(tmp_path).outcome
    assert outcome is not None and outcome.status == "failed"
    assert "was given a GPU and PyTorch sees none" in reason_text(outcome.reason)


_OF_A_RANK = RankFailure(Reason.of(Code.error, rank=1, error="FileNotFoundError", text="/out/3"))
_CRASH = "9/20 Fatal Python error: Segmentation fault\n"  # behind a progress bar without an end


@pytest.mark.parametrize(
    ("error", "log", "node", "kernel_killed", "code", "words"),
    [
        (pickle.loads(pickle.dumps(_OF_A_RANK)), "", "here", False, "error", "rank 1: FileNotFoundError: /out/3"),
        (OutOfMemoryError("killed"), "", "here", False, "host_out_of_memory", "was killed: the host is out of memory"),
        (RayActorError(), "", "here", False, "killed", "rank 1: its process ended without an error, as if killed"),
        (RayActorError(), "", "here", True, "host_out_of_memory", "the host is out of memory"),
        (RayActorError(), "", "there", True, "killed", "if memory ran out on 10.0.0.1, that may be why"),
        (RayActorError(), _CRASH, "here", True, "crashed", "crashed: Segmentation fault"),
    ],
)
def test_a_kill_by_the_kernel_counts_for_a_rank_on_its_node(
    error: Exception, log: str, node: str, kernel_killed: bool, code: str, words: str, tmp_path: Path
):
    """And for none that raised an error, was killed by Ray, or crashed: the table of why a worker ended."""
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "rank1.log").write_text(log)
    with changing(tmp_path) as trial:
        trial.nodes = [{"node": node, "address": "10.0.0.1"}] * 2
    note_deaths(tmp_path, {1: error}, here="here", kernel_killed=kernel_killed)
    (failure,) = read_trial(tmp_path).failures
    assert failure.reason.code == code and words in reason_text(failure.reason)


def test_a_crash_of_an_earlier_attempt_is_no_cause_of_this_one(tmp_path: Path):
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "rank0.log").write_text(_CRASH)
    for before, expected in (({}, "crashed: Segmentation fault"), (log_sizes(tmp_path), "as if killed")):
        note_deaths(tmp_path, {0: RayActorError()}, 2.0, before)
        (failure,) = read_trial(tmp_path).failures
        assert expected in reason_text(failure.reason)
        set_aside_failures(tmp_path)


@pytest.mark.parametrize(("killed_after", "counts"), [(20, False), (350, True)])
def test_a_kill_by_the_kernel_long_ago_is_no_cause(
    killed_after: int, counts: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    """It may have been of another container. The kernel's counts are planted; Ray Train ends after 400 looks."""
    looks, told = list[int](), dict[str, bool]()

    def kernel_kills() -> int:
        looks.append(int(len(looks) > killed_after))
        return looks[-1]

    class Fails:
        def fit(self) -> None:
            while len(looks) < 400:
                time.sleep(0.001)
            raise TrainingFailedError

    monkeypatch.setattr(job, "_LOOK_S", 0.001)
    monkeypatch.setattr(job, "kernel_kills", kernel_kills)
    monkeypatch.setattr(job, "release_placement_group", lambda folder: None)
    monkeypatch.setattr("ray.get_runtime_context", Mock())
    monkeypatch.setattr(job, "note_deaths", lambda *given: told.update(kernel_killed=given[-1]))
    monkeypatch.setattr(job, "trainer", lambda given: Fails())
    given = Job({}, str(tmp_path), 1, 1.0, False, "", None, 1.0, 0, True)
    with pytest.raises(TrainingFailedError):
        train_with_retries(given, Mock())
    assert told["kernel_killed"] is counts


@pytest.mark.parametrize(
    ("code", "final"),
    [
        *((code, True) for code in ("out_of_memory", "host_out_of_memory", "timed_out", "user_error", "diverged")),
        *((code, False) for code in ("error", "killed", "node_lost")),
    ],
)
def test_what_would_fail_again_is_not_tried_again(code: str, final: bool, tmp_path: Path):
    with changing(tmp_path) as trial:
        trial.failures.append(RankFailure(Reason.of(Code(code), rank=0)))
    assert is_final(tmp_path, RuntimeError("workers failed")) is final


_HANGS = """
import sys, threading, time
from pathlib import Path
from fsdp_lab.engine.hang import stacks_file
from fsdp_lab.engine.rank import RankReporter

def train_rank():
    waits_here()

def waits_here():
    threading.Event().wait()

sys.stderr = None  # as code of a user's may do
progress, stacks = Path("progress.json").open("w"), stacks_file(Path.cwd(), 0).open("w")
reporter = RankReporter(print, progress, stacks, 2.0)
for step in range(1, 8):
    time.sleep(0.35)
    reporter.step(step)
thread = threading.Thread(target=train_rank)
thread.start()
thread.join()
"""


def test_a_step_beyond_its_limit_ends_and_names_its_line(tmp_path: Path):
    (tmp_path / "logs").mkdir()
    (tmp_path / "hangs.py").write_text(_HANGS)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "hangs.py"], cwd=tmp_path, timeout=60, env=environment)
    assert done.returncode == 1 and read_progress(tmp_path)["step"] == 7
    with changing(tmp_path) as trial:
        trial.failures.append(RankFailure(Reason.of(Code.error, rank=1, error="DistNetworkError", text="0 bytes")))
    note_deaths(tmp_path, {0: RayActorError()}, 2.0)
    text = reason_text(cause_in(tmp_path).reason)
    assert text.startswith("no progress for trial_timeout_s=2 s since step 7 began; it was ended; rank 0 is at ")
    assert f"{tmp_path}/hangs.py:11 in waits_here; its stack is in {tmp_path}/logs/stuck.rank0.txt" in text


def stack(*frames: str) -> str:
    lines = "".join(f'  File "{file}", line {line} in {name}\n' for file, line, name in (f.split(":") for f in frames))
    return f"Thread 0x1 (most recent call first):\n{lines}"


_TRAINS = "/f/rank.py:1:train_rank"
_OTHER = stack("/usr/python3.11/threading.py:5:wait")


def test_the_rank_that_others_wait_for_is_named(tmp_path: Path):
    (tmp_path / "logs").mkdir()
    waits = stack("/v/site-packages/torch/distributed/c10d.py:7:wait", "/home/me/net.py:3:forward", _TRAINS)
    stuck = stack("/usr/python3.11/threading.py:5:wait", "/home/me/net.py:4:forward", _TRAINS)
    for rank, own in enumerate((waits, stuck)):
        stacks_file(tmp_path, rank).write_text(f"Timeout (0:00:09)!\n{_OTHER}\n{own}\n")
    note_deaths(tmp_path, {0: RayActorError()}, 9.0)
    failure = cause_in(tmp_path)
    assert failure.reason.values["stuck"]["place"] == "/home/me/net.py:4 in forward" and failure.rank == 1
    stacks_file(tmp_path, 1).write_text("")
    set_aside_failures(tmp_path)
    note_deaths(tmp_path, {0: RayActorError()}, 9.0)
    failure = cause_in(tmp_path)
    assert failure.reason.values["stuck"]["place"] == "/v/site-packages/torch/distributed/c10d.py:7 in wait"
    set_aside_failures(tmp_path)
    with changing(tmp_path) as trial:
        trial.nodes = [{"node": "a", "address": "b"}] * 2
    note_deaths(tmp_path, {0: RayActorError()}, 9.0)
    text = reason_text(cause_in(tmp_path).reason)
    assert text.endswith("rank 1, for which others wait, wrote no stack, as if its process were suspended")


def test_each_epoch_is_reported_once_the_last_at_the_end(tmp_path: Path):
    training = TrialConfig().training
    last, file, reported = training.epochs, tmp_path / "metrics.jsonl", list[float]()
    epochs = Epochs(tmp_path, training, lambda metrics: reported.append(metrics["epoch"]))
    epochs.report()
    for epoch in range(1, last + 1):
        append_line(file, json.dumps({"epoch": epoch, "step": epoch}))
        epochs.report()
        epochs.report()
    assert reported == list(range(1, last))
    file.write_text(file.read_text().replace("}", ', "val/loss": 1}'))  # trained again after a kill
    epochs.report()
    epochs.report(ended=True)
    epochs.report(ended=True)
    assert reported == list(range(1, last + 1))


def test_an_epoch_that_is_reported_again_is_in_the_file_once(tmp_path: Path):
    """A trial that resumes from a checkpoint reports epochs again: the last report counts, and a lost one is added."""
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"epoch": 2, "seconds": 2}\n{"epoch": 3, "seconds": 3}\n{"epoch": 4, "sec')  # 1 is lost, 4 cut
    reporter = reporter_of(tmp_path)
    reporter.facts({})
    for epoch, seconds in ((1, 1), (2, 2), (3, 9), (4, 9)):
        reporter.epoch({"epoch": epoch, "seconds": seconds})
    epochs = [json.loads(line) for line in file.read_text().splitlines()]
    assert [(each["epoch"], each["seconds"]) for each in epochs] == [(1, 1), (2, 2), (3, 9), (4, 9)]


def test_the_folder_of_a_removed_trial_is_not_written_again(tmp_path: Path):
    """By an epoch, where Ray makes the folder again for its own files."""
    reporter = reporter_of(tmp_path)
    reporter.facts({})
    (tmp_path / "trial.json").unlink()
    with pytest.raises(FileNotFoundError):
        reporter.epoch({"epoch": 1.0})
    assert not (tmp_path / "metrics.jsonl").exists()


def test_profiles_of_another_command_are_taken_away(tmp_path: Path):
    for name in ("memory_peaks_rank0.json", "memory_timeline_rank1.html", "model.pt"):
        (tmp_path / name).write_text(json.dumps({}))
    for name in ("model/config.json", "logs/rank0.log"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text("{}")
    clear_left_over(tmp_path)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs/mine.txt").touch()
    clear_left_over(tmp_path)
    assert (tmp_path / "logs/mine.txt").exists(), "it is of no trial"


def test_an_error_is_raised_although_files_cannot_be_sent():
    """And a process that Tune stops waits for no store: another trial waits for it."""

    def away() -> None:
        raise StorageAway("s3://bucket: the store does not answer")

    with pytest.raises(ValueError, match="the cause"), at_end(away):
        raise ValueError("the cause")
    with pytest.raises(StorageAway), at_end(away):
        pass
    with pytest.raises(SystemExit), at_end(lambda: pytest.fail("it asked the store")):
        raise SystemExit


def test_what_a_killed_rank_has_left_goes_when_the_next_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    begin = "from fsdp_lab.engine.files_of_ranks import scratch_folder; (scratch_folder() / 'model.pt').touch(); "
    killed = [sys.executable, "-c", f"{begin} import os; os.kill(os.getpid(), 9)"]
    subprocess.run(killed, check=False, env={**os.environ, "TMPDIR": str(tmp_path)})
    (left,) = tmp_path.iterdir()
    assert (left / "model.pt").exists()
    (tmp_path / "fsdp_lab_of_another").mkdir()
    own = [scratch_folder(), scratch_folder()]
    assert sorted(tmp_path.iterdir()) == sorted([*own, tmp_path / "fsdp_lab_of_another"])
    assert own[0].stat().st_mode & 0o777 == 0o700
