"""Sweeps whose storage is an S3 server on the loopback."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fsdp_lab.storage.objects import Storage
from tests.conftest import PLAIN, TINY, run_cli
from tests.folders import Store, SweepFolder
from tests.servers import KEY_ID, SECRET, Faults, held_in
from tests.sweep.conftest import runs, started, wait_for

pytestmark = pytest.mark.cluster

ALONE = ("engine=inline", *TINY, *PLAIN, "cluster.num_workers=1", "training.epochs=2")


def epochs(trial: Path) -> list[int]:
    file = trial / "metrics.jsonl"
    return [json.loads(line)["epoch"] for line in file.read_text().splitlines()] if file.exists() else []


def address_of(folder: Path, address: str) -> str:
    """Of the sweep in a folder."""
    return f"{address}/{(folder / '.storage').read_text()}"


@pytest.fixture
def credentials_at_home(address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Credentials are in ~/.aws alone."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(Path.home() / ".cache"))  # Matplotlib's fonts, which take seconds to find
    file = tmp_path / "home" / ".aws" / "credentials"
    file.parent.mkdir(parents=True)
    file.write_text(f"[default]\naws_access_key_id = {KEY_ID}\naws_secret_access_key = {SECRET}\n")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)


def leaks(folder: Path, address: str) -> list[str]:
    """The files below a folder, and the objects below an address, that have a credential in them."""
    storage = Storage(address)
    objects = {name: storage.read(name) for name in storage.files()}
    collected = [name for name, content in objects.items() if SECRET.encode() in content or KEY_ID.encode() in content]
    files = [*held_in(folder, SECRET), *held_in(folder, KEY_ID)]
    return collected + [file for file in files if not file.endswith(".aws/credentials")]


@pytest.mark.usefixtures("credentials_at_home")
@pytest.mark.full
def test_a_sweep_that_was_killed_resumes_with_the_checkpoints_in_storage(address: str, faults: Faults, tmp_path: Path):
    out = tmp_path / "out"
    faults.every, faults.delay_s = 10, 0.01
    rates = ("-m", *TINY, *PLAIN, "optimizer.lr=1e-3,2e-3", "training.epochs=8", f"cluster.storage_path={address}")
    with started(tmp_path, *rates) as process:
        wait_for(lambda: epochs(out / "0"), process)
        faults.cuts = 12  # of the ranks' connections, which wait longer each time
        before = wait_for(lambda: count if (count := len(epochs(out / "0"))) > 1 else None, process)
        process.kill()
    assert before < 8
    faults.every = 0  # for the test's sake

    done = run_cli(tmp_path, "resume=out")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "trial 0 starts, from epoch" in done.stdout
    assert [epochs(out / number) for number in "01"] == [[*range(1, 9)]] * 2
    for run in runs(tmp_path)[1]:
        assert [step for step, _ in Store(tmp_path).history(run, "train/loss")] == [*range(1, 9)]
    resumed_from = SweepFolder(out).trials[0].facts["resumed_from"]
    assert f"{address_of(out, address)}/0/checkpoints/step_" in resumed_from
    assert not list(out.glob("*/checkpoints")), "checkpoints are in storage alone"
    assert len(SweepFolder(out).trials[0].addresses) == 2, "the driver knows where ranks are"
    assert leaks(tmp_path, address) == []


@pytest.mark.full
def test_a_trial_alone_keeps_its_last_checkpoint_in_storage_and_resumes_from_it(address: str, tmp_path: Path):
    saving = ("checkpoint.mode=async", "checkpoint.keep_best=false", "training.epochs=3")
    nobody = "cluster.address=127.0.0.1:1"  # which a trial in this process does not reach
    done = run_cli(tmp_path, *ALONE, *saving, f"cluster.storage_path={address}", nobody)
    assert done.returncode == 0, done.stdout + done.stderr
    sweep = address_of(tmp_path / "out", address)
    kept = {name.split("/")[1] for name in Storage(sweep).files() if name.startswith("checkpoints/")}
    assert len(kept) == 2 and {name.partition(".")[0] for name in kept} == {"step_00000012"}, "the last, and its data"
    SweepFolder(tmp_path / "out").trials[0].change(outcome=None)
    done = run_cli(tmp_path, "resume=out")
    assert done.returncode == 0, done.stdout + done.stderr
    resumed_from = SweepFolder(tmp_path / "out").trials[0].facts["resumed_from"]
    assert f"{sweep}/checkpoints/step_00000012" in resumed_from


def test_a_store_that_forbids_is_reported_before_anything_starts(address: str, faults: Faults, tmp_path: Path):
    faults.forbidden = "^PUT"
    done = run_cli(tmp_path, *TINY, *PLAIN, f"cluster.storage_path={address}")
    assert done.returncode == 2 and "the store refuses access (Access Denied)" in done.stderr
    assert "Ray starts" not in done.stdout and "Traceback" not in done.stderr
    assert runs(tmp_path)[0] == [], "a sweep that was refused has no run"


def test_a_checkpoint_that_is_forbidden_fails_its_trial_by_name(address: str, faults: Faults, tmp_path: Path):
    faults.forbidden = "^PUT .*/checkpoints/step_00000008"
    done = run_cli(tmp_path, *ALONE, f"cluster.storage_path={address}")
    assert done.returncode == 1
    assert (
        "saving the checkpoint s3://" in done.stdout and "step_00000008: PermissionError: Access Denied" in done.stdout
    )
    assert SweepFolder(tmp_path / "out").trials[0].outcome["status"] == "failed"
    stored = Storage(address_of(tmp_path / "out", address)).files()
    markers = [name for name in stored if name.startswith("checkpoints/") and name.endswith(".json")]
    assert markers == ["checkpoints/step_00000004.json"]
