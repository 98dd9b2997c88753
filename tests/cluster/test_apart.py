"""A sweep over two nodes that have nothing in common but object storage: the trials' folder is on the driver's disk."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fsdp_lab.record.paths import sweep_address
from tests.cluster.namespaces import TWO_NODES, Cluster, Node, cluster_over
from tests.cluster.test_nodes import same_losses
from tests.servers import lay_store
from tests.sweep.conftest import results, wait_for

pytestmark = [pytest.mark.cluster, pytest.mark.full, pytest.mark.timeout(900)]

_EPOCHS = 6


def epochs(trial: Path) -> list[int]:
    file = trial / "metrics.jsonl"
    return [json.loads(line)["epoch"] for line in file.read_text().splitlines()] if file.exists() else []


def test_a_sweep_whose_drivers_node_dies_is_finished_by_another_from_storage_alone(
    cluster: Cluster, bucket: str, on_one_node: dict[str, str], tmp_path: Path
):
    (here := cluster.local / "here").mkdir()
    (there := tmp_path / "there").mkdir()
    head, other = cluster.nodes
    sweep = until_power_cut(cluster, here, f"{bucket}/apart", tmp_path)
    before = len(epochs(here / "out" / "1"))
    gone = Path(shutil.move(here, tmp_path / "gone"))  # with the node's disk
    lay_store(there)
    with cluster_over([Node(other.name, other.address, 4)], cluster.environment) as new:
        words = (f"resume={sweep}", "trust=true", f"cluster.address={new.address}")
        done = subprocess.run(
            other.command(sys.executable, "-m", "fsdp_lab", *words),
            env=new.environment, cwd=there, capture_output=True, text=True, timeout=200, check=False,
        )  # fmt: skip
    first, (row, *_) = gone / "out" / "0", results(gone)
    assert sorted(json.loads((first / "places.json").read_text())["addresses"]) == [head.address, other.address]
    assert same_losses(row, on_one_node)
    assert all(list(first.glob(f"{name}{rank}*")) for name in ("memory_peaks_rank", "logs/rank") for rank in "01")
    assert not list(gone.glob("out/*/checkpoints")) and before < _EPOCHS
    assert done.returncode == 0, done.stdout + done.stderr
    copy = there / "outputs" / "from_storage" / sweep.rpartition("/")[2]
    assert [epochs(copy / number) for number in "01"] == [[1, 2], [*range(1, _EPOCHS + 1)]]
    assert f"{sweep}/1/checkpoints/step_" in json.loads((copy / "1" / "facts.json").read_text())["resumed_from"]


def until_power_cut(cluster: Cluster, folder: Path, storage: str, log: Path) -> str:
    """Run a sweep until its second trial trains, look at the first, and cut the power of the head, where the driver is.

    Returns:
        the sweep's address.
    """
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
    return str(sweep_address(storage, folder / "out"))
