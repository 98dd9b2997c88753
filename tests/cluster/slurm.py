"""Slurm on one machine: a controller, and a `slurmd` in each of two network namespaces, with processes of its own, as
on a node of its own."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.cluster.namespaces import Node, two_namespaces
from tests.servers import server

_CONFIGURATION = """
ClusterName=lab
SlurmctldHost={host}({nodes[0].address})
SlurmUser=root
AuthType=auth/none
CredType=cred/none
AuthInfo=cred_expire=5 # a job that was requeued waits for that
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/ctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
ProctrackType=proctrack/linuxproc
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
SchedulerParameters=sched_interval=1,batch_sched_delay=0
NodeName=n0 NodeHostname={host} NodeAddr={nodes[0].address} CPUs={nodes[0].cpus} RealMemory=2000
NodeName=n1 NodeHostname={host} NodeAddr={nodes[1].address} CPUs={nodes[1].cpus} RealMemory=2000
PartitionName=lab Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
_PATH = f"{os.environ['PATH']}:/usr/sbin:/sbin"  # with those of daemons


class Slurm:
    """A running Slurm; commands are typed on its first node's network, by the user of the tests."""

    def __init__(self, nodes: list[Node], folder: Path) -> None:
        self.nodes, self.folder = nodes, folder
        # what is inherited by a job is what a login shell would have
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "RAY_", "PYTEST_"))}
        self.environment = {**kept, "PATH": _PATH, "SLURM_CONF": f"{folder}/slurm.conf", "OMP_NUM_THREADS": "1"}

    def run(self, folder: Path, *command: str, check: bool = True) -> str:
        """What a command prints, which is to end well."""
        done = subprocess.run(
            self.nodes[0].command(*command), cwd=folder, env=self.environment, capture_output=True, text=True,
            timeout=100, check=False,
        )  # fmt: skip
        assert done.returncode == 0 or not check, done.stdout + done.stderr
        return done.stdout

    def submit(self, script: Path) -> tuple[str, Path]:
        """The number of the job that a script makes, and its log."""
        job = self.run(script.parent, "sbatch", "--parsable", script.name).strip()
        return job, script.parent / f"slurm-{job}.out"

    def state(self, job: str) -> str:
        """As `COMPLETED`, `RUNNING`, `CANCELLED`."""
        return re.findall(r"JobState=(\w+)", self.run(self.folder, "scontrol", "show", "job", job))[0]

    def is_idle(self) -> bool:
        """Whether no process of a job is left."""
        return self.run(self.folder, "sinfo", "--noheader", "--format=%t %D", check=False) == "idle 2\n"

    def wait(self, job: str, log: Path, has_come: Callable[[], object]) -> None:
        """Until something has come of a job."""
        end = time.monotonic() + 400
        while not has_come():
            state, output = self.state(job), log.read_text() if log.exists() else "no log"
            assert time.monotonic() < end and state != "FAILED", f"job {job} is {state}: {output}"
            time.sleep(0.3)

    def wait_for_end(self, job: str, log: Path, state: str) -> None:
        self.wait(job, log, lambda: self.state(job) == state and self.is_idle())


@contextmanager
def slurm() -> Iterator[Slurm]:
    """Two nodes, of three cores and of two as far as Slurm knows."""
    if missing := [name for name in ("sbatch", "slurmctld", "slurmd") if shutil.which(name, path=_PATH) is None]:
        pytest.skip(f"Slurm needs {', '.join(missing)}: as root, make .venv/.cluster installs slurm-wlm")
    with ExitStack() as stack:
        nodes = stack.enter_context(two_namespaces())
        folder = Path(tempfile.mkdtemp(prefix="fs"))
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        configuration = _CONFIGURATION.format(nodes=nodes, host=socket.gethostname(), folder=folder)
        (folder / "slurm.conf").write_text(configuration)
        (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")  # `ip netns exec` shows none to detect
        for name in ("state", "spool.n0", "spool.n1"):
            (folder / name).mkdir()
        lab = Slurm(nodes, folder)

        def start(name: str, command: list[str], is_ready: Callable[[str], bool] = lambda log: True) -> None:
            stack.enter_context(server(folder, name, command, is_ready, lab.environment))

        start("controller", nodes[0].command("slurmctld", "-D"))
        start("n0", nodes[0].alone("slurmd", "-D", "-N", "n0", disks=("/tmp/ray",)))
        start("n1", nodes[1].alone("slurmd", "-D", "-N", "n1", disks=("/tmp/ray",)), lambda log: lab.is_idle())
        yield lab
