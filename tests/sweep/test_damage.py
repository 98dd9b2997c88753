"""Disks that give back other bytes, or take no more: a trial fails, the next one runs (`engine=inline`: no Ray)."""

from __future__ import annotations

import resource
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.conftest import command_line, run_cli
from tests.servers import lay_store
from tests.sweep.conftest import PLAIN, TINY, has_trained_an_epoch, results, started, wait_for

INLINE = (
    *(word for word in TINY if not word.startswith("cluster.num_workers")), *PLAIN, "engine=inline", "model=mlp",
    "forecast.enabled=false", "export=false",
)  # fmt: skip

pytestmark = [pytest.mark.ci, pytest.mark.timeout(400)]


def test_a_checkpoint_that_cannot_be_read_fails_its_trial_and_no_other(tmp_path: Path):
    words = ("-m", *INLINE, "optimizer.lr=1e-3,1e-2")
    assert run_cli(tmp_path, *words).returncode == 0
    for shard in (tmp_path / "out/0/checkpoints").glob("step_*/*.distcp"):
        shard.write_bytes(b"\x5a" * shard.stat().st_size)
    for number in range(2):
        (tmp_path / "out" / str(number) / "outcome.json").unlink()
    done = run_cli(tmp_path, "resume=out", "training.epochs=3", "resume_anyway=true")
    output = done.stdout + done.stderr
    assert done.returncode == 1, output
    assert [row["status"] for row in results(tmp_path)] == ["failed", "finished"], output
    assert "Traceback" not in output
    assert "out/0/checkpoints/step_" in output and "is damaged" in output and "move it away" in output


def test_a_checkpoint_that_the_disk_does_not_take_fails_its_trial_and_no_other(tmp_path: Path):
    """A limit on the size of a file stands in for the disk; the second trial's checkpoints are small enough."""
    lay_store(tmp_path)
    words = ("-m", *INLINE, "model.hidden_dim=2048,32")
    done = subprocess.run(
        command_line(*words),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (20 * 2**20, 20 * 2**20)),
    )
    output = done.stdout + done.stderr
    assert done.returncode == 1, output
    assert [row["status"] for row in results(tmp_path)] == ["failed", "finished"], output
    assert "saving the checkpoint" in output and "step_00000004" in output


def test_a_folder_that_has_become_read_only_is_not_called_full(tmp_path: Path):
    mount, umount = shutil.which("mount"), shutil.which("umount")
    folder = tmp_path / "out"
    with started(tmp_path, *INLINE, "training.epochs=3000", "data.num_train=960") as process:
        wait_for(lambda: has_trained_an_epoch(folder), process)
        if not mount or subprocess.run([mount, "-t", "tmpfs", "-o", "ro", "tmpfs", folder], check=False).returncode:
            pytest.skip("nothing can be mounted here (it takes root)")
        try:
            stdout, stderr = process.communicate(timeout=200)
        finally:
            subprocess.run([str(umount), "--lazy", folder], check=True)
    output = stdout + stderr
    assert process.returncode == 1, output
    assert "cannot be written (Read-only file system); make it writable" in output
    assert "its folder is full" not in output


@pytest.mark.parametrize(
    ("engine", "words"),
    [
        pytest.param("inline", ("-m", "optimizer.lr=1e-3,1e-2"), id="inline-sweep"),
        pytest.param("inline", ("optimizer.lr=1e-3",), id="inline-alone", marks=pytest.mark.full),
        pytest.param("ray", ("-m", "optimizer.lr=1e-3,1e-2"), id="ray-sweep", marks=pytest.mark.full),
        pytest.param("ray", ("optimizer.lr=1e-3",), id="ray-alone", marks=pytest.mark.full),
    ],
)
def test_a_folder_that_is_removed_in_mid_sweep_ends_it_with_one_message(
    tmp_path: Path, engine: str, words: tuple[str, ...]
):
    folder = tmp_path / "out"
    first = folder / "0" if "-m" in words else folder
    long = (*INLINE, f"engine={engine}", "cluster.num_workers=1", "training.epochs=3000", "data.num_train=960")
    with started(tmp_path, *words, *long) as process:
        wait_for(lambda: has_trained_an_epoch(first), process)
        while folder.exists():  # a trial may write while it is removed
            shutil.rmtree(folder, ignore_errors=True)
        stdout, stderr = process.communicate(timeout=250)
    output = stdout + stderr
    assert process.returncode == 1, output
    assert output.count(f"{folder} is gone: it was removed or moved while the sweep ran") == 1, output
    assert "Traceback" not in output and "resume=" not in output, output
    assert engine == "ray" or "trial 1 starts" not in output, output
    assert not (folder / "sweep.json").exists() and not list(folder.rglob("metrics.jsonl"))
    assert engine == "ray" or not folder.exists()
