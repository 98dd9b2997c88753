"""The tracker against real stores: what was told is read back with MLflow's own client."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import socket
import sqlite3
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlflow
import pytest
from mlflow.entities import Run

from fsdp_lab.config.parallel import Granularity, ShardingConfig
from fsdp_lab.config.sweep import SearchConfig, SweepConfig, TrackingConfig
from fsdp_lab.config.training import OptimizerConfig
from fsdp_lab.files import write_text
from fsdp_lab.redact import redact
from fsdp_lab.tracking import Tracker, TrackingError, command_of, outbox
from fsdp_lab.tracking.tags import RECORDED_TAG, one_line, trial_params
from tests.servers import end, free_port, lay_store, mlflow_server
from tests.test_locks import held

FACTS = {
    "data": "digits", "data_digest": "0123456789abcdef", "data_num_train": 1437, "data_num_val": 360,
    "device": "cpu", "world_size": 2, "num_params": 137546, "torch": "2.14.1", "resumed_from": None,
    "notes": ["offload=cpu has no effect on a CPU.", "sharding=root makes one unit."],
}  # fmt: skip
METRICS = {"epoch": 1, "step": 23, "train/loss": 1.5, "val/accuracy": 0.75, "memory/rank0/peak_bytes": 4096}
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


@pytest.fixture
def opened(store: TrackingConfig, problems: list[str]) -> Tracker:
    made = Tracker(store, problems.append)
    made.open()
    return made


def reader() -> mlflow.MlflowClient:
    """Of this test's store. MLflow keeps stores by URI: a relative one would be an older test's."""
    return mlflow.MlflowClient(tracking_uri=f"sqlite:///{Path.cwd()}/outputs/mlflow.db")


def read(run_id: str) -> Run:
    return reader().get_run(run_id)


def start(made: Tracker, folder: Path, parent: str | None = None) -> str:
    run_id = made.start_trial("root fp16", ["sharding=root", "precision=fp16"], folder, parent)
    made.log_config(run_id, CONFIG, CHOICES, folder)
    return run_id


def test_a_fresh_store_is_made_with_its_folder_and_experiment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Tracker(TrackingConfig("sqlite:///deep/er/mlflow.db", "lab")).open()
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
            Tracker(TrackingConfig(f"sqlite:///{tmp_path}/mlflow.db", "lab")).open()


def test_opening_twice_keeps_the_experiment_and_what_was_written_about_it(store: TrackingConfig) -> None:
    Tracker(store).open()
    client = reader()
    experiment = client.get_experiment_by_name("lab")
    assert experiment is not None
    client.set_experiment_tag(experiment.experiment_id, "mlflow.note.content", "ours")
    Tracker(store).open()
    again = client.get_experiment_by_name("lab")
    assert again is not None
    assert (again.experiment_id, again.tags["mlflow.note.content"]) == (experiment.experiment_id, "ours")


def test_parameters_are_the_choices_and_then_every_key_as_typed(opened: Tracker, tmp_path: Path) -> None:
    params = read(start(opened, tmp_path)).data.params
    in_order = trial_params(CONFIG, CHOICES)
    assert params == in_order
    assert list(in_order)[:4] == ["sharding", "precision", "offload", "sharding.dp_replicate"]
    expected = {
        "sharding": "root", "precision": "fp16", "offload": "none",
        "optimizer.lr": "0.01", "export": "false", "compile": "false", "training.max_steps": "null",
        "precision.param_dtype": "float32", "tracking.uri": "sqlite:///outputs/mlflow.db",
    }  # fmt: skip
    assert {key: params[key] for key in expected} == expected
    assert "experiment" not in params
    assert not {"search.num_trials", "search.seed"} & params.keys(), "a grid has all its cells"
    searched = trial_params(dataclasses.replace(CONFIG, search=SearchConfig("random", num_trials=7)), CHOICES)
    assert (searched["search.num_trials"], searched["search.seed"]) == ("7", "0")
    # what sharding=root says by its name; precision=fp16 says another dtype than this config has
    assert "sharding.granularity" not in params and "offload.target" not in params


def test_a_trial_of_a_sweep_is_its_child_and_a_trial_alone_is_not(opened: Tracker, tmp_path: Path) -> None:
    sweep = opened.start_sweep("night", tmp_path, "python -m fsdp_lab -m", 12)
    child, alone = start(opened, tmp_path, sweep), start(opened, tmp_path)
    assert read(sweep).info.run_name == "night"
    assert read(sweep).data.tags["num_trials"] == "12"
    assert read(sweep).data.tags["mlflow.source.name"] == "python -m fsdp_lab -m"
    assert "Started 20" in read(sweep).data.tags["mlflow.note.content"]
    opened.name_sweep(sweep, "lr (random, 13 trials)", 13)
    assert (read(sweep).info.run_name, read(sweep).data.tags["num_trials"]) == ("lr (random, 13 trials)", "13")
    assert read(child).data.tags["mlflow.parentRunId"] == sweep
    assert "mlflow.parentRunId" not in read(alone).data.tags


def test_the_description_of_a_sweep_begins_with_its_answer(opened: Tracker, tmp_path: Path) -> None:
    def note() -> str:
        return str(read(sweep).data.tags["mlflow.note.content"])

    sweep = opened.start_sweep("night", tmp_path, "python -m fsdp_lab -m", 12)
    started = note()
    opened.describe_sweep(sweep, "So far, with 3 of 12 results: Recommended: `a=1`.")
    reader().set_tag(sweep, "mlflow.note.content", note() + "\nOf the new disk.")  # by hand
    for _ in range(2):
        opened.describe_sweep(sweep, "Recommended: `a=2` on mysql://me:hunter2@host.")
        assert note() == f"Recommended: `a=2` on mysql://***@host.\n\n{started}\nOf the new disk."


def test_a_command_with_slashes_is_whole_and_its_source_is_not_what_follows_the_last(
    opened: Tracker, tmp_path: Path
) -> None:
    """MLflow's list shows of a source what follows the last slash."""
    command = "python -m fsdp_lab -m sharding=root,ddp data.root=/data/x 'objective=[val/loss:min]'"
    tags = read(opened.start_sweep("s", tmp_path, command, 2)).data.tags
    assert tags["mlflow.source.name"] == "python -m fsdp_lab -m sharding=root,ddp …"
    assert command_of(tags) == command and command in tags["mlflow.note.content"]


