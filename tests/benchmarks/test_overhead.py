"""The benchmarks of what fsdp_lab costs run at all, and average as they say; what they find is no test's business."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import throughput
from tests.conftest import ROOT


def test_tiny_trials_have_a_cost_and_a_size(tmp_path: Path):
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.tiny", "2", str(tmp_path)],
        cwd=ROOT, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    ((seconds, mib),) = json.loads(done.stdout.splitlines()[-1])
    assert 0 < seconds < 60 and mib > 10


def test_imports_with_and_without_the_collector_take_cpu_time():
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.imports", "1"],
        cwd=ROOT, capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    _, with_collector, without = done.stdout.splitlines()[2].strip("|").split("|")
    assert float(with_collector) > 0.5 and float(without) > 0.5


def test_the_interval_is_students_over_starts():
    """By hand: mean 0.9, standard deviation 0.1, and 4.303 of it over the root of 3, by the table for 2 degrees."""
    assert throughput.interval([0.8, 0.9, 1.0]) == pytest.approx((0.9, 4.303 * 0.1 / 3**0.5), abs=1e-3)
