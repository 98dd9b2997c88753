"""The projection against real stores: what was told is read back with MLflow's own client."""

from __future__ import annotations

import dataclasses
import os
import signal
import socket
import sqlite3
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import mlflow
import pytest
from mlflow.entities import Run

import fsdp_lab
from fsdp_lab.config.parallel import Granularity, ShardingConfig
from fsdp_lab.config.status import TrialStatus
from fsdp_lab.config.sweep import SearchConfig, SweepConfig, TrackingConfig
from fsdp_lab.config.training import OptimizerConfig
from fsdp_lab.tracking import Projection, TrackingError, WantedRun, annotate
from fsdp_lab.tracking.tags import (
    COMMAND_TAG,
    RECORDED_TAG,
    machine_tags,
    stored_name,
    sweep_tags,
    trial_params,
    trial_tags,
)
from tests.servers import end, free_port, lay_store, mlflow_server
from tests.test_locks import held

FACTS = {
    "data": "digits", "data_digest": "0123456789abcdef", "data_num_train": 1437, "data_num_val": 360,
    "device": "cpu", "world_size": 2, "num_params": 137546, "torch": "2.14.1", "resumed_from": None,
    "notes": ["offload=cpu has no effect on a CPU.", "sharding=root makes one unit."],
}  # fmt: skip
METRICS = {"step": 23, "train/loss": 1.5, "val/accuracy": 0.75, "memory/rank0/peak_bytes": 4096}
CHOICES = {"sharding": "root", "precision": "fp16", "offload": "none", "experiment": "null"}
CONFIG = SweepConfig(
    sharding=ShardingConfig(granularity=Granularity.root), optimizer=OptimizerConfig(lr=0.01), export=False
)