def test_tags_state_who_where_and_with_which_code(opened: Tracker, tmp_path: Path) -> None:
    tags = read(start(opened, tmp_path / "trial")).data.tags
    repository = Path(__file__).parents[2]
    head = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=repository, capture_output=True, text=True, timeout=30, check=True
    )
    assert tags["mlflow.source.git.commit"] == head.stdout.strip()
    assert tags["git.dirty"] in ("true", "false")
    assert tags["version.mlflow"] == mlflow.__version__
    assert {"version.torch", "version.ray", "version.hydra-core", "version.omegaconf"} <= tags.keys()
    assert tags["host"] == socket.gethostname()
    assert tags["mlflow.user"]
    assert tags["mlflow.source.name"] == "python -m fsdp_lab sharding=root precision=fp16"
    assert tags["fsdp_lab.folder"] == str(tmp_path / "trial")


def test_facts_become_tags_and_a_data_set_and_may_be_reported_twice(opened: Tracker, tmp_path: Path) -> None:
    run_id = start(opened, tmp_path)
    opened.log_facts(run_id, FACTS)
    opened.log_facts(run_id, FACTS)
    run = read(run_id)
    text = {key: run.data.tags[key] for key in ("device", "world_size", "num_params", "note")}
    assert text == {
        "device": "cpu", "world_size": "2", "num_params": "137546",
        "note": "offload=cpu has no effect on a CPU. sharding=root makes one unit.",
    }  # fmt: skip
    assert "resumed_from" not in run.data.tags
    assert run.inputs is not None
    (given,) = run.inputs.dataset_inputs
    assert (given.dataset.name, given.dataset.digest) == ("digits", "0123456789abcdef")
    assert {tag.key: tag.value for tag in given.tags} == {"mlflow.data.context": "training"}


