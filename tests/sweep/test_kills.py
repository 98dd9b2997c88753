"""Real processes killed in the middle of a real trial."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

from fsdp_lab.explain import explain
from fsdp_lab.files import write_text
from tests.conftest import run_cli
from tests.processes import called, descendants, still_running
from tests.sweep.conftest import (
    PLAIN,
    TINY,
    has_trained_an_epoch,
    history,
    results,
    runs,
    started,
    wait_for,
)

pytestmark = [pytest.mark.ci, pytest.mark.timeout(500)]

EPOCHS = 8
LONG = (*PLAIN, *TINY, f"training.epochs={EPOCHS}", "data.num_train=960")


def press_ctrl_c(process: subprocess.Popen[str]) -> None:
    os.killpg(process.pid, signal.SIGINT)  # to the whole group, as a terminal does


def test_an_interrupt_ends_it_in_time_and_leaves_nothing_running(tmp_path: Path):
    with started(tmp_path, *LONG, "training.epochs=200") as process:
        wait_for(lambda: has_trained_an_epoch(tmp_path / "out"), process)
        family = descendants(process.pid)
        assert called("raylet/raylet", process.pid)
        begun = time.monotonic()
        press_ctrl_c(process)
        stdout, stderr = process.communicate(timeout=200)
        took = time.monotonic() - begun
    assert process.returncode == 130, stdout + stderr
    assert "Traceback" not in stdout + stderr
    assert took < 30  # the limit is 8 s, and a busy machine has something else to do
    assert still_running(family, 30) == []
    (row,) = results(tmp_path)
    assert row["status"] == "interrupted" and int(row["epoch"]) >= 1
    (run,), _ = runs(tmp_path)
    assert run.info.status == "KILLED" and run.data.tags["status"] == "interrupted"


@pytest.mark.parametrize("after_s", [1.0, 3.0])
def test_an_interrupt_while_ray_starts_and_trials_are_forecast_ends_it_in_order(tmp_path: Path, after_s: float):
    """Seconds after `Ray starts`: while Ray is imported, while it starts, while forecasts run."""
    with started(tmp_path, *LONG, "sharding=root,per_block", "-m") as process:
        assert process.stdout
        message = ""
        while "Ray starts" not in message:
            message += process.stdout.readline()
        time.sleep(after_s)
        family = descendants(process.pid)
        press_ctrl_c(process)
        until = time.monotonic() + 60
        while process.poll() is None and time.monotonic() < until:  # Ray's servers may start in this moment yet
            family += [child for child in descendants(process.pid) if child not in family]
            time.sleep(0.05)
        stdout, stderr = process.communicate(timeout=200)
    assert process.returncode == 130, message + stdout + stderr
    assert still_running(family, 30) == []
    assert "Traceback" not in stdout + stderr


@pytest.fixture
def small_disk(tmp_path: Path):
    """A file system of 6 MB: room for MLflow's store and a checkpoint or two."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = shutil.which("mount")
    if mount is None or subprocess.run([mount, "-t", "tmpfs", "-o", "size=6m", "tmpfs", disk], check=False).returncode:
        pytest.skip("a small disk cannot be mounted here (it takes root)")
    yield disk
    subprocess.run(["umount", "--lazy", disk], check=True)


def test_a_file_that_a_full_disk_does_not_take_is_named_and_leaves_nothing(small_disk: Path):
    write_text(small_disk / "a/night.json", "whole")
    (small_disk / "filler").write_bytes(b"\0" * (5 * 2**20))
    with pytest.raises(OSError, match="No space left on device") as raised:
        write_text(small_disk / "a/night.json", "x" * 2**22)
    assert raised.value.filename == str(small_disk / "a/night.json") and "night.json: No space" in str(
        explain(raised.value)
    )
    assert (small_disk / "a/night.json").read_text() == "whole"
    assert [path.name for path in (small_disk / "a").iterdir()] == ["night.json"]


def test_a_full_disk_is_reported_and_ends_the_run(small_disk: Path):
    store = f"tracking.uri=sqlite:///{small_disk.parent}/mlflow.db"
    tiny = [argument for argument in LONG if not argument.startswith("tracking.uri")]
    done = run_cli(small_disk, *tiny, store, "checkpoint.keep_last=99", "cluster.max_failures=0", timeout=200)
    output = done.stdout + done.stderr
    assert done.returncode in (1, 2), output
    assert "No space left on device" in output
    assert "Traceback" not in output
    (run,), _ = runs(small_disk.parent)
    assert run.info.status == "FAILED"
    assert history(small_disk.parent, run, "train/loss"), "what was recorded before stays"
