"""Two nodes on one machine: network namespaces that share the disk but for some folders, joined by a cable; and a Ray
cluster over them, with the sweeps that are typed on its first node."""

from __future__ import annotations

import importlib.util
import json
import os
import secrets
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import PLAIN, TINY
from tests.folders import TrialFolder
from tests.servers import lay_store, server

_SMALL = (*PLAIN, *TINY, "model=mlp", "forecast.enabled=false", "training.epochs=2")
# A worker with two cores: either node has room for one.
TWO_NODES = (*_SMALL, "cluster.cpus_per_worker=2")
# Two workers with a core each: one node has room for both.
ONE_NODE = (*_SMALL, "cluster.cpus_per_worker=1")
# A trial over two nodes, then the same one on one of them. Whichever starts first, the other finds its nodes only
# when that one has ended: spreading is a wish, which Ray drops when a trial has the other node.
TWO_NODES_AND_ONE = ("-m", *_SMALL, "cluster.cpus_per_worker=2,1")

_PORT = 6399
_RAY = str(Path(sys.executable).with_name("ray"))


@dataclass
class Node:
    """A network namespace; `running` ends what has been started on the node."""

    name: str
    address: str
    cpus: int
    running: ExitStack = field(default_factory=ExitStack)
    raylet: subprocess.Popen[bytes] | None = None

    def command(self, *words: str) -> list[str]:
        """That command, in the namespace."""
        return ["ip", "netns", "exec", self.name, *words]

    def alone(self, *words: str, disks: tuple[str, ...] = ()) -> list[str]:
        """That command with processes of its own, by a shell that takes in orphans: all of it ends with it, as by a
        power cut. These folders are disks of its own."""
        mounts = "".join(f"mkdir -p {disk} && mount -t tmpfs tmpfs {disk} && " for disk in disks)
        script = f"{mounts}({shlex.join(words)} & wait)"
        return self.command("unshare", "--pid", "--mount-proc", "--fork", "--kill-child", "sh", "-c", script)

    @property
    def is_up(self) -> bool:
        return self.raylet is not None and self.raylet.poll() is None


@contextmanager
def two_namespaces() -> Iterator[list[Node]]:
    """Two nodes with a network between them; this machine's name resolves to the loopback there, as Debian has it."""
    mark = f"{os.getpid()}{secrets.token_hex(1)}"
    nodes = [Node(f"fsdp{mark}{letter}", f"10.77.0.{n}", 4 - n) for n, letter in enumerate("ab", 1)]
    with ExitStack() as stack:
        for node in nodes:
            ip("netns", "add", node.name)
            stack.callback(ip, "netns", "delete", node.name)
            names = Path("/etc/netns", node.name)  # `ip netns exec` lays its files over those in /etc
            names.mkdir(parents=True)
            stack.callback(shutil.rmtree, names)
            (names / "hosts").write_text(f"127.0.0.1 localhost {socket.gethostname()}\n")
        first, second = (("name", "cable", "netns", node.name) for node in nodes)
        ip("link", "add", *first, "type", "veth", "peer", *second)
        for node in nodes:
            ip("-n", node.name, "address", "add", f"{node.address}/24", "dev", "cable")
            ip("-n", node.name, "link", "set", "cable", "up")
            ip("-n", node.name, "link", "set", "lo", "up")
        yield nodes


def ip(*words: str) -> None:
    """Run `ip`, Debian's iproute2; without it or without root skip the test."""
    if shutil.which("ip") is None:
        pytest.skip("network namespaces need ip (Debian's iproute2)")
    done = subprocess.run(["ip", *words], timeout=20, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"no network namespaces here, which need root on Linux: {done.stderr.strip()}")