def history(run_id: str, key: str) -> list[tuple[int, float]]:
    return [(point.step, point.value) for point in reader().get_metric_history(run_id, key)]


def test_metrics_stand_at_their_epoch_and_an_epoch_reported_again_stands_once(
    opened: Tracker, tmp_path: Path, problems: list[str]
) -> None:
    run_id = start(opened, tmp_path)
    second = METRICS | {"epoch": 2, "step": 46, "train/loss": float("nan")}
    for metrics in (METRICS, METRICS, second):
        opened.log_epoch(run_id, metrics)
    names = {"train/step", "train/loss", "val/accuracy", "memory/rank0/peak_bytes"}
    assert set(read(run_id).data.metrics) == names
    assert history(run_id, "train/step") == [(1, 23.0), (2, 46.0)]
    assert history(run_id, "val/accuracy") == [(1, 0.75), (2, 0.75)]
    (_, first_loss), (step, last_loss) = history(run_id, "train/loss")
    assert (first_loss, step, last_loss != last_loss) == (1.5, 2, True)
    assert problems == []


def test_headline_bytes_are_in_the_store_in_mib_too(
    opened: Tracker, store: TrackingConfig, tmp_path: Path, problems: list[str]
) -> None:
    run_id = start(opened, tmp_path)
    forecast = {"epoch": 0.0, "forecast/peak_bytes": 3 * 2**20}
    measured = METRICS | {"memory/peak_bytes": 9222256.0, "memory/param_bytes": 2**20}
    for metrics in (forecast, forecast, measured, measured):
        opened.log_epoch(run_id, metrics)
    assert history(run_id, "memory/peak_mib") == [(1, 9222256 / 2**20)]
    assert history(run_id, "forecast/peak_mib") == [(0, 3.0)]
    again = Tracker(store, problems.append)  # a resume sends what the store has not got, and only that
    again.open()
    again._ids[run_id] = run_id
    again.check_epochs(run_id)
    for metrics in (forecast, measured, measured | {"epoch": 2, "memory/peak_bytes": 2.0**21}):
        again.log_epoch(run_id, metrics)
    assert history(run_id, "memory/peak_mib") == [(1, 9222256 / 2**20), (2, 2.0)]
    assert history(run_id, "forecast/peak_mib") == [(0, 3.0)]
    assert [key for key in read(run_id).data.metrics if key.endswith("_mib")] == [
        "forecast/peak_mib",
        "memory/peak_mib",
    ]
    assert read(run_id).data.metrics["memory/peak_bytes"] == 2**21
    assert problems == []


def test_what_comes_first_is_memory_in_mib_or_the_loss(opened: Tracker, tmp_path: Path) -> None:
    """MLflow's page that compares runs opens on the first metric."""
    figures = {"epoch": 1, "step": 3, "checkpoint/save_s": 1.0, "perf/samples_per_s": 700.0, "train/loss": 3.0}
    forecast, plain = start(opened, tmp_path), start(opened, tmp_path)
    opened.log_epoch(forecast, {"epoch": 0, "forecast/needed_bytes": 2.0**21, "forecast/peak_bytes": 2.0**20})
    for run_id in (forecast, plain):
        opened.log_epoch(run_id, figures)
    assert next(iter(read(forecast).data.metrics.items())) == ("forecast/peak_mib", 1.0)
    assert next(iter(read(plain).data.metrics.items())) == ("train/loss", 3.0)


def test_a_run_may_have_ended_before(opened: Tracker, tmp_path: Path) -> None:
    run_id = start(opened, tmp_path)
    opened.finish(run_id, "finished", ended=read(run_id).info.start_time + 120_000)
    info = read(run_id).info
    assert info.end_time - info.start_time == 120_000


