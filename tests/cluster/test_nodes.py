"""Sweeps over two nodes: their losses, where workers are, nodes that die, come back and join, and Ray's tokens."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fsdp_lab.forecast.speed.device import load_device
from tests.cluster.namespaces import (
    ONE_NODE,
    TWO_NODES,
    TWO_NODES_AND_ONE,
    Cluster,
    Node,
    addresses,
    cluster_over,
    epochs,
    same_losses,
)
from tests.conftest import PLAIN, TINY, without
from tests.folders import SweepFolder, TrialFolder
from tests.sweep.conftest import results, wait_for

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]

_EPOCHS = 60


@pytest.mark.parametrize(
    "variables",
    [{}, pytest.param({"FSDP_LAB_PUBLIC_RAY": "1"}, marks=pytest.mark.full)],
    ids=["shortcut", "without"],
)
@pytest.mark.documents(
    "PYTHONHASHSEED=0 ray start --head",
    "PYTHONHASHSEED=0 ray start --address=<head>:6379",
    "python -m fsdp_lab -m ... cluster.address=<head>:6379 ...",
)
def test_two_nodes_give_the_losses_of_one(cluster: Cluster, bucket: str, variables: dict[str, str], tmp_path: Path):
    """Host names resolve to the loopback on both, and nobody has named an interface. The nodes share no folder."""
    cluster.sweep(tmp_path, *TWO_NODES_AND_ONE, storage=f"{bucket}/nodes{len(variables)}", **variables)
    assert [len(set(nodes)) for nodes in addresses(tmp_path)] == [2, 1]
    two, one = results(tmp_path)
    assert same_losses(two, one), (two, one)


@pytest.mark.full
def test_a_probe_measures_the_network_between_nodes(cluster: Cluster, tmp_path: Path):
    words = (f"cluster.address={cluster.address}", "--out", "device/two.yaml")
    done = subprocess.run(
        cluster.nodes[0].command(sys.executable, "-m", "fsdp_lab.probe", *words), cwd=tmp_path,
        env=cluster.environment, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "efficiency.network " in done.stdout, done.stdout
    assert "network_latency_s" in done.stdout, "measured, or named where the bandwidth alone explains small messages"
    assert load_device(tmp_path / "device" / "two.yaml").node_size == 1


@pytest.mark.full
def test_workers_are_placed_as_asked(cluster: Cluster, on_one_node: dict[str, str], tmp_path: Path):
    """In a folder that both nodes see. Either node could hold all workers."""
    cluster.sweep(tmp_path, "-m", *ONE_NODE, "cluster.placement=pack,spread,strict_pack")
    assert [len(set(nodes)) for nodes in addresses(tmp_path)] == [1, 2, 1]
    assert all(same_losses(row, on_one_node) for row in results(tmp_path)), results(tmp_path)


@pytest.mark.full
def test_a_shard_group_that_spans_nodes_has_a_note(cluster: Cluster, tmp_path: Path):
    """Ray packs three of the four workers onto the larger node."""
    words = ("model=mlp", "forecast.enabled=false", "training.max_steps=1", "sharding.dp_replicate=2")
    said = cluster.sweep(tmp_path, *PLAIN, *TINY, *words, "cluster.num_workers=4")
    ((a, b, c, d),) = addresses(tmp_path)
    assert len({a, b, c, d}) == 2
    assert ("1 of 2 replicas, each of 2 ranks, are on more than one node" in said) == (a != b or c != d)


def printed(folder: Path) -> str:
    return (folder / "said.txt").read_text()


def trains(folder: Path) -> bool:
    return any(epochs(folder / "storage"))


def trials(folder: Path) -> list[TrialFolder]:
    return [TrialFolder(file.parent, file.parent) for file in sorted(folder.glob("storage/**/trial.json"))]


def test_a_trial_goes_on_when_its_node_is_back(cluster: Cluster, tmp_path: Path):
    node = cluster.nodes[1]
    with cluster.running(tmp_path, *TWO_NODES, f"training.epochs={_EPOCHS}") as process:
        wait_for(lambda: trains(tmp_path), process)
        node.running.close()
        wait_for(lambda: any(trial.earlier_failures for trial in trials(tmp_path)), process)
        cluster.start(node)
        assert process.wait(200) == 0, printed(tmp_path)
    assert epochs(tmp_path / "storage") == [[*range(1, _EPOCHS + 1)]], "each once"
    assert trials(tmp_path)[0].earlier_failures, "there was a failure"


@pytest.mark.full
def test_a_trial_whose_node_stays_away_fails_in_its_time(cluster: Cluster, tmp_path: Path):
    settings = (f"training.epochs={_EPOCHS}", "cluster.wait_timeout_s=5")
    with cluster.running(tmp_path, *TWO_NODES, *settings) as process:
        wait_for(lambda: trains(tmp_path), process)
        cluster.nodes[1].running.close()
        assert process.wait(120) == 1, printed(tmp_path)
    (row,) = results(tmp_path)
    assert row["error"].startswith("cannot place 2 workers with 2 CPU each within cluster.wait_timeout_s=5 s: ")


_WAIT = "[1 for group in ray.util.placement_group_table().values() if group['state'] in ('PENDING', 'RESCHEDULING')]"


@pytest.mark.full
def test_a_sweep_that_waits_for_a_node_is_resumed_on_a_new_one(cluster: Cluster, tmp_path: Path):
    """What is interrupted leaves no request behind."""
    node = cluster.nodes[1]
    with cluster.running(tmp_path, *TWO_NODES, f"training.epochs={_EPOCHS}") as process:
        wait_for(lambda: trains(tmp_path), process)
        node.running.close()
        wait_for(lambda: cluster.ask(_WAIT), process)
        process.terminate()
        assert process.wait(60) == 130, printed(tmp_path)
    assert "to resume: python -m fsdp_lab resume=out" in printed(tmp_path)
    assert cluster.ask(_WAIT) == [], "a request for room is left"
    cluster.start(node)
    cluster.sweep(tmp_path, "resume=out")
    assert epochs(tmp_path / "storage") == [[*range(1, _EPOCHS + 1)]], "each once"
    assert sorted(*addresses(tmp_path / "storage")) == [node.address for node in cluster.nodes]


@pytest.mark.full
def test_a_sweep_whose_drivers_node_dies_is_finished_by_another(
    cluster: Cluster, bucket: str, on_one_node: dict[str, str], tmp_path: Path
):
    """Workers have nothing in common but object storage. The disk of the driver is mounted in the other node."""
    (here := cluster.local / "here").mkdir()
    head, other = cluster.nodes
    words = ("-m", *without(TWO_NODES, "training.epochs="), "training.epochs=2,6")
    with cluster.running(here, *words, storage=f"{bucket}/apart") as process:
        wait_for(lambda: len(epochs(here / "out" / "1")) and len(epochs(here / "out" / "1")[0]) > 1, process, 150)
        process.kill()
        head.running.close()
    assert len(epochs(here / "out" / "1")[0]) < 6
    there = Path(shutil.move(here, tmp_path / "there"))
    with cluster_over([Node(other.name, other.address, 4)], cluster.environment) as new:
        command = other.command(sys.executable, "-m", "fsdp_lab", "resume=out", f"cluster.address={new.address}")
        done = subprocess.run(
            command, env=new.environment, cwd=there, capture_output=True, text=True, timeout=200, check=False
        )
    assert done.returncode == 0, done.stdout + done.stderr
    first, (row, *_) = there / "out" / "0", results(there)
    assert sorted(TrialFolder(first, first).addresses) == [head.address, other.address]
    assert same_losses(row, on_one_node)
    assert all(list(first.glob(f"{name}{rank}*")) for name in ("memory_peaks_rank", "logs/rank") for rank in "01")
    assert not list(there.glob("out/*/checkpoints"))
    assert epochs(there / "out") == [[1, 2], [*range(1, 7)]]
    resumed_from = SweepFolder(there / "out").trials[1].facts["resumed_from"]
    assert resumed_from.startswith(f"{bucket}/apart/here-out-"), resumed_from


@pytest.mark.full
def test_the_token_comes_from_each_of_rays_places(cluster: Cluster, tmp_path: Path):
    """And a wrong one is reported, in one line that does not have it. The first place counts."""
    command = (sys.executable, "-m", "fsdp_lab", *PLAIN, f"cluster.address={cluster.address}", "dry_run=true")
    right, wrong = cluster.environment["RAY_AUTH_TOKEN"], "0" * 64
    own = {name: value for name, value in cluster.environment.items() if not name.startswith("RAY_AUTH")}
    (at_home := tmp_path / ".ray" / "auth_token").parent.mkdir()
    mode, by_path = {"RAY_AUTH_MODE": "token"}, {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": "token"}
    for variables, home, file, reaches in (
        (mode | {"RAY_AUTH_TOKEN": right}, wrong, wrong, True),
        (mode, right, wrong, True),
        (by_path, wrong, right, True),
        (mode, wrong, right, False),
        (by_path, right, wrong, False),
        ({}, wrong, wrong, False),
    ):
        at_home.write_text(home + "\n")
        (tmp_path / "token").write_text(file + "\n")
        done = subprocess.run(
            cluster.nodes[0].command(*command), cwd=tmp_path, text=True, capture_output=True, timeout=100, check=False,
            env={**own, "HOME": str(tmp_path), **variables},
        )  # fmt: skip
        assert done.returncode == (0 if reaches else 2), done.stdout + done.stderr
        if reaches:
            continue
        (line,) = done.stderr.splitlines()
        assert f"{cluster.address}: this Ray cluster asks for an authentication token, and" in line
        assert "set RAY_AUTH_MODE=token" in line and wrong not in line
