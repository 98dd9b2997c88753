"""What is counted as a GPU and a core, against a stand-in for NVIDIA's driver library (tests/nvml.py)."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest

from fsdp_lab import hardware
from fsdp_lab.config import ConfigError, UserError, machine
from fsdp_lab.config.machine import check_driver, check_float8, check_pytorch, default_num_workers
from fsdp_lab.config.sweep import ClusterConfig
from fsdp_lab.forecast.devices import gpu_memory
from fsdp_lab.hardware import default_cpus_per_worker, default_loader_workers, driver, gpus, num_gpus, worker_cpus
from fsdp_lab.limits import Limits
from tests.cgroups import enter, group
from tests.conftest import ROOT
from tests.nvml import use, variables
from tests.ranks import config

FakeNvml = Callable[..., None]


@pytest.mark.parametrize("count", [0, 1, 8])
def test_all_gpus_are_counted_with_their_memory(fake_nvml: FakeNvml, count: int):
    fake_nvml(gpus=count, mib="143771,81559")
    visible = gpus()
    assert num_gpus() == len(visible) == count
    assert [gpu.index for gpu in visible] == list(range(count))
    assert [gpu.memory_bytes for gpu in visible] == ([143771 * 2**20] + [81559 * 2**20] * 7)[:count]
    assert all(gpu.name == "NVIDIA H200" and gpu.uuid.startswith("GPU-") for gpu in visible)
    assert len({gpu.uuid for gpu in visible}) == count
    assert default_num_workers() == (count or 2)


def test_without_the_library_there_is_nothing(fake_nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch):
    fake_nvml(gpus=2)
    use(monkeypatch, Path("libnvidia-ml-that-is-not-there.so.1"))
    assert gpus() == [] and driver() is None and num_gpus() == 0


@pytest.mark.parametrize("status", [9, 999])
def test_a_library_without_its_driver_is_nothing(fake_nvml: FakeNvml, status: int):
    """9: the driver is not loaded, as in a container that was started without GPUs."""
    fake_nvml(gpus=2, init=status)
    assert gpus() == [] and driver() is None
    check_driver()


@pytest.mark.parametrize(
    ("visible", "indices"),
    [
        ("0,1,2", [0, 1, 2]),
        ("2,0", [2, 0]),
        (" 1 , 2", [1, 2]),
        ("", []),
        ("-1", []),
        ("NoDevFiles", []),
        ("1,-1,0", [1]),
        ("0,7,1", [0]),
        ("0,,1", [0]),
        ("1,1", []),
        ("0,1,1", []),
        ("1gpu,2nd", [1, 2]),
        ("GPU-22cafe00-0000-0000-0000-000000000002", [2]),
        ("GPU-11,GPU-00", [1, 0]),
        ("GPU-11,GPU-55,GPU-00", [1]),
        ("GPU-", []),
        ("GPU-11,GPU-11cafe", []),
        ("0,GPU-00cafe", []),
        ("MIG-00", []),
    ],
)
def test_cuda_visible_devices(fake_nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch, visible: str, indices: list[int]):
    """As CUDA reads it; it is read at each call, while the driver is asked once."""
    fake_nvml(gpus=3)
    assert num_gpus() == 3
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert [gpu.index for gpu in gpus()] == indices


@pytest.mark.parametrize(
    ("mig", "visible", "uuids"),
    [
        ("2", None, ["MIG-00beef"]),
        ("-1,2", None, ["MIG-10beef"]),
        ("2,2", "MIG-01,MIG-10", ["MIG-01beef"]),
        ("2,2", "1", ["MIG-10beef"]),
        ("2", "1", ["GPU-11cafe"]),
        ("2", "MIG-0", []),
        ("2", "MIG-05", []),
        ("0,0", "0,1,2", ["GPU-22cafe"]),
        ("0", None, ["GPU-11cafe", "GPU-22cafe"]),
    ],
)
def test_a_process_gets_one_mig_instance(
    fake_nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch, mig: str, visible: str | None, uuids: list[str]
):
    """Of three GPUs; and one with MIG on but no instance is no device of CUDA's."""
    fake_nvml(gpus=3, mig=mig)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    result = gpus()
    assert [gpu.uuid[:10] for gpu in result] == uuids
    assert all(gpu.memory_bytes == 18 * 2**30 for gpu in result if gpu.uuid.startswith("MIG"))


