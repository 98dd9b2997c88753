"""How a trial's end is told from what its workers left."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import time
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
from fsdp_lab.engine.job import Epochs, Job, train_with_retries
from fsdp_lab.engine.outcome import is_final, log_sizes, note_deaths
from fsdp_lab.engine.rank import RankReporter, check_gpu
from fsdp_lab.record.reasons import Code, Reason
from fsdp_lab.record.trial_files import TrialWriter, clear_left_over, read_metrics, read_progress
from fsdp_lab.record.trial_json import RankFailure, changing, read_trial, set_aside_failures
from fsdp_lab.report.render import reason_text
from fsdp_lab.storage.files import append_line
from fsdp_lab.storage.objects import StorageAway
from tests.conftest import ROOT


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
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), "out_of_memory"),
        (RuntimeError("Connection closed by peer [127.0.0.1]:9"), "peer_lost"),
        (ValueError("out of memory of what I said"), "error"),
    ],
)
def test_kinds_of_failure(error: BaseException, code: str):
    assert code_of(error) == code


@pytest.mark.parametrize(("free", "code"), [(2**20, "out_of_memory"), (2**33, "error"), (None, "error")])
def test_cublas_that_cannot_start_is_out_of_memory_on_a_full_gpu(
    free: int | None, code: str, monkeypatch: pytest.MonkeyPatch
):
    if free is not None:
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (free, 2**37))
    error = RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`")
    assert code_of(error) == code
    assert code_of(RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED")) == "error"


def test_a_gpu_that_ray_and_pytorch_count_differently_is_told(monkeypatch: pytest.MonkeyPatch):
    """Before NCCL fails on it, or the trial trains on the CPU in a machine with GPUs."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    for seen, words in (False, r"rank 1 on .* was given a GPU and PyTorch sees none: .*=2,3; "), (True, "sees GPUs on"):
        monkeypatch.setattr(torch.cuda, "is_available", lambda seen=seen: seen)
        check_gpu(1, seen)
        with pytest.raises(UserError, match=words):
            check_gpu(1, not seen)


_OF_A_RANK = RankFailure(Reason.of(Code.error, rank=1, error="FileNotFoundError", text="/out/3"))


def of_loader(error: str, text: str, line: str) -> RankFailure:
    return RankFailure(Reason.of(Code.error, rank=1, error=error, text=text), f"{line}\n{error}: {text}\n")


_WORKER, _WAITS = "DataLoader worker (pid", '  File "/dataloader.py", line 1293, in _try_get_data'
_LOADER = of_loader("RuntimeError", f"{_WORKER} 7) is killed by signal: Killed. ", '  File "mine.py", line 3, in f')
_LOADERS = of_loader("RuntimeError", f"{_WORKER}(s) 7, 8) exited unexpectedly", _WAITS)
_BUS = of_loader("RuntimeError", f"{_WORKER} 7) is killed by signal: Bus error. ", _WAITS)
_FETCHES = of_loader("ConnectionResetError", "[Errno 104]", '  File "/r.py", line 543, in rebuild_storage_fd')
_CRASH = "9/20 Fatal Python error: Segmentation fault\n"  # behind a progress bar without an end


@pytest.mark.parametrize(
    ("error", "log", "node", "kernel_killed", "code", "words"),
    [
        (pickle.loads(pickle.dumps(_OF_A_RANK)), "", "here", False, "error", "rank 1: FileNotFoundError: /out/3"),
        (OutOfMemoryError("killed"), "", "here", False, "host_out_of_memory", "was killed: the host is out of memory"),
        (RayActorError(), "", "here", False, "killed", "rank 1: its process ended without an error, as if killed; `dm"),
        (RayActorError(), "", "here", True, "host_out_of_memory", "the host is out of memory"),
        (RayActorError(), "", "there", True, "killed", "if memory ran out on 10.0.0.1, that may be why"),
        (RayActorError(), _CRASH, "here", True, "crashed", "crashed: Segmentation fault"),
        (_OF_A_RANK, "", "here", True, "error", "rank 1: FileNotFoundError: /out/3"),
        (_LOADER, "", "here", True, "host_out_of_memory", "rank 1: a process that loads its data was killed"),
        (_LOADERS, "", "here", True, "host_out_of_memory", "that loads its data was killed: the host is out"),
        (_FETCHES, "", "here", True, "host_out_of_memory", "rank 1: a process that loads its data was killed"),
        (_LOADERS, "", "here", False, "error", "DataLoader worker"),
        (_LOADERS, "", "there", True, "error", "DataLoader worker"),
        (_BUS, "", "here", True, "error", "DataLoader worker"),
    ],
)
def test_a_kill_by_the_kernel_counts_for_a_rank_on_its_node(
    error: Exception, log: str, node: str, kernel_killed: bool, code: str, words: str, tmp_path: Path
):
    """Or for its data loader. And for none that raised another error, was killed by Ray, or crashed."""
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
    note_deaths(tmp_path, {0: RayActorError()}, 2.0, log_sizes(tmp_path))
    assert cause_in(tmp_path).reason.code == "killed"