def test_the_first_ending_stands(opened: Tracker, tmp_path: Path) -> None:
    endings = {"finished": "FINISHED", "failed": "FAILED", "oom": "FAILED", "interrupted": "KILLED"}
    for status, expected in endings.items():
        run_id = start(opened, tmp_path)
        assert read(run_id).info.status == "RUNNING"
        opened.finish(run_id, status, "line one\nline two " + "x" * 600)
        opened.finish(run_id, "skipped", "too late")
        run = read(run_id)
        assert (run.info.status, run.data.tags["status"]) == (expected, status)
        assert run.data.tags["error"].startswith("line one line two xxx")
        assert len(run.data.tags["error"]) == 500


def test_artifacts_are_the_config_without_credentials_and_what_is_given(
    opened: Tracker, tmp_path: Path, problems: list[str]
) -> None:
    folder = tmp_path / "trial"
    (folder / ".hydra").mkdir(parents=True)
    (folder / ".hydra" / "config.yaml").write_text("tracking:\n  uri: http://me:pw@host:5000\n")
    (folder / ".hydra" / "overrides.yaml").write_text("- sharding=root\n")
    (folder / "plots").mkdir()
    (folder / "plots" / "a.html").write_text("plot")
    (folder / "model.pt").write_bytes(b"weights")
    run_id = start(opened, folder)
    opened.log_artifact(run_id, folder / "plots" / "a.html", "memory")
    opened.finish(run_id, "finished", artifacts=[folder / "plots", folder / "model.pt", folder / "no_such"])
    kept = Path(read(run_id).info.artifact_uri.removeprefix("file://"))
    assert kept.is_relative_to(tmp_path / "outputs" / "mlartifacts")
    assert {str(p.relative_to(kept)): p.read_text() for p in kept.rglob("*") if p.is_file()} == {
        "config/config.yaml": "tracking:\n  uri: http://***@host:5000\n",
        "config/overrides.yaml": "- sharding=root\n",
        "memory/a.html": "plot",
        "plots/a.html": "plot",
        "model.pt": "weights",
    }
    assert read(run_id).info.status == "FINISHED"
    assert len(problems) == 1
    assert "no_such is missing" in problems[0]


def test_an_exported_model_is_stored_once(opened: Tracker, tmp_path: Path) -> None:
    """The artifact is a second name of the file; that one is never written into, so the artifact stays what it was."""
    model = tmp_path / "model.pt"
    model.write_bytes(b"weights")
    run_id = start(opened, tmp_path)
    opened.log_artifact(run_id, model, "model")
    (kept,) = Path(read(run_id).info.artifact_uri.removeprefix("file://")).rglob("model.pt")
    assert kept.samefile(model) and kept.parent.name == "model"
    write_text(model, "other weights")
    assert kept.read_bytes() == b"weights"
    opened.log_artifact(run_id, model, "model")
    assert kept.read_bytes() == b"other weights"
    assert [p.name for p in kept.parent.iterdir()] == ["model.pt"]
    model.unlink()
    assert kept.read_bytes() == b"other weights"


