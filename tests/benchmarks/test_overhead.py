"""The benchmarks of what fsdp_lab costs run at all, and average as they say; what they find is no test's business."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import throughput
from tests.conftest import ROOT


def run(*words: str) -> str:
    """What `python -m <words>` prints."""
    command = [sys.executable, "-m", *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.full
def test_tiny_trials_and_imports_have_a_cost(tmp_path: Path):
    ((seconds, mib),) = json.loads(run("benchmarks.tiny", "2", str(tmp_path)).splitlines()[-1])
    assert seconds > 0 and mib > 10
    _, with_collector, without = run("benchmarks.imports", "1").splitlines()[2].strip("|").split("|")
    assert float(with_collector) > 0 and float(without) > 0


def test_the_interval_is_students_over_starts():
    """By hand: mean 0.9, standard deviation 0.1, and 4.303 of it over the root of 3, by the table for 2 degrees."""
    assert throughput.interval([0.8, 0.9, 1.0]) == pytest.approx((0.9, 4.303 * 0.1 / 3**0.5), abs=1e-3)
