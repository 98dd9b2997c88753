"""Which stores of MLflow are made, opened and refused, and a server that dies."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import mlflow
import pytest

from fsdp_lab.config.status import TrialStatus
from fsdp_lab.config.sweep import TrackingConfig
from fsdp_lab.storage.locks import exclusive
from fsdp_lab.tracking import TrackingError, annotate
from tests.servers import end, lay_store, mlflow_server
from tests.tracking.conftest import METRICS, lab_of, reader


def open_once(store: TrackingConfig) -> None:
    with lab_of(store, []):
        pass


def test_a_store_is_made_in_the_working_folder_whatever_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], problems: list[str]
) -> None:
    here = tmp_path / "back\\slash ${x} #1"
    here.mkdir()
    monkeypatch.chdir(here)
    with lab_of(TrackingConfig("sqlite:///deep/er/mlflow.db", "lab"), problems) as lab:
        experiment = lab.projection._client.get_experiment_by_name("lab")
        lab.want(0, files=[(Path(__file__), "")], status=TrialStatus.finished)
        assert lab.projection.settle(60) == 0
    assert experiment is not None and "press *Compare*" in experiment.tags["mlflow.note.content"]
    assert [path.name for path in (*tmp_path.iterdir(), *here.iterdir())] == [here.name, "deep"], "no mlruns"
    assert sorted(path.name for path in (here / "deep/er").iterdir()) == [".mlflow.lock", "mlartifacts", "mlflow.db"]
    assert len(list((here / "deep/er/mlartifacts").glob(f"*/artifacts/{Path(__file__).name}"))) == 1
    assert problems == [] and capfd.readouterr() == ("", "")


def test_a_store_that_was_moved_does_not_log_to_its_old_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, problems: list[str]
) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    old.mkdir()
    lay_store(old)
    monkeypatch.chdir(old)
    with lab_of(TrackingConfig(f"sqlite:///{old}/mlflow.db", "lab"), problems) as lab:
        lab.want(0, status=TrialStatus.finished)
        assert lab.projection.settle(60) == 0
        run_id = lab.projection.run_id(0)
    old.rename(new)
    moved = TrackingConfig(f"sqlite:///{new}/mlflow.db", "lab")
    for refused in (lambda: open_once(moved), lambda: annotate(moved, run_id, {}, [Path(__file__)])):
        with pytest.raises(TrackingError, match=r"old/mlartifacts, but its store is in .*new: it was moved or copied"):
            refused()
    assert not old.exists()
    old.symlink_to(new)
    (new / "mlartifacts").mkdir(exist_ok=True)
    open_once(moved)


REFUSED = {
    "ftp://host/x": "MLflow cannot use the store",
    "sqlite://outputs/mlflow.db": "three slashes",
    "sqlite:////tmp/50%20off/mlflow.db": "use a path without them",
    "sqlite:////proc/nowhere/mlflow.db": "No such file or directory: '/proc/nowhere'",
    "postgresql://127.0.0.1:1/db": "MLflow cannot use the store (",
    "http://host:50x0": "host or port cannot be read",
    "http://127.0.0.1:1": "Connection refused",
    "sqlite:///text.db": "file is not a database",
}


@pytest.mark.parametrize(("uri", "reason"), REFUSED.items())
def test_a_store_that_cannot_be_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, uri: str, reason: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.db").write_text("not a database" * 100)
    with pytest.raises(TrackingError) as caught:
        open_once(TrackingConfig(uri))
    text = str(caught.value)
    assert f"tracking.uri={uri}" in text and reason in text and "\n" not in text
    assert ("start the server, set MLFLOW_TRACKING_USERNAME" in text) is (uri == "http://127.0.0.1:1")


@pytest.mark.ci
def test_a_server_that_never_answers_is_refused_within_seconds() -> None:
    """It takes connections. MLflow's own limits are minutes."""
    with socket.create_server(("127.0.0.1", 0)) as server, pytest.raises(TrackingError, match="timed out"):
        open_once(TrackingConfig(f"http://127.0.0.1:{server.getsockname()[1]}"))


def test_a_store_that_another_process_holds_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fsdp_lab.tracking.store._SCHEMA_LIMIT_S", 0.3)
    holds = rf"another process is opening the store \(process {os.getpid()},"
    with exclusive(tmp_path / ".mlflow.lock"), pytest.raises(TrackingError, match=holds):
        open_once(TrackingConfig(f"sqlite:///{tmp_path}/mlflow.db", "lab"))


def test_a_deleted_experiment_is_refused(store: TrackingConfig) -> None:
    number = reader().create_experiment("lab")
    reader().delete_experiment(number)
    with pytest.raises(TrackingError, match=f"tracking.experiment=lab was deleted.*--experiment-id {number}"):
        open_once(store)


@pytest.mark.ci
def test_a_server_is_written_to_and_its_death_is_reported_once(
    tmp_path: Path, problems: list[str], capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", "me")
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "hunter2")
    file = (Path(__file__), "")
    with (
        mlflow_server(tmp_path, "--artifacts-destination", str(tmp_path / "kept")) as (uri, process),
        lab_of(TrackingConfig(uri, "lab"), problems) as lab,
    ):
        lab.want(None)
        lab.want(0, epochs={1: METRICS | {"train/loss": float("inf")}}, files=[file], status=TrialStatus.finished)
        assert lab.projection.settle(60) == 0
        client = mlflow.MlflowClient(tracking_uri=uri)
        run = client.get_run(lab.projection.run_id(0))
        assert (run.info.status, run.data.tags["mlflow.parentRunId"]) == ("FINISHED", lab.projection.run_id(None))
        assert run.data.metrics["val/accuracy"] == 0.75
        assert [item.path for item in client.list_artifacts(run.info.run_id)] == [Path(__file__).name]
        assert problems == []
        end(process)
        for step in range(2, 12):
            lab.want(None, epochs={step: METRICS})
        lab.want(1)
        assert lab.projection.settle(5.0) == 2, "both wait"
    assert sum("does not answer" in text for text in problems) == 1
    assert f"tracking.uri={uri}" in problems[0] and "Connection refused" in problems[0]
    assert "hunter2" not in "".join(problems) and capfd.readouterr() == ("", "")
