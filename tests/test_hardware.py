"""What is counted as a GPU and a core, with a stand-in for a PyTorch that sees GPUs."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest

from fsdp_lab.config import UserError
from fsdp_lab.config.checks import check_float8, check_pytorch
from fsdp_lab.config.machine import check_gpus
from fsdp_lab.forecast.devices import for_cuda
from fsdp_lab.machine import hardware
from fsdp_lab.machine.hardware import default_cpus_per_worker, default_loader_workers, worker_cpus
from tests.conftest import ROOT, FakeGpus
from tests.processes import enter, group
from tests.ranks import config

# As PyTorch lists them on a machine with three, for AMD's under the names of CUDA.
_PYTORCH = """
import os
from types import SimpleNamespace

with open(os.environ["ASKED"], "a") as asked:
    asked.write("imported\\n")
visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1,2").split(",")
gpu = SimpleNamespace(name="AMD Instinct MI300X", total_memory=206158430208, major=9, minor=4)
cuda = SimpleNamespace(device_count=lambda: len(visible), get_device_properties=lambda index: gpu)
"""
_COUNT_HERE = """
import os, sys
from fsdp_lab.machine import hardware
from fsdp_lab.config import UserError
from fsdp_lab.config.checks import check_local_capacity
from fsdp_lab.config.machine import default_num_workers
from fsdp_lab.config.sweep import ClusterConfig
hardware._DRIVER_FILES = (os.sep,)
try:
    check_local_capacity(ClusterConfig(), 1)
except UserError as error:
    print(error)
else:
    print(default_num_workers(), hardware.gpus()[:1])
assert not {"torch", "ray", "numpy", "yaml"} & set(sys.modules)
"""


def _count(folder: Path, cwd: str = ".", **variables: str) -> str:
    """What a process prints about the GPUs that the PyTorch in a folder sees."""
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": f"{folder}{os.pathsep}{ROOT}", **variables}
    environment["ASKED"] = str(folder / "asked")
    command = [sys.executable, "-c", _COUNT_HERE]
    return subprocess.check_output(command, env=environment, cwd=folder / cwd, text=True, timeout=100)


def test_gpus_are_those_that_pytorch_sees_in_a_process_of_its_own(tmp_path: Path):
    torch = tmp_path / "torch.py"
    torch.write_text(_PYTORCH)
    gpu = "Gpu(name='AMD Instinct MI300X', memory_bytes=206158430208, capability=(9, 4))"
    assert _count(tmp_path) == f"3 [{gpu}]\n"
    assert (tmp_path / "asked").read_text() == "imported\n", "asked once"
    assert _count(tmp_path, CUDA_VISIBLE_DEVICES="1") == f"1 [{gpu}]\n"
    assert _count(tmp_path, CUDA_VISIBLE_DEVICES="") == "2 []\n", "two workers on the CPU"


def test_gpus_are_counted_whatever_else_is_said(tmp_path: Path):
    """Of a display card, of NVML, by a vendor; and a torch.py in the working folder is not imported."""
    warns = "import warnings\ncuda.device_count = lambda: warnings.warn('\\nCan\\'t initialize NVML') or 2"
    (tmp_path / "torch.py").write_text(f"{_PYTORCH}\nprint('Welcome', end='')\n{warns}")
    (tmp_path / "here").mkdir()
    (tmp_path / "here/torch.py").write_text("raise ImportError('of the working folder')")
    assert _count(tmp_path, "here").startswith("2 [Gpu(name='AMD Instinct MI300X'")


@pytest.mark.parametrize(
    ("pytorch", "why"),
    [
        ("raise ImportError('libcudart.so.13: no such file')", "ImportError: libcudart.so.13: no such file"),
        (
            "import warnings\nclass cuda:\n  device_count = lambda: warnings.warn('\\n  The driver is old\\nNew') or 0",
            "The driver is old",
        ),
        ("class cuda:\n  device_count = lambda: 0", "sees no device"),
        ("raise RuntimeError('CUDA error: lost\\nCompile with more')", "RuntimeError: CUDA error: lost"),
        ("import os\nos.abort()", "PyTorch ends with status -6"),
    ],
)
def test_gpus_that_pytorch_cannot_use_are_an_error(tmp_path: Path, pytorch: str, why: str):
    (tmp_path / "torch.py").write_text(pytorch)
    printed = _count(tmp_path)
    assert printed.startswith("PyTorch cannot use this machine's GPUs (") and f"{why}); update their driver" in printed
    assert _count(tmp_path, CUDA_VISIBLE_DEVICES="") == "2 []\n", "hidden, as the message says"


def test_a_forecast_for_this_machine_needs_its_gpus(fake_gpus: FakeGpus):
    fake_gpus(problem="PyTorch sees no device")
    assert for_cuda(config("forecast.device=cuda"))
    with pytest.raises(UserError, match="PyTorch sees no device"):
        for_cuda(config())


def test_without_a_driver_there_is_no_gpu_and_no_error(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(hardware, "_DRIVER_FILES", ("/dev/none",))
    hardware._ask_pytorch.cache_clear()
    assert hardware.gpus() == [] and hardware.num_gpus() == 0 and hardware.least_capability() is None
    check_gpus()
    hardware._ask_pytorch.cache_clear()


@pytest.mark.parametrize(
    ("cpus", "gpu_count", "expected"),
    [(2, 0, 1), (64, 0, 1), (2, 4, 1), (8, 8, 1), (15, 8, 1), (16, 8, 2), (192, 8, 16), (256, 8, 16), (12, 1, 12),
     (0.5, 1, 1), (13.0, 2, 6)],
)  # fmt: skip
def test_default_cpus_per_worker(cpus: float, gpu_count: int, expected: float):
    result = default_cpus_per_worker(cpus, gpu_count)
    assert result == expected and isinstance(result, float)


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


@pytest.mark.parametrize(("version", "refused"), [("2.11.0+cu128", True), ("2.12.0", False), ("2.15.0a0+git1", False)])
def test_a_pytorch_that_lacks_what_is_asked_for_is_refused_early(
    monkeypatch: pytest.MonkeyPatch, version: str, refused: bool
) -> None:
    monkeypatch.setattr(hardware, "version", lambda package: version)
    check_pytorch(config())
    message = r"separate_reduce_scatter_group=true needs .* PyTorch 2\.11 does not have"
    with pytest.raises(UserError, match=message) if refused else nullcontext():
        check_pytorch(config("sharding.separate_reduce_scatter_group=true"))


@pytest.mark.parametrize(
    ("gpus", "capability", "message"),
    [
        (0, (9, 0), "this machine has no GPU; use precision=bf16_mixed"),
        (2, (8, 0), "this machine's GPU has 8.0; use precision=bf16_mixed"),
        (2, (8, 9), ""),
        (1, (12, 0), ""),
    ],
)
def test_float8_is_refused_early_where_no_gpu_has_it(
    fake_gpus: FakeGpus, monkeypatch: pytest.MonkeyPatch, gpus: int, capability: tuple[int, int], message: str
) -> None:
    fake_gpus(gpus, capability=capability)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    check_float8(config("precision=bf16_mixed"))
    with pytest.raises(UserError, match=rf"precision=float8 needs .*{message}") if message else nullcontext():
        check_float8(config("precision=float8"))
    check_float8(config("precision=float8", "cluster.address=auto"))


def test_float8_without_torchao_says_how_to_install_it(fake_gpus: FakeGpus, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_gpus(1)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"precision=float8 needs torchao.*pip install -e '\.\[float8\]'"):
        check_float8(config("precision=float8"))


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
