"""Sweeps under a real Slurm: a controller and two nodes, as network namespaces."""

from __future__ import annotations

import json
import re
import shlex
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.namespaces import TWO_NODES, TWO_NODES_AND_ONE
from tests.cluster.slurm import Slurm, slurm, why_not
from tests.cluster.test_nodes import addresses, same_losses
from tests.servers import lay_store
from tests.sweep.conftest import PLAIN, TINY, has_trained_an_epoch, results, runs

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]

_ON_BOTH = ("cluster=slurm", "cluster.job.nodes=2", "cluster.job.cpus_per_node=2")


@pytest.fixture(scope="module")
def lab() -> Iterator[Slurm]:
    if reason := why_not():
        pytest.skip(reason)
    with slurm() as lab:
        yield lab


def submitted(lab: Slurm, folder: Path, *arguments: str, module: str = "fsdp_lab") -> tuple[str, Path]:
    """The number of the job that a command of ours makes, and its log."""
    lay_store(folder)
    done = lab.type(folder, *arguments, module=module)
    assert done.returncode == 0, done.stdout + done.stderr
    match = re.search(r"job (\d+) was submitted: (.+)/job.sbatch", done.stdout)
    assert match, done.stdout
    return match[1], Path(match[2]) / f"{match[1]}.log"


def until_trained(lab: Slurm, folder: Path, job: str, log: Path, seconds: float = 400) -> None:
    """Until a trial has an epoch, and not all."""
    end = time.monotonic() + seconds
    while not any(has_trained_an_epoch(file.parent) for file in folder.glob("out/storage/**/metrics.jsonl")):
        output = log.read_text() if log.exists() else "no log"
        assert time.monotonic() < end and lab.state(job) in ("PENDING", "RUNNING"), output
        time.sleep(0.2)


def epochs(folder: Path) -> list[list[int]]:
    """Of each trial, as its ranks have written them."""
    files = sorted(folder.glob("out/storage/**/metrics.jsonl"))
    return [[json.loads(line)["epoch"] for line in file.read_text().splitlines()] for file in files]


def test_a_sweep_over_two_nodes_is_requeued_and_resumes_by_itself(lab: Slurm, tmp_path: Path):
    job, log = submitted(lab, tmp_path, *TWO_NODES_AND_ONE, *_ON_BOTH)
    until_trained(lab, tmp_path, job, log)
    assert lab.run(tmp_path, "scontrol", "requeue", job).returncode == 0
    lab.wait(job, "COMPLETED", log=log)
    assert "starts on n[1-2] (start 2)" in log.read_text()
    assert epochs(tmp_path) == [[1, 2], [1, 2]], log.read_text()
    assert [len(set(nodes)) for nodes in addresses(tmp_path / "out")] == [2, 1]
    two, one = results(tmp_path)
    assert same_losses(two, one), (two, one)


@pytest.mark.full
def test_scancel_ends_a_sweep_cleanly_and_its_script_resumes_it(
    lab: Slurm, on_one_node: dict[str, str], tmp_path: Path
):
    """In a folder whose name the script has to quote."""
    folder = tmp_path / "100% of it"
    folder.mkdir()
    job, log = submitted(lab, folder, *TWO_NODES, *_ON_BOTH)
    until_trained(lab, folder, job, log)
    assert lab.run(folder, "scancel", job).returncode == 0
    lab.wait(job, "CANCELLED", log=log)
    lab.wait_idle()
    assert [run.info.status for run in runs(folder)[0]] == ["KILLED"], log.read_text()
    assert "resume: sbatch" in log.read_text()
    again = lab.run(folder, "sbatch", "--parsable", "out/job/job.sbatch").stdout.strip()
    log = log.with_name(f"{again}.log")
    lab.wait(again, "COMPLETED", log=log)
    assert "trial starts, from epoch 1" in log.read_text()
    assert epochs(folder) == [[1, 2]]
    assert same_losses(results(folder)[0], on_one_node)
    assert [run.info.status for run in runs(folder)[0]] == ["FINISHED"]


@pytest.mark.full
def test_inside_an_allocation_it_runs_there(lab: Slurm, tmp_path: Path):
    lay_store(tmp_path)
    small = (*PLAIN, *TINY, "engine=inline", "cluster.num_workers=1", "training.max_steps=1", "model=mlp")
    line = shlex.join([sys.executable, "-m", "fsdp_lab", *small, "cluster=slurm"])
    log = tmp_path / "log"
    job = lab.run(tmp_path, "sbatch", "--parsable", f"--output={log}", f"--wrap={line}").stdout.strip()
    lab.wait(job, "COMPLETED", log=log, seconds=90)
    assert f"runs in allocation {job} of Slurm" in log.read_text() and "1 of 1 trial has a result" in log.read_text()
    assert "was submitted" not in log.read_text()


@pytest.mark.full
def test_what_slurm_refuses_is_reported_in_its_words(lab: Slurm, tmp_path: Path):
    done = lab.type(tmp_path, *TWO_NODES, "cluster=slurm", "cluster.job.sbatch=[partition:gpu]")
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "out" / "job").exists()
    assert (
        "invalid partition specified: gpu" in done.stderr
        and "It requested --requeue --nodes=1 --ntasks-per-node=1 --partition=gpu." in done.stderr
    )
