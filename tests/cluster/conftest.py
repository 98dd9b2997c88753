"""One cluster of two nodes for all tests here; it takes root."""

from __future__ import annotations

import secrets
from collections.abc import Iterator

import pytest

from tests.cluster.namespaces import Cluster, cluster_over, two_namespaces, why_not


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """A node with three cores and one with two, as far as Ray knows; they ask who comes for a token."""
    if reason := why_not():
        pytest.skip(reason)
    variables = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    with two_namespaces() as nodes, cluster_over(nodes, variables) as cluster:
        yield cluster