@pytest.mark.parametrize(
    ("answers", "cuda"),
    [
        ({"cuda": 12020}, (12, 2)),
        ({"cuda": 12020, "libcuda": 13000}, (13, 0)),  # cuda-compat beside an older driver
        ({"cuda": 0}, None),
    ],
)
def test_driver(fake_nvml: FakeNvml, answers: dict[str, int], cuda: tuple[int, int] | None):
    fake_nvml(gpus=1, driver="535.104.05", **answers)
    installed = driver()
    assert installed is not None
    assert (installed.version, installed.cuda) == ("535.104.05", cuda)


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("cuda: Optional[str] = '13.2'\nhip: Optional[str] = None\n", (13, 2)),
        ("debug = False\ncuda = '12.8'\n", (12, 8)),
        ("cuda: Optional[str] = None\nhip: Optional[str] = '7.0'\n", None),
        ("cuda = None\n", None),
        ("", None),
    ],
)
def test_what_pytorch_is_built_for_is_read_from_its_text(
    monkeypatch: pytest.MonkeyPatch, text: str, version: tuple[int, int] | None
):
    monkeypatch.setattr(hardware, "_pytorch_version_file", lambda: text)
    assert hardware.pytorch_cuda() == version


def test_it_is_what_pytorch_says_itself():
    import torch

    version = hardware.pytorch_cuda()
    assert (f"{version[0]}.{version[1]}" if version else None) == torch.version.cuda


@pytest.mark.parametrize(
    ("driver_cuda", "built_for", "count"),
    [(13020, "'13.0'", 8), (13000, "'13.2'", 2), (13000, "'12.8'", 1), (0, "'13.0'", 1), (12000, "'13.0'", 0)],
)
def test_a_driver_of_the_same_major_version_or_a_newer_one_will_do(
    fake_nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch, driver_cuda: int, built_for: str, count: int
):
    fake_nvml(gpus=count, cuda=driver_cuda)
    monkeypatch.setattr(hardware, "_pytorch_version_file", lambda: f"cuda = {built_for}\n")
    check_driver()