class Cluster:
    """A Ray cluster over namespaces; the first node is its head.

    Attributes:
        environment: of all that is to reach it.
        local: a folder that is another disk on the second node; workers have their temporary files there.
    """

    def __init__(self, nodes: list[Node], folder: Path, variables: Mapping[str, str]) -> None:
        self.nodes, self.folder, self.local = nodes, folder, folder / "local"
        self.environment = {**os.environ, **variables}
        self.address = f"{nodes[0].address}:{_PORT}"
        self.local.mkdir()

    def ray(self, *words: str) -> list[str]:
        """That command of Ray's, on the first node."""
        return self.nodes[0].command(_RAY, *words)

    @contextmanager
    def running(
        self, folder: Path, *arguments: str, storage: str = "", **variables: str
    ) -> Iterator[subprocess.Popen[str]]:
        """A sweep that is typed on the first node; what it says is in `said.txt`.

        Args:
            storage: default: a folder that both nodes see.
        """
        lay_store(folder)
        words = (f"cluster.address={self.address}", f"cluster.storage_path={storage or folder / 'storage'}", *arguments)
        with (folder / "said.txt").open("w") as said:
            process = subprocess.Popen(
                self.nodes[0].command(sys.executable, "-m", "fsdp_lab", *words), cwd=folder,
                env={**self.environment, **variables}, stdout=said, stderr=said, text=True, start_new_session=True,
            )  # fmt: skip
        try:
            yield process
        finally:
            process.kill()
            process.wait(20)

    def sweep(self, folder: Path, *arguments: str, storage: str = "", **variables: str) -> str:
        """What a sweep says that is typed on the first node and ends well."""
        with self.running(folder, *arguments, storage=storage, **variables) as process:
            status = process.wait(300)
        said = (folder / "said.txt").read_text()
        assert status == 0, said
        return said

    def start(self, node: Node) -> None:
        """Start Ray on a node and wait until the cluster has it."""
        jobs = bool(importlib.util.find_spec("aiohttp_cors"))  # ray[default]: the job server is the dashboard's
        words = [f"--address={self.address}"]
        if node is self.nodes[0]:
            words = ["--head", f"--port={_PORT}", f"--temp-dir={self.folder / 'ray'}", f"--include-dashboard={jobs}"]
        words += [f"--node-ip-address={node.address}", f"--num-cpus={node.cpus}", "--num-gpus=0", "--block",
                  "--disable-usage-stats"]  # fmt: skip
        # Nodes that shared Ray's folder would delete each other's copies of a job's files.
        own = () if node is self.nodes[0] else (str(self.local), str(self.folder / "ray"))
        node.raylet = node.running.enter_context(server(
            self.folder, node.name, node.alone(_RAY, "start", *words, disks=own),
            lambda log: "Ray runtime started." in log and node.address in self.alive(),
            {**self.environment, "TMPDIR": str(self.local), "PYTHONHASHSEED": "0"},
        ))  # fmt: skip

    def revive(self) -> None:
        """Start the nodes that have ended; all of them where the head has."""
        if not self.nodes[0].is_up:
            self.nodes[1].running.close()
        for node in self.nodes:
            if not node.is_up:
                self.start(node)

    def ask(self, expression: str) -> Any:
        """The value of a Python expression about `ray`, in a process that has joined the cluster."""
        answer = self.folder / "answer.json"  # Ray prints of dead nodes
        program = f"import json, ray; ray.init({self.address!r}); json.dump({expression}, open({str(answer)!r}, 'w'))"
        done = subprocess.run(
            self.nodes[0].command(sys.executable, "-c", program), env=self.environment, cwd=self.folder, text=True,
            timeout=90, capture_output=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return json.loads(answer.read_text())

    def alive(self) -> list[str]:
        """The addresses of the nodes that Ray takes for alive."""
        return list(self.ask("[node['NodeManagerAddress'] for node in ray.nodes() if node['Alive']]"))


@contextmanager
def cluster_over(nodes: list[Node], variables: Mapping[str, str]) -> Iterator[Cluster]:
    """Ray on all these nodes."""
    folder = Path(tempfile.mkdtemp(prefix="fl"))  # short: the paths of Ray's sockets are
    cluster = Cluster(nodes, folder, variables)
    try:
        cluster.revive()
        yield cluster
    finally:
        for node in nodes:
            node.running.close()
        shutil.rmtree(folder, ignore_errors=True)


def addresses(folder: Path) -> list[list[str]]:
    """The node of each rank, of every trial in the order of its number."""
    files = (file for file in sorted(folder.glob("**/trial.json")) if "mlartifacts" not in file.parts)
    return [TrialFolder(file.parent, file.parent).addresses for file in files]


def epochs(folder: Path) -> list[list[int]]:
    """The epochs of every trial below a folder, as its ranks have written them."""
    files = [file.read_text().rpartition("\n")[0] for file in sorted(folder.glob("**/metrics.jsonl"))]
    return [[json.loads(line)["epoch"] for line in lines.splitlines()] for lines in files]


def same_losses(row: dict[str, str], other: dict[str, str]) -> bool:
    """To float32's precision: on some processors a sum by two threads rounds otherwise than one by a single thread."""
    losses, others = ([float(each["val/loss"]), float(each["train/loss"])] for each in (row, other))
    return losses == pytest.approx(others, rel=2**-23, abs=0)