@pytest.mark.skipif(not os.access("/dev/shm", os.W_OK), reason="needs a second disk")
def test_an_exported_model_on_another_disk_is_copied(opened: Tracker, tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as elsewhere:
        model = Path(elsewhere, "model.pt")
        model.write_bytes(b"weights")
        run_id = start(opened, tmp_path)
        opened.log_artifact(run_id, model, "model")
    (kept,) = Path(read(run_id).info.artifact_uri.removeprefix("file://")).rglob("model.pt")
    assert kept.read_bytes() == b"weights"


def test_credentials_are_shown_nowhere(opened: Tracker, tmp_path: Path) -> None:
    uri = "http://me:s3cr3t@host:5000"
    config = dataclasses.replace(CONFIG, tracking=TrackingConfig(uri))
    override = f"tracking.uri={uri}"
    sweep = opened.start_sweep("s", tmp_path, f"python -m fsdp_lab {override} -m", 1)
    trial = opened.start_trial("t", [override], tmp_path, sweep)
    opened.log_config(trial, config, CHOICES, tmp_path)
    opened.finish(trial, "failed", f"lost {uri}")
    assert read(trial).data.params["tracking.uri"] == "http://***@host:5000"
    assert "s3cr3t" not in repr([read(run).to_dictionary() for run in (sweep, trial)])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("http://me:pw@host:5000/x", "http://***@host:5000/x"),
        ("a https://me:p@w/d@host b", "a https://***@host b"),
        ("postgresql://host/db?password=pw&x=1", "postgresql://host/db?password=***&x=1"),
        ("sqlite:////home/me@lab/mlflow.db", "sqlite:////home/me@lab/mlflow.db"),
        ("http://host:5000", "http://host:5000"),
        *(
            (f"https://host/x?a=1&{name}=s3+/cr.t&y=2", f"https://host/x?a=1&{name}=***&y=2")
            for name in ("access_token", "client_secret", "auth", "passphrase", "X-Amz-Signature", "sig", "unheard_of")
        ),
        ("https://host/#access_token=abc", "https://host/#access_token=***"),
        ("postgresql://host/db?sslmode=require&timeout=30", "postgresql://host/db?sslmode=require&timeout=30"),
        ("mssql+pyodbc:///?odbc_connect=DRIVER%3DX%3BPWD%3Dpw%3B", "mssql+pyodbc:///?odbc_connect=***"),
        (
            "mssql+pyodbc:///?odbc_connect=DRIVER={ODBC Driver 18};SERVER=h;UID=sa; PWD=pw;Encrypt=yes",
            "mssql+pyodbc:///?odbc_connect=*** Driver 18};SERVER=h;UID=sa; PWD=***;Encrypt=yes",
        ),
        ("DRIVER=x;PWD={p w;1&2};y", "DRIVER=x;PWD=***;y"),
        (
            "'https://host/x?token=12' and (https://host/?key=34)",
            "'https://host/x?token=***' and (https://host/?key=***",
        ),
        ("optimizer.lr='tag(log,interval(1e-4,1e-2))' # a=b", "optimizer.lr='tag(log,interval(1e-4,1e-2))' # a=b"),
    ],
)
def test_redact(text: str, expected: str) -> None:
    assert redact(text) == expected


def test_files_and_folders_are_redacted_and_json_stays_json(
    opened: Tracker, tmp_path: Path, problems: list[str]
) -> None:
    """Failures are kept with their tracebacks, which may quote an address."""
    uri = "http://me:s3cr3t@host:5000/x?access_token=s3cr3t"
    failures = tmp_path / "trial" / "failures"
    failures.mkdir(parents=True)
    failure = {"message": f"lost {uri}", "traceback": f'get("{uri}")\n  raise Lost("{uri}")\n', "rank": 0}
    (failures / "rank0.json").write_text(json.dumps(failure))
    (failures / "deeper").mkdir()
    (failures / "deeper" / "rank0.log").write_bytes(f"asked {uri}\n".encode() + b"\xff")
    (tmp_path / "trial" / "cut.json").write_text(f'{{"uri": "{uri}"')
    (failures / "picture.png").write_bytes(b"\xff\x00")
    run_id = opened.start_trial("t", [], tmp_path, None)
    for path in (failures, tmp_path / "trial" / "cut.json"):
        opened.log_artifact(run_id, path, "of")
    kept = Path(str(read(run_id).info.artifact_uri).removeprefix("file://"))
    collected = {str(p.relative_to(kept)): p.read_bytes() for p in kept.rglob("*") if p.is_file()}
    assert set(collected) == {
        "of/failures/rank0.json", "of/failures/deeper/rank0.log", "of/failures/picture.png", "of/cut.json",
    }  # fmt: skip
    assert not problems and all(b"s3cr3t" not in content for content in collected.values())
    shown = "http://***@host:5000/x?access_token=***"
    assert json.loads(collected["of/failures/rank0.json"]) == {
        "message": f"lost {shown}", "traceback": f'get("{shown}")\n  raise Lost("{shown}")\n', "rank": 0,
    }  # fmt: skip
    assert collected["of/failures/picture.png"] == b"\xff\x00"


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


