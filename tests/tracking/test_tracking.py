"""The projection against real stores, read back with MLflow's own client; which stores are made, and refused."""

from __future__ import annotations

import dataclasses
import errno
import os
import signal
import socket
import sqlite3
import subprocess
import threading
from contextlib import closing
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlflow
import pytest

import fsdp_lab
from fsdp_lab.config.status import TrialStatus
from fsdp_lab.config.sweep import TrackingConfig
from fsdp_lab.storage.locks import exclusive
from fsdp_lab.tracking import TrackingError, annotate
from fsdp_lab.tracking.store import is_away, open_store
from fsdp_lab.tracking.tags import RECORDED_TAG, machine_tags, trial_params, trial_tags
from tests.conftest import ROOT
from tests.processes import ordinary_user
from tests.servers import lay_store
from tests.tracking.conftest import CHOICES, CONFIG, METRICS, Lab, lab_of


def test_parameters_are_the_choices_and_then_every_key_as_typed(lab: Lab) -> None:
    in_order = trial_params(CONFIG, CHOICES, 2)
    assert list(in_order)[:4] == ["sharding", "precision", "offload", "sharding.api"]
    params = lab.sent(0, params=in_order).data.params
    assert params == in_order
    expected = {
        "sharding": "root", "precision": "fp16", "cluster.num_workers": "2", "optimizer.lr": "0.01", "export": "false",
        "training.max_steps": "null", "tracking.uri": "sqlite:///outputs/mlflow.db",
        "precision.param_dtype": "float32",  # another than the choice says
    }  # fmt: skip
    assert {key: params[key] for key in expected} == expected
    left_out = {"experiment", "search.num_trials", "sharding.granularity", "offload.target"}  # which choices imply
    assert not left_out & params.keys()
    resumed = lab.sent(0, params=in_order | {"optimizer.lr": "0.1", "c": "4"}).data
    assert resumed.params == params | {"c": "4"} and resumed.tags["resumed_with"] == "optimizer.lr=0.1"


