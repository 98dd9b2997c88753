"""Real Rays on this machine: who may use them, what they count, and the code that reaches their workers."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
from pathlib import Path

import pytest

from tests import forked
from tests.conftest import PLAIN, ROOT, run_cli
from tests.servers import ray_head
from tests.workloads.user.project import write_project

LOOPBACK = {"127.0.0.1", "::ffff:127.0.0.1", "::1"}
_OTHERS = """
import os, ray, subprocess, sys
from fsdp_lab.config.sweep import ClusterConfig
from fsdp_lab.engine.cluster import _own_folders, start_ray, stop_ray
start_ray(ClusterConfig())
task = "print(ray.get(ray.remote(lambda: 'ran').remote()))"
exec(task)
run = f"import ray, sys; ray.init(address=sys.argv[1], logging_level='ERROR'); {task}"
context = ray.get_runtime_context()
(session,) = map(str, _own_folders)
token = os.environ["RAY_AUTH_TOKEN"]
grep = ["grep", "-rl", token, session, os.environ["HOME"]]
print("in files:" + subprocess.run(grep, capture_output=True, text=True).stdout)
own = {k: v for k, v in os.environ.items() if not k.startswith("RAY_AUTH")}
command = [sys.executable, "-c", run, context.gcs_address]
started = [
    subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=own | others)
    for others in ({}, {"RAY_AUTH_MODE": "token"}, {"RAY_AUTH_MODE": "disabled"})
]
for process in started:
    print("other:" + process.communicate()[0].strip())
stop_ray()
"""


@pytest.mark.ci
@pytest.mark.timeout(300)
def test_nobody_runs_a_task_on_a_local_ray_without_its_token(tmp_path: Path):
    """Not even one who can read what Ray left in the home folder; and the token itself is in no file."""
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray" / "auth_token").write_text("0" * 64)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_AUTH")}
    done = forked.run(tmp_path, "-c", _OTHERS, environment={**environment, "HOME": str(tmp_path)})
    assert done.stdout.split("\n") == ["ran", "in files:", "other:", "other:", "other:", ""], done.stderr


_PRINT_LISTENING = """
for connection in psutil.Process().net_connections(kind="inet"):
    if connection.status == "LISTEN":
        print(connection.laddr.ip)
"""
_ALONE = """
import psutil, torch, torch.distributed as dist
from fsdp_lab.training.distributed import setup_distributed
ranks = setup_distributed()
dist.all_reduce(torch.ones(1), group=dist.new_group(backend="gloo"))
print(ranks.rank, ranks.world_size)
"""
_JOINED = """
import errno, os, psutil, socket, torch, torch.distributed as dist
from fsdp_lab.engine.rendezvous import keep_port, set_interface
from fsdp_lab.training.distributed import join_process_group
set_interface("127.0.0.1")
os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(keep_port()), RANK="0", WORLD_SIZE="1")
try:
    socket.socket().bind(("", int(os.environ["MASTER_PORT"])))  # as a connection would be
except OSError as error:
    print(errno.errorcode[error.errno], end=" ")
join_process_group("gloo")
dist.all_reduce(torch.ones(1), group=dist.new_group(backend="gloo"))
print(os.environ["GLOO_SOCKET_IFNAME"], os.environ["NCCL_SOCKET_IFNAME"])
"""


@pytest.mark.parametrize(
    ("ranks", "variables", "first_line"),
    [
        (_ALONE, {}, "0 1"),
        (_ALONE, {"RANK": "0", "WORLD_SIZE": "1"}, "0 1"),
        (_JOINED, {}, "EADDRINUSE lo =lo"),  # by which Ray knows the node
        # as the user names it
        (_JOINED, {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo,eth9"}, "EADDRINUSE lo lo,eth9"),
    ],
)
def test_ranks_listen_only_on_the_interface_of_their_node(
    ranks: str, variables: dict[str, str], first_line: str, tmp_path: Path
):
    """The loopback stands for the node's address; a group of one listens nowhere else. Its port is kept for it."""
    launched = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK")
    kept = {k: v for k, v in os.environ.items() if k not in launched and not k.endswith("_SOCKET_IFNAME")}
    out = forked.run(tmp_path, "-c", ranks + _PRINT_LISTENING, environment=kept | variables)
    first, *addresses = out.stdout.splitlines() or [out.stderr]
    assert first == first_line
    assert set(addresses) <= LOOPBACK


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


_ELSEWHERE = """
import sys
import ray
from fsdp_lab.config.sweep import ClusterConfig
from fsdp_lab.engine.cluster import start_ray, stop_ray

@ray.remote(num_cpus=1)
def where():
    import my_project.data
    return my_project.data.__file__, hash("word")

start_ray(ClusterConfig(address=sys.argv[1]), ["my_project.net.Net", "torch.nn.Linear"])
print("there:", *ray.get(where.remote(), timeout=60))
stop_ray()
"""


@pytest.mark.ci
def test_the_users_code_reaches_a_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Its workers know neither the driver's folder nor its PYTHONPATH. They have one hash seed."""
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN", secrets.token_hex(32))
    write_project(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    with ray_head() as (address, _):
        environment = {**os.environ, "PYTHONPATH": path}
        done = forked.run(tmp_path / "elsewhere", "-c", _ELSEWHERE, address, environment=environment)
    assert "there: " in done.stdout, done.stderr
    assert str(tmp_path) not in done.stdout, "it is a copy"
    command = [sys.executable, "-c", "print(hash('word'))"]
    seeded = subprocess.run(command, env={"PYTHONHASHSEED": "0"}, capture_output=True, text=True, check=True)
    assert done.stdout.split()[-1] == seeded.stdout.strip()
