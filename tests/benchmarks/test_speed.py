"""What `make bench-speed` says of its numbers, and that it runs; how fast this machine is, is no test's business."""

from __future__ import annotations

import csv
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks import speed
from fsdp_lab.speed.device import Basis
from fsdp_lab.speed.predict import Speed
from tests.conftest import ROOT


def made_up(step_s: float, low_s: float, high_s: float) -> Speed:
    return Speed(step_s, {}, low_s, high_s, 0.1, Basis.calibration, "x")


def test_predictions_are_judged_by_hand():
    """Speeds 16, 8, 24 and 12 samples/s as predicted; the third is slower than the first when it runs."""
    some = [speed.Case(m, "ddp", "default", "fp32", "none", 1, 48) for m in ("gpt", "gpt", "vit", "vit")]
    speeds = [made_up(s, s * 0.9, s * 1.1) for s in (3.0, 6.0, 2.0, 4.0)]
    judged = speed.judge(some, speeds, [3.0, 6.5, 5.0, 4.0])
    assert judged.chosen == {"gpt": 1.0, "vit": pytest.approx(0.8)}
    assert judged.inside == 0.75 and judged.in_order == {"gpt": True, "vit": False}
    errors = sorted([0.0, 6 / 6.5 - 1, 2 / 5 - 1, 0.0], key=abs)
    assert judged.median_error == pytest.approx(np.median(np.abs(errors)))
    assert judged.level == pytest.approx((1 + 6 / 6.5) / 2 - 1), "of 0.4, 0.92, 1 and 1"
    assert judged.spearman == pytest.approx(0.4), "ranks 3 1 4 2 and 4 1 2 3: 1 - 6 * 6 / (4 * 15)"


def test_forty_eight_settings_of_two_models_vary_every_axis():
    some = speed.cases()
    assert len(set(some)) == len(some) == 48
    for axis in ("model", "sharding", "reshard", "precision", "checkpointing", "accumulate", "batch"):
        assert len({getattr(case, axis) for case in some}) > 1, axis


@pytest.mark.full
@pytest.mark.timeout(900)
def test_the_benchmark_calibrates_predicts_and_then_measures(tmp_path: Path):
    arguments = ["--small", "--rounds", "1", "--calibrate-s", "20", "--out", str(tmp_path)]
    command = [sys.executable, "-m", "benchmarks.speed", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=800, check=False)
    assert done.returncode == 0, done.stderr
    rows = list(csv.DictReader((tmp_path / "speed.csv").open()))
    assert [row["model"] for row in rows] == ["gpt"] * 3 + ["vit"] * 3
    assert all(float(row["low_s"]) <= float(row["predicted_s"]) <= float(row["high_s"]) for row in rows)
    assert all(float(row["measured_s"]) > 0 for row in rows)
    before = list(csv.DictReader((tmp_path / "predicted.csv").open()))
    assert [row["predicted_s"] for row in before] == [row["predicted_s"] for row in rows], "predicted first"
    assert "in the predicted order: " in done.stdout
