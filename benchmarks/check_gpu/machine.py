"""Which device and which libraries: asked in a process of its own, so that the command itself holds no GPU."""

from __future__ import annotations

import ctypes
import json
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

from benchmarks.check_gpu.lines import Machine

_ASK_S = 120.0  # a first `import torch` from a cold disk


def ask(device: str) -> Machine | None:
    """Describe this machine.

    Returns:
        None where `device` is "cuda" and PyTorch sees no GPU.
    """
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else None
    command = [sys.executable, "-m", "benchmarks.check_gpu.machine", device]
    answer = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=environment, timeout=_ASK_S, check=True)
    values = json.loads(answer.stdout.splitlines()[-1])
    return Machine(**values) if values else None


def describe(device: str) -> dict[str, object]:
    """The fields of `Machine`, or nothing where a GPU is asked for and there is none."""
    import torch

    cuda = device == "cuda"
    if cuda and not torch.cuda.is_available():
        return {}
    properties = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())] if cuda else []
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return {
        "device": device,
        "name": properties[0].name if cuda else f"CPU ({platform.machine()}, {cores} cores)",
        "devices": len(properties),
        "cores": cores,
        "driver": driver_version() if cuda else "-",
        "capability": f"{properties[0].major}.{properties[0].minor}" if cuda else "-",
        "torch": torch.__version__,
        "cuda": torch.version.cuda or "-",
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if cuda else "-",
        "cudnn": str(torch.backends.cudnn.version()) if cuda else "-",
        "python": platform.python_version(),
        "memory_bytes": min(p.total_memory for p in properties) if cuda else None,
    }


def driver_version() -> str:
    """By `nvidia-smi`, or by the driver's own library where that tool is not installed."""
    tool = shutil.which("nvidia-smi")
    if tool is not None:
        command = [tool, "--query-gpu=driver_version", "--format=csv,noheader"]
        answer = subprocess.run(command, capture_output=True, text=True, timeout=_ASK_S, check=False)
        if answer.returncode == 0 and answer.stdout.strip():
            return answer.stdout.split()[0]
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return "unknown"
    text = ctypes.create_string_buffer(96)
    if nvml.nvmlInit_v2() != 0 or nvml.nvmlSystemGetDriverVersion(text, len(text)) != 0:
        return "unknown"
    return text.value.decode()


def source_id(root: Path) -> str:
    """The commit; with changes that are not committed, or without git, a digest of the sources too."""
    git = ["git", "-C", str(root)]
    try:
        commit = subprocess.run([*git, "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, check=True)
        changes = subprocess.run(
            [*git, "status", "--porcelain", "--", "fsdp_lab", "benchmarks"], capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return f"no-git-{digest(root)}"
    name = commit.stdout.strip()
    return f"{name}-{digest(root)}" if changes.stdout.strip() else name


def digest(root: Path) -> str:
    """Of every Python file that takes part."""
    import hashlib

    sha = hashlib.sha256()
    for path in sorted([*root.glob("fsdp_lab/**/*.py"), *root.glob("benchmarks/**/*.py")]):
        sha.update(str(path.relative_to(root)).encode() + path.read_bytes())
    return sha.hexdigest()[:8]


if __name__ == "__main__":
    print(json.dumps(describe(sys.argv[1])))
