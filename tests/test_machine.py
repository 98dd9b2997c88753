"""This machine: its GPUs, cores and memory as they are counted, what others use of it, and what the doctor finds.

A stand-in for a PyTorch that sees GPUs; faults are made for real where that can be done.
"""

from __future__ import annotations

import importlib.util
import os
import re
import resource
import sqlite3
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from fsdp_lab.commands import doctor
from fsdp_lab.config import UserError
from fsdp_lab.config.axes.precision import check_float8
from fsdp_lab.config.checks import check_pytorch
from fsdp_lab.machine import cpu_contention, hardware
from fsdp_lab.machine.cpu_contention import Window
from fsdp_lab.machine.hardware import default_loader_workers, worker_cpus
from tests.conftest import INLINE, ROOT, FakeGpus, run_cli
from tests.folders import TrialFolder
from tests.processes import enter, group, ordinary_user
from tests.ranks import config

# As PyTorch lists them on a machine with three, for AMD's under the names of CUDA.
_PYTORCH = """
import os
from types import SimpleNamespace

visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1,2").split(",")
gpu = SimpleNamespace(name="AMD Instinct MI300X", total_memory=206158430208, major=9, minor=4)
cuda = SimpleNamespace(device_count=lambda: len(visible), get_device_properties=lambda index: gpu)
"""
_COUNT_HERE = """
import os, sys
from fsdp_lab.machine import hardware
from fsdp_lab.config import UserError
from fsdp_lab.config.machine import check_gpus, default_num_workers
hardware._DRIVER_FILES = (os.sep,)
try:
    check_gpus()
except UserError as error:
    print(error)
else:
    print(default_num_workers(), hardware.gpus()[:1])
assert not {"torch", "ray", "numpy", "yaml"} & set(sys.modules)
"""


def _count(folder: Path, cwd: str = ".", **variables: str) -> str:
    """What a process prints about the GPUs that the PyTorch in a folder sees."""
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": f"{folder}{os.pathsep}{ROOT}", **variables}
    command = [sys.executable, "-c", _COUNT_HERE]
    return subprocess.check_output(command, env=environment, cwd=folder / cwd, text=True, timeout=100)


def test_gpus_are_those_that_pytorch_sees_in_its_own_process(tmp_path: Path):
    """Whatever else is printed and warned of; and a torch.py in the working folder is not imported."""
    torch = tmp_path / "torch.py"
    torch.write_text(_PYTORCH)
    gpu = "Gpu(name='AMD Instinct MI300X', memory_bytes=206158430208, capability=(9, 4))"
    assert _count(tmp_path) == f"3 [{gpu}]\n"
    assert _count(tmp_path, CUDA_VISIBLE_DEVICES="") == "2 []\n", "two workers on the CPU"
    warns = "import warnings\nwarnings.warn('\\nCan\\'t initialize NVML')"
    torch.write_text(f"{_PYTORCH}\nprint('Welcome', end='')\n{warns}")
    (tmp_path / "here").mkdir()
    (tmp_path / "here/torch.py").write_text("raise ImportError('of the working folder')")
    assert _count(tmp_path, "here", CUDA_VISIBLE_DEVICES="1") == f"1 [{gpu}]\n"


_WARNS = "import warnings\nclass cuda:\n  device_count = lambda: warnings.warn('\\n  The driver is old\\nNew') or 0"


@pytest.mark.parametrize(
    ("pytorch", "why"),
    [
        ("raise ImportError('libcudart.so.13: no such file\\nor other')", "ImportError: libcudart.so.13: no such file"),
        (_WARNS, "The driver is old"),
        ("class cuda:\n  device_count = lambda: 0", "sees no device"),
        ("import os\nos.abort()", "PyTorch ends with status -6"),
    ],
)
def test_gpus_that_pytorch_cannot_use_are_an_error(tmp_path: Path, pytorch: str, why: str):
    (tmp_path / "torch.py").write_text(pytorch)
    printed = _count(tmp_path)
    assert printed.startswith("PyTorch cannot use this machine's GPUs (") and f"{why}); update their driver" in printed


