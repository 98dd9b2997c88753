"""The training core and the forecast take PyTorch and torchvision, with what these bring, and nothing else."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.conftest import ROOT
from tests.gpu import plain_yaml

# What torch and torchvision declare, by the names that are imported; and ourselves.
BROUGHT = (
    "torch", "torchgen", "functorch", "torchvision", "numpy", "PIL", "filelock", "typing_extensions", "sympy", "mpmath",
    "networkx", "jinja2", "markupsafe", "fsspec", "triton", "nvidia", "fsdp_lab",
)  # fmt: skip
MODULES = (
    "fsdp_lab.machine.hardware", "fsdp_lab.config", "fsdp_lab.workloads", "fsdp_lab.training",
    "fsdp_lab.training.__main__",
    "fsdp_lab.forecast.fake", "fsdp_lab.forecast.capacity", "fsdp_lab.forecast.forecast", "fsdp_lab.forecast.run",
    "fsdp_lab.engine.rank", "fsdp_lab.record.trial_files",
)  # fmt: skip

# Hides all other modules, as if they were not installed.
_HOOK = f"""
import sys
from importlib.machinery import PathFinder

class OnlyWhatTorchBrings:
    find_distributions = PathFinder.find_distributions  # PyTorch finds its backends by their entry points

    @staticmethod
    def find_spec(name, path=None, target=None):
        top = name.partition(".")[0]
        known = top in sys.stdlib_module_names or top in {BROUGHT!r} or top.startswith("_sysconfigdata")
        return PathFinder.find_spec(name, path, target) if known else None

sys.meta_path[:] = [f for f in sys.meta_path if f.__module__.startswith(("_frozen_importlib", "zipimport"))]
sys.meta_path[sys.meta_path.index(PathFinder)] = OnlyWhatTorchBrings
ours = (*sys.stdlib_module_names, "__main__", "sitecustomize")
for name in [n for n in sys.modules if n.partition(".")[0] not in ours]:
    del sys.modules[name]  # what .pth files imported
"""

_SCRIPT = f"""{_HOOK}
import importlib

for name in ("yaml", "ray", "psutil"):
    try:
        importlib.import_module(name)
    except ImportError:
        continue
    sys.exit(f"{{name}} can be imported: this test shows nothing")
for name in {MODULES!r}:
    importlib.import_module(name)
"""


def test_training_and_forecasts_are_imported_with_torch_and_torchvision_alone() -> None:
    """An import hook stands for an environment that has only these two: nothing else is found."""
    done = subprocess.run([sys.executable, "-c", _SCRIPT], cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr


@pytest.mark.ci
def test_the_gpu_suite_runs_with_pytorch_and_pytest_alone(tmp_path: Path) -> None:
    """On the CPU, where none of it may fail: it trains, forecasts and exports. The processes that it starts have the
    hook, too."""
    hidden = ("jaraco", "more_itertools", "backports", "platformdirs", "wheel", "tomli")  # in setuptools, PyTorch's own
    allowed = ("pytest", "_pytest", "py", "pluggy", "iniconfig", "packaging", "pygments", "setuptools",
               "_distutils_hack", *hidden, "tests", "sitecustomize")  # fmt: skip
    hook = _HOOK.replace(repr(BROUGHT), repr((*BROUGHT, *allowed)))
    (tmp_path / "sitecustomize.py").write_text(hook)
    command = [sys.executable, "-m", "pytest", "-c", "tests/gpu/pytest.ini", "tests/gpu", "--device", "cpu", "-q"]
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    table = tmp_path / "table.json"
    done = subprocess.run(
        [*command, "--results", str(table)], cwd=ROOT, capture_output=True, text=True, timeout=900, check=False,
        env=environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    rows = json.loads(table.read_text())["rows"]
    skipped = [row["check"] for row in rows if row["outcome"] == "skipped"]
    assert len(rows) > 60 and any("test_ray" in check for check in skipped), "ray can be imported"


def test_the_gpu_suite_has_the_options_of_conf() -> None:
    """`python -m tests.gpu.plain_yaml` writes them again."""
    assert json.loads(plain_yaml.FILE.read_text()) == plain_yaml.read_conf()


def test_what_stands_for_yaml_reads_a_value_as_yaml_does() -> None:
    for text in ("1", "0.5", "true", "False", "null", "word", "[a,b]", "[1,2]", "package.module"):
        assert plain_yaml.safe_load(text) == yaml.safe_load(text), text