def test_tags_state_who_where_and_with_which_code(lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command runs in a folder of the user's repository, not in the checkout of fsdp_lab."""
    mine = tmp_path / "mine"
    (mine / "runs").mkdir(parents=True)
    (mine / "model.py").write_text("WIDTH = 1")
    git(mine, "init", "-q")
    git(mine, "add", "model.py")
    git(mine, "-c", "user.name=me", "-c", "user.email=me@localhost", "commit", "-qm", "first")
    machine_tags.cache_clear()
    with monkeypatch.context() as there:
        there.chdir(mine / "runs")
        there.setenv("GIT_DIR", str(mine / ".git"))  # as a hook has it
        own = trial_tags(tmp_path / "trial", ["sharding=root", "precision=fp16"])
        (mine / "model.py").write_text("WIDTH = 2")
        machine_tags.cache_clear()
        assert machine_tags()["git.dirty"] == "true"
    tags = lab.sent(0, first_tags=own).data.tags
    assert (tags["mlflow.source.git.commit"], tags["git.dirty"]) == (git(mine, "rev-parse", "HEAD"), "false")
    of_tool = git(ROOT, "rev-parse", "HEAD")
    assert tags["version.fsdp_lab"] == f"{fsdp_lab.__version__} (commit {of_tool[:10]})"
    assert tags["version.mlflow"] == mlflow.__version__ and tags["host"] == socket.gethostname()
    assert (tags["mlflow.source.name"], tags["fsdp_lab.folder"]) == ("python -m fsdp_lab", str(tmp_path / "trial"))
    machine_tags.cache_clear()


def git(folder: Path, *words: str) -> str:
    return subprocess.check_output(["git", *words], cwd=folder, text=True, timeout=30).strip()


def test_a_later_start_finds_the_runs_and_sends_what_they_lack(lab: Lab, store: TrackingConfig) -> None:
    """With what is also logged in MiB: an epoch has both or neither. The trial ended long before it was sent."""
    forecast = {"forecast/peak_bytes": 3 * 2**20}
    measured = METRICS | {"memory/peak_bytes": 9222256.0}
    lab.sent(None)
    epochs = {0: forecast, 1: measured}
    first = lab.sent(0, epochs=epochs, status=TrialStatus.interrupted, error="Ctrl-C", ended=120_000)
    assert (first.info.status, first.info.end_time) == ("KILLED", 120_000)
    with lab_of(store, resumed=True) as again:
        assert again.projection.run_id(0) == first.info.run_id and RECORDED_TAG not in first.data.tags
        later = measured | {"step": 46, "memory/peak_bytes": 2.0**21}
        run = again.sent(0, epochs={**epochs, 2: later})
        assert run.info.status == "RUNNING" and not {"status", "error", RECORDED_TAG} & run.data.tags.keys()
        run = again.sent(0, status=TrialStatus.finished)
    assert (run.info.status, run.data.tags["status"], run.data.tags[RECORDED_TAG]) == ("FINISHED", "finished", "true")
    for key, points in (("memory/peak_mib", [(1, 9222256 / 2**20), (2, 2.0)]), ("forecast/peak_mib", [(0, 3.0)])):
        assert lab.history(0, key) == points
    assert lab.problems == again.problems == []


# Of MLflow's columns, which PostgreSQL enforces, and SQLite does not.
LENGTHS = {
    "runs.name": 250, "tags.key": 250, "tags.value": 8000, "params.key": 250, "params.value": 8000, "metrics.key": 250,
}  # fmt: skip


def test_long_and_strange_names_and_values_fit_a_strict_database(lab: Lab) -> None:
    """And stay apart: two names that differ in what is cut or replaced are two names, each with its value."""
    long, odd = "x" * 9000, {"val/acc@1": 3.0, "val/acc_1": 4.0, "val/a//b": 5.0, "val/100%": 6.0, "val/../x": 7.0}
    choices = {f"{long}a": "1", f"{long}b": "2", "model.a@b": "3", "model.a%b": "4", "../x": "5", "größe 🙂": "6"}
    config = dataclasses.replace(CONFIG, tracking=TrackingConfig(f"http://{long}"))
    names = [f"{long}0", f"{long}1", "a=[1, 'b'] größe 🙂 / ..\\ \"%\""]
    shown = [lab.sent(n, name=name).info.run_name for n, name in enumerate(names)]
    run = lab.sent(
        0, params=trial_params(config, choices, 2), tags={"odd@tag größe": long},
        epochs={1: {**METRICS, f"val/{long}": 1.0, "val/größe 🙂": 2.0, **odd}}, facts={"data": long, "notes": [long]},
        figures={"val/top@5": 9.0}, status=TrialStatus.failed, error=long,
    )  # fmt: skip
    assert "MLflow takes no metric val/größe 🙂; it is there as val/größe _-2c98" in lab.problems
    assert [len(name or "") for name in shown[:2]] == [250, 250] and shown[0] != shown[1] and shown[2] == names[2]
    assert {*choices.values()} <= {*run.data.params.values()} and {1.0, 2.0, *odd.values(), 9.0} <= {
        *run.data.metrics.values()
    }
    assert run.data.metrics["train/loss"] == 1.5 and run.data.metrics["val/acc_1"] == 4.0
    assert (run.info.status, len(run.data.tags["error"])) == ("FAILED", 500)
    with closing(sqlite3.connect("outputs/mlflow.db")) as database:
        for place, most in LENGTHS.items():
            table, column = place.split(".")
            (longest,) = database.execute(f"SELECT max(length({column})) FROM {table}").fetchone()
            assert longest <= most, place


def test_what_is_refused_is_reported_once_and_the_rest_goes_on(
    lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("projection", "writes"):  # a server may refuse more names than MLflow's own rule
        monkeypatch.setattr(f"fsdp_lab.tracking.{module}.stored_name", str)
    lab.projection.changed(7)  # nobody knows what it should hold
    bad, unreadable = {"mfu %": 1.0}, (tmp_path, "folder")
    run = lab.sent(0, epochs={1: bad, 2: bad, 3: METRICS}, files=[unreadable], status=TrialStatus.finished)
    assert ["refused the run of a trial" in lab.problems[0], "refused metrics" in lab.problems[1]] == [True, True]
    assert len(lab.problems) == 2 and run.info.status == "FINISHED" and lab.history(0, "train/loss") == [(3, 1.5)]
    assert RECORDED_TAG not in run.data.tags, "a resume tries again"


def test_a_store_that_breaks_and_comes_back_gets_everything(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fsdp_lab.tracking.projection._PAUSE_S", 0.05)
    lab.sent(None)
    lab.sent(0)
    with closing(sqlite3.connect("outputs/mlflow.db")) as database:
        database.execute("ALTER TABLE runs RENAME TO away")
        lab.want(0, epochs={1: METRICS})
        lab.want(1, epochs={1: METRICS})
        assert lab.projection.settle(0.3) == 2
        assert lab.projection.run_id(1) == ""
        database.execute("ALTER TABLE away RENAME TO runs")
    lab.sent(0, epochs={1: METRICS, 2: METRICS})
    assert lab.history(0, "train/loss") == [(1, 1.5), (2, 1.5)]
    assert lab.history(1, "train/loss") == [(1, 1.5)]
    away, *waiting, again = lab.problems
    assert "does not answer" in away and "answers again" in again
    assert all("waiting up to tracking.patience_s=" in text for text in waiting)


def test_what_seemed_to_fail_is_not_written_twice(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer is lost, not the write: the next attempt looks first."""
    monkeypatch.setattr("fsdp_lab.tracking.projection._PAUSE_S", 0.05)
    sent, client = list[str](), lab.projection._client

    def write(name: str, real: Any, *args: Any, **kwargs: Any) -> Any:
        result = real(*args, **kwargs)
        sent.append(name)
        if sent.count(name) == 1:
            raise OSError("the answer was lost")
        return result

    for name in ("create_run", "log_batch"):
        setattr(client, name, partial(write, name, getattr(client, name)))
    run = lab.sent(3, epochs={1: METRICS}, status=TrialStatus.finished)
    assert sent.count("create_run") == 1
    assert lab.history(3, "train/loss") == [(1, 1.5)]
    assert run.data.tags["status"] == "finished" and RECORDED_TAG in run.data.tags


def test_an_interrupt_during_a_write_leaves_the_store_whole(lab: Lab) -> None:
    """It ends the wait of the main thread, at once; an interrupted write to SQLite would leave it locked."""
    lab.sent(0)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    with closing(sqlite3.connect("outputs/mlflow.db", isolation_level=None, check_same_thread=False)) as other:
        other.execute("BEGIN IMMEDIATE")  # so that the write waits inside SQLite
        lab.want(0, epochs={1: METRICS})
        assert lab.projection.settle(600, limit_s=0.1) == 1, "a deadline ends the wait for a write that hangs"
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            lab.projection.settle(600)
        signal.signal(signal.SIGINT, before)
        other.execute("ROLLBACK")
    run = lab.sent(0, status=TrialStatus.interrupted)
    assert lab.problems == [] and run.info.status == "KILLED"
    assert lab.history(0, "train/loss") == [(1, 1.5)], "the write was made, once"


def open_once(store: TrackingConfig) -> None:
    with lab_of(store):
        pass


def test_a_store_is_made_in_the_working_folder_whatever_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    here = tmp_path / "back\\slash ${x} #1"
    here.mkdir()
    monkeypatch.chdir(here)
    with lab_of(TrackingConfig("sqlite:///deep/er/mlflow.db", "lab")) as lab:
        experiment = lab.projection._client.get_experiment_by_name("lab")
        lab.want(0, files=[(Path(__file__), "")], status=TrialStatus.finished)
        assert lab.projection.settle(60) == 0
    assert experiment is not None and "press *Compare*" in experiment.tags["mlflow.note.content"]
    assert [path.name for path in (*tmp_path.iterdir(), *here.iterdir())] == [here.name, "deep"], "no mlruns"
    assert sorted(path.name for path in (here / "deep/er").iterdir()) == [".mlflow.lock", "mlartifacts", "mlflow.db"]
    assert len(list((here / "deep/er/mlartifacts").glob(f"*/artifacts/{Path(__file__).name}"))) == 1
    assert lab.problems == [] and capfd.readouterr() == ("", "")


def test_a_store_that_was_moved_does_not_log_to_its_old_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    old.mkdir()
    lay_store(old)
    monkeypatch.chdir(old)
    with lab_of(TrackingConfig(f"sqlite:///{old}/mlflow.db", "lab")) as lab:
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


@pytest.mark.parametrize("read_only", ["mlflow.db", "."])
def test_a_store_that_may_not_be_written_is_refused_at_once(read_only: str) -> None:
    with ordinary_user() as folder:
        database = folder / "mlflow.db"
        with closing(sqlite3.connect(database)) as fresh:
            fresh.execute("CREATE TABLE runs (id TEXT)")
        (folder / read_only).chmod(0o500)
        reason = rf"tracking\.uri=sqlite:///{database}: {database} cannot be written \(attempt to write a readonly"
        with pytest.raises(TrackingError, match=reason):
            open_store(TrackingConfig(f"sqlite:///{database}"), print)


def test_artifacts_that_nothing_can_be_written_to_are_refused_at_once(store: TrackingConfig) -> None:
    Path("outputs/mlartifacts").touch()
    with pytest.raises(TrackingError, match=r"experiment=lab go to .*/outputs/mlartifacts, which cannot be written"):
        open_once(store)
    assert not is_away(PermissionError(errno.EACCES, "")) and is_away(OSError(errno.ENOSPC, ""))


def test_two_users_open_a_store(store: TrackingConfig) -> None:
    open_once(store)
    assert Path("outputs/.mlflow.lock").stat().st_mode & 0o777 == 0o666


@pytest.mark.parametrize(
    ("uri", "location", "notes"),
    [
        ("http://host:5000", "file://{}/a%20b/1", 1),
        ("http://host:5000", "{}/1", 1),
        ("http://host:5000", "mlflow-artifacts:/1", 0),
        ("http://host:5000", "s3://bucket/1", 0),
        ("postgresql:///lab", "file://{}/1", 1),
        ("postgresql:///lab", "file://{}/../outputs/mlartifacts", 0),
    ],
)
def test_artifacts_of_a_server_that_go_to_this_disk_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, uri: str, location: str, notes: int
) -> None:
    monkeypatch.chdir(tmp_path)
    found = SimpleNamespace(
        experiment_id="1",
        lifecycle_stage="active",
        artifact_location=location.format(tmp_path / "there").replace("there/../", ""),
    )
    client = SimpleNamespace(get_experiment_by_name=lambda name: found, get_experiment=lambda number: found)
    monkeypatch.setattr("mlflow.MlflowClient", lambda tracking_uri: client)
    said: list[str] = []
    open_store(TrackingConfig(uri), said.append)
    assert len(said) == notes and all("--artifacts-destination" in text and "/there/" in text for text in said)


def test_a_store_that_another_process_holds_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fsdp_lab.tracking.store._SCHEMA_LIMIT_S", 0.3)
    holds = rf"another process is opening the store \(process {os.getpid()},"
    with exclusive(tmp_path / ".mlflow.lock"), pytest.raises(TrackingError, match=holds):
        open_once(TrackingConfig(f"sqlite:///{tmp_path}/mlflow.db", "lab"))
