"""A rank that is stuck leaves its stack in its log, and is told from those that wait for it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from fsdp_lab.engine.stacks import find_stuck, last_stack, long_s
from fsdp_lab.report.reason_texts import stuck_text

# A rank whose user's code waits for a lock, in a thread as Ray's, until its log has a dump of that; after a phase that
# was long.
RANK = """
import sys, threading, time
from pathlib import Path
from fsdp_lab.engine.stacks import StackDump
from fsdp_lab.engine.worker import RayReporter, redirect_output

folder, lock = Path(sys.argv[1]), threading.Lock()
log = folder / "logs" / "rank0.log"
stacks = StackDump(0.25)
reporter = RayReporter("digits", stacks, None)

def wait_for_dumps(count):
    while log.read_text().count("Timeout (0.25 s)") < count:
        time.sleep(0.01)

def init_weights():
    lock.acquire()

def train_rank():
    reporter.phase("loading the data")
    wait_for_dumps(1)
    for step in range(1, 4):
        reporter.step(step)
    reporter.phase("initialising the weights")
    init_weights()
    stacks.end()

redirect_output(log)
print("Timeout (of the user's own)")
lock.acquire()
thread = threading.Thread(target=train_rank)
thread.start()
wait_for_dumps(2)
while " in init_weights" not in log.read_text():
    time.sleep(0.01)
lock.release()
thread.join()
stacks._thread.join()
"""
WAITS = """Timeout (0:00:01)!
Thread 0x00007f918c8fc6c0 (most recent call first):
  File "/lib/python3.11/threading.py", line 320 in wait

Thread 0x00007f918c0fb6c0 (most recent call first):
  File "/v/site-packages/torch/distributed/distributed_c10d.py", line 2805 in broadcast
  File "/v/site-packages/torch/distributed/c10d_logger.py", line 81 in wrapper
  File "/home/me/fsdp_lab/training/weights.py", line 94 in _fill
  File "/home/me/fsdp_lab/engine/rank.py", line 48 in train_rank
"""


@pytest.fixture(scope="module")
def trial(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trial")
    subprocess.run([sys.executable, "-c", RANK, str(folder)], check=True, timeout=60)
    return folder


def test_a_stuck_rank_dumps_its_stack_once_for_each_phase_and_its_place_is_found(trial: Path):
    log = trial / "logs" / "rank0.log"
    assert log.read_text().count("Timeout (0.25 s)") == 2, "none after its end"
    functions = [function for _, _, function in last_stack(log)]
    assert functions[:2] == ["init_weights", "train_rank"]
    result = find_stuck(trial)
    assert result is not None
    line = 1 + RANK.splitlines().index("    lock.acquire()")
    text = stuck_text(**result.to_dict())
    assert text == f"rank 0 is at <string>:{line} in init_weights; its stack is in {log}"


def test_a_rank_in_a_collective_waits_for_the_stuck_one(trial: Path, tmp_path: Path):
    logs = tmp_path / "logs"
    logs.mkdir()
    for rank in (2, 10):
        (logs / f"rank{rank}.log").write_text(f"what it printed\n{WAITS}\nmore\n")
    (logs / "rank3.log").write_text("it has dumped nothing\n")
    waits = find_stuck(tmp_path)
    assert waits is not None and (waits.rank, waits.place) == (2, "/home/me/fsdp_lab/training/weights.py:94 in _fill")
    (logs / "rank11.log").write_bytes((trial / "logs" / "rank0.log").read_bytes())
    stuck = find_stuck(tmp_path)
    assert stuck is not None and stuck.rank == 11 and stuck.place.endswith("in init_weights")


def test_without_a_dump_no_rank_is_accused(tmp_path: Path):
    assert find_stuck(tmp_path) is None


def test_stacks_are_dumped_before_a_trial_is_ended_for_want_of_progress():
    assert (long_s(None), long_s(1800.0), long_s(20.0)) == (60.0, 60.0, 10.0)
