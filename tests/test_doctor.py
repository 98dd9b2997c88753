"""The doctor as people run it, on machines with faults that are made for real where that can be done."""

from __future__ import annotations

import os
import re
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from fsdp_lab.commands import doctor
from tests.conftest import ROOT, FakeGpus

# A process with its own mounts: Docker's small /dev/shm, and a disk with half a megabyte left.
_SMALL = """
mount --make-rprivate / && mount -t tmpfs -o size=16m tmpfs /dev/shm && mount -t tmpfs -o size=20m tmpfs small &&
head -c 20500000 /dev/zero > small/large && exec "$@"
"""


def run_doctor(*words: str, before: tuple[str, ...] = (), cwd: Path = ROOT, **environment: str) -> tuple[int, str]:
    """Its exit status and what it prints, one line a finding."""
    command = [*before, sys.executable, "-m", "fsdp_lab.doctor", *words]
    variables = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    done = subprocess.run(command, cwd=cwd, env=variables, capture_output=True, text=True, timeout=100, check=False)
    return done.returncode, done.stdout.replace(f"\n{'':22}->", " ->") + done.stderr


@pytest.mark.skipif(os.geteuid() != 0, reason="takes root: mounts")
def test_each_fault_of_a_machine_is_found_with_its_remedy(tmp_path: Path):
    (tmp_path / "small").mkdir()
    (tmp_path / "mlflow.db").write_text("no database" * 100)
    words = ("folder=small/outputs", f"tracking.uri=sqlite:///{tmp_path}/mlflow.db")
    small = ("unshare", "--mount", "sh", "-c", _SMALL, "sh")
    status, printed = run_doctor(*words, before=small, cwd=tmp_path, TMPDIR=str(tmp_path / "small"))
    found = {line[7:22].strip(): line for line in printed.splitlines()}
    assert status == 1 and re.search(r"\d problems found$", printed.rstrip()), printed
    assert found["shared memory"].startswith("note") and "--shm-size" in found["shared memory"]
    assert found["disk"].startswith("wrong") and "0.0 GiB free in " in found["disk"]
    assert found["Ray's files"].startswith("wrong") and "TMPDIR" in found["Ray's files"]
    assert found["MLflow store"].startswith("wrong") and "file is not a database" in found["MLflow store"]
    assert found["PyTorch"].startswith("ok") and found["Python"].startswith("ok")


def test_a_python_without_libraries_and_with_a_pytorch_that_is_broken(tmp_path: Path):
    """A stand-in for a build whose libraries are missing. The rest is examined all the same."""
    (tmp_path / "torch.py").write_text("raise OSError('libcudart.so.13: cannot open shared object file')")
    command = [sys.executable, "-S", "-m", "fsdp_lab.doctor"]
    variables = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 1, done.stderr
    assert "lacks torchvision, ray, mlflow" in done.stdout and "OSError: libcudart.so.13" in done.stdout
    assert "GiB free in" in done.stdout and re.search(r"\d problems found$", done.stdout.rstrip())


def test_a_gpu_that_pytorch_does_not_see_is_found(fake_gpus: FakeGpus):
    assert not doctor._pytorch("").fails
    fake_gpus(problem="PyTorch sees no device")
    assert doctor._pytorch("the remedy")[1:] == ("the remedy", True)


def test_too_few_cores_and_too_little_memory_are_found(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("fsdp_lab.machine.hardware.num_cpus", lambda: 1)
    monkeypatch.setattr("fsdp_lab.machine.hardware.host_memory", lambda: 2**29)
    assert doctor._cores("fewer workers")[1:] == ("fewer workers", False)
    memory = doctor._memory("end others")
    assert memory.fails and memory.observation.startswith("0.5 GiB free of 0.5 GiB")


def test_a_store_is_examined_and_left_as_it_is(tmp_path: Path):
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    assert f"the first trial creates {uri}; " in doctor._store("", uri).observation and list(tmp_path.iterdir()) == []
    with sqlite3.connect(tmp_path / "mlflow.db", isolation_level=None) as database:
        database.execute("CREATE TABLE runs (id TEXT)")
        before = (tmp_path / "mlflow.db").read_bytes()
        assert doctor._store("", uri).observation.endswith("answers")
        assert (tmp_path / "mlflow.db").read_bytes() == before
        database.execute("BEGIN EXCLUSIVE")
        with pytest.raises(sqlite3.OperationalError, match="locked"):
            doctor._store("", uri)


@pytest.mark.documents("python -m fsdp_lab doctor")
def test_the_command_has_the_status_of_what_it_found(cli, tmp_path: Path):
    done = cli("doctor", list_imports=True)
    wrong = sum(line.startswith("wrong") for line in done.stdout.splitlines())  # a full memory, for example
    ends = f"{wrong} problem{'s' * (wrong != 1)} found" if wrong else "sweeps can run here"
    assert (done.returncode, done.stderr) == (int(wrong > 0), "imported: torch\n"), done.stdout
    assert done.stdout.splitlines()[-1] == ends and list(tmp_path.iterdir()) == []
    for uri in ("http://127.0.0.1:1", "sqlite:////proc/nope/x.db", f"sqlite:///{__file__}/x.db"):
        done = cli("doctor", f"tracking.uri={uri}")
        assert done.returncode == 1 and "wrong  MLflow store" in done.stdout and "\x1b" not in done.stdout
        assert re.search(r"problems? found$", done.stdout.rstrip())
    assert "[]" not in done.stdout and "None" not in done.stdout
    assert cli("doctor", "tracking.url=x").returncode == 2
