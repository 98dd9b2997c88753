"""Sweeps as jobs: of a Ray cluster (`ray job submit`, as KubeRay does it) and of a real Slurm, by deploy/slurm.sbatch.

A test that lacks a program is skipped by its name on somebody's machine, and fails in CI.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.cluster.conftest import held_in
from tests.cluster.namespaces import TWO_NODES, TWO_NODES_AND_ONE, Cluster, addresses, epochs, same_losses
from tests.cluster.slurm import Slurm, slurm
from tests.conftest import PLAIN, ROOT, TINY
from tests.servers import lay_store
from tests.sweep.conftest import results, runs
from tests.workloads.user.project import write_project

pytestmark = pytest.mark.timeout(900)
needs_jobs = pytest.mark.skipif(
    not importlib.util.find_spec("aiohttp_cors"), reason="no ray[default]: make .venv/.cluster"
)

_MINE = (
    "--config-dir=conf_of_mine", "model=mine", "data._target_=my_project.data.Corpus", *PLAIN,
    "training.global_batch_size=32", "training.timing_warmup_steps=1", "forecast.enabled=false",
)  # fmt: skip
_ONE_STEP = ("engine=inline", "cluster.num_workers=1", "training.max_steps=1")
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


def submit(cluster: Cluster, folder: Path, name: str, *entry: str, **variables: str) -> None:
    """Send a command line to the cluster, with all that is in a folder, and do not wait for it."""
    environment = f"--runtime-env-json={json.dumps({'env_vars': variables})}"
    job(cluster, folder, "submit", f"--submission-id={name}", "--no-wait", environment, "--working-dir=.", "--", *entry)


def ended(cluster: Cluster, folder: Path, name: str, status: str) -> str:
    """The log of a job that has ended in this way, by `ray job status`."""
    until = time.monotonic() + 400
    while not re.search(r"'.*' (succeeded|failed|was stopped)", told := job(cluster, folder, "status", name)):
        assert time.monotonic() < until, job(cluster, folder, "logs", name)
        time.sleep(0.5)
    log = job(cluster, folder, "logs", name)
    assert status in told, log
    return log


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """The folder that is sent; what stays is beside it."""
    write_project(tmp_path / "sent")
    lay_store(tmp_path)
    return tmp_path / "sent"


@pytest.mark.cluster
@pytest.mark.full
@needs_jobs
def test_a_job_says_with_its_status_how_the_sweep_ended(cluster: Cluster, project: Path):
    """Bad input and a failed trial, which needs no Ray of its own, so that it takes seconds."""
    ours, kept = (sys.executable, "-m", "fsdp_lab", *_MINE), project.parent
    submit(cluster, project, "lost", *ours, "cluster.address=auto", "cluster.storage_path=out")
    submit(cluster, project, "failed", *ours, *_ONE_STEP, "task.loss=my_project.net.loss_of_other_keys",
           f"hydra.run.dir={kept}/failed", f"tracking.uri=sqlite:///{kept}/mlflow.db")  # fmt: skip
    lost = ended(cluster, project, "lost", "exit code 2")
    (line,) = [line for line in lost.splitlines() if line.startswith("fsdp_lab: ")]
    assert "which Ray deletes" in line and "cluster.storage_path=/" in line
    assert "hydra.run.dir=/" in line and "tracking.uri=sqlite:////" in line
    ended(cluster, project, "failed", "exit code 1")


@pytest.mark.cluster
@pytest.mark.full
@needs_jobs
def test_the_manifest_for_kubernetes_runs_and_then_resumes(cluster: Cluster, project: Path):
    """As KubeRay submits it: a line for a shell. The volume is a folder here. The second time all is done already."""
    line = yaml.safe_load((ROOT / "deploy" / "rayjob.yaml").read_text())["spec"]["entrypoint"]
    before, mark, after = line.partition("-m sharding=ddp,per_block cluster.num_workers=16 ")
    assert mark
    line = f"{before}{shlex.join((*PLAIN, *TINY, *_ONE_STEP, 'model=mlp'))} {after}"
    for name in ("applied", "again"):
        submit(cluster, project, name, "sh", "-c", line.replace("/shared", str(project.parent)),
               PATH=f"{Path(sys.executable).parent}:{os.environ['PATH']}")  # fmt: skip
        assert "1 of 1 trial has a result" in ended(cluster, project, name, "succeeded")
    assert (project.parent / "monday" / "results.csv").exists()


@pytest.mark.cluster
@pytest.mark.full
@needs_jobs
@pytest.mark.documents(
    "ray job submit ... python -m fsdp_lab -m ...",
    "ray job logs ...",
    "ray job stop ...",
    "ray job submit ... python -m fsdp_lab resume=...",
)
def test_a_stopped_job_leaves_a_sweep_that_another_resumes(cluster: Cluster, project: Path):
    """Over both nodes, with the code that came along, which lies in another copy the second time."""
    ours, kept = (sys.executable, "-m", "fsdp_lab"), project.parent
    words = (
        "-m", *_MINE, "task.loss=my_project.net.loss", "optimizer.lr=1e-2", f"training.epochs={_EPOCHS}",
        "cluster.address=auto", "cluster.num_workers=2", "cluster.cpus_per_worker=2",
        f"cluster.storage_path={kept}/storage", f"hydra.sweep.dir={kept}/out",
        f"tracking.uri=sqlite:///{kept}/mlflow.db",
    )  # fmt: skip
    submit(cluster, project, "first", *ours, *words, RAY_JOB_STOP_WAIT_TIME_S="20")
    end = time.monotonic() + 400
    while not any(epochs(kept / "storage")):
        assert time.monotonic() < end, job(cluster, project, "logs", "first")
        time.sleep(0.5)
    job(cluster, project, "stop", "first")
    log = ended(cluster, project, "first", "was stopped")
    assert f"to resume: python -m fsdp_lab resume={kept}/out --config-dir=conf_of_mine" in log
    assert "\x1b" not in log and "\r" not in log and "trial 0:  epoch 1/" in log, "plain lines"
    assert [run.info.status for run in runs(kept)[0]] == ["KILLED"]
    assert 0 < len(epochs(kept / "storage")[0]) < _EPOCHS

    (project / "more.txt").write_text("so that Ray makes another copy")
    submit(cluster, project, "second", *ours, f"resume={kept}/out", "--config-dir=conf_of_mine")
    assert "trial 0 starts, from epoch" in ended(cluster, project, "second", "succeeded")
    assert epochs(kept / "storage") == [[*range(1, _EPOCHS + 1)]], "each once"
    assert {node for nodes in addresses(kept) for node in nodes} == {node.address for node in cluster.nodes}
    assert held_in(kept, cluster.environment["RAY_AUTH_TOKEN"]) == [], "the token is in no file of ours"


@pytest.fixture(scope="module")
def lab() -> Iterator[Slurm]:
    with slurm() as lab:
        yield lab


def edited(folder: Path, *words: str) -> Path:
    """A user's copy of the script, for nodes with two cores and no GPUs."""
    lay_store(folder)
    text = (ROOT / "deploy" / "slurm.sbatch").read_text()
    quoted = " ".join(f"'{word}'" for word in words)
    for line, mine in (
        (r"#SBATCH --gpus-per-node=8\n", ""),
        (r"#SBATCH --cpus-per-task=.*", "#SBATCH --cpus-per-task=2"),
        (r"sweep=\S*", "sweep=$PWD/out"),
        (r"words=\(-m .*\)", f"words=({quoted})"),
        (r"export PATH=\$PWD/\.venv/bin:", f"export PATH={sys.prefix}/bin:"),
    ):
        text, count = re.subn(f"(?m)^{line}", mine, text)
        assert count == 1, line
    (folder / "slurm.sbatch").write_text(text)
    return folder / "slurm.sbatch"


