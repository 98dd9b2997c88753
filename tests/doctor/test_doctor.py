"""Each check of the doctor, with the fault that it is to find: made for real where that can be done, in a child."""

from __future__ import annotations

import ctypes
import json
import os
import re
import resource
import socket
import sqlite3
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from functools import partial
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from fsdp_lab.config.sweep import TrackingConfig
from fsdp_lab.doctor import libraries, machine
from fsdp_lab.doctor.__main__ import findings
from fsdp_lab.doctor.finding import Finding, lines
from fsdp_lab.doctor.services import check_cluster, check_store
from fsdp_lab.limits import Limits, read_limits
from tests.cgroups import enter, group
from tests.conftest import ROOT

_NOBODY = 65534
_NEW_MOUNTS = 0x00020000  # of unshare(2)
root_only = pytest.mark.skipif(os.geteuid() != 0, reason="takes root: mounts, groups or another user")


def in_child(prepare: Callable[[], object], check: Callable[[], Finding]) -> Finding:
    """What a check finds in a fork of this process, in which something was prepared first."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        with suppress(BaseException):
            try:
                prepare()
                answer = asdict(check())
            except BaseException:  # noqa: BLE001 - the parent tells it
                answer = {"subject": "", "observation": traceback.format_exc()}
            os.write(writer, json.dumps(answer).encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as answers:
        finding = Finding(**json.loads(answers.read()))
    os.waitpid(child, 0)
    assert finding.subject, finding.observation
    return finding


def unshare(what: int) -> None:
    library = ctypes.CDLL(None, use_errno=True)
    if library.unshare(what):
        raise OSError(ctypes.get_errno(), "unshare")


def mount_small(folder: Path | str, size: str) -> None:
    """A small disk in the memory, for this process alone."""
    unshare(_NEW_MOUNTS)
    subprocess.run(["mount", "--make-rprivate", "/"], check=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)], check=True)


def test_what_is_installed_here_is_fine():
    """What is not: how full memory and disks are depends on what else runs."""
    result = [libraries.check_python(), libraries.check_libraries(), libraries.check_torch()]
    assert [finding for finding in result if finding.fails] == []
    assert "torch 2." in result[1].observation and result[1].remedy == ""


def fill_small(folder: Path) -> None:
    """Leave half a megabyte of a small disk, on which temporary files are."""
    mount_small(folder, "20m")
    (folder / "large").write_bytes(bytes(int(19.5 * 2**20)))
    tempfile.tempdir = str(folder)


# What is made wrong in a folder's child process; what looks at it; the level, and words of observation and remedy.
FAULTS: dict[str, tuple[Callable[[Path], object], Callable[[Path], Finding], str, str]] = {
    "small shared memory": (
        lambda _: mount_small("/dev/shm", "16m"), lambda _: machine.check_shared_memory(),
        "note", "/dev/shm has 16 MiB.*--shm-size",
    ),
    "a full disk": (
        lambda folder: mount_small(folder, "20m"), lambda folder: machine.check_folder(folder / "outputs"),
        "wrong", "20 MiB free in ",
    ),
    "a full disk of temporary files": (
        fill_small, lambda _: machine.check_temporary(), "note", "Ray stops writing.*TMPDIR",
    ),
    "a folder of somebody else": (
        lambda _: os.setuid(_NOBODY), lambda _: machine.check_folder(Path("/")),
        "wrong", r"/: cannot be written \(Permission denied\)",
    ),
    "few open files": (
        lambda _: resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256)), lambda _: machine.check_open_files(),
        "note", "256 per process.*ulimit -n",
    ),
    "few processes": (
        lambda _: resource.setrlimit(resource.RLIMIT_NPROC, (200, 200)),
        lambda _: machine.check_processes(read_limits()), "note", "200 for this user",
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name.startswith("few") else root_only) for name in FAULTS]
)
def test_a_fault_is_found(tmp_path: Path, name: str):
    prepare, check, level, words = FAULTS[name]
    tmp_path.chmod(0o755)
    finding = in_child(lambda: prepare(tmp_path), lambda: check(tmp_path))
    assert finding.level == level and re.search(words, f"{finding.observation} {finding.remedy}")


@root_only
@pytest.mark.parametrize(
    ("controller", "limit", "check", "level", "words"),
    [
        ("cpu", {"cfs_quota_us": 50_000}, machine.check_cores, "note", "limited to the time of 0.5"),
        ("cpu", {"cfs_quota_us": 100_000}, machine.check_cores, "", "^1 for this process"),
        ("memory", {"limit_in_bytes": 512 * 2**20}, machine.check_memory, "wrong", "of 512 MiB.*--memory"),
        ("pids", {"max": 300}, machine.check_processes, "note", "^299 more of 300.*--pids-limit"),
    ],
)
def test_a_limit_of_a_control_group_is_found(
    controller: str, limit: dict[str, int], check: Callable[[Limits], Finding], level: str, words: str
):
    with group(controller, **limit) as folder:
        finding = in_child(lambda: enter(folder), lambda: check(read_limits()))
    assert not level or finding.level == level
    assert re.search(words, f"{finding.observation} {finding.remedy}")


@root_only
def test_a_folder_or_a_store_below_one_that_cannot_be_read_is_found(tmp_path: Path):
    for folder in (tmp_path, *tmp_path.parents[:3]):
        folder.chmod(folder.stat().st_mode | 0o055)
    hidden = tmp_path / "hidden"
    hidden.mkdir(mode=0o700)
    nobody = partial(os.setuid, _NOBODY)
    for check in (lambda: machine.check_folder(hidden / "mine"), lambda: check_store(store(hidden / "mlflow.db"))):
        finding = in_child(nobody, check)
        assert finding.level == "wrong" and str(hidden) in finding.observation
        assert "cannot be written" in finding.observation


@pytest.mark.parametrize("uri", ["postgresql://h:abc/db", "http://[::1/x", "postgresql://me:pa/ss@h/db"])
def test_a_store_whose_address_is_none_is_found(uri: str):
    finding = check_store(uri)
    assert finding.level == "wrong" and "is not an address" in finding.observation and "pa" not in finding.observation


def test_a_check_that_fails_is_a_finding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)

    def fails(*_: object) -> Finding:
        raise PermissionError(13, "Permission denied", "/proc/x")

    monkeypatch.setattr("fsdp_lab.doctor.__main__.check_cores", fails)
    monkeypatch.setattr("fsdp_lab.doctor.__main__.check_torch", lambda: Finding("PyTorch", "left out"))
    result = {finding.subject: finding for finding in findings({})}
    assert result["cores"].level == "wrong" and "Permission denied" in result["cores"].observation
    assert "PyTorch" in result


@root_only
def test_cached_files_count_as_free_memory(tmp_path: Path):
    def read_file() -> None:
        enter(folder)
        with (tmp_path / "large").open("wb") as file:
            for _ in range(100):
                file.write(bytes(2 * 2**20))
            file.flush()
            os.fsync(file.fileno())

    with group("memory", limit_in_bytes=512 * 2**20) as folder:
        finding = in_child(read_file, lambda: machine.check_memory(read_limits()))
        (folder / "memory.force_empty").write_text("0")
    assert int(finding.observation.split()[0]) > 400, finding.observation


def test_limits_of_groups_of_version_2(tmp_path: Path):
    """Files in their place: this machine has version 1."""
    job = tmp_path / "system.slice" / "job"
    job.mkdir(parents=True)
    (tmp_path / "proc").write_text("0::/system.slice/job\n")
    (job / "cpu.max").write_text("150000 100000\n")
    (job / "memory.max").write_text("max\n")
    (job.parent / "memory.max").write_text(f"{2**30}\n")
    (job.parent / "memory.current").write_text(f"{2**29 + 2**20}\n")
    (job.parent / "memory.stat").write_text(f"anon 1\ninactive_file {2**20}\nactive_file {2**21}\n")
    (job / "pids.max").write_text("100\n")
    (job / "pids.current").write_text("40\n")
    assert read_limits(tmp_path / "proc", tmp_path) == Limits(1.5, 2**30, 2**29, 100, 60)
    assert read_limits(tmp_path / "none", tmp_path) == Limits()


def test_fewer_cores_than_workers_are_found(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(machine, "default_num_workers", lambda: 2)
    core = min(os.sched_getaffinity(0))
    finding = in_child(lambda: os.sched_setaffinity(0, {core}), lambda: machine.check_cores(Limits()))
    assert finding.level == "note" and "cluster.cpus_per_worker=0.5" in finding.remedy


def store(file: Path) -> str:
    return f"sqlite:///{file}"


def make_store(file: Path) -> None:
    """A database with as many pages as it takes to damage one in the middle. MLflow's takes seconds to make."""
    with sqlite3.connect(file) as database:
        database.execute("CREATE TABLE runs (id TEXT)")
        database.executemany("INSERT INTO runs VALUES (?)", [("x" * 500,) for _ in range(200)])
    database.close()