def test_without_shared_memory_no_process_hands_over_images(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(hardware, "shared_memory", lambda: 64 * 2**20)  # Docker's default
    assert default_loader_workers(True, 16) == 0


def test_the_cores_of_a_worker(monkeypatch: pytest.MonkeyPatch):
    """Ray's reservation where there is one; under torchrun, which sets OMP_NUM_THREADS=1, a share of the machine."""
    monkeypatch.setattr(hardware, "num_cpus", lambda: 24)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert worker_cpus() == 24
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert worker_cpus() == 3
    monkeypatch.setenv(hardware.WORKER_CPUS, "2.5")
    assert worker_cpus() == 2.5


def test_a_pytorch_that_lacks_what_is_asked_for_is_refused_early(monkeypatch: pytest.MonkeyPatch):
    wanted, zeros = config("sharding.separate_reduce_scatter_group=true"), "sharding.find_unused_parameters=true"
    monkeypatch.setattr(hardware, "version", lambda package: "2.12.0a0+git1")
    check_pytorch(wanted)
    check_pytorch(config("sharding=ddp", zeros))
    with pytest.raises(UserError, match=r"=true needs FSDPModule\.set_reduce_scatter_unused_params, .* PyTorch 2\.12"):
        check_pytorch(config("sharding=root", zeros))
    monkeypatch.setattr(hardware, "version", lambda package: "2.11.0+cu128")
    with pytest.raises(UserError, match=r"separate_reduce_scatter_group=true needs .* PyTorch 2\.11 does not have"):
        check_pytorch(wanted)


@pytest.mark.parametrize(
    ("gpus", "capability", "message"),
    [
        (0, (9, 0), "this machine has no GPU; use precision=bf16_mixed"),
        (2, (8, 0), "this machine's GPU has 8.0; use precision=bf16_mixed"),
        (2, (8, 9), ""),
        (1, (9, 0), r"torchao.*pip install -e '\.\[float8\]'"),
    ],
)
def test_float8_is_refused_early_where_no_gpu_has_it(fake_gpus: FakeGpus, monkeypatch, gpus, capability, message):
    fake_gpus(gpus, capability=capability)
    has_torchao = "torchao" not in message
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name if has_torchao else None)
    check_float8(config("precision=bf16_mixed"), is_here=True)
    with pytest.raises(UserError, match=rf"precision=float8 needs .*{message}") if message else nullcontext():
        check_float8(config("precision=float8"), is_here=True)
    if has_torchao:  # another machine may have the GPU
        check_float8(config("precision=float8"), is_here=False)


@pytest.mark.skipif(os.geteuid() != 0, reason="takes root: control groups")
@pytest.mark.parametrize(
    ("controller", "limit", "asked", "answer"),
    [
        ("cpu", {"cfs_quota_us": 100_000}, "num_cpus", 1),
        ("memory", {"limit_in_bytes": 512 * 2**20}, "host_memory", 512 * 2**20),
    ],
)
def test_cores_and_memory_are_those_of_the_control_group(
    controller: str, limit: dict[str, int], asked: str, answer: int
):
    command = [sys.executable, "-c", f"from fsdp_lab.machine import hardware; print(hardware.{asked}())"]
    with group(controller, **limit) as folder:
        printed = subprocess.check_output(command, cwd=ROOT, preexec_fn=lambda: enter(folder), timeout=60)
    assert int(printed) == answer


@pytest.mark.parametrize(("quota", "cores"), [("max", 8), ("50000", 1), ("150000", 1), ("400000", 4), ("6400000", 8)])
def test_limits_of_version_2_hold_in_the_groups_below(
    quota: str, cores: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Files in their place: this machine has version 1."""
    job = tmp_path / "system.slice" / "job"
    job.mkdir(parents=True)
    (tmp_path / "own").write_text("0::/system.slice/job\n")
    (job / "cpu.max").write_text(f"{quota} 100000\n")
    (job / "memory.max").write_text("max\n")
    (job.parent / "memory.max").write_text(f"{2**27}\n")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    monkeypatch.setattr(hardware, "_OWN_GROUPS", tmp_path / "own")
    monkeypatch.setattr(hardware, "_ALL_GROUPS", tmp_path)
    assert hardware.num_cpus() == cores and hardware.host_memory() == 2**27


# A process with its own mounts: Docker's small /dev/shm, and a disk with half a megabyte left.
_SMALL = """
mount --make-rprivate / && mount -t tmpfs -o size=16m tmpfs /dev/shm && mount -t tmpfs -o size=20m tmpfs small &&
head -c 20500000 /dev/zero > small/large && exec "$@"
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="takes root: mounts")
def test_each_fault_of_a_machine_is_found_with_its_remedy(tmp_path: Path):
    (tmp_path / "small").mkdir()
    (tmp_path / "mlflow.db").write_text("no database" * 100)
    command = [
        "unshare", "--mount", "sh", "-c", _SMALL, "sh", sys.executable, "-m", "fsdp_lab.doctor",
        "folder=small/outputs", f"tracking.uri=sqlite:///{tmp_path}/mlflow.db",
    ]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path / "small")}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=100)
    printed = done.stdout.replace(f"\n{'':22}->", " ->")
    found = {line[7:22].strip(): line for line in printed.splitlines()}
    assert done.returncode == 1 and re.search(r"\d problems found$", printed.rstrip()), printed + done.stderr
    assert found["shared memory"].startswith("note") and "--shm-size" in found["shared memory"]
    assert found["disk"].startswith("wrong") and "0.0 GiB free in " in found["disk"]
    assert found["Ray's files"].startswith("wrong") and "TMPDIR" in found["Ray's files"]
    assert found["MLflow store"].startswith("wrong") and "file is not a database" in found["MLflow store"]
    assert found["PyTorch"].startswith("ok") and found["Python"].startswith("ok")


