"""What a job of Ray's is refused, by its environment and the folder that it stands in; real jobs are in
tests/cluster/test_jobs.py."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from fsdp_lab.config import ConfigError
from fsdp_lab.config.sweep import ClusterConfig, Engine, SweepConfig, TrackingConfig
from fsdp_lab.engine.cluster import code_environment
from fsdp_lab.engine.ray_job import JOB_VARIABLE, check_job
from fsdp_lab.record.sweep_json import SweepStart
from fsdp_lab.sweep.names import OF_A_NIGHT, folder_key
from fsdp_lab.sweep.start import check_start
from tests.workloads.user.project import importable, write_project

_STAYS = TrackingConfig(uri="sqlite:////shared/mlflow.db")


@pytest.fixture
def copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the files that came with a job, which stands in it."""
    folder = tmp_path / "session_1" / "runtime_resources" / "working_dir_files" / "_ray_pkg_1"
    folder.mkdir(parents=True)
    monkeypatch.setenv(JOB_VARIABLE, "{}")
    monkeypatch.chdir(folder)
    return folder


@pytest.mark.parametrize(
    ("storage", "uri", "folder", "words"),
    [
        (None, _STAYS.uri, "outputs/x", "for example hydra.sweep.dir=/"),
        ("/shared", "sqlite:///outputs/mlflow.db", "/shared/x", "for example tracking.uri=sqlite:////"),
        ("storage", _STAYS.uri, "/shared/x", "for example cluster.storage_path=/"),
        ("s3://bucket/x", _STAYS.uri, "outputs/x", "for example hydra.sweep.dir=/"),
    ],
)
@pytest.mark.usefixtures("copy")
def test_what_would_go_with_the_jobs_files_is_refused(storage: str | None, uri: str, folder: str, words: str):
    config = SweepConfig(cluster=ClusterConfig(address="auto", storage_path=storage), tracking=TrackingConfig(uri=uri))
    with pytest.raises(ConfigError, match="which Ray deletes; add permanent folders") as caught:
        check_job(config, Path(folder), "hydra.sweep.dir")
    assert words in str(caught.value)


@pytest.mark.usefixtures("copy")
def test_a_night_gets_what_it_takes(monkeypatch: pytest.MonkeyPatch):
    config = SweepConfig(cluster=ClusterConfig(address="auto"), tracking=_STAYS)
    assert [folder_key(multirun) for multirun in (True, False)] == ["hydra.sweep.dir", "hydra.run.dir"]
    monkeypatch.setenv(OF_A_NIGHT, "true")
    record = SweepStart("", [], True, "", 1)
    plan = SimpleNamespace(config=config, folder=Path("outputs/nightly/x/sweep"), started=record)
    with pytest.raises(ConfigError, match=r"for example nightly\.folder=/shared/fsdp_lab/<a name>$"):
        check_start(plan)  # type: ignore[arg-type]  # refused before more of it is read


@pytest.mark.usefixtures("copy")
def test_a_ray_of_its_own_is_refused_beside_the_cluster():
    with pytest.raises(ConfigError, match=r"add cluster\.address=auto"):
        check_job(SweepConfig(tracking=_STAYS), Path("/shared/x"), "hydra.run.dir")
    check_job(SweepConfig(engine=Engine.inline, tracking=_STAYS), Path("/shared/x"), "hydra.run.dir")


@pytest.mark.usefixtures("copy")
def test_a_job_whose_results_stay_starts(monkeypatch: pytest.MonkeyPatch):
    auto = ClusterConfig(address="auto", storage_path="s3://bucket/x")
    server = TrackingConfig(uri="http://mlflow:5000")
    check_job(SweepConfig(cluster=auto, tracking=server), Path("/shared/x"), "hydra.sweep.dir")
    monkeypatch.delenv(JOB_VARIABLE)
    check_job(SweepConfig(), Path("outputs/x"), "hydra.sweep.dir")


def test_code_that_came_with_a_job_is_not_sent_again(copy: Path, monkeypatch: pytest.MonkeyPatch):
    write_project(copy)
    with importable(copy):
        assert code_environment(["my_project.net.Net"]) is None
        monkeypatch.delenv(JOB_VARIABLE)
        assert code_environment(["my_project.net.Net"]) == {"py_modules": [str(copy / "my_project")]}
