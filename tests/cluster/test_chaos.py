"""Nodes that die, come back, join and leave while a sweep runs."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.cluster.namespaces import TWO_NODES, Cluster
from tests.cluster.test_nodes import words
from tests.folders import TrialFolder
from tests.sweep.conftest import has_trained_an_epoch, results, wait_for

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]

_EPOCHS = 60


@contextmanager
def running(cluster: Cluster, folder: Path, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A sweep that is typed on the first node; what it says is in `said.txt`."""
    command = cluster.nodes[0].command(sys.executable, "-m", "fsdp_lab", *words(cluster, folder), *arguments)
    with (folder / "said.txt").open("w") as printed:
        process = subprocess.Popen(
            command, env=cluster.environment, cwd=folder, stdout=printed, stderr=printed, text=True,
            start_new_session=True,
        )  # fmt: skip
    try:
        yield process
    finally:
        process.kill()
        process.wait(20)


def printed(folder: Path) -> str:
    return (folder / "said.txt").read_text()


def trains(folder: Path) -> bool:
    return any(has_trained_an_epoch(file.parent) for file in folder.glob("storage/**/metrics.jsonl"))


def failed_before(folder: Path) -> bool:
    return any(TrialFolder(f.parent, f.parent).earlier_failures for f in folder.glob("storage/**/trial.json"))


def test_a_trial_goes_on_when_its_node_is_back(cluster: Cluster, tmp_path: Path):
    node = cluster.nodes[1]
    with running(cluster, tmp_path, *TWO_NODES, f"training.epochs={_EPOCHS}") as process:
        wait_for(lambda: trains(tmp_path), process)
        cluster.kill(node)
        wait_for(lambda: failed_before(tmp_path), process)
        cluster.start(node)
        assert process.wait(200) == 0, printed(tmp_path)
    (metrics,) = tmp_path.glob("storage/**/metrics.jsonl")
    epochs = [json.loads(line)["epoch"] for line in metrics.read_text().splitlines()]
    assert epochs == list(range(1, _EPOCHS + 1)), "each once"
    assert failed_before(tmp_path), "there was a failure"


@pytest.mark.full
def test_a_trial_whose_node_stays_away_fails_in_its_time(cluster: Cluster, tmp_path: Path):
    node = cluster.nodes[1]
    settings = (f"training.epochs={_EPOCHS}", "cluster.wait_timeout_s=5")
    with running(cluster, tmp_path, *TWO_NODES, *settings) as process:
        wait_for(lambda: trains(tmp_path), process)
        cluster.kill(node)
        assert process.wait(120) == 1, printed(tmp_path)
    (row,) = results(tmp_path)
    assert row["error"].startswith("cannot place 2 workers with 2 CPU each within cluster.wait_timeout_s=5 s: ")


@pytest.mark.full
def test_a_node_that_joins_is_used_by_the_next_trial(cluster: Cluster, tmp_path: Path):
    node = cluster.nodes[1]
    if node.raylet is not None:
        cluster.kill(node)
    while node.address in cluster.alive():  # else Ray may give the first trial to it
        time.sleep(0.5)
    one_worker = ("cluster.num_workers=1", f"training.epochs={_EPOCHS},{_EPOCHS + 1},2")
    others = [word for word in TWO_NODES if not word.startswith("training.epochs=")]
    with running(cluster, tmp_path, "-m", *others, *one_worker) as process:
        wait_for(lambda: trains(tmp_path), process)
        cluster.start(node)
        assert process.wait(250) == 0, printed(tmp_path)
    used = [TrialFolder(f.parent, f.parent).addresses for f in sorted(tmp_path.glob("storage/**/trial.json"))]
    assert used[0] == [cluster.nodes[0].address] and [node.address] in used[1:], printed(tmp_path)


_HOLD = "ray.get(ray.util.placement_group([{'CPU': 3}, {'CPU': 2}], name='held').ready(), timeout=100) is not None"
_FREE = "ray.util.remove_placement_group(ray.util.get_placement_group('held'))"
_WAIT = "[1 for group in ray.util.placement_group_table().values() if group['state'] in ('PENDING', 'RESCHEDULING')]"


@pytest.mark.full
def test_a_sweep_that_waits_for_room_is_interrupted_and_resumed(cluster: Cluster, tmp_path: Path):
    """Somebody else has every core; what is interrupted leaves no request behind."""
    assert cluster.ask(_HOLD)
    try:
        with running(cluster, tmp_path, *TWO_NODES) as process:
            wait_for(lambda: "waits for 4 CPU (0 of 5 free)" in printed(tmp_path), process)
            process.terminate()
            assert process.wait(60) == 130, printed(tmp_path)
        assert "to resume: python -m fsdp_lab resume=out" in printed(tmp_path)
        assert cluster.ask(_WAIT) == [], "a request for room is left"
    finally:
        cluster.ask(_FREE)
    with running(cluster, tmp_path, "resume=out") as process:
        assert process.wait(120) == 0, printed(tmp_path)
    assert [row["status"] for row in results(tmp_path)] == ["finished"]
