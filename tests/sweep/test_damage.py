"""Files that cannot be read or written (`engine=inline`: no Ray)."""

from __future__ import annotations

import json
import resource
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from fsdp_lab.config import UserError
from fsdp_lab.sweep.store.find import find_trusted
from fsdp_lab.sweep.sweep_data import sweep_in
from tests import forked, trained
from tests.conftest import INLINE, command_line, run_cli
from tests.folders import SweepFolder
from tests.servers import lay_store
from tests.sweep.conftest import has_trained_an_epoch, results, started, wait_for

pytestmark = pytest.mark.timeout(400)


@pytest.mark.ci
def test_a_checkpoint_that_cannot_be_read_fails_its_trial_and_no_other(tmp_path: Path):
    words = ("-m", *INLINE, "optimizer.lr=1e-3,1e-2")
    assert run_cli(tmp_path, *words).returncode == 0
    for shard in (tmp_path / "out/0/checkpoints").glob("step_*/*.distcp"):
        shard.write_bytes(b"\x5a" * shard.stat().st_size)
    for trial in SweepFolder(tmp_path / "out").trials:
        trial.change(outcome=None)
    done = run_cli(tmp_path, "resume=out", "training.epochs=3", "resume_anyway=true")
    output = done.stdout + done.stderr
    assert done.returncode == 1, output
    assert [row["status"] for row in results(tmp_path)] == ["failed", "finished"], output
    assert "Traceback" not in output
    assert "out/0/checkpoints/step_" in output and "is damaged" in output and "move it away" in output


@pytest.mark.ci
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


@pytest.mark.ci
def test_a_folder_that_is_removed_in_mid_sweep_ends_it(tmp_path: Path):
    folder = tmp_path / "out"
    long = ("-m", "optimizer.lr=1e-3,1e-2", *INLINE, "training.epochs=3000", "data.num_train=960")
    with started(tmp_path, *long) as process:
        wait_for(lambda: has_trained_an_epoch(folder / "0"), process)
        while folder.exists():  # a trial may write while it is removed
            shutil.rmtree(folder, ignore_errors=True)
        stdout, stderr = process.communicate(timeout=250)
    output = stdout + stderr
    assert process.returncode == 2, output
    assert f"{folder}/sweep.json: No such file or directory" in output and "Traceback" not in output, output
    assert "free the disk" not in output, output
    assert "trial 1 starts" not in output and not folder.exists()


FILES = ("sweep.json", "trials.jsonl", *(f"0/{name}" for name in (
    "trial.json", "metrics.jsonl", ".hydra/config.yaml", ".hydra/hydra.yaml",
)))  # fmt: skip


def test_a_file_that_cannot_be_read_is_named_with_the_remedy(tmp_path: Path):
    folder = trained.copy_trained(tmp_path) / "out"
    for name in FILES:
        whole = (folder / name).read_bytes()
        for content in (b'{"a": \n', b'["other"]\n', b"\xff\n"):
            (folder / name).write_bytes(content)
            with pytest.raises(UserError, match=rf"{folder / name}.* cannot be read .*(restore|start a new sweep)"):
                sweep_in(folder)
        (folder / name).write_bytes(whole)
    assert len(sweep_in(folder)[0].trials) == trained.COUNT


OTHER_TYPES = (
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


def test_a_value_of_another_type_is_named_with_the_remedy(tmp_path: Path):
    folder = trained.copy_trained(tmp_path) / "out"
    for name, content in OTHER_TYPES:
        whole = (folder / name).read_bytes() if (folder / name).exists() else b"{}"
        (folder / name).write_text(f"{content}\n")
        with pytest.raises(UserError, match=rf"{folder / name}.* cannot be read .*; (restore it|start a new)"):
            sweep_in(find_trusted(str(folder), "sweep", trust=False)[0])
        (folder / name).write_bytes(whole)
    assert len(sweep_in(folder)[0].trials) == trained.COUNT


def test_a_line_of_a_trial_is_written_again_as_the_message_says(tmp_path: Path):
    folder = trained.copy_trained(tmp_path) / "out"
    first, *others = (folder / "trials.jsonl").read_text().splitlines(keepends=True)
    (folder / "trials.jsonl").write_text("".join(["garbage\n", *others]))
    with pytest.raises(UserError, match=r"line 1 .* write that line again, with the overrides in \.hydra/overrides"):
        sweep_in(folder)
    again = {"overrides": yaml.safe_load((folder / "0/.hydra/overrides.yaml").read_text()), "folder": "0"}
    (folder / "trials.jsonl").write_text("".join([f"{json.dumps(again)}\n", *others]))
    assert json.loads(first) == again and len(sweep_in(folder)[0].trials) == trained.COUNT


def test_a_file_that_cannot_be_read_ends_commands_with_2(tmp_path: Path):
    folder = trained.copy_trained(tmp_path)
    (folder / "out/0/trial.json").write_text("")
    for done in (run_cli(folder, "resume=out"), forked.run(folder, "fsdp_lab.report", "sweep=out")):
        assert done.returncode == 2 and "out/0/trial.json cannot be read" in done.stderr, done.stdout + done.stderr
        assert "restore it from a copy, or remove it" in done.stderr and "Traceback" not in done.stderr
    (folder / "out/0/trial.json").unlink()
    assert run_cli(folder, "resume=out").returncode == 0
    assert [row["status"] for row in results(folder)] == ["finished"] * trained.COUNT
