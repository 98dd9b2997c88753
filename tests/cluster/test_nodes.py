"""A sweep over two nodes with no setting beyond the cluster's address and a folder that both see."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cluster.namespaces import Cluster
from tests.conftest import run_cli
from tests.servers import lay_store
from tests.sweep.conftest import PLAIN, TINY, results

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(400)]

# A worker with two cores: either node has room for one.
TWO_NODES = (*PLAIN, *TINY, "model=mlp", "forecast.enabled=false", "training.epochs=2", "cluster.cpus_per_worker=2")


def words(cluster: Cluster, folder: Path) -> tuple[str, ...]:
    """The address, and a folder that both nodes see."""
    lay_store(folder)
    return f"cluster.address={cluster.address}", f"cluster.storage_path={folder / 'storage'}"


def sweep(cluster: Cluster, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A sweep that is typed on the first node."""
    return subprocess.run(
        cluster.nodes[0].command(sys.executable, "-m", "fsdp_lab", *words(cluster, folder), *arguments),
        env=cluster.environment, cwd=folder, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip


def addresses(folder: Path) -> list[list[str]]:
    """The node of each rank, of every trial in the order of its number."""
    return [json.loads(file.read_text())["addresses"] for file in sorted(folder.glob("storage/**/places.json"))]


def test_two_nodes_give_the_losses_of_one(cluster: Cluster, tmp_path: Path):
    """Host names resolve to the loopback on both, and nobody has named an interface."""
    (two := tmp_path / "two").mkdir()
    (one := tmp_path / "one").mkdir()
    done = sweep(cluster, two, *TWO_NODES)
    assert done.returncode == 0, done.stdout + done.stderr
    done = run_cli(one, *TWO_NODES, "cluster.cpus_per_worker=1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(addresses(two)[0]) == [node.address for node in cluster.nodes]
    (there,), (here,) = results(two), results(one)
    assert there["val/loss"] == here["val/loss"] and there["train/loss"] == here["train/loss"]


def test_workers_are_placed_as_asked(cluster: Cluster, tmp_path: Path):
    """Either node could hold all of them."""
    words = ("model=mlp", "forecast.enabled=false", "training.max_steps=1", "cluster.placement=pack,spread,strict_pack")
    done = sweep(cluster, tmp_path, "-m", *PLAIN, *TINY, *words)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [len(set(nodes)) for nodes in addresses(tmp_path)] == [1, 2, 1]


def test_the_ranks_of_a_shard_group_are_on_one_node(cluster: Cluster, tmp_path: Path):
    """Ray alone packs three of the four workers onto the larger node."""
    words = ("model=mlp", "forecast.enabled=false", "training.max_steps=1", "sharding.dp_replicate=2")
    done = sweep(cluster, tmp_path, *PLAIN, *TINY, *words, "cluster.num_workers=4")
    assert done.returncode == 0, done.stdout + done.stderr
    ((a, b, c, d),) = addresses(tmp_path)
    assert a == b != c == d
