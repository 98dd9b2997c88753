"""One cluster of two nodes for all tests here, which takes root, and S3 servers. In CI a test that lacks something
fails."""

from __future__ import annotations

import itertools
import math
import os
import re
import secrets
import socket
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable, Generator, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from s3fs import S3FileSystem
from werkzeug.serving import make_server

from tests.cluster.namespaces import ONE_NODE, Cluster, Node, cluster_over, two_namespaces
from tests.conftest import run_cli
from tests.servers import server
from tests.sweep.conftest import results

S3_PORT = 9000  # in a network namespace nobody else has it
KEY_ID, SECRET = "fsdplabtestkeyid", "fsdplab-test-secret-0f1e2d3c4b5a"
ALL_OF_THEM = math.inf
_REFUSAL = "<Error><Code>{}</Code><Message>{}</Message></Error>"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Fail a skipped test where CI=true, by the reason of the skip: there, everything is to be installed."""
    report = yield
    if report.skipped and os.environ.get("CI") == "true" and item.get_closest_marker("cluster"):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
        report.outcome, report.longrepr = "failed", f"{item.nodeid} must run where CI=true: {reason}"
    return report


@pytest.fixture(scope="session")
def nodes() -> Iterator[list[Node]]:
    """Two network namespaces, for all but Slurm."""
    with two_namespaces() as nodes:
        yield nodes


@pytest.fixture(scope="session")
def bucket(nodes: list[Node], tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a bucket that both nodes reach."""
    head = nodes[0]
    command = head.command(sys.executable, "-m", "moto.server", "-H", head.address, "-p", str(S3_PORT))
    put = f"from urllib.request import *; urlopen(Request('http://{head.address}:{S3_PORT}/bucket', method='PUT'))"
    make = head.command(sys.executable, "-c", put)

    def is_ready(log: str) -> bool:
        return subprocess.run(make, capture_output=True, timeout=30, check=False).returncode == 0

    with server(tmp_path_factory.mktemp("s3"), "s3", command, is_ready):
        yield "s3://bucket"


@pytest.fixture(scope="session")
def one_cluster(nodes: list[Node]) -> Iterator[Cluster]:
    """A node with three cores and one with two, as far as Ray knows; they ask who comes for a token. Their S3 server
    is `bucket`."""
    variables = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    with cluster_over(nodes, {**variables, **s3_settings(S3_PORT, nodes[0].address)}) as cluster:
        yield cluster


@pytest.fixture
def cluster(one_cluster: Cluster) -> Cluster:
    """The cluster; nodes that the test before has killed are there again."""
    one_cluster.revive()
    return one_cluster


@pytest.fixture(scope="session")
def on_one_node(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The row of `results.csv` of what is compared with two nodes."""
    folder = tmp_path_factory.mktemp("one")
    done = run_cli(folder, *ONE_NODE)
    assert done.returncode == 0, done.stdout + done.stderr
    (row,) = results(folder)
    return row


def s3_settings(port: int, host: str = "127.0.0.1") -> dict[str, str]:
    """The environment of who uses an S3 server."""
    return {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}", "AWS_ACCESS_KEY_ID": KEY_ID, "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_DEFAULT_REGION": "us-east-1", "AWS_EC2_METADATA_DISABLED": "true",
    }  # fmt: skip


class Faults:
    """moto's S3 as a WSGI application, which answers well until told otherwise.

    Attributes:
        every: one in so many requests is answered 503; 0: none.
        cuts: so many connections more are cut without an answer; `ALL_OF_THEM`: the server is away.
        forbidden: requests that match this expression (`PUT /bucket/…`) are answered 403; "": none.
    """

    def __init__(self) -> None:
        self.every, self.cuts, self.forbidden = 0, 0.0, ""
        self._numbers = itertools.count(1)
        self._store = DomainDispatcherApplication(create_backend_app)

    def __call__(self, request: dict[str, Any], respond: Callable[..., Any]) -> Iterable[bytes]:
        number = next(self._numbers)
        if self.cuts > 0:
            self.cuts -= 1
            request["werkzeug.socket"].shutdown(socket.SHUT_RDWR)
            raise ConnectionAbortedError
        if self.forbidden and re.search(self.forbidden, f"{request['REQUEST_METHOD']} {request['PATH_INFO']}"):
            respond("403 Forbidden", [("Content-Type", "application/xml")])
            return [_REFUSAL.format("AccessDenied", "Access Denied").encode()]
        if self.every and number % self.every == 0:
            respond("503 Slow Down", [("Content-Type", "application/xml")])
            return [_REFUSAL.format("ServiceUnavailable", "Please try again").encode()]
        answer: Iterable[bytes] = self._store(request, respond)
        return answer


@pytest.fixture
def faults(monkeypatch: pytest.MonkeyPatch) -> Iterator[Faults]:
    """An S3 server in this process; the environment, and so that of what this process starts, leads to it."""
    faults = Faults()
    server = make_server("127.0.0.1", 0, faults, threaded=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    for name, value in s3_settings(server.port).items():
        monkeypatch.setenv(name, value)
    S3FileSystem.clear_instance_cache()  # a client keeps the environment that it was made in
    S3FileSystem().mkdirs("bucket", exist_ok=True)
    yield faults
    server.shutdown()


def held_in(folder: Path, word: str) -> list[Path]:
    """The files below a folder that have a word in them."""
    return [path for path in folder.rglob("*") if path.is_file() and word.encode() in path.read_bytes()]


@pytest.fixture
def address(faults: Faults) -> str:
    """Of a prefix in the bucket that nobody has used."""
    return f"s3://bucket/{uuid.uuid4().hex[:8]}"
