"""What the cluster can hold: refused when it never can, told when it has to wait."""

from __future__ import annotations

import os
import secrets
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from fsdp_lab.config import ConfigError, UserError
from fsdp_lab.config.machine import RunningCluster
from fsdp_lab.config.sweep import ClusterConfig, Placement
from fsdp_lab.engine import cluster as cluster_module
from fsdp_lab.engine.cluster import code_environment, reachable, running_cluster
from fsdp_lab.engine.resources import check_capacity, cpus_per_worker_on, resolve_cpus_per_worker
from fsdp_lab.machine.cpu_contention import launchers
from fsdp_lab.machine.hardware import WORKER_CPUS
from tests.conftest import PLAIN, ROOT, TINY, run_cli
from tests.engine.ray_cluster import process_tree, ray_head
from tests.servers import free_port
from tests.sweep.conftest import results, started, wait_for
from tests.workloads.user.project import write_project


def test_more_than_the_cluster_has_is_refused_with_both_numbers(monkeypatch: pytest.MonkeyPatch):
    """The answers of a Ray with one core stand in."""
    rays_with(monkeypatch, 1.0)
    assert check_capacity(ClusterConfig(cpus_per_worker=0.5), 2) == {"CPU": 1.0}
    assert check_capacity(ClusterConfig(cpus_per_worker=0.25), 1) == {"CPU": 0.25}
    assert resolve_cpus_per_worker(ClusterConfig()) == 1.0
    message = "cluster.num_workers=2 with 1 CPU each: the cluster's nodes hold 1 .* use cluster.num_workers=1, a"
    with pytest.raises(ConfigError, match=message):
        check_capacity(ClusterConfig(), 2)


def test_workers_of_which_each_fits_no_node_are_refused(monkeypatch: pytest.MonkeyPatch):
    """The answers of a Ray with nodes of eight and two cores stand in: ten in all, and one of them holds five."""
    rays_with(monkeypatch, 8.0, 2.0)
    shared = {"storage_path": "/shared"}
    assert check_capacity(ClusterConfig(cpus_per_worker=2, **shared), 5) == {"CPU": 10.0}
    assert check_capacity(ClusterConfig(cpus_per_worker=1 / 3, **shared), 30)
    with pytest.raises(ConfigError, match=r"num_workers=2 with 5 CPU each: .* hold 1 of .* use .*num_workers=1, a"):
        check_capacity(ClusterConfig(cpus_per_worker=5, **shared), 2)
    packed = ClusterConfig(cpus_per_worker=2, placement=Placement.strict_pack, **shared)
    assert check_capacity(packed, 4) == {"CPU": 8.0}
    with pytest.raises(ConfigError, match=r"strict_pack .*num_workers=5: no node holds more than 4 .* use .*=4, or"):
        check_capacity(packed, 5)


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [
        ([("10.0.0.1", True, 0), ("10.0.0.2", True, 8)], RunningCluster(8, False)),
        (
            [("10.0.0.1", True, 4), ("10.0.0.2", True, 0)],
            RunningCluster(4, True),
        ),  # the head's
        ([("10.0.0.1", True, 4), ("10.0.0.2", False, 8)], RunningCluster(4, True)),
        ([("10.0.0.1", True, 2), ("10.0.0.2", True, 4)], RunningCluster(4, False)),
        ([("10.0.0.1", True, 0), ("10.0.0.2", True, 0)], RunningCluster(2, False)),
    ],
)
def test_the_default_number_of_workers_is_of_the_cluster(
    monkeypatch: pytest.MonkeyPatch, nodes: list[tuple[str, bool, int]], expected: RunningCluster
):
    """What a connected Ray answers stands in."""
    rays = [
        {"NodeManagerAddress": address, "Alive": alive, "Resources": {"CPU": 8.0} | ({"GPU": gpu} if gpu else {})}
        for address, alive, gpu in nodes
    ]
    monkeypatch.setattr("ray.is_initialized", lambda: True)
    monkeypatch.setattr("ray.nodes", lambda: rays)
    monkeypatch.setattr("ray.util.get_node_ip_address", lambda: "10.0.0.1")
    assert running_cluster("10.0.0.1:6379") == expected
    with pytest.raises(ConfigError, match="do not run through Ray Client"):
        running_cluster("ray://10.0.0.1:10001")


