"""A Ray that is started here is nobody else's. A whole sweep is in tests/sweep/test_fates.py."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import forked

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
    environment = {k: v for k, v in os.environ.items() if not k.startswith("RAY_AUTH")} | {"HOME": str(tmp_path)}
    out = subprocess.run(
        [sys.executable, "-c", _OTHERS], capture_output=True, text=True, timeout=240, check=True, env=environment
    )
    assert out.stdout.split("\n") == ["ran", "in files:", "other:", "other:", "other:", ""], out.stderr


_ALONE = """
import psutil, torch, torch.distributed as dist
from fsdp_lab.training.distributed import setup_distributed
ranks = setup_distributed()
group = dist.new_group(backend="gloo")
dist.barrier()
dist.all_reduce(torch.ones(1), group=group)
print(ranks.rank, ranks.world_size)
for connection in psutil.Process().net_connections(kind="inet"):
    if connection.status == "LISTEN":
        print(connection.laddr.ip)
"""


@pytest.mark.parametrize("launched", [False, True])
def test_a_group_of_one_listens_nowhere_beyond_the_loopback(launched: bool, tmp_path: Path):
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK")
    environment = {key: value for key, value in os.environ.items() if key not in names}
    environment |= {"RANK": "0", "WORLD_SIZE": "1"} if launched else {}
    out = forked.run(tmp_path, "-c", _ALONE, environment=environment)
    alone, *addresses = out.stdout.splitlines() or [out.stderr]
    assert alone == "0 1"
    assert set(addresses) <= LOOPBACK


_JOINED = """
import os, psutil, torch, torch.distributed as dist
from fsdp_lab.engine.rendezvous import free_port, set_interface
from fsdp_lab.training.distributed import join_process_group
set_interface("127.0.0.1")
os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()), RANK="0", WORLD_SIZE="1")
join_process_group("gloo")
dist.all_reduce(torch.ones(1), group=dist.new_group(backend="gloo"))
print(os.environ["GLOO_SOCKET_IFNAME"], os.environ["NCCL_SOCKET_IFNAME"])
for connection in psutil.Process().net_connections(kind="inet"):
    if connection.status == "LISTEN":
        print(connection.laddr.ip)
"""


@pytest.mark.parametrize("chosen", [None, "lo,eth9"])
def test_ranks_use_the_interface_by_which_ray_knows_their_node(chosen: str | None, tmp_path: Path):
    """The loopback stands for the node's address. An interface that the user names stays."""
    environment = {key: value for key, value in os.environ.items() if not key.endswith("_SOCKET_IFNAME")}
    environment |= {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": chosen} if chosen else {}
    out = forked.run(tmp_path, "-c", _JOINED, environment=environment)
    interfaces, *addresses = out.stdout.splitlines() or [out.stderr]
    assert interfaces == f"lo {chosen or '=lo'}"
    assert set(addresses) <= LOOPBACK
