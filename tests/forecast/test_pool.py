"""Processes that answer questions, and what becomes of an answer when a process ends. They import this: no PyTorch."""

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

PROCESS = "pool import serve"  # in the command line of each process of a pool
LIMIT_S = 60.0


def answer(question: str) -> tuple[str, int]:
    """What is asked for is done, and then answered, with the id of the process."""
    match question.partition(" "):
        case "sleep", _, seconds:
            time.sleep(float(seconds))
        case "meet", _, folder:  # until two processes are there
            Path(folder, str(os.getpid())).touch()
            while len(list(Path(folder).iterdir())) < 2:
                time.sleep(0.01)
        case "signal", _, number:
            os.kill(os.getpid(), int(number))
        case "leave", _, status:
            os._exit(int(status))
    return question, os.getpid()


def test_one_process_answers_in_its_turn_and_one_that_dies_costs_one_answer():
    with Pool(answer, 1, LIMIT_S) as pool:
        reported, pids = zip(*[future.result() for future in [pool.submit(word) for word in "abc"]], strict=True)
        assert reported == ("a", "b", "c") and len(set(pids)) == 1 and os.getpid() not in pids
        pid = pids[0]
        for question, message in (
            (f"signal {signal.SIGKILL:d}", "was killed, most likely because memory ran out"),
            (f"signal {signal.SIGSEGV:d}", "ended by SIGSEGV"),
            ("leave 3", "ended with exit code 3"),
        ):
            lost, after = pool.submit(question), pool.submit("b")
            with pytest.raises(NoAnswerError, match=f"^{message}$"):
                lost.result()
            text, other = after.result()
            assert text == "b" and other != pid
            pid = other


def test_a_late_answer_costs_no_other():
    with Pool(answer, 1, LIMIT_S) as pool:
        _, pid = pool.submit("a").result()
        pool._limit_s = 0.1
        with pytest.raises(NoAnswerError, match=r"^did not answer within 0\.1 s$"):
            pool.submit("sleep 60").result()
        pool._limit_s = LIMIT_S
        assert pool.submit("b").result()[1] != pid


class Spoiled:
    """Pickled, it is a call that fails."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return int, ("a question that cannot be read",)


def test_a_question_that_cannot_be_read_ends_the_process_and_nobody_waits():
    with Pool(answer, 1, LIMIT_S) as pool, pytest.raises(NoAnswerError, match="ended with exit code 1"):
        pool.submit(Spoiled()).result()


def test_ctrl_c_is_the_parents_also_while_a_process_starts():
    child = _Child(answer)
    try:
        assert child._process.pid is not None
        os.kill(child._process.pid, signal.SIGINT)  # Python has not even started there
        asked = f"signal {signal.SIGINT:d}"
        assert child.ask(asked, LIMIT_S)[0] == asked
    finally:
        child.kill()


def test_the_end_of_the_pool_is_the_end_of_its_processes():
    with Pool(answer, 1, LIMIT_S) as pool:
        assert pool.submit("a").result()
        begun, waiting = pool.submit("sleep 60"), pool.submit("b")
        while not begun.running():
            time.sleep(0.01)
    assert called(PROCESS) == []
    with pytest.raises(NoAnswerError):
        begun.result(timeout=0)
    with pytest.raises(CancelledError):
        waiting.result(timeout=0)


def test_two_work_side_by_side_and_end_with_a_parent_that_is_killed(tmp_path: Path):
    code = (
        "from fsdp_lab.forecast.pool import Pool; from tests.forecast.test_pool import answer\n"
        "if __name__ == '__main__':\n"
        "    with Pool(answer, 2, 60) as pool:\n"
        f"        [future.result() for future in [pool.submit('meet {tmp_path}') for _ in range(2)]]\n"
        "        print('both', flush=True); pool.submit('sleep 60').result()"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout and parent.stdout.readline() == "both\n"
        children = called(PROCESS, parent.pid)
        parent.kill()
    assert len(children) == 2 and still_running(children, 10) == []
