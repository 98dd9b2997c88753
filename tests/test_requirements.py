"""The training core and the forecast take PyTorch and torchvision, with what these bring, and nothing else."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT

# What torch and torchvision declare, by the names that are imported; and ourselves.
BROUGHT = (
    "torch", "torchgen", "functorch", "torchvision", "numpy", "PIL", "filelock", "typing_extensions", "sympy", "mpmath",
    "networkx", "jinja2", "markupsafe", "fsspec", "triton", "nvidia", "fsdp_lab",
)  # fmt: skip
MODULES = (
    "fsdp_lab.hardware", "fsdp_lab.config", "fsdp_lab.workloads", "fsdp_lab.training", "fsdp_lab.training.__main__",
    "fsdp_lab.forecast.fake", "fsdp_lab.forecast.capacity", "fsdp_lab.forecast.forecast", "fsdp_lab.forecast.run",
    "fsdp_lab.engine.rank", "fsdp_lab.record.trial_files",
)  # fmt: skip

_SCRIPT = f"""
import importlib, sys
from importlib.machinery import PathFinder
from pathlib import Path

class OnlyWhatTorchBrings:
    find_distributions = PathFinder.find_distributions  # PyTorch finds its backends by their entry points

    @staticmethod
    def find_spec(name, path=None, target=None):
        top = name.partition(".")[0]
        known = top in sys.stdlib_module_names or top in {BROUGHT!r} or top.startswith("_sysconfigdata")
        return PathFinder.find_spec(name, path, target) if known else None

sys.meta_path[:] = [f for f in sys.meta_path if f.__module__.startswith(("_frozen_importlib", "zipimport"))]
sys.meta_path[sys.meta_path.index(PathFinder)] = OnlyWhatTorchBrings
for name in [n for n in sys.modules if n.partition(".")[0] not in (*sys.stdlib_module_names, "__main__")]:
    del sys.modules[name]  # what .pth files imported

for name in ("yaml", "ray", "psutil"):
    try:
        importlib.import_module(name)
    except ImportError:
        continue
    sys.exit(f"{{name}} can be imported: this test shows nothing")
for name in {MODULES!r}:
    importlib.import_module(name)

from dataclasses import replace
from fsdp_lab.config import TrialConfig, conf_dir
from fsdp_lab.config.training import TrainingConfig
from fsdp_lab.config.workload import DataConfig
from fsdp_lab.training import train

class Memo:
    def facts(self, facts): pass
    def phase(self, name): pass
    def step(self, step): print("step", step)
    def epoch(self, metrics, checkpoint): print("loss", metrics["train/loss"])

TrialConfig().check(1)
data = DataConfig("fsdp_lab.workloads.vision.synthetic.SyntheticImages", num_train=16, num_val=8)
trial = replace(TrialConfig(), data=data, training=TrainingConfig(epochs=1, max_steps=1, global_batch_size=8))
trial.check(1)
train(trial, Path(sys.argv[1]), Memo())
print("brought:", sorted({{n.partition(".")[0] for n in sys.modules}} & {{"yaml", "ray", "hydra", "mlflow", "psutil"}}))
sys.stdout.flush()
import os
os._exit(0)  # gloo's threads may outlive the interpreter
"""


@pytest.mark.ci
def test_one_step_with_torch_and_torchvision_alone(tmp_path: Path) -> None:
    """An import hook stands for an environment that has only these two: nothing else is found."""
    command = [sys.executable, "-c", _SCRIPT, str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    step, loss, brought = done.stdout.splitlines()
    assert (step, brought) == ("step 1", "brought: []")
    assert 0 < float(loss.removeprefix("loss ")) < 5
    assert (tmp_path / "model.pt").is_file()