@pytest.mark.cluster
@pytest.mark.full
def test_a_sweep_is_requeued_before_its_time_limit_and_resumes(lab: Slurm, tmp_path: Path):
    """Slurm sends USR1 to the script two minutes before the limit, which has whole minutes."""
    job, log = lab.submit(edited(tmp_path, *TWO_NODES_AND_ONE))
    signal = ("scancel", "--batch", "--signal=USR1", job)
    lab.wait(job, log, lambda: log.exists() and re.search(r"trial \d starts", log.read_text()))
    lab.run(tmp_path, *signal)  # it got no further since its start, and continues
    lab.wait(job, log, lambda: any(epochs(tmp_path / "out" / "storage")))
    assert lab.state(job) == "RUNNING" and "resumes:" not in log.read_text()
    lab.run(tmp_path, *signal)
    lab.wait_for_end(job, log, "COMPLETED")
    assert log.read_text().count("resumes:") == 1
    assert epochs(tmp_path / "out" / "storage") == [[1, 2], [1, 2]], log.read_text()
    assert [len(set(nodes)) for nodes in addresses(tmp_path / "out")] == [2, 1]
    two, one = results(tmp_path)
    assert same_losses(two, one), (two, one)


@pytest.mark.cluster
@pytest.mark.full
@pytest.mark.documents("sbatch slurm.sbatch", "scancel <job>")
def test_scancel_ends_a_sweep_and_its_script_resumes_it(lab: Slurm, on_one_node: dict[str, str], tmp_path: Path):
    """In a folder whose name the script has to quote."""
    folder = tmp_path / "100% of it"
    folder.mkdir()
    script = edited(folder, *TWO_NODES)
    job, log = lab.submit(script)
    lab.wait(job, log, lambda: any(epochs(folder / "out" / "storage")))
    lab.run(folder, "scancel", job)
    lab.wait_for_end(job, log, "CANCELLED")
    assert [run.info.status for run in runs(folder)[0]] == ["KILLED"], log.read_text()
    again, log = lab.submit(script)
    lab.wait_for_end(again, log, "COMPLETED")
    assert "trial starts, from epoch 1" in log.read_text()
    assert epochs(folder / "out" / "storage") == [[1, 2]]
    assert same_losses(results(folder)[0], on_one_node)
    assert [run.info.status for run in runs(folder)[0]] == ["FINISHED"]
