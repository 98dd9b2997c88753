"""A Ray that is started here is nobody else's, and neither are the ranks of its trials."""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil
import pytest

from fsdp_lab.engine.rendezvous import interface_of
from tests.processes import descendants
from tests.sweep.conftest import PLAIN, TINY, has_trained_an_epoch, ranks_of, started, wait_for

LOOPBACK = {"127.0.0.1", "::ffff:127.0.0.1", "::1"}

_LISTENERS = """
import psutil
from fsdp_lab.config.sweep import ClusterConfig
from fsdp_lab.engine.cluster import start_ray, stop_ray
start_ray(ClusterConfig())
family = [psutil.Process(), *psutil.Process().children(recursive=True)]
for process in family:
    for connection in process.net_connections(kind="inet"):
        if connection.status == "LISTEN":
            print(process.name(), connection.laddr.ip)
stop_ray()
"""


def test_every_server_of_a_local_ray_listens_on_the_loopback_only():
    out = subprocess.run([sys.executable, "-c", _LISTENERS], capture_output=True, text=True, timeout=120, check=True)
    addresses = {line.split()[-1] for line in out.stdout.splitlines()}
    assert addresses, out.stderr
    assert addresses <= LOOPBACK


_OTHERS = """
import os, ray, subprocess, sys
from fsdp_lab.config.sweep import ClusterConfig
from fsdp_lab.engine.cluster import start_ray, stop_ray
start_ray(ClusterConfig())
task = "print(ray.get(ray.remote(lambda: 'ran').remote()))"
exec(task)
run = f"import ray, sys; ray.init(address=sys.argv[1], logging_level='ERROR'); {task}"
context = ray.get_runtime_context()
session = ray._private.worker._global_node.get_session_dir_path()
token = os.environ["RAY_AUTH_TOKEN"]
grep = ["grep", "-rl", token, session, os.environ["HOME"]]
print("in files:" + subprocess.run(grep, capture_output=True, text=True).stdout)
own = {k: v for k, v in os.environ.items() if not k.startswith("RAY_AUTH")}
for others in ({}, {"RAY_AUTH_MODE": "token"}, {"RAY_AUTH_MODE": "disabled"}):
    command = [sys.executable, "-c", run, context.gcs_address]
    done = subprocess.run(command, capture_output=True, text=True, env=own | others)
    print("other:" + done.stdout.strip())
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


def listening(processes: list[psutil.Process]) -> set[tuple[str, str]]:
    """`(process, address)` of every socket that takes connections."""
    connections = [(p.name(), c) for p in processes for c in p.net_connections(kind="inet")]
    return {(name, c.laddr.ip) for name, c in connections if c.status == psutil.CONN_LISTEN}


@pytest.mark.timeout(300)
def test_no_rank_of_a_trial_listens_beyond_the_loopback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Neither PyTorch's store nor gloo. The file by which the ranks meet is nobody else's, and gone afterwards."""
    temporary = Path(short := tempfile.mkdtemp(prefix="t"))  # Ray's sockets lie in it: their paths have to be short
    monkeypatch.setenv("TMPDIR", short)
    long = (
        *PLAIN,
        *TINY,
        "training.epochs=300",
        "checkpoint.mode=async",
        "checkpoint.every_epochs=100",
        "forecast.enabled=false",
    )
    with started(tmp_path, *long) as process:
        wait_for(lambda: has_trained_an_epoch(tmp_path / "out"), process, 240)
        assert len(ranks_of(process)) == 2
        result = listening([psutil.Process(process.pid), *descendants(process.pid)])
        (folder,) = temporary.glob("fsdp_lab_*")
        (inside,) = (path for path in folder.iterdir() if path.is_dir())  # of the trial; the rest is a socket
        assert len(list(inside.iterdir())) == 1 and folder.stat().st_mode & 0o777 == 0o700
        process.send_signal(2)
        process.communicate(timeout=60)
    assert {"rank0", "rank1"} <= {name for name, _ in result}, "the ranks were looked at"
    assert {address for _, address in result} <= LOOPBACK, result
    assert not list(temporary.glob("fsdp_lab_*"))
    shutil.rmtree(temporary, ignore_errors=True)


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
def test_a_group_of_one_listens_nowhere_beyond_the_loopback(launched: bool):
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK")
    environment = {key: value for key, value in os.environ.items() if key not in names}
    environment |= {"RANK": "0", "WORLD_SIZE": "1"} if launched else {}
    out = subprocess.run(
        [sys.executable, "-c", _ALONE], capture_output=True, text=True, timeout=120, check=True, env=environment
    )
    alone, *addresses = out.stdout.splitlines()
    assert alone == "0 1"
    assert set(addresses) <= LOOPBACK


_BY_PORT = """
import os, psutil, torch, torch.distributed as dist
from fsdp_lab.engine import rendezvous
from fsdp_lab.training.distributed import join_by_tcp_store
address, port = rendezvous.open_port(one_node=True)
rendezvous.set_interface(address)
join_by_tcp_store(address, port, rendezvous._port.pop().detach(), "gloo", 0, 1, 20.0)
dist.all_reduce(torch.ones(1), group=dist.new_group(backend="gloo"))
print(os.environ["GLOO_SOCKET_IFNAME"], os.environ["NCCL_SOCKET_IFNAME"])
for connection in psutil.Process().net_connections(kind="inet"):
    if connection.status == "LISTEN":
        print(connection.laddr.ip, connection.laddr.port == port)
"""


@pytest.mark.parametrize("chosen", [None, "lo,eth9"])
def test_ranks_on_one_other_node_meet_at_its_loopback(chosen: str | None):
    """PyTorch's store takes the socket that is made for it; an interface that the user names stays."""
    environment = {key: value for key, value in os.environ.items() if not key.endswith("_SOCKET_IFNAME")}
    environment |= {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": chosen} if chosen else {}
    out = subprocess.run(
        [sys.executable, "-c", _BY_PORT], capture_output=True, text=True, timeout=120, check=True, env=environment
    )
    interfaces, *result = out.stdout.splitlines()
    assert interfaces == f"lo {chosen or '=lo'}"
    assert "127.0.0.1 True" in result
    assert {line.split()[0] for line in result} <= LOOPBACK


def test_the_interface_is_the_one_that_has_the_address():
    assert interface_of("127.0.0.1") in ("lo", "lo0")
    assert interface_of("192.0.2.1") is None, "behind address translation no interface has the node's address"
