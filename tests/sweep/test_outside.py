"""A sampler of another package runs a sweep like our own; a scheduler does in test_fates.py."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests import forked
from tests.conftest import ROOT, STORE
from tests.servers import lay_store
from tests.sweep.conftest import PLAIN, results

pytestmark = pytest.mark.ci

TINY = (
    "model=mlp", "data=synthetic", "data.num_train=16", "data.num_val=8", "training.global_batch_size=8",
    "checkpoint.mode=off", "export=false", "memory_profile=off", "forecast.enabled=false", STORE, "hydra.sweep.dir=out",
)  # fmt: skip
SCRIPT = f"""
import sys
sys.path.append({str(ROOT)!r})
from fsdp_lab.__main__ import main
from fsdp_lab.config.registry import register
register("search.name", "counts", "tests.sweep.outside")
main()
"""


def run_registered(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """The command line, in a process that has registered what `tests.sweep.outside` defines."""
    lay_store(folder)
    return forked.run(folder, "-c", SCRIPT, "-m", *TINY, *PLAIN, *words)


def test_a_sampler_of_another_package_suggests_the_trials(tmp_path: Path):
    words = ["engine=inline", "search.name=counts", "search.num_trials=6", "optimizer.lr=0.1,0.01,0.001"]
    done = run_registered(tmp_path, *words, "training.seed=1,2", "training.epochs=1")
    assert done.returncode == 0, done.stdout + done.stderr
    rows = results(tmp_path)
    assert [(row["optimizer.lr"], row["training.seed"]) for row in rows] == [
        (lr, seed) for seed in ("1", "2") for lr in ("0.1", "0.01", "0.001")
    ]


def test_a_name_that_is_not_registered_is_refused(tmp_path: Path):
    done = run_registered(tmp_path, "engine=inline", "search.name=count", "optimizer.lr=0.1,0.01")
    assert done.returncode == 2
    assert "search.name=count is not an option. Choose one of: grid, random, optuna, counts." in done.stderr
