"""Sweeps over two nodes with no setting beyond the cluster's address and storage that both see."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.cluster.namespaces import ONE_NODE, TWO_NODES_AND_ONE, Cluster
from tests.conftest import PLAIN, TINY
from tests.folders import TrialFolder
from tests.servers import lay_store
from tests.sweep.conftest import results

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]


def words(cluster: Cluster, folder: Path, storage: str = "") -> tuple[str, ...]:
    """The cluster's address and storage; default: a folder that both nodes see."""
    lay_store(folder)
    return f"cluster.address={cluster.address}", f"cluster.storage_path={storage or folder / 'storage'}"


def sweep(
    cluster: Cluster, folder: Path, *arguments: str, storage: str = "", **variables: str
) -> subprocess.CompletedProcess[str]:
    """A sweep that is typed on the first node."""
    return subprocess.run(
        cluster.nodes[0].command(sys.executable, "-m", "fsdp_lab", *words(cluster, folder, storage), *arguments),
        env={**cluster.environment, **variables}, cwd=folder, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip


def addresses(folder: Path) -> list[list[str]]:
    """The node of each rank, of every trial in the order of its number."""
    files = (file for file in sorted(folder.glob("**/trial.json")) if "mlartifacts" not in file.parts)
    return [TrialFolder(file.parent, file.parent).addresses for file in files]


def losses(row: dict[str, str]) -> list[float]:
    return [float(row["val/loss"]), float(row["train/loss"])]


def same_losses(row: dict[str, str], other: dict[str, str]) -> bool:
    """To float32's precision: on some processors a sum by two threads rounds otherwise than one by a single thread."""
    return losses(row) == pytest.approx(losses(other), rel=2**-23, abs=0)


@pytest.mark.parametrize("variables", [{}, {"FSDP_LAB_PUBLIC_RAY": "1"}], ids=["shortcut", "without"])
@pytest.mark.documents(
    "ray start --head",
    "ray start --address=<head>:6379",
    "python -m fsdp_lab -m ... cluster.address=<head>:6379 ...",
)
def test_two_nodes_give_the_losses_of_one(cluster: Cluster, bucket: str, variables: dict[str, str], tmp_path: Path):
    """Host names resolve to the loopback on both, and nobody has named an interface. The nodes share no folder."""
    done = sweep(cluster, tmp_path, *TWO_NODES_AND_ONE, storage=f"{bucket}/nodes{len(variables)}", **variables)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [len(set(nodes)) for nodes in addresses(tmp_path)] == [2, 1]
    two, one = results(tmp_path)
    assert same_losses(two, one), (losses(two), losses(one))


@pytest.mark.full
def test_workers_are_placed_as_asked(cluster: Cluster, on_one_node: dict[str, str], tmp_path: Path):
    """In a folder that both nodes see. Either node could hold all workers."""
    done = sweep(cluster, tmp_path, "-m", *ONE_NODE, "cluster.placement=pack,spread,strict_pack")
    assert done.returncode == 0, done.stdout + done.stderr
    assert [len(set(nodes)) for nodes in addresses(tmp_path)] == [1, 2, 1]
    assert all(same_losses(row, on_one_node) for row in results(tmp_path)), results(tmp_path)


@pytest.mark.full
def test_a_shard_group_that_spans_nodes_has_a_note(cluster: Cluster, tmp_path: Path):
    """Ray packs three of the four workers onto the larger node."""
    words = ("model=mlp", "forecast.enabled=false", "training.max_steps=1", "sharding.dp_replicate=2")
    done = sweep(cluster, tmp_path, *PLAIN, *TINY, *words, "cluster.num_workers=4")
    assert done.returncode == 0, done.stdout + done.stderr
    ((a, b, c, d),) = addresses(tmp_path)
    assert len({a, b, c, d}) == 2
    assert ("1 of 2 shard groups, each of 2 ranks, are on more than one node" in done.stdout) == (a != b or c != d)
