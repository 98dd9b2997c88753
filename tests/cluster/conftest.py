"""One cluster of two nodes for all tests here, which takes root, and one S3 server with a proxy in front that can be
told to fail. In CI a test that lacks something fails."""

from __future__ import annotations

import os
import secrets
import uuid
from collections.abc import Generator, Iterator

import pytest
from s3fs import S3FileSystem

from tests.cluster.namespaces import ONE_NODE, Cluster, Node, cluster_over, two_namespaces, why_not
from tests.conftest import run_cli
from tests.servers import Faults, faulty, s3_server, s3_settings
from tests.sweep.conftest import results

S3_PORT = 9000  # in a network namespace nobody else has it


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
    if reason := why_not():
        pytest.skip(reason)
    with two_namespaces() as nodes:
        yield nodes


@pytest.fixture(scope="session")
def bucket(nodes: list[Node], tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a bucket that both nodes reach."""
    head = nodes[0]
    with s3_server(tmp_path_factory.mktemp("bucket"), S3_PORT, head.address, within=head.command()):
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


@pytest.fixture(scope="session")
def s3_port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    with s3_server(tmp_path_factory.mktemp("s3")) as port:
        yield port


@pytest.fixture
def faults(s3_port: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[Faults]:
    """The proxy; this process's environment, and so that of what it starts, leads to it."""
    with faulty(s3_port) as (port, faults):
        for name, value in s3_settings(port).items():
            monkeypatch.setenv(name, value)
        S3FileSystem.clear_instance_cache()  # a client keeps the environment that it was made in
        yield faults


@pytest.fixture
def address(faults: Faults) -> str:
    """Of a prefix in the bucket that nobody has used."""
    return f"s3://bucket/{uuid.uuid4().hex[:8]}"
