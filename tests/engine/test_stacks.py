"""A rank that is stuck leaves its stack in its log, and is told from those that wait for it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from fsdp_lab.engine.job import Watch
from fsdp_lab.engine.stacks import Frame, find_stuck, long_s
from fsdp_lab.record.trial_files import Progress, read_progress
from fsdp_lab.report.reason_texts import stuck_text

# A rank whose user's code waits for a lock, in a thread as Ray's, and is asked from another one.
RANK = """
import json, sys, threading, time
from pathlib import Path
from fsdp_lab.engine.stacks import dump_stacks
from fsdp_lab.engine.worker import redirect_output

lock, said = threading.Lock(), sys.argv[2]

def init_weights():
    lock.acquire()

def train_rank():
    init_weights()

redirect_output(Path(sys.argv[1]) / "logs" / "rank0.log")
with lock:
    thread = threading.Thread(target=train_rank)
    thread.start()
    while not (stack := dump_stacks()) or stack[0][2] != "init_weights":
        time.sleep(0.01)
Path(said).write_text(json.dumps(stack))
thread.join()
"""
WAITS: list[Frame] = [
    ("/v/site-packages/torch/distributed/distributed_c10d.py", "2805", "broadcast"),
    ("/v/site-packages/torch/distributed/c10d_logger.py", "81", "wrapper"),
    ("/home/me/fsdp_lab/training/weights.py", "94", "_fill"),
    ("/home/me/fsdp_lab/engine/rank.py", "48", "train_rank"),
]


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> list[Frame]:
    """Of a rank that is stuck; its log is in the same folder."""
    folder = tmp_path_factory.mktemp("trial")
    subprocess.run([sys.executable, "-c", RANK, str(folder), str(folder / "said")], check=True, timeout=60)
    assert " in init_weights" in (folder / "logs" / "rank0.log").read_text()
    return [tuple(frame) for frame in json.loads((folder / "said").read_text())]


def test_a_rank_that_is_asked_answers_with_its_stack_and_its_place_is_found(stack: list[Frame], tmp_path: Path):
    assert [function for _, _, function in stack][:2] == ["init_weights", "train_rank"]
    line = 1 + RANK.splitlines().index("    lock.acquire()")
    log = tmp_path / "logs" / "rank0.log"
    stuck = find_stuck(tmp_path, {0: stack})
    assert stuck is not None
    text = stuck_text(**stuck)
    assert text == f"rank 0 is at <string>:{line} in init_weights; its stack is in {log}"


def test_a_rank_in_a_collective_waits_for_the_stuck_one(stack: list[Frame], tmp_path: Path):
    assert find_stuck(tmp_path, {}) is None, "without an answer no rank is accused"
    waiting = {10: WAITS, 2: WAITS, 3: []}
    waits = find_stuck(tmp_path, waiting)
    assert waits is not None and (waits["rank"], waits["place"]) == (
        2,
        "/home/me/fsdp_lab/training/weights.py:94 in _fill",
    )
    stuck = find_stuck(tmp_path, {**waiting, 11: stack})
    assert stuck is not None and stuck["rank"] == 11 and stuck["place"].endswith(" in init_weights")


def test_stacks_are_dumped_before_a_trial_is_ended_for_want_of_progress():
    assert (long_s(None), long_s(1800.0), long_s(20.0)) == (60.0, 60.0, 10.0)


def test_ranks_are_asked_once_for_each_phase_that_is_long(tmp_path: Path):
    """And what they say is in the folder until the phase ends."""
    watch, progress, asked = Watch(tmp_path, timeout_s=None, wait_timeout_s=1.0), Progress(), list[int]()

    def ask_stacks() -> dict[int, list[Frame]]:
        asked.append(1)
        return {0: WAITS}

    watch.ask_stacks = ask_stacks
    for phase in ("loading the data", "building the model"):
        progress.phase(phase)
        watch.look(progress.content, 1.0)
        assert read_progress(tmp_path).stuck is None
        for _ in range(3):
            watch.look(progress.content, 40.0)
        assert (read_progress(tmp_path).stuck or {})["rank"] == 0
    assert len(asked) == 2 and read_progress(tmp_path).time is not None
