"""One cluster of two nodes for all tests here, which takes root, and one S3 server with a proxy in front that can be
told to fail."""

from __future__ import annotations

import secrets
import uuid
from collections.abc import Iterator

import pytest
from s3fs import S3FileSystem

from tests.cluster.namespaces import Cluster, cluster_over, two_namespaces, why_not
from tests.s3 import Faults, faulty, s3_server, settings


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """A node with three cores and one with two, as far as Ray knows; they ask who comes for a token."""
    if reason := why_not():
        pytest.skip(reason)
    variables = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    with two_namespaces() as nodes, cluster_over(nodes, variables) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def s3_port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    pytest.importorskip("moto", reason="moto is not installed: make test-cluster installs it")
    with s3_server(tmp_path_factory.mktemp("s3")) as port:
        yield port


@pytest.fixture
def faults(s3_port: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[Faults]:
    """The proxy; this process's environment, and so that of what it starts, leads to it."""
    with faulty(s3_port) as (port, faults):
        for name, value in settings(port).items():
            monkeypatch.setenv(name, value)
        S3FileSystem.clear_instance_cache()  # a client keeps the environment that it was made in
        yield faults


@pytest.fixture
def address(faults: Faults) -> str:
    """Of a prefix in the bucket that nobody has used."""
    return f"s3://bucket/{uuid.uuid4().hex[:8]}"
