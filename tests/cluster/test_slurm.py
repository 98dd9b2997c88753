"""Sweeps of deploy/slurm.sbatch under a real Slurm: a controller and two nodes, as network namespaces."""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.namespaces import TWO_NODES, TWO_NODES_AND_ONE
from tests.cluster.slurm import Slurm, slurm, why_not
from tests.cluster.test_nodes import addresses, same_losses
from tests.conftest import ROOT
from tests.servers import lay_store
from tests.sweep.conftest import has_trained_an_epoch, results, runs

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def lab() -> Iterator[Slurm]:
    if reason := why_not():
        pytest.skip(reason)
    with slurm() as lab:
        yield lab


def edited(folder: Path, *words: str) -> Path:
    """A user's copy of the script, for nodes with two cores and no GPUs."""
    lay_store(folder)
    text = (ROOT / "deploy" / "slurm.sbatch").read_text().replace("#SBATCH --gpus-per-node=8\n", "")
    quoted = " ".join(f"'{word}'" for word in words)
    for line, mine in (
        (r"#SBATCH --cpus-per-task=.*", "#SBATCH --cpus-per-task=2"),
        (r"sweep=\S*", "sweep=$PWD/out"),
        (r"words=\(-m .*\)", f"words=({quoted})"),
        (r"export PATH=\$PWD/\.venv/bin:", f"export PATH={sys.prefix}/bin:"),
    ):
        text, count = re.subn(f"(?m)^{line}", mine, text)
        assert count == 1, line
    (folder / "slurm.sbatch").write_text(text)
    return folder / "slurm.sbatch"


def submitted(lab: Slurm, script: Path) -> tuple[str, Path]:
    """The number of the job that a script makes, and its log."""
    done = lab.run(script.parent, "sbatch", "--parsable", script.name)
    assert done.returncode == 0, done.stdout + done.stderr
    job = done.stdout.strip()
    return job, script.parent / f"slurm-{job}.out"


def until(lab: Slurm, job: str, log: Path, has_come: Iterator[bool], seconds: float = 400) -> None:
    """Until something has come of a job that is in the queue or runs."""
    end = time.monotonic() + seconds
    while not next(has_come):
        output = log.read_text() if log.exists() else "no log"
        assert time.monotonic() < end and lab.state(job) in ("PENDING", "RUNNING"), output
        time.sleep(0.2)


def trained(folder: Path) -> Iterator[bool]:
    """Whether a trial has an epoch, and not all."""
    while True:
        yield any(has_trained_an_epoch(file.parent) for file in folder.glob("out/storage/**/metrics.jsonl"))


def begun(log: Path) -> Iterator[bool]:
    """Whether a trial has started."""
    while True:
        yield log.exists() and re.search(r"trial \d starts", log.read_text()) is not None


def epochs(folder: Path) -> list[list[int]]:
    """Of each trial, as its ranks have written them."""
    files = sorted(folder.glob("out/storage/**/metrics.jsonl"))
    return [[json.loads(line)["epoch"] for line in file.read_text().splitlines()] for file in files]


def test_a_sweep_over_two_nodes_is_requeued_before_its_time_limit_and_resumes(lab: Slurm, tmp_path: Path):
    """Slurm sends USR1 to the script two minutes before the limit, which has whole minutes."""
    job, log = submitted(lab, edited(tmp_path, *TWO_NODES_AND_ONE))
    signal = ("scancel", "--batch", "--signal=USR1", job)
    until(lab, job, log, begun(log))
    assert lab.run(tmp_path, *signal).returncode == 0, "it got no further since its start, and continues"
    until(lab, job, log, trained(tmp_path))
    assert lab.state(job) == "RUNNING" and "resumes:" not in log.read_text()
    assert lab.run(tmp_path, *signal).returncode == 0
    lab.wait(job, "COMPLETED", log=log)
    assert log.read_text().count("resumes:") == 1
    assert epochs(tmp_path) == [[1, 2], [1, 2]], log.read_text()
    assert [len(set(nodes)) for nodes in addresses(tmp_path / "out")] == [2, 1]
    two, one = results(tmp_path)
    assert same_losses(two, one), (two, one)


@pytest.mark.full
@pytest.mark.documents("sbatch slurm.sbatch", "scancel <job>")
def test_scancel_ends_a_sweep_cleanly_and_its_script_resumes_it(
    lab: Slurm, on_one_node: dict[str, str], tmp_path: Path
):
    """In a folder whose name the script has to quote."""
    folder = tmp_path / "100% of it"
    folder.mkdir()
    script = edited(folder, *TWO_NODES)
    job, log = submitted(lab, script)
    until(lab, job, log, trained(folder))
    assert lab.run(folder, "scancel", job).returncode == 0
    lab.wait(job, "CANCELLED", log=log)
    lab.wait_idle()
    assert [run.info.status for run in runs(folder)[0]] == ["KILLED"], log.read_text()
    again, log = submitted(lab, script)
    lab.wait(again, "COMPLETED", log=log)
    assert "trial starts, from epoch 1" in log.read_text()
    assert epochs(folder) == [[1, 2]]
    assert same_losses(results(folder)[0], on_one_node)
    assert [run.info.status for run in runs(folder)[0]] == ["FINISHED"]
