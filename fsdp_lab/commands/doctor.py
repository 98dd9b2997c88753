"""Whether this machine can run sweeps: what is wrong, and how to fix it.

python -m fsdp_lab.doctor [tracking.uri=http://127.0.0.1:5000] [folder=/data/outputs]

Looks at Python, PyTorch, GPUs, cores, memory, shared memory, disk, MLflow's store, and for a device file of this
machine in conf_of_mine or the folder of --config-dir; changes nothing. Keys:
  tracking.uri   the store of your sweeps (sqlite:///outputs/mlflow.db)
  folder         where sweeps write (outputs)

`wrong`: sweeps fail until it is fixed. `note`: they run, but slower or smaller. Exits with 1 if anything is wrong.
"""

from __future__ import annotations

import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from fsdp_lab.config import UserError, read_words, split_config_dir
from fsdp_lab.config.describe import docstring
from fsdp_lab.config.options import PROBE, use_devices_of
from fsdp_lab.config.status import ExitCode
from fsdp_lab.config.sweep import TrackingConfig
from fsdp_lab.config.wording import count
from fsdp_lab.config.words import store_named
from fsdp_lab.machine.output import outlast_reader

_GIB = 2**30
_LEAST_MEMORY = 3 * _GIB  # the driver, Ray and two workers of the default trial used 2.7 GiB
_NEEDED = ("torch", "torchvision", "ray", "mlflow", "hydra", "omegaconf", "optuna", "rich", "plotly", "yaml")


class Finding(NamedTuple):
    """The result of a check. `remedy` is "" if there is nothing to do; `fails`: sweeps fail without the remedy."""

    observation: str
    remedy: str = ""
    fails: bool = False


def _python(remedy: str) -> Finding:
    missing = [name for name in _NEEDED if find_spec(name) is None]
    lacks = f", lacks {', '.join(missing)}" if missing else ""
    fails = bool(missing) or not (3, 11) <= sys.version_info[:2] <= (3, 13)  # `requires-python` in pyproject.toml
    return Finding(f"{platform.python_version()}, {sys.executable}{lacks}", remedy if fails else "", fails)


def _pytorch(remedy: str) -> Finding:
    import torch

    from fsdp_lab.machine.hardware import gpu_problem

    devices = [torch.device("cpu"), *(torch.device("cuda", index) for index in range(torch.cuda.device_count()))]
    for device in devices:
        torch.ones(2, 2, device=device).matmul(torch.ones(2, 2, device=device)).sum().item()
    built = {"CUDA": torch.version.cuda, "ROCm": torch.version.hip}
    parts = [torch.__version__, *(f"{name} {number}" for name, number in built.items() if number)]
    parts += [f"NVIDIA's driver {file.read_text().strip()}" for file in Path("/sys/module/nvidia").glob("version")]
    parts += [f"{gpu.name}, {_gib(gpu.total_memory)}" for gpu in map(torch.cuda.get_device_properties, devices[1:])]
    problem = gpu_problem()
    return Finding("; ".join(filter(None, [*parts, problem])), remedy if problem else "", bool(problem))


def _cores(remedy: str) -> Finding:
    from fsdp_lab.config.machine import default_num_workers
    from fsdp_lab.machine.hardware import num_cpus

    cores, workers = num_cpus(), default_num_workers()
    return Finding(f"{cores} for {workers} workers of a trial", remedy if cores < workers else "")


def _memory(remedy: str) -> Finding:
    import psutil

    from fsdp_lab.machine.hardware import host_memory

    total = host_memory()
    free = min(total, psutil.virtual_memory().available)
    observation = f"{_gib(free)} free of {_gib(total)}; Ray and two workers need {_gib(_LEAST_MEMORY)}"
    return Finding(observation, remedy if free < _LEAST_MEMORY else "", fails=free < _LEAST_MEMORY)


def _shared_memory(remedy: str) -> Finding:
    usage = shutil.disk_usage("/dev/shm")
    return Finding(f"{_gib(usage.free)} free of {_gib(usage.total)}", remedy if usage.total < _GIB else "")