def test_a_store_is_looked_at_and_left_as_it_is(tmp_path: Path):
    assert check_store(store(tmp_path / "none" / "mlflow.db")).observation.endswith("the first trial creates it")
    assert list(tmp_path.iterdir()) == []
    make_store(tmp_path / "mlflow.db")
    before = (tmp_path / "mlflow.db").read_bytes()
    finding = check_store(store(tmp_path / "mlflow.db"))
    assert finding.level == "ok" and finding.observation.endswith("is writable and has 200 runs")
    assert (tmp_path / "mlflow.db").read_bytes() == before


def test_a_store_that_is_no_database_is_found(tmp_path: Path):
    (tmp_path / "mlflow.db").write_text("no database, but long enough to look like a header of one" * 20)
    finding = check_store(store(tmp_path / "mlflow.db"))
    assert finding.level == "wrong" and "file is not a database" in finding.observation
    assert "move it away" in finding.remedy


def test_a_store_with_a_damaged_page_is_found(tmp_path: Path):
    file = tmp_path / "mlflow.db"
    make_store(file)
    with file.open("r+b") as bytes_of:
        bytes_of.seek(file.stat().st_size // 2 // 4096 * 4096)
        bytes_of.write(b"\xff" * 4096)
    finding = check_store(store(file))
    assert finding.level == "wrong" and "move it away" in finding.remedy


def test_a_store_that_another_program_holds_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("fsdp_lab.doctor.services._TIMEOUT_S", 0.1)
    make_store(tmp_path / "mlflow.db")
    other = sqlite3.connect(tmp_path / "mlflow.db", isolation_level=None)
    other.execute("BEGIN EXCLUSIVE")
    finding = check_store(store(tmp_path / "mlflow.db"))
    other.close()
    assert finding.level == "wrong" and "locked" in finding.observation and "fuser" in finding.remedy


@root_only
def test_a_store_of_somebody_else_is_found(tmp_path: Path):
    make_store(tmp_path / "mlflow.db")
    for folder in (tmp_path, *tmp_path.parents[:3]):
        folder.chmod(folder.stat().st_mode | 0o055)
    (tmp_path / "mlflow.db").chmod(0o444)
    finding = in_child(lambda: os.setuid(_NOBODY), lambda: check_store(store(tmp_path / "mlflow.db")))
    assert (
        finding.level == "wrong" and "mlflow.db cannot be written" in finding.observation and "chmod" in finding.remedy
    )
    finding = in_child(lambda: os.setuid(_NOBODY), lambda: check_store(store(tmp_path / "new.db")))
    assert finding.level == "wrong" and f"{tmp_path} cannot be written" in finding.observation


@contextmanager
def server(status: int) -> Iterator[str]:
    """The address of a server that gives every request the same status: MLflow's takes seconds to start."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.send_header("Content-Length", "2")
            self.end_headers()
            self.wfile.write(b"{}" if status == 200 else b"no")

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as listening:
        threading.Thread(target=listening.serve_forever, args=(0.05,), daemon=True).start()
        yield f"http://127.0.0.1:{listening.server_port}"
        listening.shutdown()


def with_user(uri: str) -> str:
    return uri.replace("//", "//user:secret@")


@pytest.mark.parametrize(
    ("status", "level", "message"), [(200, "ok", "answers"), (401, "wrong", "refuses access"), (500, "wrong", "fails")]
)
def test_a_server_is_asked(status: int, level: str, message: str):
    with server(status) as uri:
        finding = check_store(with_user(uri))
    assert finding.level == level and message in finding.observation and "secret" not in finding.observation


def test_a_server_or_a_cluster_that_is_not_there_is_found():
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{closed.getsockname()[1]}"
        finding, cluster = check_store(f"http://{address}"), check_cluster(address)
        database = check_store(f"postgresql://{address}/mlflow")
        closed.listen()
        assert check_cluster(address).level == "ok"
    assert (
        finding.level == "wrong"
        and "no MLflow server answers" in finding.observation
        and TrackingConfig.uri in finding.remedy
    )
    assert cluster.level == "wrong" and "ray start --head" in cluster.remedy
    assert database.level == "wrong"
    assert check_cluster("head").level == "wrong"


def test_a_driver_that_is_too_old_is_found(fake_nvml: Callable[..., None]):
    fake_nvml(gpus=2, cuda=11040)
    finding = libraries.check_gpus()
    assert finding.level == "wrong" and "supports CUDA 11.4 at most" in finding.observation
    assert "update the driver" in finding.remedy


def test_a_pytorch_that_does_not_see_the_gpus_is_found(fake_nvml: Callable[..., None]):
    fake_nvml(gpus=2)
    finding = libraries.check_torch()
    assert finding.level == "wrong" and "it sees 0 of 2 GPUs" in finding.observation


def test_gpus_that_are_hidden_are_reported(fake_nvml: Callable[..., None], monkeypatch: pytest.MonkeyPatch):
    fake_nvml(gpus=2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert libraries.check_gpus().level == "note"


def test_a_driver_that_does_not_answer_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    (tmp_path / "nvidiactl").touch()
    monkeypatch.setattr(libraries, "_DEVICE", tmp_path / "nvidiactl")
    monkeypatch.setattr(libraries, "driver", lambda: None)
    finding = libraries.check_gpus()
    assert finding.level == "wrong" and "--gpus=all" in finding.remedy


def test_another_python_is_found(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(libraries, "OLDEST", (3, 99))
    assert libraries.check_python().level == "wrong"


def test_a_version_that_is_not_declared_is_found(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(libraries, "_version", lambda name: "1.0" if name == "ray" else "99")
    finding = libraries.check_libraries()
    assert finding.level == "note" and "ray 1.0 (" in finding.observation


def doctor(*words: str, isolated: bool = False, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *(["-S"] if isolated else []), "-m", "fsdp_lab.doctor", *words]
    return subprocess.run(
        command, cwd=ROOT, env={**os.environ, **environment}, capture_output=True, text=True, timeout=100, check=False
    )


def test_a_python_without_libraries_and_with_a_pytorch_that_is_broken(tmp_path: Path):
    """A stand-in for a build whose libraries are missing. The rest is looked at all the same."""
    (tmp_path / "torch.py").write_text("raise OSError('libcudart.so.13: cannot open shared object file')")
    done = doctor(isolated=True, PYTHONPATH=str(tmp_path), COLUMNS="60")
    assert done.returncode == 1, done.stderr
    assert "wrong  libraries        torch, torchvision, ray" in done.stdout
    assert "OSError: libcudart.so.13" in " ".join(done.stdout.split())
    assert done.stdout.splitlines()[-1].endswith("to repair") and max(map(len, done.stdout.splitlines())) <= 60


def test_the_command_has_the_status_of_what_it_found(cli, tmp_path: Path):
    done = cli("doctor", list_imports=True)
    wrong = sum(line.startswith("wrong") for line in done.stdout.splitlines())  # a full memory, for example
    ends = f"{wrong} to repair" if wrong else "sweeps can run here"
    assert (done.returncode, done.stderr) == (int(wrong > 0), "imported: torch\n"), done.stdout
    assert done.stdout.splitlines()[-1] == ends and list(tmp_path.iterdir()) == []
    (tmp_path / "mlflow.db").write_text("damaged" * 100)
    done = cli("doctor", f"tracking.uri={store(tmp_path / 'mlflow.db')}")
    assert done.returncode == 1 and "wrong  MLflow store" in done.stdout and "\x1b" not in done.stdout
    assert done.stdout.splitlines()[-1].endswith("to repair")
    assert cli("doctor", "tracking.url=x").returncode == 2


def test_a_line_breaks_within_its_column():
    lines_shown = lines([Finding("disk", "1 GiB free of a great many", "remove what is old and large", fails=True)], 40)
    assert lines_shown == [
        "wrong  disk             1 GiB free of a",
        "                        great many",
        "                        -> remove what",
        "                           is old and",
        "                           large",
    ]
