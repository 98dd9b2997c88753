"""`make test-gpu` runs this suite, with Python, torch, torchvision and pytest alone, and prints one table.

ARGS: `--device cuda|cpu` (default: cuda where PyTorch sees a GPU), `--results FILE` writes the table as JSON, and after
`--limit` seconds (360) no further check starts. On a CPU two gloo ranks train small models, and what only CUDA has is
skipped.
"""

from __future__ import annotations

import json
import platform
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

try:
    import torch
    import torchvision
except ImportError as error:
    pytest.exit(
        f"{error}: name a Python with torch, torchvision and pytest, as in make test-gpu PYTHON=.venv/bin/python"
    )

from tests.gpu.ranks import Ranks

_LATE = "no time left: --limit"
_BEGUN = pytest.StashKey[float]()
_ROWS: list[dict[str, Any]] = []


@dataclass(frozen=True)
class Machine:
    """Where the suite runs: `cuda` or `cpu`, with how many GPUs."""

    device: str
    gpus: int

    @property
    def cuda(self) -> bool:
        return self.device == "cuda"

    @property
    def ranks(self) -> int:
        return 1 if self.cuda and self.gpus == 1 else 2


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", choices=("cuda", "cpu"), help="default: cuda where PyTorch sees a GPU")
    parser.addoption("--results", type=Path, help="file for the table, as JSON")
    parser.addoption("--limit", type=float, default=360.0, help="seconds after which no further check starts")


def machine_of(config: pytest.Config) -> Machine:
    there = torch.cuda.device_count()  # makes no context
    device = config.getoption("--device", None) or ("cuda" if there else "cpu")
    if device == "cuda" and not there:
        raise pytest.UsageError("--device cuda: PyTorch sees no GPU; use --device cpu")
    return Machine(device, there)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Give tests of a `setting` those of the device, by the module's `SETTINGS`."""
    if "setting" in metafunc.fixturenames:
        metafunc.parametrize("setting", metafunc.module.SETTINGS[machine_of(metafunc.config).device])


def pytest_runtest_setup(item: pytest.Item) -> None:
    begun = item.config.stash.setdefault(_BEGUN, time.monotonic())
    if time.monotonic() - begun > item.config.getoption("--limit", 360.0):
        pytest.skip(_LATE)


@pytest.fixture(scope="session")
def machine(request: pytest.FixtureRequest) -> Machine:
    return machine_of(request.config)


@pytest.fixture(scope="session")
def ranks(machine: Machine) -> Iterator[Ranks]:
    """All ranks: one on a single GPU, else two."""
    ranks = Ranks(machine.ranks, machine.cuda)
    yield ranks
    ranks.end()


@pytest.fixture(scope="session", autouse=True)
def forecasts(request: pytest.FixtureRequest, machine: Machine) -> Any:
    """Started before the first test, if one needs them."""
    from tests.gpu.test_memory import Forecasts

    wanted = any("forecasts" in getattr(item, "fixturenames", ()) for item in request.session.items)
    return Forecasts(machine) if wanted else None


@pytest.fixture
def figures(record_property: Callable[[str, object], None]) -> Callable[..., None]:
    """`figures(apart=1e-6)` puts figures into the row of this test."""

    def add(**values: object) -> None:
        for name, value in values.items():
            record_property(name, value)

    return add


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    report: Any = yield
    if report.when == "call" or not report.passed:
        why = report.longrepr[2] if report.skipped else str(call.excinfo.value).strip()[:4000] if call.excinfo else ""
        row = {
            "check": item.nodeid.rpartition("/")[2], "outcome": report.outcome, "seconds": round(report.duration, 1),
            "figures": dict(item.user_properties), **({"why": why} if why else {}),
        }  # fmt: skip
        _ROWS.append(row)
        if file := item.config.getoption("--results", None):  # after each check: a run that is killed has its table
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(json.dumps({**describe(machine_of(item.config)), "rows": _ROWS}, indent=1) + "\n")
    return report


@cache
def describe(machine: Machine) -> dict[str, Any]:
    """Return the device, its driver and the versions."""
    about = {"python": platform.python_version(), "torch": torch.__version__, "torchvision": torchvision.__version__}
    if not machine.cuda:
        return {"device": f"CPU, {platform.machine()}", "ranks": machine.ranks, **about}
    asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        driver = subprocess.run(asked, capture_output=True, text=True, check=True, timeout=30).stdout.splitlines()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        driver = "unknown"
    gpu = torch.cuda.get_device_properties(0)
    return {
        "device": gpu.name, "gpus": machine.gpus, "memory_bytes": gpu.total_memory, "driver": driver, **about,
        "cuda": torch.version.cuda, "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        "cudnn": torch.backends.cudnn.version(),
    }  # fmt: skip


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    if all(row["check"].startswith("test_ray") for row in _ROWS):
        return
    terminalreporter.section(" ".join(f"{name}={value}" for name, value in describe(machine_of(config)).items()))
    for row in _ROWS:
        shown = " ".join(f"{name}={value}" for name, value in row["figures"].items() if value not in ("", None))
        why = row.get("why", "").partition("\n")[0][:200]
        terminalreporter.write_line(f"{row['outcome']:7} {row['seconds']:6.1f} s  {row['check']}  {shown} {why}")
    late = sum(_LATE in row.get("why", "") for row in _ROWS)
    counts = [f"{sum(row['outcome'] == how for row in _ROWS)} {how}" for how in ("passed", "failed")]
    terminalreporter.write_line(f"{', '.join(counts)}, {late} not measured: --limit")
