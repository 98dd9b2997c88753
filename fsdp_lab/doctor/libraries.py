"""Checks of Python, the libraries, and PyTorch's view of the GPUs."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform
import sys
from pathlib import Path

from fsdp_lab.config import UserError
from fsdp_lab.config.machine import check_driver
from fsdp_lab.doctor.finding import Finding, gib
from fsdp_lab.hardware import driver, gpus, num_gpus, pytorch_cuda

OLDEST, NEWEST = (3, 11), (3, 13)  # `requires-python` in pyproject.toml
_NEEDED = ("torch", "torchvision", "ray", "mlflow", "hydra-core", "omegaconf", "optuna", "rich", "plotly", "PyYAML")
_DEVICE = Path("/dev/nvidiactl")


def check_python() -> Finding:
    """Compare the version with those that the libraries are pinned for."""
    observation = f"{platform.python_version()}, {sys.executable}"
    if not OLDEST <= sys.version_info[:2] <= NEWEST:
        between = f"{'.'.join(map(str, OLDEST))} to {'.'.join(map(str, NEWEST))}"
        return Finding(
            "Python", f"{observation}: fsdp_lab needs {between}", "make PYTHON=python3.12 clean sweep", fails=True
        )
    return Finding("Python", observation)


def check_libraries() -> Finding:
    """Report libraries that are missing, or installed in a version that is not declared."""
    versions = {name: _version(name) for name in _NEEDED}
    missing = [name for name, version in versions.items() if version is None]
    if missing:
        observation = f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'} not installed for this Python"
        return Finding("libraries", observation, _install(), fails=True)
    observation = ", ".join(f"{name} {versions[name]}" for name in ("torch", "ray", "mlflow"))
    if others := _undeclared():
        return Finding("libraries", f"{observation}; not declared: {', '.join(others)}", _install())
    return Finding("libraries", observation)


def _install() -> str:
    root = Path(__file__).resolve().parents[2]
    return f"make -C {root} sweep" if (root / "Makefile").exists() else f"{sys.executable} -m pip install fsdp_lab"


def _undeclared() -> list[str]:
    """Return the libraries with a version that fsdp_lab does not declare; empty if that cannot be determined."""
    try:
        from packaging.requirements import Requirement

        declared = [Requirement(line) for line in importlib.metadata.requires("fsdp_lab") or ()]
    except (ImportError, importlib.metadata.PackageNotFoundError):
        return []
    undeclared = []
    for one in declared:
        if one.marker is not None and not one.marker.evaluate({"extra": ""}):
            continue
        version = _version(one.name)
        if version is None or not one.specifier.contains(version, prereleases=True):
            undeclared.append(f"{one.name} {version or 'missing'} ({one.specifier})")
    return undeclared


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def check_gpus() -> Finding:
    """Compare the driver's GPUs with the build of PyTorch. Takes no context on a GPU."""
    installed, devices = driver(), gpus()
    if installed is None and _DEVICE.exists():
        observation = f"{_DEVICE} exists, but the driver's library libnvidia-ml.so.1 does not answer"
        remedy = "docker run --gpus=all with NVIDIA's container toolkit, or restart the machine after a driver update"
        return Finding("GPUs", observation, remedy, fails=True)
    if not devices:
        if installed is None:
            return Finding("GPUs", "none: trials run on the CPU, with gloo")
        observation = (
            f"driver {installed.version} has none for this process (CUDA_VISIBLE_DEVICES): trials run on the CPU"
        )
        return Finding("GPUs", observation, "unset CUDA_VISIBLE_DEVICES to use them")
    names = {name: [d.name for d in devices].count(name) for name in dict.fromkeys(d.name for d in devices)}
    observation = ", ".join(f"{number} × {name or 'unknown'}" for name, number in names.items())
    counted_by = f"driver {installed.version}" if installed else "counted by PyTorch, which is built for ROCm"
    observation += f", {gib(min(d.memory_bytes for d in devices))} each; {counted_by}"
    try:
        check_driver()
    except UserError as error:
        problem, _, remedy = str(error).rpartition("; ")
        return Finding("GPUs", problem, remedy, fails=True)
    return Finding("GPUs", observation)


def check_torch() -> Finding:
    """Import PyTorch and compute with it, on the CPU and on each GPU."""
    if importlib.util.find_spec("torch") is None:
        return Finding("PyTorch", "not installed", _install(), fails=True)
    try:
        import torch

        built = pytorch_cuda()
        observation = f"{torch.__version__}, built " + (f"for CUDA {built[0]}.{built[1]}" if built else "without CUDA")
        seen, there = torch.cuda.device_count(), num_gpus()
        if there and seen != there:
            return Finding(
                "PyTorch", f"{observation}: it sees {seen} of {there} GPUs", "check CUDA_VISIBLE_DEVICES", fails=True
            )
        for device in ["cpu", *(f"cuda:{index}" for index in range(seen))]:
            if torch.ones(2, 2, device=device).matmul(torch.ones(2, 2, device=device)).sum().item() != 8:
                return Finding("PyTorch", f"{observation}: {device} computes wrongly", "replace the device", fails=True)
        if not torch.distributed.is_available():
            return Finding("PyTorch", f"{observation}: it lacks torch.distributed", _install(), fails=True)
    except Exception as error:  # noqa: BLE001 - whatever a broken installation or device raises
        problem = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        return Finding("PyTorch", f"cannot compute ({problem})", _install(), fails=True)
    return Finding("PyTorch", observation)
