"""A sampler of another package runs a sweep like our own; a scheduler does in test_fates.py."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests import forked
from tests.conftest import INLINE
from tests.servers import lay_store
from tests.sweep.conftest import results
from tests.sweep.outside import registering

pytestmark = pytest.mark.ci

SCRIPT = registering("search.name", "counts")


def run_registered(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """The command line, in a process that has registered what `tests.sweep.outside` defines."""
    lay_store(folder)
    return forked.run(folder, "-c", SCRIPT, "-m", *INLINE, *words)


def test_a_sampler_of_another_package_suggests_the_trials(tmp_path: Path):
    words = ["search.name=counts", "search.num_trials=6", "optimizer.lr=0.1,0.01,0.001"]
    done = run_registered(tmp_path, *words, "training.seed=1,2", "training.epochs=1")
    assert done.returncode == 0, done.stdout + done.stderr
    rows = results(tmp_path)
    assert [(row["optimizer.lr"], row["training.seed"]) for row in rows] == [
        (lr, seed) for seed in ("1", "2") for lr in ("0.1", "0.01", "0.001")
    ]


def test_a_name_that_is_not_registered_is_refused(tmp_path: Path):
    done = run_registered(tmp_path, "search.name=count", "optimizer.lr=0.1,0.01")
    assert done.returncode == 2
    assert "search.name=count is not an option. Choose one of: grid, random, optuna, counts." in done.stderr
