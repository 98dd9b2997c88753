"""Sweeps that `ray job submit` sends to the cluster, with the user's code and options in `--working-dir`."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from tests.cluster.namespaces import Cluster
from tests.cluster.test_nodes import addresses
from tests.conftest import PLAIN, ROOT, TINY
from tests.folders import SweepFolder
from tests.servers import held_in, lay_store
from tests.sweep.conftest import has_trained_an_epoch, runs
from tests.workloads.user.project import write_project

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.full,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not importlib.util.find_spec("aiohttp_cors"), reason="no ray[default]: make .venv/.cluster"),
]

_MINE = (
    "--config-dir=conf_of_mine", "model=mine", "data._target_=my_project.data.Corpus", *PLAIN,
    "training.global_batch_size=32", "training.timing_warmup_steps=1", "forecast.enabled=false",
)  # fmt: skip
_EPOCHS = 40


def job(cluster: Cluster, folder: Path, *words: str) -> str:
    """What a command of `ray job` prints, typed on the first node in a folder."""
    command, *more = words
    done = subprocess.run(
        cluster.ray("job", command, "--address=http://127.0.0.1:8265", "--log-color=false", *more), cwd=folder,
        env=cluster.environment, capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def submit(cluster: Cluster, folder: Path, name: str, *arguments: str, variables: str = "{}") -> None:
    """Send a command line of ours to the cluster, with all that is in a folder, and do not wait for it."""
    entry = [sys.executable, "-m", "fsdp_lab", *arguments]
    environment = f'--runtime-env-json={{"env_vars": {variables}}}'
    job(cluster, folder, "submit", f"--submission-id={name}", "--no-wait", environment, "--working-dir=.", "--", *entry)


def ended(cluster: Cluster, folder: Path, name: str, seconds: float = 400) -> str:
    """What `ray job status` says of a job that has ended."""
    until = time.monotonic() + seconds
    while not re.search(r"'.*' (succeeded|failed|was stopped)", status := job(cluster, folder, "status", name)):
        assert time.monotonic() < until, job(cluster, folder, "logs", name)
        time.sleep(0.5)
    return status


def until_trained(folder: Path, read_output: Callable[[], str]) -> None:
    end = time.monotonic() + 400
    while not any(has_trained_an_epoch(file.parent) for file in folder.glob("storage/**/metrics.jsonl")):
        assert time.monotonic() < end and "Traceback" not in read_output(), read_output()
        time.sleep(0.5)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """The folder that is sent; what stays is beside it."""
    write_project(tmp_path / "sent")
    lay_store(tmp_path)
    return tmp_path / "sent"


def test_a_job_says_with_its_status_how_the_sweep_ended(cluster: Cluster, project: Path):
    """Bad input, a failed trial and a result; these need no Ray of their own, so that they take seconds."""
    stays = (f"hydra.run.dir={project.parent}/$", f"tracking.uri=sqlite:///{project.parent}/mlflow.db")
    inline = (*_MINE, "engine=inline", "cluster.num_workers=1", "training.max_steps=1")
    submit(cluster, project, "lost", *_MINE, "cluster.address=auto", "cluster.storage_path=out")
    submit(cluster, project, "failed", *inline, "task.loss=my_project.net.loss_of_other_keys",
           *(word.replace("$", "failed") for word in stays))  # fmt: skip
    submit(cluster, project, "finished", *inline, "task.loss=my_project.net.loss",
           *(word.replace("$", "finished") for word in stays))  # fmt: skip
    assert "exit code 2" in ended(cluster, project, "lost")
    (line,) = [line for line in job(cluster, project, "logs", "lost").splitlines() if line.startswith("fsdp_lab: ")]
    assert "which Ray deletes" in line and "cluster.storage_path=/" in line
    assert "hydra.run.dir=/" in line and "tracking.uri=sqlite:////" in line
    assert "exit code 1" in ended(cluster, project, "failed"), job(cluster, project, "logs", "failed")
    assert "succeeded" in ended(cluster, project, "finished"), job(cluster, project, "logs", "finished")
    assert SweepFolder(project.parent / "finished").trials[0].outcome is not None


def test_the_command_of_the_manifest_for_kubernetes_runs_and_then_resumes(cluster: Cluster, tmp_path: Path):
    """As KubeRay submits it: a line for a shell. The volume is a folder here. The second time all is done already."""
    lay_store(tmp_path)
    small = (*PLAIN, *TINY, "engine=inline", "cluster.num_workers=1", "training.max_steps=1", "model=mlp")
    line = yaml.safe_load((ROOT / "deploy" / "rayjob.yaml").read_text())["spec"]["entrypoint"]
    before, mark, after = line.partition("-m sharding=ddp,per_block cluster.num_workers=16 ")
    assert mark
    line = f"{before}{shlex.join(small)} {after}".replace("/shared", str(tmp_path))
    path = json.dumps({"env_vars": {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}})
    for name in ("applied", "again"):
        job(cluster, tmp_path, "submit", f"--submission-id={name}", "--no-wait", f"--runtime-env-json={path}", "--",
            "sh", "-c", line)  # fmt: skip
        assert "succeeded" in ended(cluster, tmp_path, name), job(cluster, tmp_path, "logs", name)
        assert "1 of 1 trial has a result" in job(cluster, tmp_path, "logs", name)
    assert (tmp_path / "monday" / "results.csv").exists()


@pytest.mark.documents(
    "ray job submit ... python -m fsdp_lab -m ...",
    "ray job logs ...",
    "ray job stop ...",
    "ray job submit ... python -m fsdp_lab resume=...",
)
def test_a_job_that_is_stopped_leaves_a_sweep_that_another_job_resumes(cluster: Cluster, project: Path):
    """Over both nodes, with the code that came along, which lies in another copy the second time."""
    kept = project.parent
    words = (
        "-m", *_MINE, "task.loss=my_project.net.loss", "optimizer.lr=1e-2", f"training.epochs={_EPOCHS}",
        "cluster.address=auto", "cluster.num_workers=2", "cluster.cpus_per_worker=2",
        f"cluster.storage_path={kept}/storage", f"hydra.sweep.dir={kept}/out",
        f"tracking.uri=sqlite:///{kept}/mlflow.db",
    )  # fmt: skip
    submit(cluster, project, "first", *words, variables='{"RAY_JOB_STOP_WAIT_TIME_S": "20"}')
    until_trained(kept, lambda: job(cluster, project, "logs", "first"))
    job(cluster, project, "stop", "first")
    assert "was stopped" in ended(cluster, project, "first")
    log = job(cluster, project, "logs", "first")
    assert f"to resume: python -m fsdp_lab resume={kept}/out --config-dir=conf_of_mine" in log
    assert "\x1b" not in log and "\r" not in log and "trial 0:  epoch 1/" in log, "plain lines"
    assert [run.info.status for run in runs(kept)[0]] == ["KILLED"]
    first = next(kept.glob("storage/**/0/metrics.jsonl"))
    assert 0 < len(first.read_text().splitlines()) < _EPOCHS

    (project / "more.txt").write_text("so that Ray makes another copy")
    submit(cluster, project, "second", f"resume={kept}/out", "--config-dir=conf_of_mine")
    assert "succeeded" in ended(cluster, project, "second", 200), job(cluster, project, "logs", "second")
    assert "trial 0 starts, from epoch" in job(cluster, project, "logs", "second")
    epochs = [json.loads(line)["epoch"] for line in first.read_text().splitlines()]
    assert epochs == [*range(1, _EPOCHS + 1)], "each once"
    assert {node for nodes in addresses(kept) for node in nodes} == {node.address for node in cluster.nodes}
    assert held_in(kept, cluster.environment["RAY_AUTH_TOKEN"]) == [], "the token is in no file of ours"
