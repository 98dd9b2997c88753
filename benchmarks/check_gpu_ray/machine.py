"""The machine that is checked: its GPUs, its software, its memory."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil

from fsdp_lab.hardware import num_cpus

ROOT = Path(__file__).resolve().parents[2]
_TIMEOUT_S = 120
# What a measurement comes from: not the tests, not the documents, not what packs the wheels.
_SOURCES = ("fsdp_lab/**/*.py", "hydra_plugins/**/*.py", "conf/**/*.yaml", "benchmarks/check_gpu_ray/[_clms]*.py")
# In a process of its own: whoever asks CUDA holds a context, which takes GPU memory, until it ends.
_PROBE = """
import json, torch
devices = range(torch.cuda.device_count()) if torch.cuda.is_available() else []
try:
    nccl = ".".join(map(str, torch.cuda.nccl.version()))
except Exception:
    nccl = ""
memory = [torch.cuda.mem_get_info(device) for device in devices]
print(json.dumps({
    "names": [torch.cuda.get_device_name(device) for device in devices],
    "used": [total - free for free, total in memory],
    "total": [total for free, total in memory],
    "nccl": nccl,
}))
"""


@dataclass(frozen=True)
class Machine:
    """`gpus`: the names of those that PyTorch sees, empty for a check on the CPU; `capacity_bytes`: the memory of the
    largest of them, without any the host's (with swap). `versions`: by name, "" for what is not there. `sources`: a
    digest of the code that is measured, which a copy without git or with changes has too."""

    gpus: tuple[str, ...]
    driver: str
    versions: dict[str, str]
    commit: str
    sources: str
    capacity_bytes: int
    cores: int

    @property
    def device(self) -> str:
        """As a person reads it."""
        if not self.gpus:
            return f"CPU ({platform.machine()}, {self.cores} cores)"
        counts = {name: self.gpus.count(name) for name in self.gpus}
        return ", ".join(f"{count} x {name}" for name, count in counts.items())

    @property
    def num_workers(self) -> int:
        """What a sweep takes by default."""
        return len(self.gpus) or 2

    @property
    def key(self) -> dict[str, str]:
        """What measurements depend on."""
        return {"device": self.device, "driver": self.driver, "sources": self.sources, **self.versions}

    @property
    def about(self) -> str:
        versions = ", ".join(f"{name} {number or 'none'}" for name, number in self.versions.items())
        code = f"commit {self.commit or 'unknown'} (sources {self.sources})"
        return f"{self.device}, driver {self.driver or 'none'}; {versions}; {code}."


def look(device: str, environment: dict[str, str]) -> Machine:
    """This machine, as a process with that environment sees it.

    Raises:
        RuntimeError: PyTorch cannot be asked.
    """
    probed = probe(environment)
    memory = psutil.virtual_memory().total + psutil.swap_memory().total
    listed = [row["memory.total"] for row in nvidia_smi(environment)] if device == "cuda" else []
    capacity = max([*(mib * 2**20 for mib in listed), *probed["total"]], default=memory)
    numbers = {name: version_of(name) for name in ("torch", "ray", "mlflow")}
    numbers |= {"Python": platform.python_version(), "NCCL": probed["nccl"]}
    return Machine(tuple(probed["names"]), driver(environment), numbers, commit(), sources(), capacity, num_cpus())


def probe(environment: dict[str, str]) -> dict[str, Any]:
    """What PyTorch says of its devices.

    Raises:
        RuntimeError: it says nothing; with the end of its output.
    """
    try:
        done = subprocess.run(
            [sys.executable, "-c", _PROBE],
            env=environment,
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            check=False,
        )
        return json.loads(done.stdout.splitlines()[-1])
    except subprocess.TimeoutExpired as error:
        raise RuntimeError(f"PyTorch did not name its devices within {_TIMEOUT_S} s") from error
    except (IndexError, ValueError) as error:
        raise RuntimeError(f"PyTorch did not name its devices: {done.stderr[-1000:]}") from error


def nvidia_smi(environment: dict[str, str]) -> list[dict[str, int]]:
    """`memory.used` and `memory.total` of each visible GPU, in MiB; empty where the tool is missing or fails."""
    fields = ("memory.used", "memory.total")
    rows = _query(environment, ",".join(fields))
    try:
        return [dict(zip(fields, map(int, row.split(",")), strict=True)) for row in rows]
    except ValueError:  # "[N/A]", where memory is shared with the host
        return []


def driver(environment: dict[str, str]) -> str:
    return next(iter(_query(environment, "driver_version")), "")


def _query(environment: dict[str, str], fields: str) -> list[str]:
    if environment.get("CUDA_VISIBLE_DEVICES") == "" or shutil.which("nvidia-smi") is None:
        return []
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits"]
    command += [f"--id={visible}"] if visible else []
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return [line.strip() for line in done.stdout.splitlines() if line.strip()] if done.returncode == 0 else []


def used_bytes(environment: dict[str, str]) -> list[int]:
    """GPU memory in use, by device, of all processes together."""
    rows = nvidia_smi(environment)
    return [row["memory.used"] * 2**20 for row in rows] if rows else probe(environment)["used"]


def version_of(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def commit() -> str:
    """The commit that is checked out; "" without git."""
    try:
        done = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, timeout=10, check=False
        )
        return done.stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return ""


def sources() -> str:
    """A digest of the code that is measured."""
    digest = hashlib.sha256()
    for path in sorted(path for pattern in _SOURCES for path in ROOT.glob(pattern)):
        digest.update(str(path.relative_to(ROOT)).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:8]


def environment_of(device: str) -> dict[str, str]:
    """For child processes: of this process, with the repository importable, and for a CPU without GPUs.

    NCCL names its version in the ranks' logs, which shows that it was used.
    """
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1"}
    environment.setdefault("NCCL_DEBUG", "VERSION")
    return environment | ({"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {})
