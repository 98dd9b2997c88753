"""A cluster that asks for a token, which comes from each of the places that Ray knows; and what is said of a wrong
one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.cluster.namespaces import Cluster

pytestmark = [pytest.mark.cluster, pytest.mark.full, pytest.mark.timeout(900)]

_REACH = """
import sys
from fsdp_lab.config import UserError
from fsdp_lab.config.sweep import ClusterConfig
from fsdp_lab.engine.cluster import start_ray, stop_ray
try:
    start_ray(ClusterConfig(address=sys.argv[1]))
except UserError as error:
    sys.exit(str(error))
import ray
print(ray.get(ray.remote(lambda: "ran").options(num_cpus=0).remote(), timeout=60))
stop_ray()
"""


def reach(cluster: Cluster, home: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """A driver on the first node with these variables, and none that the cluster was started with."""
    own = {k: v for k, v in cluster.environment.items() if not k.startswith("RAY_AUTH")}
    return subprocess.run(
        cluster.nodes[0].command(sys.executable, "-c", _REACH, cluster.address), cwd=home, capture_output=True,
        env={**own, "HOME": str(home), **variables}, text=True, timeout=100, check=False,
    )  # fmt: skip


def write_token(file: Path, token: str) -> Path:
    file.parent.mkdir(exist_ok=True)
    file.write_text(token + "\n")
    return file


def test_the_token_comes_from_each_of_rays_places(cluster: Cluster, tmp_path: Path):
    token = cluster.environment["RAY_AUTH_TOKEN"]
    done = reach(cluster, tmp_path, RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=token)
    assert done.stdout == "ran\n", done.stderr
    write_token(tmp_path / ".ray" / "auth_token", token)
    done = reach(cluster, tmp_path, RAY_AUTH_MODE="token")
    assert done.stdout == "ran\n", done.stderr
    path = write_token(tmp_path / "token", token)
    write_token(tmp_path / ".ray" / "auth_token", "0" * 64)
    done = reach(cluster, tmp_path, RAY_AUTH_MODE="token", RAY_AUTH_TOKEN_PATH=str(path))
    assert done.stdout == "ran\n", done.stderr


def test_a_wrong_token_is_reported(cluster: Cluster, tmp_path: Path):
    wrong = write_token(tmp_path / ".ray" / "auth_token", "0" * 64)
    for variables in ({"RAY_AUTH_MODE": "token"}, {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(wrong)}, {}):
        done = reach(cluster, tmp_path, **variables)
        assert done.returncode == 1 and len(done.stderr.splitlines()) == 1, done.stderr
        assert f"{cluster.address}: this Ray cluster asks for an authentication token, and" in done.stderr
        assert "set RAY_AUTH_MODE=token" in done.stderr and "0" * 64 not in done.stderr