def test_what_the_doctor_passes_is_no_other_users(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("resource.getrlimit", lambda which: (64, 128))
    with pytest.raises(UserError, match=r"may open 128 files here \(`ulimit -Hn`\), and Ray needs 256;"):
        doctor._ray_files("")
    monkeypatch.setattr("resource.getrlimit", lambda which: (64, resource.RLIM_INFINITY))
    with ordinary_user() as folder:
        monkeypatch.setenv("RAY_TMPDIR", str(folder / "mine"))
        assert "free in" in doctor._ray_files("").observation
        (folder / "mine/ray").mkdir(0o500, parents=True)
        with pytest.raises(UserError, match=rf"may not write into {folder}/mine/ray; set RAY_TMPDIR"):
            doctor._ray_files("")
        monkeypatch.setattr(Path, "home", Mock(side_effect=RuntimeError))  # no HOME, and nobody the system knows
        with pytest.raises(UserError, match="has no home folder; set HOME"):
            doctor._store("", f"sqlite:///{folder}/mlflow.db")


def test_too_few_cores_and_too_little_memory_are_found(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("fsdp_lab.machine.hardware.num_cpus", lambda: 1)
    monkeypatch.setattr("fsdp_lab.machine.hardware.host_memory", lambda: 2**29)
    assert doctor._cores("fewer workers")[1:] == ("fewer workers", False)
    memory = doctor._memory("end others")
    assert memory.fails and memory.observation.startswith("0.5 GiB free of 0.5 GiB")


def test_a_store_is_examined_and_left_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("fsdp_lab.tracking.store._SQLITE_TIMEOUT_S", 0.1)
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    assert f"the first trial creates {uri}; " in doctor._store("", uri).observation and list(tmp_path.iterdir()) == []
    with sqlite3.connect(tmp_path / "mlflow.db", isolation_level=None) as database:
        database.execute("CREATE TABLE runs (id TEXT)")
        before = (tmp_path / "mlflow.db").read_bytes()
        assert doctor._store("", uri).observation.endswith("answers")
        assert (tmp_path / "mlflow.db").read_bytes() == before
        database.execute("BEGIN EXCLUSIVE")
        with pytest.raises(UserError, match=r"mlflow\.db cannot be written \(database is locked\)"):
            doctor._store("", uri)


@pytest.mark.documents("python -m fsdp_lab doctor")
def test_the_command_has_the_status_of_what_it_found(cli, tmp_path: Path):
    done = cli("doctor")
    wrong = sum(line.startswith("wrong") for line in done.stdout.splitlines())  # a full memory, for example
    ends = f"{wrong} problem{'s' * (wrong != 1)} found" if wrong else "sweeps can run here"
    assert (done.returncode, done.stderr) == (int(wrong > 0), ""), done.stdout
    assert done.stdout.splitlines()[-1] == ends and list(tmp_path.iterdir()) == []
    done = cli("doctor", "tracking.uri=sqlite:////proc/nope/x.db")
    assert done.returncode == 1 and "wrong  MLflow store" in done.stdout and "\x1b" not in done.stdout
    assert re.search(r"problems? found$", done.stdout.rstrip())
    assert "[]" not in done.stdout and "None" not in done.stdout


def test_what_others_compute_is_distinguished_from_our_own(monkeypatch: pytest.MonkeyPatch):
    """The readings of a machine of two cores: the time, the seconds that all and that our processes used."""
    values: dict[str, Any] = {"time": 100.0, "busy": 1000.0, "ours": {1: 5.0, 7: 1.0}}  # process 7 ends
    monkeypatch.setattr(cpu_contention, "time", SimpleNamespace(monotonic=lambda: values["time"]))
    monkeypatch.setattr(cpu_contention, "_busy_s", lambda: values["busy"])
    monkeypatch.setattr(cpu_contention, "_family_s", lambda roots: dict(values["ours"]))
    monkeypatch.setattr(cpu_contention.os, "cpu_count", lambda: 2)
    window = Window()
    values |= {"time": 110.0, "busy": 1012.0, "ours": {1: 12.0, 2: 1.0}}  # 8 s of 12 were ours, in 20 core seconds
    assert window.share() == pytest.approx((12 - 8) / 20)
    values |= {"time": 120.0, "busy": 1022.0, "ours": {1: 22.0}}  # one of ours has ended; all of this was ours
    assert window.share() == pytest.approx((22 - 18) / 40)
    values |= {"busy": 900.0}  # a clock of the kernel that was set back
    assert window.share() == 0.0


@pytest.mark.ci
def test_a_trial_measures_what_others_compute_while_it_is_timed(tmp_path: Path):
    """A burning process that is not the trial's: it has a core of this machine's to itself, or a share of one."""
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as burning:
        try:
            done = run_cli(tmp_path, *INLINE, "training.epochs=1", "data.num_train=2048")
        finally:
            burning.kill()
    assert done.returncode == 0, done.stderr
    (epoch,) = TrialFolder(tmp_path / "out", tmp_path / "out").epochs
    assert 0.3 / (os.cpu_count() or 1) < epoch["perf/others_cpu"] <= 1
