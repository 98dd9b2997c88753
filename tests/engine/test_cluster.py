"""What a cluster holds, which address is one, and what a job of Ray's may leave behind: without a Ray."""

from __future__ import annotations

import os
import socket
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fsdp_lab.config import ConfigError, UserError
from fsdp_lab.config.machine import RunningCluster
from fsdp_lab.config.sweep import ClusterConfig, Placement, SweepConfig, TrackingConfig
from fsdp_lab.engine import cluster as engine
from fsdp_lab.engine import shortcut
from fsdp_lab.engine.cluster import reachable, running_cluster, set_environment
from fsdp_lab.engine.ray_job import JOB_VARIABLE, check_job
from fsdp_lab.engine.resources import check_capacity, cpus_per_worker_on
from fsdp_lab.machine.cpu_contention import launchers
from fsdp_lab.machine.hardware import WORKER_CPUS
from fsdp_lab.machine.private import Name
from tests.conftest import PLAIN, run_cli
from tests.servers import free_port

set_environment()  # the second Ray Train is the one that is asked


def nodes_with(*nodes: tuple[str, bool, float, int]) -> list[dict[str, Any]]:
    """As `ray.nodes()` has nodes of (address, alive, cores, GPUs); one without GPUs has no such key."""
    return [
        {"NodeManagerAddress": address, "Alive": alive, "Resources": {"CPU": cpu} | ({"GPU": gpu} if gpu else {})}
        for address, alive, cpu, gpu in nodes
    ]


def test_servers_are_looked_at_while_another_thread_ends_them(monkeypatch: pytest.MonkeyPatch):
    servers: dict[str, Any] = {}
    ends = SimpleNamespace(is_running=lambda: servers.clear() or True, status=lambda: "sleeping")
    servers |= {"gcs_server": ends, "raylet": ends}
    monkeypatch.setattr(engine, "_servers", servers)
    assert engine.lost_server() is None and engine.lost_server() is None


