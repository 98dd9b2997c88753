"""Which device and which libraries: asked in a process of its own, so that the command itself holds no GPU."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from pathlib import Path

from benchmarks.check_gpu.lines import Machine
from fsdp_lab.hardware import driver, num_cpus

ROOT = Path(__file__).resolve().parent.parent.parent
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
    cores = num_cpus()
    return {
        "device": device,
        "name": properties[0].name if cuda else f"CPU ({platform.machine()}, {cores} cores)",
        "devices": len(properties),
        "cores": cores,
        "driver": getattr(driver(), "version", "unknown") if cuda else "-",
        "capability": f"{properties[0].major}.{properties[0].minor}" if cuda else "-",
        "torch": torch.__version__,
        "cuda": torch.version.cuda or "-",
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if cuda else "-",
        "cudnn": str(torch.backends.cudnn.version()) if cuda else "-",
        "python": platform.python_version(),
        "memory_bytes": min(p.total_memory for p in properties) if cuda else None,
    }


def commit(root: Path) -> str:
    """The commit, `+changes` where the sources are others; "unknown" without git."""
    git = ["git", "-C", str(root)]
    try:
        name = subprocess.run([*git, "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, check=True)
        changes = subprocess.run(
            [*git, "status", "--porcelain", "--", "fsdp_lab", "benchmarks"], capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return name.stdout.strip() + ("+changes" if changes.stdout.strip() else "")


def digest(root: Path) -> str:
    """Of every Python file that takes part: another commit with the same sources measures the same."""
    import hashlib

    sha = hashlib.sha256()
    for path in sorted([*root.glob("fsdp_lab/**/*.py"), *root.glob("benchmarks/**/*.py")]):
        sha.update(str(path.relative_to(root)).encode() + path.read_bytes())
    return sha.hexdigest()[:8]


if __name__ == "__main__":
    print(json.dumps(describe(sys.argv[1])))
