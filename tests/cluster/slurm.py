"""Slurm on one machine: munge, a controller, and a `slurmd` in each of two network namespaces, with processes of its
own, as on a node of its own."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tests.cluster.namespaces import Node, two_namespaces
from tests.cluster.namespaces import why_not as why_no_namespaces
from tests.servers import server

_START_S = 90
_PROGRAMS = ("sbatch", "slurmctld", "slurmd", "munged")


def why_not() -> str:
    """Why Slurm cannot run here; "" where it can."""
    if missing := [name for name in _PROGRAMS if shutil.which(name, path=_path()) is None]:
        return f"Slurm needs {', '.join(missing)}: as root, make .venv/.cluster installs slurm-wlm and munge"
    return why_no_namespaces()


def _path() -> str:
    """Where programs are, with those of daemons."""
    return f"{os.environ['PATH']}:/usr/sbin:/sbin"


class Slurm:
    """A running Slurm; commands are typed on its first node's network, by the user of the tests."""

    def __init__(self, nodes: list[Node], folder: Path) -> None:
        self.nodes, self.folder = nodes, folder
        # what is inherited by a job is what a login shell would have
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "RAY_", "PYTEST_"))}
        self.environment = {**kept, "SLURM_CONF": str(folder / "slurm.conf"), "OMP_NUM_THREADS": "1"}

    def run(self, folder: Path, *command: str, seconds: float = 100) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.nodes[0].command(*command), cwd=folder, env=self.environment, capture_output=True, text=True,
            timeout=seconds, check=False,
        )  # fmt: skip

    def state(self, job: str) -> str:
        """As `COMPLETED`, `RUNNING`, `CANCELLED`."""
        shown = self.run(self.folder, "scontrol", "--oneliner", "show", "job", job).stdout
        return next((word.partition("=")[2] for word in shown.split() if word.startswith("JobState=")), "")

    def wait_idle(self) -> None:
        """Until no process of a job is left."""
        end = time.monotonic() + _START_S + 10
        while self.run(self.folder, "sinfo", "--noheader", "--format=%t %D").stdout.split() != ["idle", "2"]:
            logs = "".join(file.read_text() for file in self.folder.glob("*.log"))
            assert time.monotonic() < end, f"Slurm's nodes are not free: {logs}"
            time.sleep(0.3)

    def wait(self, job: str, *states: str, log: Path, seconds: float = 400) -> None:
        end = time.monotonic() + seconds
        while (state := self.state(job)) not in states:
            output = log.read_text() if log.exists() else "no log"
            assert time.monotonic() < end and state != "FAILED", f"job {job} is {state}: {output}"
            time.sleep(0.3)


def configuration(nodes: Sequence[Node], folder: Path) -> str:
    host, lines = socket.gethostname(), []
    for number, node in enumerate(nodes, 1):
        lines.append(f"NodeName=n{number} NodeHostname={host} NodeAddr={node.address} CPUs={node.cpus} RealMemory=2000")
    return "\n".join([
        "ClusterName=lab", f"SlurmctldHost={host}({nodes[0].address})", "SlurmctldPort=7817", "SlurmdPort=7818",
        "SlurmUser=root", "SlurmdUser=root", "AuthType=auth/munge", "CredType=cred/munge",
        # a job that was requeued waits for its credential to expire: 120 s otherwise
        f"AuthInfo=socket={folder}/munge/socket,cred_expire=5",
        f"StateSaveLocation={folder}/state", f"SlurmdSpoolDir={folder}/spool.%n", f"SlurmctldPidFile={folder}/ctld.pid",
        f"SlurmdPidFile={folder}/slurmd.%n.pid", f"SlurmctldLogFile={folder}/ctld.log",
        f"SlurmdLogFile={folder}/slurmd.%n.log", "ProctrackType=proctrack/linuxproc", "TaskPlugin=task/none",
        "JobAcctGatherType=jobacct_gather/none", "SlurmdParameters=config_overrides", "SelectType=select/cons_tres",
        "SelectTypeParameters=CR_Core", "ReturnToService=2", "SchedulerParameters=sched_interval=1,batch_sched_delay=0",
        "MpiDefault=none", "SwitchType=switch/none", *lines,
        "PartitionName=lab Nodes=ALL Default=YES MaxTime=INFINITE State=UP", "",
    ])  # fmt: skip


@contextmanager
def slurm() -> Iterator[Slurm]:
    """Two nodes, of three cores and of two as far as Slurm knows."""
    with ExitStack() as stack:
        nodes = stack.enter_context(two_namespaces())
        folder = Path(tempfile.mkdtemp(prefix="fs"))
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        folder.chmod(0o755)
        (folder / "slurm.conf").write_text(configuration(nodes, folder))
        (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")  # `ip netns exec` shows none to detect
        (folder / "state").mkdir()
        lab = Slurm(nodes, folder)

        def start(name: str, *command: str, is_ready: Callable[[], bool] = lambda: True) -> None:
            stack.enter_context(server(folder, name, command, is_ready, {**lab.environment, "PATH": _path()}))

        start("munged", *munge(folder / "munge"), is_ready=(folder / "munge" / "socket").exists)
        start("controller", *nodes[0].command("slurmctld", "-D"))
        for number, node in enumerate(nodes, 1):
            (folder / f"spool.n{number}").mkdir()
            start(f"node{number}", *as_node(node, f"n{number}"))
        lab.wait_idle()
        yield lab


def as_node(node: Node, name: str) -> list[str]:
    """`slurmd` with its own processes and /tmp/ray, by a shell that takes in orphans; all of it ends with it."""
    script = f"mkdir -p /tmp/ray && mount -t tmpfs tmpfs /tmp/ray && (slurmd -D -N {name} & wait)"
    return node.command("unshare", "--pid", "--mount", "--mount-proc", "--fork", "--kill-child", "sh", "-c", script)


def munge(folder: Path) -> list[str]:
    """A daemon with a key of its own; it wants folders that nobody else writes."""
    folder.mkdir(mode=0o755)
    (folder / "key").write_bytes(os.urandom(64))
    (folder / "key").chmod(0o600)
    for path in (folder, folder / "key"):
        shutil.chown(path, "munge", "munge")
    files = {"socket": "socket", "key-file": "key", "log-file": "log", "pid-file": "pid", "seed-file": "seed"}
    options = [f"--{option}={folder / file}" for option, file in files.items()]
    return ["runuser", "-u", "munge", "--", "munged", "--foreground", *options]