def test_names_and_values_of_any_length_fit_a_strict_database(
    strict: TrackingConfig, tmp_path: Path, problems: list[str]
) -> None:
    """And stay apart: two names that differ in what is cut are two names."""
    made = Tracker(strict, problems.append)
    made.open()
    long = "x" * 7000
    runs = [made.start_trial(f"{long}{i}", [f"model._target_={long}"], tmp_path, None) for i in range(2)]
    config = dataclasses.replace(CONFIG, tracking=TrackingConfig(f"http://{long}"))
    made.log_config(runs[0], config, {f"{long}a": "1", f"{long}b": "2"}, tmp_path)
    made.log_epoch(runs[0], {**METRICS, f"val/{long}": 1.0})
    made.log_facts(runs[0], {**FACTS, "data": long, "notes": [long]})
    made.finish(runs[0], "failed", long)
    assert problems == []
    names = [read(run).info.run_name or "" for run in runs]
    assert names[0] != names[1] and {len(name) for name in names} == {250}
    params = read(runs[0]).data.params
    assert sorted(v for k, v in params.items() if k.startswith("xxx")) == ["1", "2"]
    assert read(runs[0]).info.status == "FAILED"


def test_an_experiment_with_a_name_that_is_too_long_is_refused(store: TrackingConfig) -> None:
    with pytest.raises(TrackingError, match=r"tracking\.experiment has 300 characters"):
        Tracker(dataclasses.replace(store, experiment="x" * 300)).open()


def test_one_line_redacts_before_it_cuts() -> None:
    assert one_line("ab\n http://me:password@host", 14) == "ab http://***…"


