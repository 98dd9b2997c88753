"""Two nodes on one machine: network namespaces that share the disk but for two folders, joined by a cable; and a Ray
cluster over them, with the sweeps that are typed on its first node."""

from __future__ import annotations

import importlib.util
import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.conftest import PLAIN, TINY
from tests.folders import TrialFolder
from tests.processes import descendants
from tests.servers import lay_store

_SMALL = (*PLAIN, *TINY, "model=mlp", "forecast.enabled=false", "training.epochs=2")
# A worker with two cores: either node has room for one.
TWO_NODES = (*_SMALL, "cluster.cpus_per_worker=2")
# Two workers with a core each: one node has room for both.
ONE_NODE = (*_SMALL, "cluster.cpus_per_worker=1")
# A trial over two nodes, then the same one on one of them. Whichever starts first, the other finds its nodes only
# when that one has ended: spreading is a wish, which Ray drops when a trial has the other node.
TWO_NODES_AND_ONE = ("-m", *_SMALL, "cluster.cpus_per_worker=2,1")

_PORT = 6399
_START_S = 90
_MARK = "answer:"


@dataclass
class Node:
    """A network namespace; `raylet`: `ray start --block` in it, while the node is up."""

    name: str
    address: str
    cpus: int
    raylet: subprocess.Popen[bytes] | None = None

    def command(self, *words: str) -> list[str]:
        """That command, in the namespace."""
        return ["ip", "netns", "exec", self.name, *words]


@dataclass
class Cluster:
    """A Ray cluster over namespaces; the first node is its head.

    Attributes:
        environment: of all that is to reach it.
        local: a folder that is another disk on the second node; workers have their temporary files there.
    """

    nodes: list[Node]
    folder: Path
    environment: dict[str, str] = field(default_factory=dict)
    _asked: subprocess.Popen[str] | None = None

    def __post_init__(self) -> None:
        self.local = self.folder / "local"
        self.local.mkdir()

    @property
    def address(self) -> str:
        return f"{self.nodes[0].address}:{_PORT}"

    def ray(self, *words: str) -> list[str]:
        """That command of Ray's, on the first node."""
        return self.nodes[0].command(str(Path(sys.executable).with_name("ray")), *words)

    def sweep_words(self, folder: Path, storage: str = "") -> tuple[str, ...]:
        """The cluster's address and storage; default: a folder that both nodes see."""
        lay_store(folder)
        return f"cluster.address={self.address}", f"cluster.storage_path={storage or folder / 'storage'}"

    def sweep(
        self, folder: Path, *arguments: str, storage: str = "", **variables: str
    ) -> subprocess.CompletedProcess[str]:
        """A sweep that is typed on the first node, to its end."""
        words = (*self.sweep_words(folder, storage), *arguments)
        return subprocess.run(
            self.nodes[0].command(sys.executable, "-m", "fsdp_lab", *words), cwd=folder,
            env={**self.environment, **variables}, capture_output=True, text=True, timeout=300, check=False,
        )  # fmt: skip

    @contextmanager
    def running(self, folder: Path, *arguments: str, storage: str = "") -> Iterator[subprocess.Popen[str]]:
        """A sweep that is typed on the first node; what it says is in `said.txt`."""
        words = (*self.sweep_words(folder, storage), *arguments)
        with (folder / "said.txt").open("w") as said:
            process = subprocess.Popen(
                self.nodes[0].command(sys.executable, "-m", "fsdp_lab", *words), cwd=folder, env=self.environment,
                stdout=said, stderr=said, text=True, start_new_session=True,
            )  # fmt: skip
        try:
            yield process
        finally:
            process.kill()
            process.wait(20)

    def start(self, node: Node) -> None:
        """Start Ray on a node and wait until the cluster has it."""
        ray = str(Path(sys.executable).with_name("ray"))
        jobs = bool(importlib.util.find_spec("aiohttp_cors"))  # ray[default]: the job server is the dashboard's
        head = ["--head", f"--port={_PORT}", f"--temp-dir={self.folder / 'ray'}", f"--include-dashboard={jobs}",
                "--dashboard-host=127.0.0.1"]  # fmt: skip
        where = head if node is self.nodes[0] else [f"--address={self.address}"]
        command = [ray, "start", *where, f"--node-ip-address={node.address}", f"--num-cpus={node.cpus}", "--num-gpus=0",
                   "--block", "--disable-usage-stats"]  # fmt: skip
        with (self.folder / f"{node.name}.log").open("ab") as log:
            node.raylet = subprocess.Popen(
                node.command(*self._on_its_disk(node), *command), cwd=self.folder, stdout=log, stderr=log,
                env={**self.environment, "TMPDIR": str(self.local)},
            )  # fmt: skip
        knock = node.command(sys.executable, "-c", _KNOCK, node.address)
        end, is_head = time.monotonic() + _START_S, node is self.nodes[0]
        while (is_head and subprocess.run(knock, check=False).returncode) or node.address not in self.alive():
            assert node.raylet.poll() is None, (self.folder / f"{node.name}.log").read_text()
            assert time.monotonic() < end, f"{node.name} did not start within {_START_S} s"
            time.sleep(0.2)

    def _on_its_disk(self, node: Node) -> list[str]:
        """What starts a command that sees the node's own disk: `ip netns exec` has a mount namespace for each. Nodes
        that shared Ray's folder would delete each other's copies of a job's files."""
        if node is self.nodes[0]:
            return []
        own = 'mount -t tmpfs tmpfs "$0" && mount -t tmpfs tmpfs "$1" && shift && exec "$@"'
        return ["sh", "-c", own, str(self.local), str(self.folder / "ray")]

    def revive(self) -> None:
        """Start the nodes that have ended; all of them where the head has."""
        for node in self.nodes:
            if node.raylet is not None and node.raylet.poll() is not None:
                self.kill(node)
        if self.nodes[0].raylet is None:
            self.end()
        for node in self.nodes:
            if node.raylet is None:
                self.start(node)

    def ask(self, expression: str) -> Any:
        """The value of a Python expression about `ray`, in a process that has joined the cluster."""
        if self._asked is None:
            self._asked = subprocess.Popen(
                self.nodes[0].command(sys.executable, "-c", _ANSWER, self.address),
                env=self.environment, cwd=self.folder, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )  # fmt: skip
        assert self._asked.stdin and self._asked.stdout
        limit = threading.Timer(_START_S, self._asked.kill)
        limit.start()
        try:
            print(expression, file=self._asked.stdin, flush=True)
            # Ray prints the end of a dead node's log, too
            answers = (line.removeprefix(_MARK) for line in self._asked.stdout if line.startswith(_MARK))
            answer = next(answers, None)
            assert answer is not None, f"the cluster does not answer: {expression}"
            return json.loads(answer)
        finally:
            limit.cancel()

    def alive(self) -> list[str]:
        """The addresses of the nodes that Ray takes for alive."""
        return list(self.ask("[node['NodeManagerAddress'] for node in ray.nodes() if node['Alive']]"))

    def kill(self, node: Node) -> None:
        """End a node as a power cut does: every process of it at once."""
        assert node.raylet is not None
        if node.raylet.poll() is None:  # else it has ended by itself, as it does when it loses the head
            for process in [psutil.Process(node.raylet.pid), *descendants(node.raylet.pid)]:
                with suppress(psutil.NoSuchProcess):
                    process.kill()
        node.raylet.wait(10)
        node.raylet = None

    def end(self) -> None:
        """End all that this has started."""
        if self._asked is not None:
            self._asked.kill()
            self._asked.communicate()
            self._asked = None
        for node in self.nodes:
            if node.raylet is not None:
                self.kill(node)


