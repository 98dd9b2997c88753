"""A command ends with the status of its work, whatever becomes of its output."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import PLAIN, ROOT

COMMANDS = [["fsdp_lab", "--help"], ["fsdp_lab", "--cfg", "job"], ["fsdp_lab", "-m", "dry_run=true"],
            ["fsdp_lab.report", "--help"], ["fsdp_lab.nightly", "--help"], ["fsdp_lab", "doctor"]]  # fmt: skip
SWEEP = ["fsdp_lab", "-m", "optimizer.lr=0.1,0.01", "engine=inline", "model=mlp", "data=synthetic", "data.num_train=8",
         "data.num_val=8", "training.global_batch_size=8", "checkpoint.mode=off", "export=false", *PLAIN]  # fmt: skip


def ended(words: list[str], folder: Path, out: int, encoding: str = "utf-8") -> tuple[int, str]:
    environment = {**os.environ, "PYTHONIOENCODING": encoding, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", *words]
    done = subprocess.run(
        command, cwd=folder, env=environment, stdout=out, stderr=subprocess.PIPE, text=True, timeout=300, check=False
    )
    return done.returncode, done.stderr


def closed_pipe() -> int:
    read, write = os.pipe()
    os.close(read)
    return write


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_a_reader_may_close_the_pipe(words: list[str], tmp_path: Path):
    """As `head` does. Python itself would print a traceback, and once more when it exits."""
    assert ended(words, tmp_path, closed_pipe()) == (0, "")


@pytest.mark.ci
@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_a_sweep_outlasts_its_reader(encoding: str, tmp_path: Path):
    assert ended(SWEEP, tmp_path, closed_pipe(), encoding)[0] == 0
    assert len(list(tmp_path.glob("outputs/multirun/*/*/report.html"))) == 1


def test_characters_that_the_encoding_lacks_become_question_marks(tmp_path: Path):
    with (tmp_path / "out").open("w") as out:
        code, errors = ended(["fsdp_lab", "optimizer.lr='×'"], tmp_path, out.fileno(), "ascii")
    assert code == 2 and errors.startswith("fsdp_lab: optimizer.lr=?")


def test_a_full_disk_of_a_log_changes_no_status(tmp_path: Path):
    with open("/dev/full", "w") as out:
        assert ended(["fsdp_lab", "--keys"], tmp_path, out.fileno()) == (0, "")
