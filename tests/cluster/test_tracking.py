"""One tracking server for several nodes: MLflow's, on PostgreSQL, with its artifacts in object storage."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.conftest import S3_PORT, SECRET, held_in, s3_settings
from tests.cluster.namespaces import Node
from tests.conftest import INLINE, without
from tests.servers import mlflow_server
from tests.sweep.conftest import results

pytestmark = pytest.mark.cluster

SMALL = (*without(INLINE, "precision=", "hydra.", "tracking."), "training.epochs=2")
_RUNS = """
import json, sys
from mlflow import MlflowClient
client = MlflowClient(tracking_uri=sys.argv[1])
experiment = client.get_experiment_by_name(sys.argv[2])
runs = client.search_runs([experiment.experiment_id], max_results=500)
print(json.dumps([{
    "id": run.info.run_id, "status": run.info.status, "tags": run.data.tags, "metrics": run.data.metrics,
    "epochs": sorted(point.step for point in client.get_metric_history(run.info.run_id, "val/loss")),
    "artifacts": sorted(entry.path for entry in client.list_artifacts(run.info.run_id)),
    "place": run.info.artifact_uri, "begun": run.info.start_time, "ended": run.info.end_time,
} for run in runs]))
"""
_OBJECTS = "from s3fs import S3FileSystem; print(*S3FileSystem().find('bucket/mlflow'), sep='\\n')"


@dataclass
class Shared:
    """Two nodes and a server on the first; a driver knows its address alone, and no password of what is behind it."""

    nodes: list[Node]
    address: str

    def start(self, node: int, folder: Path, *words: str, **variables: str) -> subprocess.Popen[str]:
        """Begin a Python with these words on a node, in a folder of its own."""
        folder.mkdir(exist_ok=True)
        return subprocess.Popen(
            self.nodes[node].command(sys.executable, *words), cwd=folder, text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", **variables}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip

    def runs(self, folder: Path, experiment: str) -> list[dict[str, Any]]:
        """All runs of an experiment, as the second node sees them."""
        printed = ended(self.start(1, folder, "-c", _RUNS, self.address, experiment))
        runs: list[dict[str, Any]] = json.loads(printed.splitlines()[-1])
        return runs


def ended(process: subprocess.Popen[str]) -> str:
    """What a command prints, which ends well."""
    out, _ = process.communicate(timeout=200)
    assert process.returncode == 0, out
    return out


@pytest.fixture(scope="module")
def shared(nodes: list[Node], bucket: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shared]:
    """The server on the first node, with an empty database of Debian's PostgreSQL."""
    if shutil.which("pg_virtualenv") is None:
        pytest.skip("PostgreSQL needs pg_virtualenv: as root, make .venv/.cluster installs postgresql")
    head, folder = nodes[0], tmp_path_factory.mktemp("tracking")
    with mlflow_server(
        folder, "--artifacts-destination", f"{bucket}/mlflow", store="postgresql+psycopg://", host=head.address,
        port=5000, within=head.command("pg_virtualenv", "-t"), environment=s3_settings(S3_PORT, head.address),
    ) as (address, process):  # fmt: skip
        yield Shared(nodes, address)
        os.killpg(process.pid, signal.SIGTERM)  # then it ends PostgreSQL
        process.wait(60)


@pytest.mark.documents(
    "mlflow server ... --backend-store-uri postgresql... --artifacts-destination s3...",
    "python -m fsdp_lab -m ... tracking.uri=https... tracking.experiment=team",
)
def test_two_nodes_write_into_one_experiment_at_the_same_time(shared: Shared, tmp_path: Path):
    folders = [tmp_path / "a", tmp_path / "b"]
    words = ("-m", "fsdp_lab", "-m", *SMALL, "precision=fp32", "hydra.sweep.dir=out", "tracking.experiment=team")
    sweeps = [
        shared.start(n, folder, *words, f"tracking.uri={shared.address}", f"training.seed={n}0,{n}1,{n}2,{n}3")
        for n, folder in enumerate(folders)
    ]  # neither finds the experiment
    for sweep in sweeps:
        ended(sweep)
    runs = {run["id"]: run for run in shared.runs(tmp_path, "team")}
    assert len(runs) == 2 * (1 + 4), "none is lost, none is there twice"
    assert {run["status"] for run in runs.values()} == {"FINISHED"}
    spans = []
    for folder in folders:
        rows = results(folder)
        (parent,) = (runs[id] for id in {runs[row["run_id"]]["tags"]["mlflow.parentRunId"] for row in rows})
        spans.append((parent["begun"], parent["ended"]))
        assert parent["tags"]["fsdp_lab.folder"] == str(folder / "out")
        assert {"report.html", "results.csv"} <= set(parent["artifacts"])
        for row in rows:
            run = runs[row["run_id"]]
            assert run["metrics"]["val/loss"] == pytest.approx(float(row["val/loss"]), rel=1e-9)
            assert run["epochs"] == [1, 2] and run["tags"]["fsdp_lab.trial"] == row["trial"]
            assert run["tags"]["fsdp_lab.recorded"] == "true" and "model" in run["artifacts"]
            assert run["place"].startswith("mlflow-artifacts:/")
    assert max(begun for begun, _ in spans) < min(end for _, end in spans), "both wrote at the same time"
    objects = ended(shared.start(1, tmp_path, "-c", _OBJECTS, **s3_settings(S3_PORT, shared.nodes[0].address)))
    assert objects.count("/model.pt\n") == 8, "artifacts are in the bucket, by way of the server"


@pytest.mark.full
@pytest.mark.documents("python -m fsdp_lab.nightly --once tracking.uri=https...")
def test_a_night_is_compared_with_the_last_in_a_shared_store(shared: Shared, tmp_path: Path):
    words = ("-m", "fsdp_lab.nightly", "--once", *SMALL, "precision=fp32,bf16", f"tracking.uri={shared.address}",
             "tracking.experiment=nights", "nightly.folder=nights", "nightly.repeats=1",
             "nightly.tolerance.samples_per_s=1")  # fmt: skip
    for _ in range(2):
        ended(shared.start(0, tmp_path, *words))
    tags = [run["tags"] for run in shared.runs(tmp_path, "nights") if "nightly.verdict" in run["tags"]]
    tags.sort(key=lambda each: each["nightly.night"])
    assert [each["nightly.verdict"] for each in tags] == ["good", "good"]
    assert [each.get("nightly.baseline") for each in tags] == [None, tags[0]["nightly.night"]]
    assert held_in(tmp_path, SECRET) == []