_KNOCK = f"""
import socket, sys
try:
    socket.create_connection((sys.argv[1], {_PORT}), 1).close()
except OSError:
    sys.exit(1)
"""
_ANSWER = """
import json, sys, ray
ray.init(address=sys.argv[1], log_to_driver=False, logging_level="ERROR")
for line in sys.stdin:
    print("answer:" + json.dumps(eval(line)), flush=True)
"""


def why_not() -> str:
    """Why there can be no namespaces here; "" where there can."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "network namespaces need root on Linux"
    if shutil.which("ip") is None:
        return "network namespaces need ip (Debian's iproute2)"
    name = f"fsdp{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    if made.returncode == 0:
        made = subprocess.run(
            ["ip", "netns", "exec", name, "ip", "link", "set", "lo", "up"], capture_output=True, text=True, check=False
        )
        subprocess.run(["ip", "netns", "delete", name], check=False)
    return f"no network namespaces here: {made.stderr.strip()}" if made.returncode else ""


@contextmanager
def two_namespaces() -> Iterator[list[Node]]:
    """Two nodes with a network between them; this machine's name resolves to the loopback there, as Debian has it."""
    mark = f"{os.getpid()}{secrets.token_hex(1)}"
    # Their own addresses: Ray looks at all processes of the machine for another Ray at the same one.
    network = f"10.77.{os.getpid() % 256}"
    nodes = [Node(f"fsdp{mark}{letter}", f"{network}.{n}", 4 - n) for n, letter in enumerate("ab", 1)]
    cables = [f"v{mark}{letter}" for letter in "ab"]
    with ExitStack() as stack:
        for node in nodes:
            ip("netns", "add", node.name)
            stack.callback(ip, "netns", "delete", node.name)
            names = Path("/etc/netns", node.name)  # `ip netns exec` lays its files over those in /etc
            names.mkdir(parents=True)
            stack.callback(shutil.rmtree, names)
            (names / "hosts").write_text(f"127.0.0.1 localhost {socket.gethostname()}\n")
        ends = [("name", cable, "netns", node.name) for cable, node in zip(cables, nodes, strict=True)]
        ip("link", "add", *ends[0], "type", "veth", "peer", *ends[1])
        for node, cable in zip(nodes, cables, strict=True):
            ip("-n", node.name, "address", "add", f"{node.address}/24", "dev", cable)
            ip("-n", node.name, "link", "set", cable, "up")
            ip("-n", node.name, "link", "set", "lo", "up")
        yield nodes


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, timeout=20, capture_output=True)


@contextmanager
def cluster_over(nodes: list[Node], variables: Mapping[str, str]) -> Iterator[Cluster]:
    """Ray on all these nodes."""
    folder = Path(tempfile.mkdtemp(prefix="fl"))  # short: the paths of Ray's sockets are
    cluster = Cluster(nodes, folder, {**os.environ, **variables})
    try:
        for node in nodes:
            cluster.start(node)
        yield cluster
    finally:
        cluster.end()
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