@pytest.fixture
def problems() -> list[str]:
    return []


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TrackingConfig:
    """A fresh store in the current folder, by its relative path; the migration that makes one takes seconds."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "outputs").mkdir()
    lay_store(tmp_path / "outputs")
    return TrackingConfig("sqlite:///outputs/mlflow.db", "lab")


class Lab:
    """What a driver wants MLflow to hold, and the projection that sends it."""

    def __init__(self, store: TrackingConfig, problems: list[str]) -> None:
        self.runs: dict[int | None, WantedRun] = {}
        self.projection = Projection(store, "night", lambda number: self.runs[number], problems.append)

    @property
    def client(self) -> Any:
        return self.projection._client

    def want(self, number: int | None, **fields: Any) -> None:
        first = WantedRun("root fp16", trial_tags(Path("trial"), ["sharding=root", "precision=fp16"]))
        self.runs[number] = dataclasses.replace(self.runs.get(number, first), **fields)
        self.projection.changed(number)

    def sent(self, number: int | None, **fields: Any) -> Run:
        """Want it, wait, and read the run."""
        self.want(number, **fields)
        assert self.projection.settle(60) == 0
        return self.read(number)

    def read(self, number: int | None) -> Run:
        return read(self.projection.run_id(number))

    def history(self, number: int | None, key: str) -> list[tuple[int, float]]:
        points = reader().get_metric_history(self.projection.run_id(number), key)
        return [(point.step, point.value) for point in points]


@contextmanager
def lab_of(store: TrackingConfig, problems: list[str], resumed: bool = False) -> Iterator[Lab]:
    made = Lab(store, problems)
    made.projection.open(resumed)
    try:
        yield made
    finally:
        made.projection.stop()


@pytest.fixture
def lab(store: TrackingConfig, problems: list[str]) -> Iterator[Lab]:
    with lab_of(store, problems) as made:
        yield made


def open_once(store: TrackingConfig) -> None:
    with lab_of(store, []):
        pass


def reader() -> mlflow.MlflowClient:
    """Of this test's store. MLflow keeps stores by URI: a relative one would be an older test's."""
    return mlflow.MlflowClient(tracking_uri=f"sqlite:///{Path.cwd()}/outputs/mlflow.db")


def read(run_id: str) -> Run:
    return reader().get_run(run_id)


def test_a_fresh_store_is_made_with_its_folder_and_experiment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    open_once(TrackingConfig("sqlite:///deep/er/mlflow.db", "lab"))
    client = mlflow.MlflowClient(tracking_uri=f"sqlite:///{tmp_path}/deep/er/mlflow.db")
    experiment = client.get_experiment_by_name("lab")
    assert experiment is not None
    assert experiment.artifact_location == (tmp_path / "deep/er/mlartifacts").as_uri()
    assert "press *Compare*" in experiment.tags["mlflow.note.content"]
    assert [p.name for p in tmp_path.iterdir()] == ["deep"]  # no mlruns, no mlflow.db in the current folder
    assert capfd.readouterr() == ("", "")


def test_a_store_that_another_process_does_not_let_go_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fsdp_lab.tracking.store._SCHEMA_LIMIT_S", 0.3)
    with held(tmp_path / ".mlflow.lock") as other:
        message = (
            rf"tracking.uri=sqlite:///{tmp_path}/mlflow.db: another process is opening the store \(process {other.pid},"
        )
        with pytest.raises(TrackingError, match=message):
            open_once(TrackingConfig(f"sqlite:///{tmp_path}/mlflow.db", "lab"))


@pytest.mark.parametrize("name", ["back\\slash", "${x}", "run#1"])
def test_the_store_is_in_the_working_folder_whatever_its_name(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, problems: list[str]
) -> None:
    (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / name)
    with lab_of(TrackingConfig(f"sqlite:///{len(name)}{ord(name[0])}/mlflow.db", "lab"), problems) as lab:
        lab.want(0, files=[(Path(__file__), "")], status=TrialStatus.finished)
        assert lab.projection.settle(60) == 0
    assert problems == [] and [path.name for path in tmp_path.iterdir()] == [name]
    folder = next(Path().iterdir())
    assert sorted(path.name for path in folder.iterdir()) == [".mlflow.lock", "mlartifacts", "mlflow.db"]
    assert len(list(folder.glob(f"mlartifacts/*/artifacts/{Path(__file__).name}"))) == 1


@pytest.mark.parametrize("uri", ["sqlite:////tmp/what?/mlflow.db", "sqlite:////tmp/50%20off/mlflow.db"])
def test_an_address_that_cannot_name_its_path_is_refused(uri: str) -> None:
    with pytest.raises(TrackingError, match=r"has a % or \?.* use a path without them"):
        open_once(TrackingConfig(uri, "lab"))


def test_a_store_that_was_moved_does_not_log_to_its_old_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, problems: list[str]
) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    for folder in (old, new):  # a store keeps no connection of an earlier place
        folder.mkdir(exist_ok=True)
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


def test_opening_twice_keeps_the_experiment_and_what_was_written_about_it(store: TrackingConfig) -> None:
    open_once(store)
    client = reader()
    experiment = client.get_experiment_by_name("lab")
    assert experiment is not None
    client.set_experiment_tag(experiment.experiment_id, "mlflow.note.content", "ours")
    open_once(store)
    again = client.get_experiment_by_name("lab")
    assert again is not None
    assert (again.experiment_id, again.tags["mlflow.note.content"]) == (experiment.experiment_id, "ours")


def test_a_name_that_mlflow_refuses_costs_no_other_metric(lab: Lab, problems: list[str]) -> None:
    odd = {"val/acc@1": 0.5, "val/acc_1": 0.25, "val/a//b": 1.0, "val/100%": 2.0, "val/../x": 3.0}
    run = lab.sent(
        0, epochs={1: {**METRICS, "epoch": 1, **odd}}, figures={"val/top@5": 9.0},
        params={stored_name("model.a@b"): "1"}, tags={"odd@tag": "3", "even": "4"},
    )  # fmt: skip
    assert run.data.metrics["train/loss"] == 1.5 and run.data.metrics["val/acc_1"] == 0.25
    assert {*odd.values(), 9.0} <= set(run.data.metrics.values())
    assert list(run.data.params.values()) == ["1"] and {"3", "4"} <= set(run.data.tags.values())
    assert [problem for problem in problems if "val/acc@1" in problem] == [
        "MLflow takes no metric val/acc@1; it is there as val/acc_1-4739"
    ]
    lab.sent(0, status=TrialStatus.finished)
    assert lab.read(0).data.tags[RECORDED_TAG] == "true"


@pytest.fixture
def strict(store: TrackingConfig) -> TrackingConfig:
    """SQLite takes texts of any length; with triggers it refuses what is longer than MLflow's column, as PostgreSQL
    does."""
    from mlflow.store.tracking.dbmodels import models

    with closing(sqlite3.connect("outputs/mlflow.db")) as database:
        for table in models.Base.metadata.tables.values():
            for column in table.columns:
                length = getattr(column.type, "length", None)
                if length and database.execute(f"PRAGMA table_info({table.name})").fetchall():
                    database.execute(
                        f"CREATE TRIGGER strict_{table.name}_{column.name} BEFORE INSERT ON {table.name} WHEN "
                        f"length(NEW.{column.name}) > {length} BEGIN SELECT RAISE(ABORT, '{column.name} too long'); END"
                    )
        database.commit()
    return store


def test_an_experiment_with_a_name_that_is_too_long_is_refused(store: TrackingConfig) -> None:
    with pytest.raises(TrackingError, match=r"tracking\.experiment has 300 characters"):
        open_once(dataclasses.replace(store, experiment="x" * 300))


@contextmanager
def silent_server() -> Iterator[int]:
    """A port that takes connections and never answers."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        yield int(server.getsockname()[1])


