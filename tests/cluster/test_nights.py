"""Nights on machines that have nothing in common but object storage."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from fsdp_lab.storage import Storage
from tests import forked
from tests.nightly.test_night import INLINE
from tests.s3 import SECRET, held_in
from tests.servers import lay_store

pytestmark = [pytest.mark.cluster, pytest.mark.full]

SHORT = (*INLINE, "precision=fp32", "nightly.repeats=1", "nightly.keep=1")


def nightly(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    folder.mkdir(exist_ok=True)
    lay_store(folder)
    return forked.run(folder, "fsdp_lab.nightly", *arguments, environment={**os.environ, "OMP_NUM_THREADS": "1"})


def test_tonight_on_another_machine_is_compared_with_last_night(address: str, tmp_path: Path):
    one, other, third = (tmp_path / name for name in ("one", "other", "third"))
    words = (*SHORT, f"cluster.storage_path={address}")
    done = nightly(one, "--once", *words)
    assert done.returncode == 0, done.stdout + done.stderr
    shared = Storage(f"{address}/nights/nightly")
    (first,) = (name.removesuffix(".json") for name in shared.files() if name.endswith(".json"))
    done = nightly(other, "--once", *words)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"against {first}: nothing got worse" in done.stdout
    nights = [json.loads(shared.read(name)) for name in sorted(shared.files()) if name.endswith(".json")]
    assert [(night["verdict"], night["baseline"]) for night in nights] == [("good", None), ("good", first)]
    assert "nights.html" in shared.files() and not list(tmp_path.glob("*/nights/*/*.json"))
    kept = [name for name in Storage(address).files() if "/checkpoints/" in name]
    assert kept and nightly(one, "--once", *words).returncode == 0
    left = [name for name in Storage(address).files() if "/checkpoints/" in name]
    assert not {name for name in left if name.startswith(first)}, "of the first machine's first night"
    nights = [json.loads(shared.read(name)) for name in sorted(shared.files()) if name.endswith(".json")]
    done = nightly(third, "--accept", "as good as it gets", *words)
    assert done.returncode == 0, done.stdout + done.stderr
    done = nightly(one, "--check", *words)
    assert f"baseline: {nights[-1]['id']} (accepted)" in done.stdout
    assert f"study:    nightly, in {shared.address}" in done.stdout
    assert held_in(tmp_path, SECRET) == []