@contextmanager
def silent_server() -> Iterator[int]:
    """A port that takes connections and never answers."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        yield int(server.getsockname()[1])


def refused(uri: str) -> str:
    with pytest.raises(TrackingError) as caught:
        Tracker(TrackingConfig(uri)).open()
    assert f"tracking.uri={redact(uri)}" in str(caught.value)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("silent", [False, pytest.param(True, marks=pytest.mark.ci)])
def test_an_absent_server_is_reported_with_the_remedy(silent: bool) -> None:
    with silent_server() as port:
        message = refused(f"http://me:pw@127.0.0.1:{port if silent else free_port()}")
    assert "http://***@127.0.0.1" in message
    assert ("timed out" if silent else "Connection refused") in message
    assert "start it with `mlflow server --port" in message
    assert "tracking.uri=sqlite:///outputs/mlflow.db" in message


REFUSED = {
    "ftp://host/x": "MLflow cannot use the store",
    "outputs/mlruns": "cannot write to this kind of store",
    "": "cannot write to this kind of store",
    "sqlite://outputs/mlflow.db": "three slashes",
    "sqlite:///:memory:": "three slashes",
    "sqlite:////proc/nowhere/mlflow.db": "cannot be opened for writing",
    "postgresql://me:pw@127.0.0.1:1/db": "no database answers",
    "http://[::1": "Invalid IPv6 URL",
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
    assert f"another version of MLflow than the installed {mlflow.__version__}" in message
    assert "mlflow db upgrade" in message


def test_a_deleted_experiment_is_named_with_the_command_that_restores_it(store: TrackingConfig) -> None:
    client = reader()
    number = client.create_experiment("lab")
    client.delete_experiment(number)
    with pytest.raises(TrackingError, match=f"tracking.experiment=lab was deleted.*--experiment-id {number}"):
        Tracker(store).open()


def test_a_refused_metric_is_reported_once_and_the_rest_goes_on(
    opened: Tracker, tmp_path: Path, problems: list[str]
) -> None:
    run_id = start(opened, tmp_path)
    for epoch in (1, 2):
        opened.log_epoch(run_id, {"epoch": epoch, "mfu %": 1.0})
    opened.log_epoch(run_id, METRICS)
    assert len(problems) == 1
    assert "refused metrics" in problems[0]
    opened.recorded(run_id)
    assert RECORDED_TAG not in reader().get_run(run_id).data.tags, "a resume tries again"
    assert history(run_id, "train/loss") == [(1, 1.5)]


def test_a_store_that_breaks_and_comes_back_is_reported_once_and_written_again(
    opened: Tracker, tmp_path: Path, problems: list[str], capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    now = [100.0]
    monkeypatch.setattr(outbox, "time", SimpleNamespace(monotonic=lambda: now[0]))
    run_id = start(opened, tmp_path)
    with closing(sqlite3.connect("outputs/mlflow.db")) as database:
        database.execute("ALTER TABLE runs RENAME TO away")
        opened.log_epoch(run_id, METRICS)
        late = start(opened, tmp_path, run_id)
        opened.log_epoch(late, METRICS)
        assert opened.run_id(late) == ""
        database.execute("ALTER TABLE away RENAME TO runs")
    opened.log_epoch(run_id, METRICS | {"epoch": 2})  # within the pause: it waits
    assert history(run_id, "train/loss") == []
    now[0] += 31
    opened.log_epoch(run_id, METRICS | {"epoch": 3})
    assert history(run_id, "train/loss") == [(1, 1.5), (2, 1.5), (3, 1.5)]
    assert history(opened.run_id(late), "train/loss") == [(1, 1.5)]
    assert opened.settle(0) == 0
    assert len(problems) == 2
    assert "does not answer" in problems[0] and "answers again" in problems[1]
    assert "Traceback" not in "".join(capfd.readouterr())


@pytest.fixture
def server(tmp_path: Path) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    with mlflow_server(tmp_path, "--artifacts-destination", str(tmp_path / "kept")) as started:
        yield started


def test_what_seemed_to_fail_and_got_through_is_not_written_twice(opened: Tracker, tmp_path: Path) -> None:
    """The answer is lost, not the write: the next attempt looks first."""
    sent = []

    def lose_the_answer(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def write(*args: Any, **kwargs: Any) -> Any:
            result = real(*args, **kwargs)
            sent.append(name)
            if sent.count(name) == 1:
                raise OSError("the answer was lost")
            return result

        return write

    client = opened._client
    assert client is not None
    client.create_run = lose_the_answer("run", client.create_run)
    client.log_batch = lose_the_answer("batch", client.log_batch)
    handle = opened.start_trial("t", [], tmp_path, None, "night", "3")
    opened.log_epoch(handle, METRICS)
    opened.finish(handle, "finished")
    opened.recorded(handle)
    assert opened.settle(10) == 0
    assert sent.count("run") == 1
    run_id = opened.run_id(handle)
    assert history(run_id, "train/loss") == [(1, 1.5)]
    recorded = opened.find_runs("night")
    assert {number: (run.handle, run.status, run.recorded) for number, run in recorded.items()} == {
        "3": (run_id, "finished", True)
    }


def test_an_interrupt_in_the_middle_of_a_write_leaves_the_store_whole(
    opened: Tracker, tmp_path: Path, problems: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An interrupted write to SQLite would leave it locked: the run could not be ended, and the shutdown would hang."""
    handle = opened.start_trial("t", [], tmp_path, None, "night", "3")
    client, writes, delivered = opened._client, threading.Event(), threading.Event()
    assert client is not None
    log_batch = client.log_batch
    monkeypatch.setattr(client, "log_batch", lambda *a, **k: (writes.set(), log_batch(*a, **k)))

    def handler(number: int, frame: Any) -> None:
        if not delivered.is_set():
            delivered.set()
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, handler)
    with closing(sqlite3.connect("outputs/mlflow.db", isolation_level=None, check_same_thread=False)) as other:
        other.execute("BEGIN IMMEDIATE")  # so that the write waits inside SQLite

        def interrupt() -> None:
            assert writes.wait(60)
            while not delivered.wait(0.05):  # one that comes as the wait begins is heard when it ends
                os.kill(os.getpid(), signal.SIGINT)
            other.execute("ROLLBACK")

        thread = threading.Thread(target=interrupt)
        thread.start()
        try:
            with pytest.raises(KeyboardInterrupt) as interrupted:  # whose traceback lives on, as in the driver
                opened.log_epoch(handle, METRICS)
            opened.finish(handle, "interrupted")
            thread.join(60)
        finally:
            signal.signal(signal.SIGINT, before)
    assert interrupted.value and opened.settle(0.0) == 0 and problems == []
    run_id = opened.run_id(handle)
    assert reader().get_run(run_id).info.status == "KILLED"
    assert history(run_id, "train/loss") == [(1, 1.5)], "the write was made, once"