def test_a_driver_that_is_too_old_is_reported_with_both_versions(fake_nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch):
    fake_nvml(gpus=2, driver="535.104", cuda=12020)
    monkeypatch.setattr(hardware, "_pytorch_version_file", lambda: "cuda = '13.0'\n")
    with pytest.raises(UserError) as raised:
        check_driver()
    assert all(part in str(raised.value) for part in ("2 GPUs", "driver 535.104", "CUDA 12.2", "CUDA 13.0"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    check_driver()


def test_a_pytorch_without_cuda_is_reported(fake_nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch):
    fake_nvml(gpus=1, cuda=12020)
    monkeypatch.setattr(hardware, "_pytorch_version_file", lambda: "cuda: Optional[str] = None\n")
    with pytest.raises(UserError, match=r"has 1 GPU, but PyTorch is built without CUDA; .* built for CUDA 12, or hide"):
        check_driver()


@pytest.mark.timeout(120)
def test_a_sweep_is_refused_before_ray_starts(cli, nvml_library: Path, monkeypatch: pytest.MonkeyPatch):
    """Whatever PyTorch is installed here: this driver is older than any that this project takes."""
    monkeypatch.setenv("LD_LIBRARY_PATH", str(nvml_library.parent), prepend=os.pathsep)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for name, value in variables(gpus=1, driver="390.1", cuda=9010).items():
        monkeypatch.setenv(name, value)
    done = cli(timeout=100)
    assert done.returncode == 2, done.stderr
    assert "this machine has 1 GPU, but" in done.stderr
    assert "Traceback" not in done.stderr and "Ray starts" not in done.stdout


def test_it_imports_nothing_slow():
    script = "import sys, fsdp_lab.hardware; print(sorted({'torch', 'ray', 'numpy', 'yaml'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("cpus", "gpu_count", "expected"),
    [(2, 0, 1), (64, 0, 1), (2, 4, 1), (8, 8, 1), (15, 8, 1), (16, 8, 2), (192, 8, 16), (256, 8, 16), (12, 1, 12),
     (0.5, 1, 1), (13.0, 2, 6)],
)  # fmt: skip
def test_default_cpus_per_worker(cpus: float, gpu_count: int, expected: float):
    result = default_cpus_per_worker(cpus, gpu_count)
    assert result == expected and isinstance(result, float)


@pytest.mark.parametrize(
    ("cuda", "cpus", "expected"),
    [(False, 1, 0), (False, 16, 0), (True, 0.5, 0), (True, 1, 0), (True, 2, 1), (True, 3.5, 2), (True, 5, 4),
     (True, 16, 4)],
)  # fmt: skip
def test_default_loader_workers(cuda: bool, cpus: float, expected: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(hardware, "shared_memory", lambda: 2**30)
    assert default_loader_workers(cuda, cpus) == expected


def test_without_shared_memory_no_process_hands_over_images(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(hardware, "shared_memory", lambda: 64 * 2**20)  # Docker's default
    assert default_loader_workers(True, 16) == 0


ROCM_PYTORCH = """
import os
from types import SimpleNamespace

with open(os.environ["ASKED"], "a") as asked:
    asked.write("imported\\n")
visible = os.environ.get("HIP_VISIBLE_DEVICES", "0,1,2").split(",")
cuda = SimpleNamespace(
    device_count=lambda: len(visible),
    get_device_properties=lambda index: SimpleNamespace(name="AMD Instinct MI300X", total_memory=206158430208),
)
"""
COUNT_HERE = """
import sys, pynvml
from fsdp_lab import hardware
def CDLL(name): raise OSError(name)
pynvml.CDLL = CDLL
from fsdp_lab.config.machine import check_driver, default_num_workers
from fsdp_lab.engine.rank import check_gpu
check_driver()
print(hardware.is_rocm(), default_num_workers(), hardware.gpus(), sep="\\n")
assert "torch" not in sys.modules
"""


def _count(folder: Path, **variables: str) -> list[str]:
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": f"{folder}{os.pathsep}{ROOT}", **variables}
    done = subprocess.run(
        [sys.executable, "-c", COUNT_HERE], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_gpus_of_amd_are_counted_by_a_pytorch_for_rocm(tmp_path: Path):
    """A stand-in for PyTorch: a driver without NVML, and a build whose `torch/version.py` names ROCm."""
    torch, asked = tmp_path / "torch", tmp_path / "asked"
    torch.mkdir()
    (torch / "__init__.py").write_text(ROCM_PYTORCH)
    (torch / "version.py").write_text(
        "__version__ = '2.15.0+rocm7.2'\ncuda: Optional[str] = None\nhip: str = '7.2.1'\n"
    )
    rocm, workers, found = _count(tmp_path, ASKED=str(asked))
    assert (rocm, workers) == ("True", "3")
    assert found.count("AMD Instinct MI300X") == 3 and found.count("memory_bytes=206158430208") == 3
    assert asked.read_text() == "imported\n", "once, in a process of its own"
    assert _count(tmp_path, ASKED=str(asked), HIP_VISIBLE_DEVICES="1")[1] == "1"
    (torch / "__init__.py").write_text("raise ImportError('libamdhip64.so')")
    assert _count(tmp_path, ASKED=str(asked))[1] == "2", "a driver that does not answer: two workers on the CPU"
    (torch / "version.py").write_text(
        "__version__ = '2.15.0'\ncuda: Optional[str] = '13.2'\nhip: Optional[str] = None\n"
    )
    assert _count(tmp_path, ASKED=str(asked))[:3] == ["False", "2", "[]"]


def test_what_the_driver_keeps_for_itself_is_not_cudas(fake_nvml: Callable[..., None]):
    fake_nvml(gpus=1, mib="143771", reserved_mib=600)
    assert gpus()[0].memory_bytes == (143771 - 600) * 2**20


def test_a_gpu_counts_where_nothing_more_is_reported(fake_nvml: Callable[..., None]):
    fake_nvml(gpus=2, silent=1)
    assert [(gpu.index, gpu.name, gpu.memory_bytes) for gpu in gpus()] == [(0, "", 0), (1, "", 0)]
    assert gpu_memory() is None


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


@pytest.mark.parametrize(
    ("version", "refused"), [("2.11.0+cu128", True), ("2.12.0", False), ("2.15.0a0+git1", False), ("", False)]
)
def test_a_pytorch_that_lacks_what_is_asked_for_is_refused_early(
    monkeypatch: pytest.MonkeyPatch, version: str, refused: bool
) -> None:
    monkeypatch.setattr(hardware, "_pytorch_version_file", lambda: f"__version__ = '{version}'\ncuda = '13.0'\n")
    check_pytorch(config())
    message = r"separate_reduce_scatter_group=true needs .* PyTorch 2\.11 does not have"
    with pytest.raises(UserError, match=message) if refused else nullcontext():
        check_pytorch(config("sharding.separate_reduce_scatter_group=true"))


@pytest.mark.parametrize(
    ("gpus", "capability", "message"),
    [
        (0, "90", "this machine has no GPU; use precision=bf16_mixed"),
        (2, "90,80", "this machine's GPU has 8.0; use precision=bf16_mixed"),
        (2, "90,89", ""),
        (1, "120", ""),
    ],
)
def test_float8_is_refused_early_where_no_gpu_has_it(
    fake_nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch, gpus: int, capability: str, message: str
) -> None:
    fake_nvml(gpus=gpus, capability=capability)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    check_float8(config("precision=bf16_mixed"))
    with pytest.raises(UserError, match=rf"precision=float8 needs .*{message}") if message else nullcontext():
        check_float8(config("precision=float8"))
    check_float8(config("precision=float8", "cluster.address=auto"))


def test_float8_without_torchao_says_how_to_install_it(fake_nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_nvml(gpus=1)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"precision=float8 needs torchao.*pip install 'fsdp_lab\[float8\]'"):
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
    command = [sys.executable, "-c", f"from fsdp_lab import hardware; print(hardware.{asked}())"]
    with group(controller, **limit) as folder:
        printed = subprocess.check_output(command, cwd=ROOT, preexec_fn=lambda: enter(folder), timeout=60)
    assert int(printed) == answer


@pytest.mark.parametrize(("quota", "cores"), [(None, 8), (0.5, 1), (1.5, 1), (4.0, 4), (64.0, 8)])
def test_cores_are_those_that_the_control_group_allows(
    quota: float | None, cores: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    monkeypatch.setattr(hardware, "read_limits", lambda: Limits(cpus=quota))
    assert hardware.num_cpus() == cores


def test_a_request_above_the_quota_is_refused_by_its_name(monkeypatch: pytest.MonkeyPatch):
    for module in (hardware, machine):
        monkeypatch.setattr(module, "read_limits", lambda: Limits(cpus=1.5))
    with pytest.raises(ConfigError) as refused:
        machine.check_local_capacity(ClusterConfig(num_workers=2), 2)
    message = str(refused.value)
    for words in ("cluster.num_workers=2", "has 1 by the quota", "(1.5 cores)", "cluster.cpus_per_worker=0.5"):
        assert words in message
