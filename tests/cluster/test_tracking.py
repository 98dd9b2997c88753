"""One tracking server for several nodes: MLflow's, on PostgreSQL, with its artifacts in object storage."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.conftest import S3_PORT
from tests.cluster.namespaces import Node
from tests.conftest import INLINE, without
from tests.servers import SECRET, held_in, mlflow_server, postgres_server, s3_settings, why_no_postgres
from tests.sweep.conftest import results

pytestmark = pytest.mark.cluster

_MLFLOW_PORT, _POSTGRES_PORT = 5000, 5432  # in a network namespace nobody else has them
_LIMIT_S = 200
SMALL = (*without(INLINE, "precision=", "hydra.", "tracking."), "training.epochs=2")
SWEEP = ("-m", *SMALL, "precision=fp32", "hydra.sweep.dir=out")


@dataclass
class Shared:
    """Two nodes and a server on the first; a driver knows its address alone, and no password of what is behind it."""

    nodes: list[Node]
    address: str

    def start(self, node: int, folder: Path, module: str, *words: str) -> subprocess.Popen[str]:
        """Begin a command on a node, in a folder of its own."""
        folder.mkdir(exist_ok=True)
        command = self.nodes[node].command(sys.executable, "-m", module, *words, f"tracking.uri={self.address}")
        return subprocess.Popen(
            command, cwd=folder, env={**os.environ, "OMP_NUM_THREADS": "1"}, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip

    def run(self, node: int, folder: Path, module: str, *words: str) -> str:
        """What a command prints, which ends well."""
        return ended(self.start(node, folder, module, *words))

    def ask(self, text: str, *arguments: str) -> Any:
        """What a Python program on the second node prints as JSON, its last line."""
        command = self.nodes[1].command(sys.executable, "-c", text, *arguments)
        environment = {**os.environ, **s3_settings(S3_PORT, self.nodes[0].address)}
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=_LIMIT_S, env=environment)
        return json.loads(done.stdout.splitlines()[-1])

    def runs(self, experiment: str) -> Any:
        """All runs of an experiment."""
        return self.ask(_RUNS, self.address, experiment)


_OBJECTS = """
import sys
from s3fs import S3FileSystem
print(sum(path.endswith("/" + sys.argv[1]) for path in S3FileSystem().find("bucket/mlflow")))
"""
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


def ended(process: subprocess.Popen[str]) -> str:
    out, _ = process.communicate(timeout=_LIMIT_S)
    assert process.returncode == 0, out
    return out


@pytest.fixture(scope="module")
def shared(nodes: list[Node], bucket: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shared]:
    if reason := why_no_postgres():
        pytest.skip(reason)
    head = nodes[0]
    with (
        postgres_server(_POSTGRES_PORT, within=head.command()) as store,
        mlflow_server(
            tmp_path_factory.mktemp("tracking"), "--artifacts-destination", f"{bucket}/mlflow", store=store,
            host=head.address, port=_MLFLOW_PORT, within=head.command(), environment=s3_settings(S3_PORT, head.address),
        ) as (address, _),
    ):  # fmt: skip
        yield Shared(nodes, address)


@pytest.mark.documents(
    "mlflow server ... --backend-store-uri postgresql... --artifacts-destination s3...",
    "python -m fsdp_lab -m ... tracking.uri=https... tracking.experiment=team",
)
def test_two_nodes_write_into_one_experiment_at_the_same_time(shared: Shared, tmp_path: Path):
    folders = [tmp_path / "a", tmp_path / "b"]
    sweeps = [
        shared.start(n, folder, "fsdp_lab", *SWEEP, "tracking.experiment=team", f"training.seed={n}0,{n}1,{n}2,{n}3")
        for n, folder in enumerate(folders)
    ]  # neither finds the experiment
    for sweep in sweeps:
        ended(sweep)
    runs = {run["id"]: run for run in shared.runs("team")}
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
    assert shared.ask(_OBJECTS, "model.pt") == 8, "artifacts are in the bucket, by way of the server"


@pytest.mark.full
@pytest.mark.documents("python -m fsdp_lab.nightly --once tracking.uri=https...")
def test_a_night_is_compared_with_the_last_in_a_shared_store(shared: Shared, tmp_path: Path):
    words = ("--once", *SMALL, "precision=fp32,bf16", "tracking.experiment=nights", "nightly.folder=nights")
    loose = ("nightly.repeats=1", "nightly.tolerance.samples_per_s=1")
    for _ in range(2):
        shared.run(0, tmp_path, "fsdp_lab.nightly", *words, *loose)
    tags = [run["tags"] for run in shared.runs("nights") if "nightly.verdict" in run["tags"]]
    tags.sort(key=lambda each: each["nightly.night"])
    assert [each["nightly.verdict"] for each in tags] == ["good", "good"]
    assert [each.get("nightly.baseline") for each in tags] == [None, tags[0]["nightly.night"]]
    assert held_in(tmp_path, SECRET) == []