def test_a_write_is_made_where_no_thread_can_be_started(
    opened: Tracker, tmp_path: Path, problems: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limit of threads is simulated: a real one would be the whole user's."""

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    handle = opened.start_trial("t", [], tmp_path, None, "night", "3")
    monkeypatch.setattr(threading.Thread, "start", refuse)
    opened.log_epoch(handle, METRICS)
    assert problems == [] and history(opened.run_id(handle), "train/loss") == [(1, 1.5)]


def test_while_one_thread_hangs_in_a_write_another_sends_nothing(opened: Tracker, tmp_path: Path) -> None:
    """As at the deadline of an interrupt: what is added then waits, and nothing is sent twice."""
    client = opened._client
    assert client is not None
    create, hangs, resumed, calls = client.create_run, threading.Event(), threading.Event(), []

    def hang(*args: Any, **kwargs: Any) -> Any:
        calls.append(threading.current_thread().name)
        hangs.set()
        assert resumed.wait(60)
        return create(*args, **kwargs)

    client.create_run = hang
    driver = threading.Thread(target=lambda: opened.start_trial("t", [], tmp_path, None, "night", "3"), name="driver")
    driver.start()
    assert hangs.wait(60)
    opened.start_sweep("night", tmp_path, "command", 1, "night")
    assert opened.settle(0.0) == 2
    resumed.set()
    driver.join(60)
    assert opened.settle(10) == 0
    assert calls == ["mlflow", "mlflow"] and set(opened.find_runs("night")) == {"", "3"}


@pytest.mark.ci
def test_a_server_is_written_to_and_its_death_is_reported_once(
    server: tuple[str, subprocess.Popen[bytes]], tmp_path: Path, problems: list[str],
    capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    uri, process = server
    (tmp_path / "model.pt").write_bytes(b"weights")
    made = Tracker(TrackingConfig(uri.replace("://", "://me:pw@"), "lab"), problems.append)
    made.open()
    sweep = made.start_sweep("night", tmp_path, "python -m fsdp_lab -m", 1)
    run_id = start(made, tmp_path, sweep)
    made.log_facts(run_id, FACTS)
    made.log_epoch(run_id, METRICS | {"train/loss": float("inf")})
    made.log_artifact(run_id, tmp_path / "model.pt")
    made.finish(run_id, "finished")
    client = mlflow.MlflowClient(tracking_uri=uri)
    run = client.get_run(run_id)
    assert (run.info.status, run.data.tags["mlflow.parentRunId"]) == ("FINISHED", sweep)
    assert run.data.params == trial_params(CONFIG, CHOICES)
    assert run.data.metrics["val/accuracy"] == 0.75
    assert run.inputs is not None
    assert run.inputs.dataset_inputs[0].dataset.digest == "0123456789abcdef"
    assert [item.path for item in client.list_artifacts(run_id)] == ["model.pt"]
    assert problems == []

    end(process)
    for epoch in range(2, 12):
        made.log_epoch(sweep, METRICS | {"epoch": epoch})
    assert made.run_id(start(made, tmp_path, sweep)) == ""
    made.finish(sweep, "finished")
    assert len(problems) == 1
    assert made.settle(0.5) > 10, "all of them wait"
    del problems[1:]
    assert f"tracking.uri={uri.replace('://', '://***@')}" in problems[0]
    assert "Connection refused" in problems[0]
    assert "pw" not in problems[0]
    assert capfd.readouterr() == ("", "")
