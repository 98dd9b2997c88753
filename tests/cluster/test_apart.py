"""A sweep over two nodes whose workers have nothing in common but object storage."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cluster.namespaces import TWO_NODES, Cluster, Node, cluster_over
from tests.cluster.test_nodes import same_losses
from tests.folders import SweepFolder, TrialFolder
from tests.servers import lay_store
from tests.sweep.conftest import results, wait_for

pytestmark = [pytest.mark.cluster, pytest.mark.full, pytest.mark.timeout(900)]

_EPOCHS = 6


def epochs(trial: Path) -> list[int]:
    file = trial / "metrics.jsonl"
    return [json.loads(line)["epoch"] for line in file.read_text().splitlines()] if file.exists() else []


def test_a_sweep_whose_drivers_node_dies_is_finished_by_another(
    cluster: Cluster, bucket: str, on_one_node: dict[str, str], tmp_path: Path
):
    (here := cluster.local / "here").mkdir()
    head, other = cluster.nodes
    until_power_cut(cluster, here, f"{bucket}/apart", tmp_path)
    before = len(epochs(here / "out" / "1"))
    there = Path(shutil.move(here, tmp_path / "there"))  # the disk of the driver, in the other node
    with cluster_over([Node(other.name, other.address, 4)], cluster.environment) as new:
        words = ("resume=out", f"cluster.address={new.address}")
        done = subprocess.run(
            other.command(sys.executable, "-m", "fsdp_lab", *words),
            env=new.environment, cwd=there, capture_output=True, text=True, timeout=200, check=False,
        )  # fmt: skip
    first, (row, *_) = there / "out" / "0", results(there)
    assert sorted(TrialFolder(first, first).addresses) == [head.address, other.address]
    assert same_losses(row, on_one_node)
    assert all(list(first.glob(f"{name}{rank}*")) for name in ("memory_peaks_rank", "logs/rank") for rank in "01")
    assert not list(there.glob("out/*/checkpoints")) and before < _EPOCHS
    assert done.returncode == 0, done.stdout + done.stderr
    assert [epochs(there / "out" / number) for number in "01"] == [[1, 2], [*range(1, _EPOCHS + 1)]]
    resumed_from = SweepFolder(there / "out").trials[1].facts["resumed_from"]
    assert resumed_from.startswith(f"{bucket}/apart/here-out-"), resumed_from


def until_power_cut(cluster: Cluster, folder: Path, storage: str, log: Path) -> None:
    """Run a sweep until its second trial trains, and cut the power of the head, where the driver is."""
    lay_store(folder)
    words = ("-m", *TWO_NODES, f"training.epochs=2,{_EPOCHS}", f"cluster.address={cluster.address}",
             f"cluster.storage_path={storage}")  # fmt: skip
    with (log / "said.txt").open("w") as printed:
        process = subprocess.Popen(
            cluster.nodes[0].command(sys.executable, "-m", "fsdp_lab", *words), env=cluster.environment, cwd=folder,
            stdout=printed, stderr=printed, text=True, start_new_session=True,
        )  # fmt: skip
    try:
        wait_for(lambda: len(epochs(folder / "out" / "1")) > 1, process, 150)
    finally:
        process.kill()
        process.wait(20)
        cluster.kill(cluster.nodes[0])
