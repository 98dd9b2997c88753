"""Processes that answer questions, and what becomes of an answer when a process does not go on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import CancelledError
from pathlib import Path

import pytest

from fsdp_lab.forecast.pool import NoAnswerError, Pool, _Child
from tests.processes import called, still_running

LIMIT_S = 60.0


def answer(question: str) -> tuple[str, int]:
    """What is asked for is done, and then answered, with the id of the process."""
    match question.partition(" "):
        case "sleep", _, seconds:
            time.sleep(float(seconds))
        case "signal", _, number:
            os.kill(os.getpid(), int(number))
        case "leave", _, status:
            os._exit(int(status))
    return question, os.getpid()


def test_one_process_answers_every_question_in_its_turn():
    with Pool(answer, 1, LIMIT_S) as pool:
        futures = [pool.submit(word) for word in "abc"]
        reported, pids = zip(*[future.result() for future in futures], strict=True)
    assert reported == ("a", "b", "c")
    assert len(set(pids)) == 1 and os.getpid() not in pids
    assert called("spawn_main") == []


def test_as_many_work_side_by_side_as_were_asked_for():
    with Pool(answer, 2, LIMIT_S) as pool:
        pids = {future.result()[1] for future in [pool.submit("sleep 2"), pool.submit("sleep 2")]}
    assert len(pids) == 2


@pytest.mark.parametrize(
    ("question", "message"),
    [
        (f"signal {signal.SIGKILL:d}", "was killed, most likely because memory ran out"),
        (f"signal {signal.SIGSEGV:d}", "ended by SIGSEGV"),
        ("leave 3", "ended with exit code 3"),
        ("sleep 60", "did not answer within 5 s"),
    ],
)
def test_a_process_that_does_not_answer_costs_one_answer(question: str, message: str):
    with Pool(answer, 1, 5.0) as pool:
        first, lost, last = [pool.submit(word) for word in ("a", question, "b")]
        assert first.result()[0] == "a"
        with pytest.raises(NoAnswerError, match=f"^{message}$"):
            lost.result()
        assert last.result()[0] == "b" and last.result()[1] != first.result()[1]


def test_ctrl_c_is_the_parents():
    with Pool(answer, 1, LIMIT_S) as pool:
        assert pool.submit(f"signal {signal.SIGINT:d}").result()[0] == f"signal {signal.SIGINT:d}"


def test_ctrl_c_while_a_process_starts_is_the_parents_too():
    child = _Child(answer)
    try:
        assert child._process.pid is not None
        os.kill(child._process.pid, signal.SIGINT)  # Python has not even started there
        assert child.ask("a", LIMIT_S)[0] == "a"
    finally:
        child.kill()


def test_the_end_of_the_pool_is_the_end_of_its_processes():
    with Pool(answer, 1, LIMIT_S) as pool:
        assert pool.submit("a").result()
        begun, waiting = pool.submit("sleep 60"), pool.submit("b")
        while not begun.running():
            time.sleep(0.01)
    assert called("spawn_main") == []
    with pytest.raises(NoAnswerError):
        begun.result(timeout=0)
    with pytest.raises(CancelledError):
        waiting.result(timeout=0)


def test_processes_end_with_a_parent_that_is_killed(tmp_path: Path):
    code = (
        "from fsdp_lab.forecast.pool import Pool; from tests.forecast.test_pool import answer\n"
        "if __name__ == '__main__':\n"
        "    with Pool(answer, 2, 60) as pool:\n"
        "        [future.result() for future in [pool.submit('sleep 1'), pool.submit('sleep 1')]]\n"
        "        print('both', flush=True); pool.submit('sleep 60').result()"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout and parent.stdout.readline() == "both\n"
        children = called("spawn_main", parent.pid)
        parent.kill()
    assert len(children) == 2 and still_running(children, 10) == []
