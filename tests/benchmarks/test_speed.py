"""A small part of `make bench-speed`: the order of settings whose speeds lie far apart, on this machine."""

from __future__ import annotations

import csv
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks import speed
from fsdp_lab.cpu_contention import Others
from fsdp_lab.speed.device import Basis
from fsdp_lab.speed.measured import DISTURBED
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
    assert judged.inside == 0.75
    errors = sorted([0.0, 6 / 6.5 - 1, 2 / 5 - 1, 0.0], key=abs)
    assert judged.median_error == pytest.approx(np.median(np.abs(errors)))
    assert judged.level == pytest.approx((1 + 6 / 6.5) / 2 - 1), "of 0.4, 0.92, 1 and 1"
    assert judged.spearman == pytest.approx(0.4), "ranks 3 1 4 2 and 4 1 2 3: 1 - 6 * 6 / (4 * 15)"


def test_forty_eight_settings_of_two_models_vary_every_axis():
    some = speed.cases()
    assert len(set(some)) == len(some) == 48
    for axis in ("model", "sharding", "reshard", "precision", "checkpointing", "accumulate", "batch"):
        assert len({getattr(case, axis) for case in some}) > 1, axis


def in_order(rows: list[dict[str, str]], seconds: str) -> list[dict[str, str]]:
    return sorted(rows, key=lambda row: float(row["batch"]) / float(row[seconds]))


@pytest.mark.full
@pytest.mark.timeout(900)
def test_settings_whose_speeds_lie_far_apart_are_predicted_in_their_order(tmp_path: Path):
    """A calibration in a hurry, six predictions, six trials. Within a model the order is that of the batch's cost."""
    arguments = ["--small", "--rounds", "2", "--calibrate-s", "40", "--out", str(tmp_path)]
    command = [sys.executable, "-m", "benchmarks.speed", *arguments]
    with Others() as others:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=800, check=False)
    assert done.returncode == 0, done.stderr
    if others.share > DISTURBED:
        pytest.skip(f"others used {others.share:.0%} of the cores: what was measured says nothing of this machine")
    rows = list(csv.DictReader((tmp_path / "speed.csv").open()))
    assert len(rows) == 6
    for model in ("gpt", "vit"):
        own = [row for row in rows if row["model"] == model]
        assert in_order(own, "predicted_s") == in_order(own, "measured_s")
    before = list(csv.DictReader((tmp_path / "predicted.csv").open()))
    assert [row["predicted_s"] for row in before] == [row["predicted_s"] for row in rows], "predicted first"
