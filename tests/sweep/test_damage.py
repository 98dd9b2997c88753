"""Files that are damaged or removed, or that a full disk does not take: each is named, and costs no other trial."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

import pytest

from fsdp_lab.config import UserError
from fsdp_lab.sweep.record import sweep_in
from fsdp_lab.sweep.store.find import find_trusted
from tests import forked, trained
from tests.conftest import INLINE, run_cli, without
from tests.folders import Store, SweepFolder
from tests.sweep.conftest import has_trained_an_epoch, started, wait_for

pytestmark = pytest.mark.timeout(400)


@pytest.mark.ci
def test_an_unreadable_checkpoint_fails_its_trial_alone(tmp_path: Path):
    sweep = SweepFolder(trained.copy_trained(tmp_path) / "out")
    for shard in sweep.path.glob("0/checkpoints/step_*/*.distcp"):
        shard.write_bytes(b"\x5a" * shard.stat().st_size)
    for trial in sweep.trials[:2]:
        trial.change(outcome=None)
    done = run_cli(tmp_path, "resume=out", "training.epochs=3", "resume_anyway=true")
    output = done.stdout + done.stderr
    assert done.returncode == 1 and "Traceback" not in output, output
    assert sweep.statuses == ["failed", *["finished"] * 3] and len(sweep.trials[1].epochs) == 3, output
    assert (
        "out/0/checkpoints/step_" in output
        and "is damaged" in output
        and "to start from the checkpoint before it, move " in output
    )


@pytest.mark.ci
def test_a_folder_that_is_removed_in_mid_sweep_ends_it(tmp_path: Path):
    folder = tmp_path / "out"
    with started(tmp_path, "-m", "optimizer.lr=1e-3,1e-2", *INLINE, "training.epochs=3000") as process:
        wait_for(lambda: has_trained_an_epoch(folder / "0"), process)
        while folder.exists():  # a trial may write while it is removed
            shutil.rmtree(folder, ignore_errors=True)
        stdout, stderr = process.communicate(timeout=250)
    output = stdout + stderr
    assert process.returncode == 2 and "Traceback" not in output, output
    assert f"{folder}/sweep.json: No such file or directory" in output and "free the disk" not in output, output
    assert "trial 1 starts" not in output and not folder.exists()


FILES = (
    "sweep.json", "trials.jsonl", "0/trial.json", "0/metrics.jsonl", "0/.hydra/config.yaml", "0/.hydra/hydra.yaml",
)  # fmt: skip
OTHER_TYPES: tuple[tuple[str, str], ...] = (
    *(("0/metrics.jsonl", f'{{"epoch": {epoch}}}') for epoch in ('"x"', "NaN", "null", "1.5", "true", "[1]")),
    *(("0/metrics.jsonl", f'{{"epoch": 1, "val/loss": {loss}}}') for loss in ('"q"', "null", "[]", "9" * 400)),
    *(("0/trial.json", f'{{"forecast": {{"forecast/peak_bytes": {peak}}}}}') for peak in ('"q"', "null", "{}")),
    ("0/trial.json", '{"forecast_words": {"predicted_by": 3}}'), ("0/trial.json", '{"failures": [{"reason": 5}]}'),
    *(("0/trial.json", f'{{"facts": {{"notes": {notes}}}}}') for notes in ("5", "[5]")),
    ("0/trial.json", '{"outcome": {"status": "finished", "seconds": "q"}}'),
    ("0/trial.json", '{"outcome": {"status": []}}'), ("0/trial.json", '{"nodes": [{"node": 5}]}'),
    *(("0/.hydra/hydra.yaml", f"hydra: {{verbose: 1, {rest}}}") for rest in ("", "runtime: {choices: 5}")),
    ("sweep.json", "[" * 100_000),
    *(("trials.jsonl", line) for line in (
        '{"overrides": 5, "folder": 3, "storage": 7}', '{"overrides": [5], "folder": "0"}',
        '{"overrides": [], "folder": "0", "storage": 7}', "[" * 100_000,
    )),
)  # fmt: skip

NAMED = "cannot be read .*(restore it|write that line again|start a new sweep)"
# A file, what it holds then (None: it is removed), and what reading the sweep gives: a message that names the file,
# or the status and the number of epochs of trial 0.
DAMAGE: tuple[tuple[str, bytes | None, str | tuple[str, int]], ...] = (
    *((name, content, NAMED) for name in FILES for content in (b'{"a": \n', b'["other"]\n', b"\xff\n")),
    *((name, f"{content}\n".encode(), NAMED) for name, content in OTHER_TYPES),
    ("sweep.json", None, "there is no sweep.json"),
    ("trials.jsonl", None, "lacks a trial; restore the file"),
    ("0/.hydra/config.yaml", None, NAMED),
    ("0/.hydra/hydra.yaml", None, NAMED),
    ("0/trial.json", None, ("waiting", 2)),  # so a resume trains it
    ("0/metrics.jsonl", None, ("finished", 0)),
    ("results.csv", None, ("finished", 2)),  # made anew
)


def read(folder: Path) -> str | tuple[str, int]:
    try:
        first, *_ = sweep_in(find_trusted(str(folder), "sweep", trust=False)[0]).trials
    except UserError as error:
        return str(error)
    return first.status.value, len(first.epochs)


def test_a_damaged_file_is_named_with_the_remedy_or_not_needed(tmp_path: Path):
    folder = trained.copy_trained(tmp_path) / "out"
    for name, content, outcome in DAMAGE:
        whole = (folder / name).read_bytes()
        if content is None:
            (folder / name).unlink()
        else:
            (folder / name).write_bytes(content)
        found = read(folder)
        if isinstance(outcome, str):
            assert isinstance(found, str) and name in found and re.search(outcome, found), (name, content, found)
        else:
            assert found == outcome, (name, content)
        (folder / name).write_bytes(whole)
    assert len(DAMAGE) == 6 * 3 + 27 + 7 and read(folder) == ("finished", 2)


def test_a_damaged_file_ends_commands_with_2(tmp_path: Path):
    folder = trained.copy_trained(tmp_path)
    (folder / "out/0/trial.json").write_text("")
    for done in (run_cli(folder, "resume=out"), forked.run(folder, "fsdp_lab.report", "sweep=out")):
        assert done.returncode == 2 and "out/0/trial.json cannot be read" in done.stderr, done.stdout + done.stderr
        assert "restore it from a copy, or remove it" in done.stderr and "Traceback" not in done.stderr
    (folder / "out/0/trial.json").unlink()
    assert run_cli(folder, "resume=out").returncode == 0
    assert SweepFolder(folder / "out").statuses == ["finished"] * trained.COUNT


@pytest.mark.ci
def test_a_full_disk_that_takes_no_checkpoint_fails_the_trial(tmp_path: Path):
    """And no other: 1.29 million parameters take 15.5 MB with Adam's state, so that a second epoch finds no room.

    What was recorded before stays.
    """
    disk = tmp_path / "disk"
    disk.mkdir()
    if os.system(f"mount -t tmpfs -o size=24m tmpfs {disk}"):
        pytest.skip("a small disk cannot be mounted here (it takes root)")
    store = f"tracking.uri=sqlite:///{tmp_path}/mlflow.db"
    words = (*without(INLINE, "tracking.uri"), store, "export=false", "checkpoint.keep_last=9")
    try:
        done = run_cli(disk, "-m", *words, "model.hidden_dim=1100,32", timeout=300)
        failed, finished = SweepFolder(disk / "out").rows
    finally:
        os.system(f"umount --lazy {disk}")
    assert done.returncode == 1 and "Traceback" not in done.stdout + done.stderr, done.stdout + done.stderr
    assert (failed["status"], finished["status"]) == ("failed", "finished"), done.stdout
    assert "saving the checkpoint" in failed["error"] and "step_00000008" in failed["error"]
    assert re.search(r"the disk of .*/checkpoints has \d MiB left", failed["error"]), failed["error"]
    first, second = Store(tmp_path).trials
    assert (first.info.status, second.info.status) == ("FAILED", "FINISHED")
    assert [epoch for epoch, _ in Store(tmp_path).history(first, "train/loss")] == [1]