@pytest.mark.parametrize(
    ("each", "placement", "workers", "tp", "message"),
    [
        (1 / 3, "pack", 31, 1, r"num_workers=31 .* hold 30 of"),
        # ten in all, and one of them holds five
        (5.0, "pack", 2, 1, r"num_workers=2 with 5 CPU each: .* hold 1 of .* use .*num_workers=1, a"),
        (2.0, "strict_pack", 5, 1, r"strict_pack .*num_workers=5: no node holds more than 4 .* use .*=4, or"),
        # ten as well, of which the second node holds two: no group of four
        (1.0, "pack", 10, 4, r"tp=4 .*num_workers=10: 4 workers .* hold 8 workers in .* or cluster.num_workers=8"),
        (1.0, "pack", 10, 16, r"tp=16 .*num_workers=10: .* hold 0 workers in such groups; use a smaller sharding.tp\."),
    ],
)
def test_more_than_the_nodes_hold_is_refused_with_both_numbers(
    each: float, placement: str, workers: int, tp: int, message: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("ray.nodes", lambda: nodes_with(("10.0.0.1", True, 8.0, 0), ("10.0.0.2", True, 2.0, 0)))
    monkeypatch.setattr("ray.cluster_resources", lambda: {"CPU": 10.0})
    cluster = ClusterConfig(cpus_per_worker=each, placement=Placement[placement], storage_path="/shared")
    fewer = workers - 1 if tp == 1 else 8
    assert check_capacity(cluster, fewer, min(tp, 4)) == pytest.approx({"CPU": each * fewer})
    with pytest.raises(ConfigError, match=message):
        check_capacity(cluster, workers, tp)


@pytest.mark.parametrize(
    ("nodes", "workers", "cores_each"),
    [
        ([("10.0.0.1", True, 4, 0), ("10.0.0.2", True, 96, 8), ("10.0.0.3", True, 32, 8)], (8, False), 4.0),
        ([("10.0.0.1", True, 8, 4), ("10.0.0.2", True, 64, 0)], (4, True), 2.0),  # the head's
        ([("10.0.0.1", True, 96, 8), ("10.0.0.2", False, 8, 8)], (8, True), 12.0),
        ([("10.0.0.1", True, 64, 0), ("10.0.0.2", True, 64, 0)], (2, False), 1.0),
    ],
)
def test_the_default_number_of_workers_is_of_the_cluster(
    nodes: list[tuple[str, bool, float, int]], workers: tuple[int, bool], cores_each: float,
    monkeypatch: pytest.MonkeyPatch,
):  # fmt: skip
    """The most GPUs of a node, and the fewest cores for each of a node with GPUs. What Ray answers stands in."""
    monkeypatch.setattr("ray.is_initialized", lambda: True)
    monkeypatch.setattr("ray.nodes", lambda: nodes_with(*nodes))
    monkeypatch.setattr("ray.util.get_node_ip_address", lambda: "10.0.0.1")
    assert running_cluster("10.0.0.1:6379") == RunningCluster(*workers)
    assert cpus_per_worker_on(nodes_with(*nodes)) == cores_each


def test_no_ray_at_an_address_is_told_before_a_file_is_written(tmp_path: Path):
    address = f"127.0.0.1:{free_port()}"
    done = run_cli(tmp_path, *PLAIN, f"cluster.address={address}", timeout=60)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
    assert done.returncode == 2 and "Traceback" not in done.stdout + done.stderr
    assert f"cluster.address={address}: no Ray cluster answers there" in done.stderr


@pytest.mark.parametrize(
    ("says", "problem"), [(b"", "sent nothing for 0.2 s"), (b"SSH-2.0-x\r\n", "something other than")]
)
def test_a_port_behind_which_is_no_ray_is_named_at_once(says: bytes, problem: str, monkeypatch: pytest.MonkeyPatch):
    """Ray itself tries for 330 s."""
    monkeypatch.setattr("fsdp_lab.engine.cluster._PROBE_TIMEOUT_S", 0.2)
    taken: list[socket.socket] = []
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        monkeypatch.setenv("RAY_ADDRESS", address)

        def take() -> None:
            for _ in range(2):
                taken.append(server.accept()[0])
                taken[-1].sendall(says)

        threading.Thread(target=take, daemon=True).start()
        for typed, named in ((address, ""), ("auto", f", which is {address} by RAY_ADDRESS")):
            with pytest.raises(UserError, match=f"^cluster.address={typed}{named}: no Ray .*{problem}") as refused:
                reachable(typed)
            assert ("unset RAY_ADDRESS" in str(refused.value)) == bool(named)


def test_the_last_cluster_of_this_machine_is_named_if_gone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("RAY_ADDRESS", "auto")
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    assert reachable("auto") == ("auto", "cluster.address=auto"), "Ray looks for one that runs here"
    (tmp_path / "ray").mkdir()
    (tmp_path / "ray" / "ray_current_cluster").write_text(address := f"127.0.0.1:{free_port()}")
    with pytest.raises(UserError, match=f"which is {address} by the last `ray start` on this machine: no Ray"):
        reachable("auto")


def test_the_ranks_of_the_node_are_ours_when_others_are_counted(monkeypatch: pytest.MonkeyPatch):
    """Otherwise the other ranks of a trial would count as others, and no speed under Ray would decide anything."""
    monkeypatch.setenv(WORKER_CPUS, "1.0")  # a worker of Ray, whose parent is the raylet
    assert [process.pid for process in launchers()] == [os.getppid()]
    monkeypatch.delenv(WORKER_CPUS)
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    assert [process.pid for process in launchers()] == [os.getpid()]


def test_a_job_whose_results_would_go_with_its_files_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """And a Ray of its own beside the cluster. Real jobs are in tests/cluster/test_jobs.py."""
    (files := tmp_path / "session_1" / "runtime_resources" / "working_dir_files" / "_ray_pkg_1").mkdir(parents=True)
    monkeypatch.chdir(files)
    of_job, elsewhere = ClusterConfig(address="auto", storage_path="storage"), TrackingConfig(uri="http://mlflow:5000")
    lost = SweepConfig(cluster=of_job, tracking=TrackingConfig(uri="sqlite:///outputs/mlflow.db"))
    kept = SweepConfig(cluster=ClusterConfig(address="auto", storage_path="s3://b/x"), tracking=elsewhere)
    check_job(lost, Path("outputs/x"), "hydra.sweep.dir")  # no job
    monkeypatch.setenv(JOB_VARIABLE, "{}")
    check_job(kept, Path("/shared/x"), "hydra.sweep.dir")
    with pytest.raises(ConfigError, match=r"storage_path=/.* hydra\.sweep\.dir=/.* tracking\.uri=sqlite:////"):
        check_job(lost, Path("outputs/x"), "hydra.sweep.dir")
    with pytest.raises(ConfigError, match=r"address=null starts a second Ray .*; add cluster\.address=auto"):
        check_job(SweepConfig(tracking=elsewhere), Path("/shared/x"), "hydra.sweep.dir")


def test_ray_has_each_name_as_we_use_it():
    lacking = [lacks for name in shortcut.NAMES if (lacks := name.lacks()) is not None]
    assert lacking == [], "trials run by the public way, which is slower: see fsdp_lab/engine/shortcut.py"
    assert len(shortcut.NAMES) <= 12


def test_a_ray_without_a_name_is_used_by_its_public_ones(monkeypatch: pytest.MonkeyPatch):
    """Or where a variable says so. Sweeps by the public way are in tests/cluster/test_nodes.py."""
    monkeypatch.delenv("FSDP_LAB_PUBLIC_RAY", raising=False)
    assert shortcut.unusable() is None
    names = shortcut.NAMES
    for name, lacking in {
        Name("ray.not_there", "Anything"): "ray.not_there.Anything",
        Name("ray.train", "RunConfig", ("name", "colour")): "ray.train.RunConfig(colour)",
    }.items():
        monkeypatch.setattr(shortcut, "NAMES", (*names, name))
        assert shortcut.unusable() == f"this Ray lacks {lacking}"
    monkeypatch.setenv("FSDP_LAB_PUBLIC_RAY", "1")
    assert shortcut.unusable() == "FSDP_LAB_PUBLIC_RAY is set"