def _disk(remedy: str, folder: Path, before: str = "") -> Finding:
    there = next(path for path in (folder.absolute(), *folder.absolute().parents) if os.path.lexists(path))
    with tempfile.TemporaryFile(dir=there):
        free = shutil.disk_usage(there).free
    return Finding(f"{before}{_gib(free)} free in {there}", remedy if free < _GIB else "", fails=free < _GIB)


def _ray_files(remedy: str) -> Finding:
    from fsdp_lab.config.machine import check_open_files, ray_folder

    check_open_files()
    return _disk(remedy, ray_folder())


def _store(remedy: str, uri: str) -> Finding:
    from fsdp_lab.tracking.store import check_home, check_sqlite, open_store, sqlite_path

    check_home()
    if not uri.startswith("sqlite:"):
        open_store(TrackingConfig(uri))
    elif (file := sqlite_path(uri)).exists():
        check_sqlite(uri)
    else:  # MLflow would create it
        return _disk(remedy, file.parent, f"the first trial creates {uri}; ")
    return Finding(f"{uri} answers")


def _device_file(remedy: str) -> Finding:
    from fsdp_lab.config.options import data_sheets
    from fsdp_lab.forecast.devices import file_here, words_for

    if (file := file_here()) is None:
        return Finding("none, so forecasts predict no speed here", remedy)
    return Finding(f"{file}" if file in data_sheets() else f"{file}; use it by {words_for(file)}")


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / _GIB:.1f} GiB"


def main(arguments: Sequence[str] | None = None) -> int:
    """Print each finding as it is made, and return the exit status: 1 if anything is wrong, 2 for bad input."""
    outlast_reader()
    words = sys.argv[1:] if arguments is None else arguments
    try:
        config_dir, words = split_config_dir(words)
        use_devices_of(config_dir)
        options = read_words(words, ("tracking.uri", "folder"), docstring(sys.modules[__name__])) if words else {}
    except UserError as error:
        print(f"fsdp_lab.doctor: {error}", file=sys.stderr)
        return ExitCode.refused
    uri, folder = store_named(options), Path(options.get("folder", "outputs"))
    wrong = 0
    for subject, check, remedy in (
        ("Python", _python, "with Python 3.11 to 3.13 run `make sweep`, or pip install fsdp_lab"),
        ("PyTorch", _pytorch, 'install one for this driver, or set CUDA_VISIBLE_DEVICES=<index> ("" for the CPU)'),
        ("cores", _cores, "set a smaller cluster.num_workers or cluster.cpus_per_worker"),
        ("memory", _memory, "end other programs, or raise the container's limit (docker run --memory=...)"),
        ("shared memory", _shared_memory, "docker run --shm-size=8g; below 1 GiB data.loader_workers is 0"),
        ("disk", lambda remedy: _disk(remedy, folder), "remove old sweeps, or set hydra.sweep.dir"),
        ("Ray's files", _ray_files, "set RAY_TMPDIR to another folder"),
        ("device file", _device_file, f"{PROBE} measures one in a minute"),
        ("MLflow store", lambda remedy: _store(remedy, uri), "close what holds it, restore it, or name another"),
    ):
        try:
            finding = check(remedy)
        except Exception as error:  # noqa: BLE001 - a broken installation, device or store may raise anything
            remedy = "" if isinstance(error, UserError) else remedy  # the message has it
            finding = Finding(f"{type(error).__name__}: {error}".partition("\n")[0], remedy, fails=True)
        level = "wrong" if finding.fails else "note" if finding.remedy else "ok"
        print(f"{level:<7}{subject:<15}{finding.observation}", flush=True)
        if finding.remedy:
            print(f"{'':22}-> {finding.remedy}", flush=True)
        wrong += finding.fails
    print(count(wrong, "problem") + " found" if wrong else "sweeps can run here")
    return ExitCode.failed if wrong else ExitCode.finished