@pytest.mark.parametrize(("killed_after", "counts"), [(20, False), (350, True)])
def test_a_kill_by_the_kernel_long_ago_is_no_cause(
    killed_after: int, counts: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    """It may have been of another container. The kernel's counts are planted; Ray Train ends after 400 looks.

    And the workers of a trial that fails are released."""
    looks, told, released = list[int](), Mock(), Mock()

    def kernel_kills() -> int:
        looks.append(int(len(looks) > killed_after))
        return looks[-1]

    def fit() -> None:
        while len(looks) < 400:
            time.sleep(0.001)
        raise TrainingFailedError

    planted = {"_LOOK_S": 0.001, "kernel_kills": kernel_kills, "trainer": lambda given: Mock(fit=fit),
               "note_deaths": told, "release_placement_group": released}  # fmt: skip
    for name, value in planted.items():
        monkeypatch.setattr(job, name, value)
    monkeypatch.setattr("ray.get_runtime_context", Mock())
    with pytest.raises(TrainingFailedError):
        train_with_retries(Job({}, str(tmp_path), 1, 1.0, False, "", None, 1.0, 0, True), Mock())
    assert told.call_args.args[-1] is counts
    released.assert_called_once_with(tmp_path)


def test_what_would_fail_again_is_not_tried_again(tmp_path: Path):
    again = (Code.error, Code.killed, Code.node_lost)
    final = (Code.out_of_memory, Code.host_out_of_memory, Code.timed_out, Code.user_error, Code.diverged)
    for code in (*again, *final):
        with changing(tmp_path) as trial:
            trial.failures = [RankFailure(Reason.of(code, rank=0))]
        assert is_final(tmp_path, RuntimeError("workers failed")) == (code in final), code


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
    """As Python writes it, of a thread that runs a trial or another."""
    lines = "".join(f'  File "{file}", line {line} in {name}\n' for file, line, name in (f.split(":") for f in frames))
    return f"Thread 0x1 (most recent call first):\n{lines}"


def test_the_rank_that_others_wait_for_is_named(tmp_path: Path):
    (tmp_path / "logs").mkdir()
    frames = {"/v/site-packages/torch/distributed/c10d.py:7:wait": 3, "/usr/python3.11/threading.py:5:wait": 4}
    for rank, (frame, line) in enumerate(frames.items()):
        own = stack(frame, f"/home/me/net.py:{line}:forward", "/f/rank.py:1:train_rank")
        other = stack("/usr/python3.11/threading.py:5:wait")
        stacks_file(tmp_path, rank).write_text(f"Timeout (0:00:09)!\n{other}\n{own}\n")
    note_deaths(tmp_path, {0: RayActorError()}, 9.0)
    failure = cause_in(tmp_path)
    assert failure.reason.values["stuck"]["place"] == "/home/me/net.py:4 in forward" and failure.rank == 1
    stacks_file(tmp_path, 1).write_text("")
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
    for epoch in range(1, last + 1):
        append_line(file, json.dumps({"epoch": epoch, "step": epoch}))
        epochs.report()
        epochs.report()
    assert reported == list(range(1, last))
    file.write_text(file.read_text().replace("}", ', "val/loss": 1}'))  # trained again after a kill
    epochs.report()
    epochs.report(ended=True)
    assert reported == list(range(1, last + 1))


def test_an_epoch_that_is_reported_again_is_in_the_file_once(tmp_path: Path):
    """A trial that resumes from a checkpoint reports epochs again: the last report counts, and a lost one is added."""
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"epoch": 2, "seconds": 2}\n{"epoch": 3, "seconds": 3}\n{"epoch": 4, "sec')  # 1 is lost, 4 cut
    reporter = RankReporter(TrialWriter(tmp_path).receive, (tmp_path / "progress.json").open("w"))
    reporter.facts({})
    for epoch, seconds in ((1, 1), (2, 2), (3, 9), (4, 9)):
        reporter.epoch({"epoch": epoch, "seconds": seconds})
    epochs = [json.loads(line) for line in file.read_text().splitlines()]
    assert [(each["epoch"], each["seconds"]) for each in epochs] == [(1, 1), (2, 2), (3, 9), (4, 9)]


def test_files_of_another_command_go_and_those_of_no_trial_stay(tmp_path: Path):
    names = ("memory_peaks_rank0.json", "memory_timeline_rank1.html", "model.pt", "model/config.json", "logs/rank0.log")
    for name in (*names, "logs/mine.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("{}")
    clear_left_over(tmp_path)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [tmp_path / "logs/mine.txt"]


def test_an_error_is_raised_although_files_cannot_be_sent():
    """And a process that Tune stops waits for no store: another trial waits for it."""
    store = Mock(side_effect=StorageAway("the store does not answer"))
    with pytest.raises(ValueError, match="the cause"), at_end(store):
        raise ValueError("the cause")
    with pytest.raises(StorageAway), at_end(store):
        pass
    with pytest.raises(SystemExit), at_end(store):
        raise SystemExit
    assert store.call_count == 2


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
