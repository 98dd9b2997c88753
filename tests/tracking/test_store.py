"""Which stores of MLflow are made, opened and refused, and a server that dies."""

from __future__ import annotations

import dataclasses
import os
import socket
import sqlite3
from contextlib import closing
from pathlib import Path

import mlflow
import pytest

from fsdp_lab.config.status import TrialStatus
from fsdp_lab.config.sweep import TrackingConfig
from fsdp_lab.storage.locks import exclusive
from fsdp_lab.tracking import TrackingError, annotate
from fsdp_lab.tracking.tags import trial_params
from tests.servers import end, free_port, lay_store, mlflow_server
from tests.tracking.conftest import CHOICES, CONFIG, METRICS, lab_of, reader


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


def test_opening_twice_keeps_what_was_written_of_an_experiment(store: TrackingConfig) -> None:
    open_once(store)
    first = reader().get_experiment_by_name("lab")
    assert first is not None
    reader().set_experiment_tag(first.experiment_id, "mlflow.note.content", "ours")
    open_once(store)
    again = reader().get_experiment_by_name("lab")
    assert again is not None
    assert (again.experiment_id, again.tags["mlflow.note.content"]) == (first.experiment_id, "ours")


def test_a_store_that_was_moved_does_not_log_to_its_old_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, problems: list[str]
) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    for folder in (old, new):  # a store keeps no connection of an earlier place
        folder.mkdir()
    lay_store(old)
    monkeypatch.chdir(old)
    with lab_of(TrackingConfig(f"sqlite:///{old}/mlflow.db", "lab"), problems) as lab:
        lab.want(0, status=TrialStatus.finished)
        assert lab.projection.settle(60) == 0
        run_id = lab.projection.run_id(0)
    new.rmdir()
    old.rename(new)
    moved = TrackingConfig(f"sqlite:///{new}/mlflow.db", "lab")
    for refused in (lambda: open_once(moved), lambda: annotate(moved, run_id, {}, [Path(__file__)])):
        with pytest.raises(TrackingError, match=r"old/mlartifacts, but its store is in .*new: it was moved or copied"):
            refused()
    assert not old.exists()
    old.symlink_to(new)
    (new / "mlartifacts").mkdir(exist_ok=True)
    open_once(moved)
    open_once(dataclasses.replace(moved, experiment="another"))


def refused(uri: str) -> str:
    with pytest.raises(TrackingError) as caught:
        open_once(TrackingConfig(uri))
    assert f"tracking.uri={uri}" in str(caught.value) and "\n" not in str(caught.value)
    return str(caught.value)


REFUSED = {
    "ftp://host/x": "MLflow cannot use the store",
    "sqlite://outputs/mlflow.db": "three slashes",
    "sqlite:///:memory:": "three slashes",
    "sqlite:////tmp/50%20off/mlflow.db": "use a path without them",
    "sqlite:////proc/nowhere/mlflow.db": "No such file or directory: '/proc/nowhere'",
    "postgresql://127.0.0.1:1/db": "MLflow cannot use the store (",
    "http://host:50x0": "host or port cannot be read",
    "http:///path": "Invalid url",
    "sqlite:///text.db": "file is not a database",
    "sqlite:///folder.db": "unable to open database file",
}


def test_a_store_that_cannot_be_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.db").write_text("not a database" * 100)
    (tmp_path / "folder.db").mkdir()
    messages = {uri: refused(uri) for uri in REFUSED}
    assert {uri: text for uri, text in messages.items() if REFUSED[uri] not in text} == {}


@pytest.mark.parametrize("silent", [False, pytest.param(True, marks=pytest.mark.ci)])
def test_an_absent_or_silent_server_is_reported_with_the_remedy(silent: bool) -> None:
    """The silent one takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        message = refused(f"http://127.0.0.1:{server.getsockname()[1] if silent else free_port()}")
    assert ("timed out" if silent else "Connection refused") in message
    assert "start the server, set MLFLOW_TRACKING_USERNAME" in message


def test_a_store_that_another_process_holds_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fsdp_lab.tracking.store._SCHEMA_LIMIT_S", 0.3)
    holds = rf"another process is opening the store \(process {os.getpid()},"
    with exclusive(tmp_path / ".mlflow.lock"), pytest.raises(TrackingError, match=holds):
        open_once(TrackingConfig(f"sqlite:///{tmp_path}/mlflow.db", "lab"))


def test_a_deleted_experiment_or_one_of_a_long_name_is_refused(store: TrackingConfig) -> None:
    with pytest.raises(TrackingError, match=r"tracking\.experiment has 300 characters"):
        open_once(dataclasses.replace(store, experiment="x" * 300))
    number = reader().create_experiment("lab")
    reader().delete_experiment(number)
    with pytest.raises(TrackingError, match=f"tracking.experiment=lab was deleted.*--experiment-id {number}"):
        open_once(store)


def test_a_store_of_another_mlflow_version_is_refused(store: TrackingConfig) -> None:
    with closing(sqlite3.connect("outputs/mlflow.db")) as database, database:
        database.execute("UPDATE alembic_version SET version_num = 'fromthefuture'")
    message = refused(store.uri)
    assert "MLflow cannot use the store (" in message and "'mlflow db upgrade" in message


@pytest.mark.ci
def test_a_server_is_written_to_and_its_death_is_reported_once(
    tmp_path: Path, problems: list[str], capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", "me")
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "hunter2")
    (tmp_path / "model.pt").write_bytes(b"weights")
    params = trial_params(CONFIG, CHOICES, 2)
    with (
        mlflow_server(tmp_path, "--artifacts-destination", str(tmp_path / "kept")) as (uri, process),
        lab_of(TrackingConfig(uri, "lab"), problems) as lab,
    ):
        lab.want(None)
        epochs = {1: METRICS | {"train/loss": float("inf")}}
        files = [(tmp_path / "model.pt", "")]
        lab.want(0, params=params, epochs=epochs, files=files, status=TrialStatus.finished)
        assert lab.projection.settle(60) == 0
        client = mlflow.MlflowClient(tracking_uri=uri)
        run = client.get_run(lab.projection.run_id(0))
        assert (run.info.status, run.data.tags["mlflow.parentRunId"]) == ("FINISHED", lab.projection.run_id(None))
        assert (run.data.params, run.data.metrics["val/accuracy"]) == (params, 0.75)
        assert [item.path for item in client.list_artifacts(run.info.run_id)] == ["model.pt"]
        assert problems == []
        end(process)
        for step in range(2, 12):
            lab.want(None, epochs={step: METRICS})
        lab.want(1)
        assert lab.projection.settle(5.0) == 2, "both wait"
    assert sum("does not answer" in text for text in problems) == 1
    assert f"tracking.uri={uri}" in problems[0] and "Connection refused" in problems[0]
    assert "hunter2" not in "".join(problems) and capfd.readouterr() == ("", "")
