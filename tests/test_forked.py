"""A command in a fork is the command in a process of its own, but for what is imported already."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import forked

_PROBE = """
import atexit, json, multiprocessing, os, signal, sys

atexit.register(print, "the end")
main = sys.modules["__main__"]
json.dump({
    "folder": os.getcwd(), "words": sys.argv, "path": sys.path, "environment": dict(os.environ),
    "main": [__name__, main.__spec__.name, main.__file__, globals() is vars(main)],
    "tests": "tests" in sys.modules, "umask": os.umask(0o22), "interrupt": repr(signal.getsignal(signal.SIGINT)),
    "parent": multiprocessing.parent_process(), "stdin": sys.stdin.read(),
}, sys.stdout, indent=1, sort_keys=True)
print("to stderr", file=sys.stderr)
if sys.argv[1] == "error":
    raise ValueError("wrong")
if sys.argv[1] == "kill":
    sys.stdout.flush()
    os.kill(os.getpid(), signal.SIGTERM)
sys.exit({"none": None, "seven": 7, "word": "a word"}[sys.argv[1]])
"""


@pytest.mark.parametrize("how", ["none", "seven", "word", "error", "kill"])
def test_it_sees_and_leaves_what_a_process_of_its_own_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    monkeypatch.setenv("FSDP_LAB_PROBE", how)
    (tmp_path / "probe.py").write_text(_PROBE)
    alone = subprocess.run(
        [sys.executable, "-m", "probe", how], cwd=tmp_path, capture_output=True, text=True, stdin=subprocess.DEVNULL,
        env=dict(os.environ), check=False,
    )  # fmt: skip
    fork = forked.run(tmp_path, "probe", how)
    seen, expected = (done.stdout.rpartition("the end") for done in (fork, alone))
    assert json.loads(seen[0] or seen[2]) == json.loads(expected[0] or expected[2])
    assert seen[1:] == expected[1:] or how == "kill"
    assert fork.returncode == alone.returncode
    errors, expected_errors = (done.stderr.splitlines() for done in (fork, alone))
    assert (
        errors == expected_errors
        if how != "error"
        else (errors[0], errors[-1]) == (expected_errors[0], expected_errors[-1])
    )


def test_what_it_has_imported_is_run_as_if_it_had_not(tmp_path: Path) -> None:
    words = ("fsdp_lab.report", "sweep=nowhere")
    alone = subprocess.run([sys.executable, "-m", *words], cwd=tmp_path, capture_output=True, text=True, check=False)
    fork = forked.run(tmp_path, *words)
    assert alone.stderr.startswith("fsdp_lab.report: ")
    assert (fork.returncode, fork.stdout, fork.stderr) == (alone.returncode, alone.stdout, alone.stderr)


def test_one_that_lasts_too_long_is_ended(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text("import time\nprint('begun', flush=True)\ntime.sleep(60)\n")
    with pytest.raises(subprocess.TimeoutExpired) as ended:
        forked.run(tmp_path, "slow", seconds=2)
    assert ended.value.output == "begun\n"
    (tmp_path / "quick.py").write_text("print('fine')\n")
    assert forked.run(tmp_path, "quick").stdout == "fine\n", "the next one has its own answer"


def test_what_is_read_as_a_process_starts_is_obeyed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "found.py").write_text("import tempfile\nprint(tempfile.gettempdir())\n")
    assert forked.run(tmp_path, "found").returncode == 1
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "elsewhere"))
    assert forked.run(tmp_path, "found").returncode == 0
    monkeypatch.undo()
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    assert forked.run(tmp_path / "elsewhere", "found").stdout == f"{tmp_path}\n"
