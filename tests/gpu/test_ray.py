"""A sweep of real trials on the device, where Ray, Hydra and MLflow are installed."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.gpu.conftest import Machine

pytestmark = pytest.mark.ci

ROOT = Path(__file__).resolve().parents[2]
WORDS = (
    "-m", "sharding=root,per_block", "precision=fp32", "offload=none", "reshard_after_forward=always",
    "data.num_train=256", "training.epochs=1", "tracking.uri=sqlite:///mlflow.db", "hydra.sweep.dir=sweep",
)  # fmt: skip


def test_the_sweep_of_the_readme_trains_on_the_device(
    machine: Machine, tmp_path: Path, figures: Callable[..., None]
) -> None:
    if missing := [name for name in ("ray", "hydra", "mlflow") if importlib.util.find_spec(name) is None]:
        pytest.skip(f"{' and '.join(missing)} cannot be imported")
    from tests.folders import Store, SweepFolder

    data = "data=digits" if importlib.util.find_spec("sklearn") else "data=synthetic"
    done = subprocess.run(
        [sys.executable, "-m", "fsdp_lab", *WORDS, data], cwd=tmp_path, capture_output=True, text=True, timeout=300,
        check=False, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    first, second = SweepFolder(tmp_path / "sweep").rows
    assert first["status"] == second["status"] == "finished"
    assert abs(float(first["val/loss"]) - float(second["val/loss"])) <= (1e-4 if machine.cuda else 1e-5)
    trials = Store(tmp_path).trials
    assert len(trials) == 2
    for run in trials:
        figures(device=run.data.tags["device"], val_loss=run.data.metrics["val/loss"])
        assert run.data.metrics["memory/peak_bytes"] > run.data.metrics["memory/param_bytes"] > 0
        assert run.data.tags["device"] == (torch.cuda.get_device_name(0) if machine.cuda else "cpu")
