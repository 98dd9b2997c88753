"""A sweep over two nodes with no setting beyond the cluster's address and a folder that both see."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.cluster.namespaces import Cluster
from tests.servers import lay_store
from tests.sweep.conftest import PLAIN, TINY, results, started

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(400)]

_SMALL = (*PLAIN, *TINY, "model=mlp", "forecast.enabled=false", "training.epochs=2")


def sweep(cluster: Cluster, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A sweep that is typed on the first node."""
    lay_store(folder)
    words = (*_SMALL, f"cluster.address={cluster.address}", f"cluster.storage_path={folder / 'storage'}", *arguments)
    return subprocess.run(
        cluster.nodes[0].command(sys.executable, "-m", "fsdp_lab", *words),
        env=cluster.environment, cwd=folder, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip


def test_two_nodes_give_the_losses_of_one(cluster: Cluster, tmp_path: Path):
    """Host names resolve to the loopback on both, and nobody has named an interface."""
    (two := tmp_path / "two").mkdir()
    (one := tmp_path / "one").mkdir()
    done = sweep(cluster, two)
    assert done.returncode == 0, done.stdout + done.stderr
    with started(one, *_SMALL) as process:
        assert process.wait(200) == 0
    (there,), (here,) = results(two), results(one)
    assert there["val/loss"] == here["val/loss"] and there["train/loss"] == here["train/loss"]