def refused(uri: str) -> str:
    with pytest.raises(TrackingError) as caught:
        open_once(TrackingConfig(uri))
    assert f"tracking.uri={uri}" in str(caught.value) and "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("silent", [False, pytest.param(True, marks=pytest.mark.ci)])
def test_an_absent_server_is_reported_with_the_remedy(silent: bool) -> None:
    with silent_server() as port:
        message = refused(f"http://127.0.0.1:{port if silent else free_port()}")
    assert ("timed out" if silent else "Connection refused") in message
    assert "start the server, set MLFLOW_TRACKING_USERNAME" in message
    assert "tracking.uri=sqlite:///outputs/mlflow.db" in message


REFUSED = {
    "ftp://host/x": "MLflow cannot use the store",
    "sqlite://outputs/mlflow.db": "three slashes",
    "sqlite:///:memory:": "three slashes",
    "sqlite:////proc/nowhere/mlflow.db": "No such file or directory: '/proc/nowhere'",
    "postgresql://127.0.0.1:1/db": "MLflow cannot use the store (",
    "http://[::1": "host or port cannot be read",
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


def test_a_store_of_another_mlflow_version_is_refused(store: TrackingConfig) -> None:
    with closing(sqlite3.connect("outputs/mlflow.db")) as database, database:
        database.execute("UPDATE alembic_version SET version_num = 'fromthefuture'")
    message = refused(store.uri)
    assert "MLflow cannot use the store (" in message and "'mlflow db upgrade" in message


def test_a_deleted_experiment_is_named_with_the_command_that_restores_it(store: TrackingConfig) -> None:
    client = reader()
    number = client.create_experiment("lab")
    client.delete_experiment(number)
    with pytest.raises(TrackingError, match=f"tracking.experiment=lab was deleted.*--experiment-id {number}"):
        open_once(store)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    with mlflow_server(tmp_path, "--artifacts-destination", str(tmp_path / "kept")) as started:
        yield started


def test_parameters_are_the_choices_and_then_every_key_as_typed(lab: Lab) -> None:
    in_order = trial_params(CONFIG, CHOICES, 2)
    params = lab.sent(0, params=in_order).data.params
    assert params == in_order
    assert list(in_order)[:4] == ["sharding", "precision", "offload", "sharding.dp_replicate"]
    expected = {
        "sharding": "root", "precision": "fp16", "offload": "none", "cluster.num_workers": "2",
        "optimizer.lr": "0.01", "export": "false", "compile": "false", "training.max_steps": "null",
        "precision.param_dtype": "float32", "tracking.uri": "sqlite:///outputs/mlflow.db",
    }  # fmt: skip
    assert {key: params[key] for key in expected} == expected
    assert "experiment" not in params
    assert not {"search.num_trials", "search.seed"} & params.keys(), "a grid has all its cells"
    searched = trial_params(dataclasses.replace(CONFIG, search=SearchConfig("random", num_trials=7)), CHOICES, 2)
    assert (searched["search.num_trials"], searched["search.seed"]) == ("7", "0")
    # what sharding=root says by its name; precision=fp16 says another dtype than this config has
    assert "sharding.granularity" not in params and "offload.target" not in params


def test_a_parameter_that_changed_in_a_resume_stands_in_a_tag(lab: Lab) -> None:
    lab.sent(0, params={"a": "1", "b": "2"})
    run = lab.sent(0, params={"a": "1", "b": "3", "c": "4"})
    assert run.data.params == {"a": "1", "b": "2", "c": "4"} and run.data.tags["resumed_with"] == "b=3"


def test_a_trial_of_a_sweep_is_its_child_and_a_trial_alone_is_not(
    lab: Lab, store: TrackingConfig, tmp_path: Path
) -> None:
    command = "python -m fsdp_lab -m sharding=root,ddp data.root=/data/x 'objective=[val/loss:min]'"
    tags = sweep_tags(tmp_path, command)
    lab.want(0)
    sweep = lab.sent(None, name="night", first_tags=tags, tags={"num_trials": "12"})
    assert (sweep.info.run_name, sweep.data.tags["num_trials"]) == ("night", "12")
    note = sweep.data.tags["mlflow.note.content"]
    assert "Started 20" in note and sweep.data.tags[COMMAND_TAG] == command and command in note
    sweep = lab.sent(None, name="lr (random, 13 trials)", tags={"num_trials": "13"})
    assert (sweep.info.run_name, sweep.data.tags["num_trials"]) == ("lr (random, 13 trials)", "13")
    assert lab.sent(1).data.tags["mlflow.parentRunId"] == sweep.info.run_id
    with lab_of(store, []) as alone:
        assert "mlflow.parentRunId" not in alone.sent(0).data.tags


def test_the_description_of_a_sweep_begins_with_its_answer(lab: Lab, tmp_path: Path) -> None:
    def note(**fields: Any) -> str:
        return str(lab.sent(None, **fields).data.tags["mlflow.note.content"])

    started = note(first_tags=sweep_tags(tmp_path, "python -m fsdp_lab -m"))
    now = note(answer="So far, with 3 of 12 results: Recommended: `a=1`.")
    reader().set_tag(lab.projection.run_id(None), "mlflow.note.content", now + "\nOf the new disk.")  # by hand
    for _ in range(2):
        answered = note(answer="Recommended: `a=2`.")
        assert answered == f"Recommended: `a=2`.\n\n{started}\nOf the new disk."


def test_tags_state_who_where_and_with_which_code(lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command runs in a folder of the user's repository, not in the checkout of fsdp_lab."""
    (tmp_path / "mine" / "runs").mkdir(parents=True)
    (tmp_path / "mine" / "model.py").write_text("WIDTH = 1")
    git(tmp_path / "mine", "init", "-q")
    git(tmp_path / "mine", "add", "model.py")
    git(tmp_path / "mine", "-c", "user.name=me", "-c", "user.email=me@localhost", "commit", "-qm", "first")
    words = ["sharding=root", "precision=fp16"]
    machine_tags.cache_clear()
    with monkeypatch.context() as there:
        there.chdir(tmp_path / "mine" / "runs")
        there.setenv("GIT_DIR", str(tmp_path / "mine" / ".git"))  # as a hook has it
        own = trial_tags(tmp_path / "trial", words)
    tags = lab.sent(0, first_tags=own).data.tags
    assert tags["mlflow.source.git.commit"] == git(tmp_path / "mine", "rev-parse", "HEAD")
    assert tags["git.dirty"] == "false"
    of_tool = git(Path(__file__).parents[2], "rev-parse", "HEAD")
    assert tags["version.fsdp_lab"] == f"{fsdp_lab.__version__} (commit {of_tool[:10]})"
    assert tags["version.mlflow"] == mlflow.__version__
    assert {"version.torch", "version.ray", "version.hydra-core", "version.omegaconf"} <= tags.keys()
    assert tags["host"] == socket.gethostname()
    assert tags["mlflow.user"]
    assert tags["mlflow.source.name"] == "python -m fsdp_lab"
    assert tags["fsdp_lab.folder"] == str(tmp_path / "trial")
    (tmp_path / "mine" / "model.py").write_text("WIDTH = 2")
    machine_tags.cache_clear()
    monkeypatch.chdir(tmp_path / "mine" / "runs")
    assert machine_tags()["git.dirty"] == "true"
    monkeypatch.chdir(tmp_path)
    machine_tags.cache_clear()
    assert not {"mlflow.source.git.commit", "git.dirty"} & machine_tags().keys(), "no repository"


def git(folder: Path, *words: str) -> str:
    done = subprocess.run(["git", *words], cwd=folder, capture_output=True, text=True, timeout=30, check=True)
    return done.stdout.strip()


def test_metrics_stand_at_their_epoch_once_whatever_is_compared_again(lab: Lab, problems: list[str]) -> None:
    second = METRICS | {"step": 46, "train/loss": float("nan")}
    lab.sent(0, epochs={1: METRICS})
    run = lab.sent(0, epochs={1: METRICS, 2: second})
    assert set(run.data.metrics) == {"train/step", "train/loss", "val/accuracy", "memory/rank0/peak_bytes"}
    assert lab.history(0, "train/step") == [(1, 23.0), (2, 46.0)]
    assert lab.history(0, "val/accuracy") == [(1, 0.75), (2, 0.75)]
    (_, first_loss), (step, last_loss) = lab.history(0, "train/loss")
    assert (first_loss, step, last_loss != last_loss) == (1.5, 2, True)
    assert problems == []


def test_a_later_start_finds_the_runs_and_sends_what_they_lack(
    lab: Lab, store: TrackingConfig, problems: list[str]
) -> None:
    """With what is also logged in MiB: an epoch has both or neither."""
    forecast = {"forecast/peak_bytes": 3 * 2**20}
    measured = METRICS | {"memory/peak_bytes": 9222256.0, "memory/param_bytes": 2**20}
    lab.sent(None)
    first = lab.sent(0, epochs={0: forecast, 1: measured}, status=TrialStatus.interrupted)
    assert first.info.status == "KILLED"
    with lab_of(store, problems, resumed=True) as again:
        assert again.projection.run_id(0) == first.info.run_id and RECORDED_TAG not in again.read(0).data.tags
        later = measured | {"step": 46, "memory/peak_bytes": 2.0**21}
        epochs = {0: forecast, 1: measured, 2: later}
        assert again.sent(0, epochs=epochs).info.status == "RUNNING"
        again.sent(0, status=TrialStatus.finished)
        assert RECORDED_TAG in again.read(0).data.tags
    for key, points in (("memory/peak_mib", [(1, 9222256 / 2**20), (2, 2.0)]), ("forecast/peak_mib", [(0, 3.0)])):
        assert lab.history(0, key) == points
    run = lab.read(0)
    assert [key for key in run.data.metrics if key.endswith("_mib")] == ["forecast/peak_mib", "memory/peak_mib"]
    assert (run.info.status, run.data.tags["status"]) == ("FINISHED", "finished")
    assert problems == []


def test_what_comes_first_is_memory_in_mib_or_the_loss(lab: Lab) -> None:
    """MLflow's page that compares runs opens on the first metric."""
    figures = {"step": 3, "checkpoint/save_s": 1.0, "perf/samples_per_s": 700.0, "train/loss": 3.0}
    forecast = {"forecast/needed_bytes": 2.0**21, "forecast/peak_bytes": 2.0**20}
    metrics = lab.sent(0, epochs={0: forecast, 1: figures}).data.metrics
    assert next(iter(metrics.items())) == ("forecast/peak_mib", 1.0)
    metrics = lab.sent(1, epochs={1: figures}).data.metrics
    assert next(iter(metrics.items())) == ("train/loss", 3.0)


def test_a_run_ends_once_at_its_time(lab: Lab) -> None:
    endings = {"finished": "FINISHED", "failed": "FAILED", "oom": "FAILED", "interrupted": "KILLED"}
    for number, (status, expected) in enumerate(endings.items()):
        begun = lab.sent(number).info
        assert begun.status == "RUNNING"
        error = "line one\nline two " + "x" * 600
        lab.sent(number, status=TrialStatus(status), error=error, ended=begun.start_time + 120_000)
        run = lab.sent(number, ended=begun.start_time + 999_000)
        assert (run.info.status, run.data.tags["status"]) == (expected, status)
        assert run.info.end_time - run.info.start_time == 120_000
        assert run.data.tags["error"].startswith("line one line two xxx")
        assert len(run.data.tags["error"]) == 500
        assert (RECORDED_TAG in run.data.tags) == (status != "interrupted")


def kept(run: Run) -> Path:
    return Path(str(run.info.artifact_uri).removeprefix("file://"))


def test_artifacts_are_the_files_as_they_are(lab: Lab, tmp_path: Path, problems: list[str]) -> None:
    files = {"config.yaml": b"a: 1\n", "rank0.log": b"text\n\xff", "cut.json": b'{"uri": "', "picture.png": b"\xff\x00"}
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    run = lab.sent(0, files=[(tmp_path / name, "of") for name in (*files, "no_such")], status=TrialStatus.finished)
    assert kept(run).is_relative_to(tmp_path / "outputs" / "mlartifacts") and not problems
    collected = {str(p.relative_to(kept(run))): p.read_bytes() for p in kept(run).rglob("*") if p.is_file()}
    assert collected == {f"of/{name}": content for name, content in files.items()}


def test_names_and_values_of_any_length_fit_a_strict_database(strict: TrackingConfig, problems: list[str]) -> None:
    """And stay apart: two names that differ in what is cut are two names."""
    long = "x" * 7000
    config = dataclasses.replace(CONFIG, tracking=TrackingConfig(f"http://{long}"))
    with lab_of(strict, problems) as lab:
        names = [
            lab.sent(n, name=f"{long}{n}", first_tags=trial_tags(Path("t"), [f"model._target_={long}"])).info.run_name
            for n in range(2)
        ]
        run = lab.sent(
            0, params=trial_params(config, {f"{long}a": "1", f"{long}b": "2"}, 2),
            epochs={1: {**METRICS, f"val/{long}": 1.0}}, facts={**FACTS, "data": long, "notes": [long]},
            status=TrialStatus.failed, error=long,
        )  # fmt: skip
    assert problems == []
    assert names[0] != names[1] and {len(name or "") for name in names} == {250}
    assert sorted(v for k, v in run.data.params.items() if k.startswith("xxx")) == ["1", "2"]
    assert run.info.status == "FAILED"


def test_a_refused_metric_is_reported_once_and_the_rest_goes_on(
    lab: Lab, problems: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("projection", "writes"):  # a server may refuse more names than MLflow's own rule
        monkeypatch.setattr(f"fsdp_lab.tracking.{module}.stored_name", str)
    bad = {"mfu %": 1.0}
    run = lab.sent(0, epochs={1: bad, 2: bad, 3: METRICS}, status=TrialStatus.finished)
    assert len(problems) == 1
    assert "refused metrics" in problems[0]
    assert run.info.status == "FINISHED"
    assert RECORDED_TAG not in run.data.tags, "a resume tries again"
    assert lab.history(0, "train/loss") == [(3, 1.5)]


def test_a_store_that_breaks_and_comes_back_is_reported_once_and_gets_everything(
    lab: Lab, problems: list[str], capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
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
    away, *waiting, again = problems
    assert "does not answer" in away and "answers again" in again
    assert all("waiting up to tracking.patience_s=" in text for text in waiting)
    assert "Traceback" not in "".join(capfd.readouterr())


def test_what_cannot_be_wanted_or_read_ends_nothing(lab: Lab, tmp_path: Path, problems: list[str]) -> None:
    """An error in one run is reported, and a file that cannot be read is left out; the others go on."""
    lab.projection.changed(7)  # nobody knows what it should hold
    run = lab.sent(0, epochs={1: METRICS}, files=[(tmp_path, "folder")], status=TrialStatus.finished)
    assert run.info.status == "FINISHED" and RECORDED_TAG in run.data.tags
    assert len(problems) == 1 and "refused the run of a trial" in problems[0]


def test_what_seemed_to_fail_and_got_through_is_not_written_twice(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer is lost, not the write: the next attempt looks first."""
    monkeypatch.setattr("fsdp_lab.tracking.projection._PAUSE_S", 0.05)
    sent = []

    def lose_the_answer(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def write(*args: Any, **kwargs: Any) -> Any:
            result = real(*args, **kwargs)
            sent.append(name)
            if sent.count(name) == 1:
                raise OSError("the answer was lost")
            return result

        return write

    lab.client.create_run = lose_the_answer("run", lab.client.create_run)
    lab.client.log_batch = lose_the_answer("batch", lab.client.log_batch)
    run = lab.sent(3, epochs={1: METRICS}, status=TrialStatus.finished)
    assert sent.count("run") == 1
    assert lab.history(3, "train/loss") == [(1, 1.5)]
    assert run.data.tags["status"] == "finished" and RECORDED_TAG in run.data.tags


def test_an_interrupt_in_the_middle_of_a_write_leaves_the_store_whole(lab: Lab, problems: list[str]) -> None:
    """It ends the wait of the main thread, at once; an interrupted write to SQLite would leave it locked."""
    lab.sent(0)
    interrupted = threading.Event()

    def handler(number: int, frame: Any) -> None:
        interrupted.set()
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, handler)
    with closing(sqlite3.connect("outputs/mlflow.db", isolation_level=None, check_same_thread=False)) as other:
        other.execute("BEGIN IMMEDIATE")  # so that the write waits inside SQLite
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
        try:
            lab.want(0, epochs={1: METRICS})
            with pytest.raises(KeyboardInterrupt):
                lab.projection.settle(600)
        finally:
            signal.signal(signal.SIGINT, before)
        other.execute("ROLLBACK")
    run = lab.sent(0, status=TrialStatus.interrupted)
    assert interrupted.is_set() and problems == [] and run.info.status == "KILLED"
    assert lab.history(0, "train/loss") == [(1, 1.5)], "the write was made, once"


def test_a_write_that_hangs_ends_no_wait_late(lab: Lab) -> None:
    """As at the deadline of an interrupt: nothing is sent twice, and what is wanted later waits."""
    create, hangs, resumed, calls = lab.client.create_run, threading.Event(), threading.Event(), []

    def hang(*args: Any, **kwargs: Any) -> Any:
        calls.append(threading.current_thread().name)
        hangs.set()
        assert resumed.wait(60)
        return create(*args, **kwargs)

    lab.client.create_run = hang
    lab.want(3)
    assert hangs.wait(60)
    lab.want(None)
    assert lab.projection.settle(60, limit_s=0.1) == 2
    resumed.set()
    assert lab.projection.settle(60) == 0
    assert calls == ["mlflow", "mlflow"]


@pytest.mark.ci
def test_a_server_is_written_to_and_its_death_is_reported_once(
    server: tuple[str, subprocess.Popen[bytes]], tmp_path: Path, problems: list[str],
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    uri, process = server
    monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", "me")
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "hunter2")
    (tmp_path / "model.pt").write_bytes(b"weights")
    with lab_of(TrackingConfig(uri, "lab"), problems) as lab:
        lab.want(None)
        lab.want(
            0, params=trial_params(CONFIG, CHOICES, 2), facts=FACTS, epochs={1: METRICS | {"train/loss": float("inf")}},
            files=[(tmp_path / "model.pt", "")], status=TrialStatus.finished,
        )  # fmt: skip
        assert lab.projection.settle(60) == 0
        client = mlflow.MlflowClient(tracking_uri=uri)
        run = client.get_run(lab.projection.run_id(0))
        assert (run.info.status, run.data.tags["mlflow.parentRunId"]) == ("FINISHED", lab.projection.run_id(None))
        assert run.data.params == trial_params(CONFIG, CHOICES, 2)
        assert run.data.metrics["val/accuracy"] == 0.75
        assert [item.path for item in client.list_artifacts(run.info.run_id)] == ["model.pt"]
        assert problems == []
        end(process)
        for step in range(2, 12):
            lab.want(None, epochs={step: METRICS})
        lab.want(1)
        assert lab.projection.settle(5.0) == 2, "both wait"
        assert lab.projection.run_id(1) == ""
    (problem, *_) = problems
    assert sum("does not answer" in text for text in problems) == 1
    assert f"tracking.uri={uri}" in problem
    assert "Connection refused" in problem
    assert "hunter2" not in "".join(problems)
    assert capfd.readouterr() == ("", "")
