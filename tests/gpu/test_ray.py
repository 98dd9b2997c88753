"""A sweep of real trials on the device, where Ray, Hydra and MLflow are installed."""

from __future__ import annotations

import csv
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
    data = "data=digits" if importlib.util.find_spec("sklearn") else "data=synthetic"
    done = subprocess.run(
        [sys.executable, "-m", "fsdp_lab", *WORDS, data], cwd=tmp_path, capture_output=True, text=True, timeout=300,
        check=False, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    with (tmp_path / "sweep" / "results.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["status"] for row in rows] == ["finished", "finished"]
    assert abs(float(rows[0]["val/loss"]) - float(rows[1]["val/loss"])) <= (1e-4 if machine.cuda else 1e-5)

    import mlflow

    client = mlflow.MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
    experiments = [each.experiment_id for each in client.search_experiments()]
    trials = [run for run in client.search_runs(experiments) if "mlflow.parentRunId" in run.data.tags]
    assert len(trials) == 2
    device = torch.cuda.get_device_name(0) if machine.cuda else "cpu"
    for run in trials:
        figures(device=run.data.tags["device"], val_loss=run.data.metrics["val/loss"])
        assert run.data.metrics["memory/peak_bytes"] > run.data.metrics["memory/param_bytes"] > 0
        assert run.data.tags["device"] == device