@pytest.mark.ci
def test_a_sweep_is_planned_for_the_workers_of_the_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """It has eight GPUs by name, and this machine none."""
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    words = ("-m", *PLAIN, "sharding.dp_replicate=2,3,8", "training.global_batch_size=${per_worker:4},30")
    with ray_head(gpus=8) as (address, _):
        done = run_cli(tmp_path, *words, f"cluster.address={address}", "dry_run=true")
        typed = run_cli(tmp_path, *words, f"cluster.address={address}", "dry_run=true", "cluster.num_workers=6")
    assert (done.returncode, typed.returncode) == (0, 0), done.stderr + typed.stderr
    assert [line.split()[1:] for line in done.stdout.splitlines() if line.startswith("  ")] == [
        [f"sharding.dp_replicate={replicas}", "training.global_batch_size=32"] for replicas in (2, 8)
    ]
    assert "left out 2: sharding.dp_replicate=3 does not divide cluster.num_workers=8" in done.stdout
    assert "asking Ray" not in typed.stdout and "dp_replicate=8 does not divide cluster.num_workers=6" in typed.stdout


def test_a_cluster_that_does_not_answer_is_named_before_anything_is_composed(tmp_path: Path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and nothing listens
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        done = run_cli(tmp_path, "-m", *PLAIN, "training.epochs=1,2", f"cluster.address={address}", "dry_run=true")
    assert done.returncode == 2
    assert f"cluster.address={address}: no Ray cluster answers there" in done.stderr


def rays_with(monkeypatch: pytest.MonkeyPatch, *cores: float) -> None:
    known = [{"Alive": True, "Resources": {"CPU": each}} for each in cores]
    monkeypatch.setattr("ray.nodes", lambda: known)
    monkeypatch.setattr("ray.cluster_resources", lambda: {"CPU": sum(cores)})


@pytest.mark.parametrize(
    ("nodes", "each"),
    [
        ([(True, 64, 0)], 1.0),
        ([(True, 96, 8)], 12.0),
        ([(True, 4, 0), (True, 96, 8), (True, 32, 8)], 4.0),  # the head's cores are no worker's
        ([(True, 96, 8), (False, 8, 8)], 12.0),
        ([], 1.0),
    ],
)
def test_cpus_per_worker_by_the_nodes(nodes: list[tuple[bool, int, int]], each: float):
    """As `ray.nodes()` has them; a node without GPUs has no such key."""
    rays = [
        {"Alive": alive, "Resources": {"CPU": float(cpu), "memory": 1e9} | ({"GPU": float(gpu)} if gpu else {})}
        for alive, cpu, gpu in nodes
    ]
    assert cpus_per_worker_on(rays) == each


_START = """
import os, ray, sys
from fsdp_lab.machine import hardware
from fsdp_lab.config.sweep import ClusterConfig
from fsdp_lab.engine.cluster import _own_folders, start_ray, stop_ray
from fsdp_lab.engine.resources import num_gpus
hardware.num_gpus = lambda: int(sys.argv[1])
start_ray(ClusterConfig())
print("GPUs:", num_gpus())
print("nicer by:", ray.get(ray.remote(lambda: os.nice(0)).remote()) - os.nice(0))
(folder,) = _own_folders
assert (folder / "logs").is_dir()
stop_ray()
assert not folder.exists(), "temporary files stay"
"""


_DOES_NOT_START = """
import ray
from fsdp_lab.config.sweep import ClusterConfig
from fsdp_lab.engine.cluster import UserError, start_ray
def fails(*words, **settings):
    raise Exception("The current node timed out during startup.\\nMore")
ray.init = fails
try:
    start_ray(ClusterConfig())
except UserError as error:
    print(error)
"""


@pytest.mark.ci
def test_a_ray_that_does_not_start_is_named_with_what_to_do():
    """Its error stands in for a machine on which Ray's servers take longer than Ray waits."""
    done = subprocess.run([sys.executable, "-c", _DOES_NOT_START], capture_output=True, text=True, check=True)
    assert "Ray did not start on this machine (The current node timed out during startup.); see what" in done.stdout


@pytest.mark.full
@pytest.mark.timeout(120)
@pytest.mark.parametrize(("visible", "count"), [(None, 2), ("1,7", 1)])
def test_ray_here_has_the_gpus_that_we_count(visible: str | None, count: int):
    """Of two. Left to itself Ray takes the entries of CUDA_VISIBLE_DEVICES as they are, and counts two for `1,7`."""
    environment = dict(os.environ)
    environment.pop("CUDA_VISIBLE_DEVICES", None)
    if visible is not None:
        environment["CUDA_VISIBLE_DEVICES"] = visible
    done = subprocess.run(
        [sys.executable, "-c", _START, str(count)],
        env=environment, capture_output=True, text=True, timeout=110, check=False,
    )  # fmt: skip
    assert f"GPUs: {count}" in done.stdout, done.stderr
    assert "nicer by: 0" in done.stdout, "trials wait for whatever else the machine does"
    assert done.returncode == 0, done.stderr


_LOSE_A_SERVER = """
import shutil, sys, time, psutil
from fsdp_lab.config.sweep import ClusterConfig
from fsdp_lab.engine.cluster import _own_folders, lost_server, start_ray, stop_ray
start_ray(ClusterConfig())
assert lost_server() is None
(folder,) = _own_folders
server = next(child for child in psutil.Process().children() if child.name() == sys.argv[1])
server.kill()
while server.is_running() and server.status() != psutil.STATUS_ZOMBIE:
    time.sleep(0.01)
print("lost:", lost_server(), flush=True)
stop_ray()
print("after:", lost_server())
assert (folder / "logs").is_dir(), "what its logs say is lost"
shutil.rmtree(folder)
"""


@pytest.mark.full
@pytest.mark.timeout(120)
@pytest.mark.parametrize("server", [pytest.param("raylet", marks=pytest.mark.full), "gcs_server"])
def test_a_server_of_rays_that_ended_is_named(server: str):
    """And what it wrote is kept. A sweep whose raylet is killed is in `tests/sweep/test_chaos.py`."""
    done = subprocess.run(
        [sys.executable, "-c", _LOSE_A_SERVER, server], capture_output=True, text=True, timeout=110, check=False
    )
    assert f"lost: {server}" in done.stdout, done.stderr
    assert done.returncode == 0, done.stderr


_WITH_A_GPU = """
from fsdp_lab.machine import hardware
from fsdp_lab.commands.main import main
hardware._ask_pytorch = lambda visible: ((hardware.Gpu("NVIDIA H200", 2**37, (9, 0)),), "")
main()
"""


@pytest.mark.full
@pytest.mark.skipif(torch.cuda.is_available() or not torch.version.cuda, reason="it takes CUDA without a GPU")
def test_a_trial_whose_gpu_pytorch_does_not_see_says_so(tmp_path: Path):
    """Ray places the worker on a GPU that is not there: told before NCCL fails on it, and not tried again."""
    words = (*PLAIN, "model=mlp", "forecast.enabled=false", "hydra.run.dir=out")
    command = [sys.executable, "-c", _WITH_A_GPU, *words]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 1, done.stderr
    assert done.stdout.count("trial starts") == 1
    assert "was given a GPU and PyTorch sees none: torch.cuda.is_available() is False" in done.stdout


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The address of a Ray cluster with two cores that does not belong to the trial. Ray asks who comes for a
    token: all that this test starts get one of its own."""
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN", secrets.token_hex(32))
    with ray_head() as (address, _):
        yield address


_HOLD_EVERY_CORE = """
import sys, time, ray
ray.init(address=sys.argv[1], logging_level="ERROR", log_to_driver=False)
@ray.remote(num_cpus=2)
class Holder:
    def hold(self): return True
holder = Holder.remote()
print(ray.get(holder.hold.remote()), flush=True)
time.sleep(300)
"""


@pytest.mark.full
@pytest.mark.timeout(300)
def test_a_trial_on_a_busy_cluster_says_what_it_waits_for_and_then_runs(cluster: str, tmp_path: Path):
    arguments = (*PLAIN, *TINY, "training.max_steps=2", f"cluster.address={cluster}")
    with process_tree(sys.executable, "-c", _HOLD_EVERY_CORE, cluster) as holder:
        assert holder.stdout and holder.stdout.readline().strip() == "True"
        with started(tmp_path, *arguments) as process:
            assert process.stdout
            os.set_blocking(process.stdout.fileno(), False)
            printed = ""

            def waits() -> bool:
                nonlocal printed
                with suppress(BlockingIOError):
                    printed += os.read(process.stdout.fileno(), 65536).decode()  # type: ignore[union-attr]
                return "waits for" in printed and "\n" in printed.partition("waits for")[2]

            wait_for(waits, process, 120)
            assert "waits for 2 CPU;" in printed
            assert "cluster.wait_timeout_s=600" in printed
            holder.kill()  # its actor goes with it, and the cores are free
            wait_for(lambda: (tmp_path / "out" / "model.pt").exists(), process, 120)
            process.wait(60)
    assert process.returncode == 0
    assert results(tmp_path)[0]["status"] == "finished"


def left_in(folder: Path) -> list[str]:
    """The files of a sweep; Hydra makes the folder of a trial alone before it calls us."""
    result = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    return [str(path) for path in result if path.parts[0] not in (".cache", ".config")]


@pytest.mark.full
@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    ("environment", "given"),
    [({"RAY_AUTH_MODE": "disabled"}, "none was given"), ({"RAY_AUTH_TOKEN": "0" * 64}, "does not match")],
)
def test_a_cluster_that_wants_another_token_is_reported_and_nothing_else(
    cluster: str, cli, monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], given: str, tmp_path: Path
):
    monkeypatch.setenv("HOME", str(tmp_path))  # somebody's own may have a token
    if "RAY_AUTH_TOKEN" not in environment:
        monkeypatch.delenv("RAY_AUTH_TOKEN")
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    done = cli(*PLAIN, f"cluster.address={cluster}", "forecast.enabled=false", timeout=120)
    assert done.returncode in (1, 2)
    assert f"cluster.address={cluster}: this Ray cluster asks for an authentication token, and" in done.stderr
    assert given in done.stderr and "RAY_AUTH_TOKEN" in done.stderr
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert left_in(tmp_path) == []


@pytest.mark.timeout(120)
@pytest.mark.parametrize("more", [(), ("-m", "optimizer.lr=1e-3,1e-2")])
def test_a_cluster_that_is_not_there_is_reported_before_anything_is_written(cli, tmp_path: Path, more: tuple[str, ...]):
    address = f"127.0.0.1:{free_port()}"
    done = cli(*PLAIN, *more, f"cluster.address={address}", timeout=60)
    assert left_in(tmp_path) == []
    assert done.returncode in (1, 2)
    assert f"cluster.address={address}: no Ray cluster answers there" in done.stderr
    assert "ray start --head" in done.stderr
    assert "Traceback" not in done.stdout + done.stderr


@pytest.mark.parametrize(
    ("says", "problem"),
    [(None, "it takes connections, and says nothing for 0.2 s"), (b"SSH-2.0-x\r\n", "something else than Ray")],
)
@pytest.mark.parametrize("by_variable", [False, True])
def test_a_port_behind_which_is_no_ray_is_named_at_once(
    monkeypatch: pytest.MonkeyPatch, says: bytes | None, problem: str, by_variable: bool
):
    """Ray itself tries for 330 s."""
    monkeypatch.setattr(cluster_module, "_PROBE_TIMEOUT_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as server:
        address, taken = f"127.0.0.1:{server.getsockname()[1]}", list[socket.socket]()

        def take() -> None:
            taken.append(server.accept()[0])
            taken[0].sendall(says or b"")

        threading.Thread(target=take, daemon=True).start()
        if by_variable:
            monkeypatch.setenv("RAY_ADDRESS", address)
        with pytest.raises(UserError, match=problem) as refused:
            reachable("auto" if by_variable else address)
    named = f"cluster.address=auto, which is {address} by RAY_ADDRESS: no Ray cluster answers there"
    assert (named if by_variable else f"cluster.address={address}: no Ray") in str(refused.value)
    assert ("unset RAY_ADDRESS" in str(refused.value)) is by_variable
    taken[0].close()


@pytest.mark.parametrize("value", ["ray://127.0.0.1:10001", "local", "127.0.0.1"])
def test_an_address_of_another_kind_is_refused(monkeypatch: pytest.MonkeyPatch, value: str):
    monkeypatch.setenv("RAY_ADDRESS", value)
    with pytest.raises(UserError, match="an address is <host>:<port>"):
        reachable("auto")


@pytest.mark.parametrize("by_variable", ["", "auto"])
def test_the_last_cluster_of_this_machine_is_named_where_it_is_gone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, by_variable: str
):
    monkeypatch.setenv("RAY_ADDRESS", by_variable)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    assert reachable("auto") == ("auto", "cluster.address=auto"), "Ray looks for one that runs here"
    (tmp_path / "ray").mkdir()
    (tmp_path / "ray" / "ray_current_cluster").write_text(address := f"127.0.0.1:{free_port()}")
    with pytest.raises(UserError, match=f"which is {address} by the last `ray start` on this machine: no Ray"):
        reachable("auto")


_ELSEWHERE = """
import sys
import ray
from fsdp_lab.config.sweep import ClusterConfig
from fsdp_lab.engine.cluster import start_ray, stop_ray

@ray.remote(num_cpus=1)
def where():
    import my_project.data
    return my_project.data.__file__

start_ray(ClusterConfig(address=sys.argv[1]), ["my_project.net.Net", "torch.nn.Linear"])
print("there:", ray.get(where.remote(), timeout=60))
stop_ray()
"""


@pytest.mark.ci
def test_the_users_code_reaches_a_cluster(cluster: str, tmp_path: Path):
    """Its workers know neither the folder that the driver works in nor the driver's PYTHONPATH."""
    write_project(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    done = subprocess.run(
        [sys.executable, "-c", _ELSEWHERE, cluster],
        cwd=tmp_path / "elsewhere", env=environment, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert "there: " in done.stdout, done.stderr
    assert str(tmp_path) not in done.stdout, "it is a copy"


def test_code_of_ours_and_of_others_needs_no_environment():
    assert code_environment(["torch.nn.Linear", "fsdp_lab.workloads.user.task.model_loss"]) is None


def test_the_ranks_of_the_node_are_ours_when_others_are_counted(monkeypatch: pytest.MonkeyPatch):
    """Otherwise the other ranks of a trial would count as others, and no speed under Ray would decide anything."""
    monkeypatch.setenv(WORKER_CPUS, "1.0")  # a worker of Ray, whose parent is the raylet
    assert [process.pid for process in launchers()] == [os.getppid()]
    monkeypatch.delenv(WORKER_CPUS)
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    assert [process.pid for process in launchers()] == [os.getpid()]


_GROUPS = """
from pathlib import Path
from fsdp_lab.config.sweep import ClusterConfig
from fsdp_lab.engine.cluster import start_ray, stop_ray
from fsdp_lab.engine.resources import mark_of, release_placement_group
start_ray(ClusterConfig())
import ray
from ray.util import placement_group, placement_group_table

def states():
    return [placement_group_table(group)["state"] for group in groups]

def workers(folder, cpus):
    return placement_group([{"CPU": cpus, "memory": mark_of(Path(folder))}] * 2)

groups = [workers("one", 0.01), workers("two", 0.01), placement_group([{"memory": 1}])]
ray.get([group.ready() for group in groups])
groups.append(workers("two", 10000))
release_placement_group(Path("two"))
release_placement_group(Path("two"))
print(*states())
stop_ray()
"""


@pytest.mark.ci
@pytest.mark.timeout(120)
def test_what_a_trial_holds_or_waits_for_is_freed_and_nothing_else(tmp_path: Path):
    """Whoever asked for it, and though nobody has told its name."""
    done = subprocess.run(
        [sys.executable, "-c", _GROUPS], cwd=tmp_path, capture_output=True, text=True, timeout=110, check=True
    )
    assert done.stdout.split() == ["CREATED", "REMOVED", "CREATED", "REMOVED"], done.stderr
