"""Sweeps whose storage is an S3 server on the loopback."""

from __future__ import annotations

import json
import shutil
from contextlib import suppress
from pathlib import Path

import pytest
from s3fs import S3FileSystem

from fsdp_lab.record.paths import sweep_address
from fsdp_lab.storage import Storage
from fsdp_lab.sweep.listeners.storage import Outgoing
from tests import forked
from tests.conftest import run_cli
from tests.s3 import ALL_OF_THEM, KEY_ID, SECRET, Faults, held_in
from tests.sweep.conftest import PLAIN, TINY, has_trained_an_epoch, history, runs, started, wait_for

pytestmark = pytest.mark.cluster

ALONE = ("engine=inline", *TINY, *PLAIN, "cluster.num_workers=1", "training.epochs=2")


def epochs(trial: Path) -> list[int]:
    return [json.loads(line)["epoch"] for line in (trial / "metrics.jsonl").read_text().splitlines()]


def num_reported(port: int, sweep: str, trial: str) -> int:
    """The number of epochs that storage has of a trial, by the server itself: faults do not keep the test waiting."""
    server = S3FileSystem(endpoint_url=f"http://127.0.0.1:{port}", use_listings_cache=False)
    with suppress(FileNotFoundError):
        return int(server.cat_file(f"{sweep}/{trial}/metrics.jsonl").count(b"\n"))
    return 0


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
def test_a_sweep_that_was_killed_resumes_from_storage_alone(address: str, faults: Faults, tmp_path: Path):
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir(), there.mkdir()
    faults.every, faults.delay_s = 10, 0.01
    rates = ("-m", *TINY, *PLAIN, "optimizer.lr=1e-3,2e-3", "training.epochs=8", f"cluster.storage_path={address}")
    with started(here, *rates) as process:
        wait_for(lambda: (here / "out" / ".storage").exists(), process)
        sweep = sweep_address(address, here / "out")
        assert sweep is not None
        wait_for(lambda: num_reported(faults.behind, sweep, "0"), process)
        faults.cuts = 12  # of the ranks' and the driver's connections, which wait longer each time
        before = wait_for(lambda: count if (count := num_reported(faults.behind, sweep, "0")) > 1 else None, process)
        process.kill()
    assert before < 8
    here.rename(tmp_path / "gone")  # at once: processes of the killed sweep may write there yet
    faults.every = 0  # for the test's sake

    done = run_cli(there, f"resume={sweep}", "trust=true")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "trial 0 starts, from epoch" in done.stdout
    copy = there / "outputs" / "from_storage" / sweep.rpartition("/")[2]
    assert [epochs(copy / number) for number in "01"] == [[*range(1, 9)]] * 2
    assert [num_reported(faults.behind, sweep, number) for number in "01"] == [8, 8]
    for run in runs(there)[1]:
        assert [step for step, _ in history(there, run, "train/loss")] == [*range(1, 9)]
    assert f"{sweep}/0/checkpoints/step_" in json.loads((copy / "0" / "facts.json").read_text())["resumed_from"]
    assert not list(copy.glob("*/checkpoints")), "checkpoints are in storage alone"
    assert len(json.loads((copy / "0" / "places.json").read_text())["nodes"]) == 2, "the driver knows where ranks are"
    assert leaks(tmp_path, address) == []


@pytest.mark.full
def test_a_trial_alone_is_taken_up_elsewhere_when_it_is_trusted(address: str, tmp_path: Path):
    saving = ("checkpoint.mode=async", "checkpoint.keep_best=false", "training.epochs=3")
    nobody = "cluster.address=127.0.0.1:1"  # which a trial in this process does not reach
    done = run_cli(tmp_path, *ALONE, *saving, f"cluster.storage_path={address}", nobody)
    assert done.returncode == 0, done.stdout + done.stderr
    sweep = sweep_address(address, tmp_path / "out")
    command = f"resume={sweep} trust=true"
    assert sweep is not None and f"from any machine: python -m fsdp_lab {command}\n" in done.stdout
    kept = {name.split("/")[1] for name in Storage(sweep).files() if name.startswith("checkpoints/")}
    assert len(kept) == 2 and {name.partition(".")[0] for name in kept} == {"step_00000012"}, "the last, and its data"
    Storage(sweep).delete(["outcome.json"])  # as where the store was away at the end
    assert run_cli(tmp_path, "resume=out").returncode == 0
    assert "outcome.json" in Storage(sweep).files()
    Storage(sweep).delete(["outcome.json"])
    shutil.rmtree(tmp_path / "out")
    done = run_cli(tmp_path, f"resume={sweep}")
    assert done.returncode == 2 and "add trust=true" in done.stderr
    (tmp_path / "mlflow.db").unlink()
    (elsewhere := tmp_path / "elsewhere").mkdir()
    done = run_cli(elsewhere, *command.split())
    assert done.returncode == 0, done.stdout + done.stderr
    assert (elsewhere / "mlflow.db").exists() and not (tmp_path / "mlflow.db").exists()
    assert f"from any machine: python -m fsdp_lab {command}\n" in done.stdout
    assert "outcome.json" in Storage(sweep).files()
    (reader := tmp_path / "reader").mkdir()
    done = forked.run(reader, "fsdp_lab.report", f"sweep={sweep}", "trust=true")
    assert done.returncode == 0, done.stdout + done.stderr
    assert (reader / "outputs" / "from_storage" / sweep.rpartition("/")[2] / "report.html").exists()


@pytest.mark.full
def test_an_interrupted_sweep_says_how_it_goes_on_here_and_elsewhere(address: str, faults: Faults, tmp_path: Path):
    faults.delay_s = 0.1  # what is sent last is not there at once
    words = ("-m", *ALONE[:-1], "optimizer.lr=1e-3,2e-3", "training.epochs=400", f"cluster.storage_path={address}")
    with started(tmp_path, *words) as process:
        wait_for(lambda: has_trained_an_epoch(tmp_path / "out" / "0"), process)
        process.terminate()
        stdout, stderr = process.communicate(timeout=200)
    assert process.returncode == 130, stdout + stderr
    sweep = sweep_address(address, tmp_path / "out")
    assert sweep is not None
    here, anywhere = "to resume: python -m fsdp_lab resume=out\n", f"python -m fsdp_lab resume={sweep} trust=true"
    assert stdout.count(here) == 2 and stdout.count(f"from any machine: {anywhere}\n") == 3, stdout
    assert "did not reach object storage" not in stdout and "results.csv" in Storage(sweep).files()


def test_what_a_store_that_is_away_has_not_taken_is_named_once(
    address: str, faults: Faults, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    S3FileSystem.clear_instance_cache()
    outgoing = Outgoing(Storage(address), print)
    faults.cuts = ALL_OF_THEM
    for name in ("a", "b", "b"):
        outgoing.put(name, b"1")
    assert outgoing.settle(0.5) == ["a", "b"]
    faults.cuts = 0
    assert outgoing.settle(20.0) == [] and sorted(Storage(address).files()) == ["a", "b"]


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
    sweep = sweep_address(address, tmp_path / "out")
    assert sweep is not None and json.loads(Storage(sweep).read("outcome.json"))["status"] == "failed"
    markers = [name for name in Storage(sweep).files() if name.startswith("checkpoints/") and name.endswith(".json")]
    assert markers == ["checkpoints/step_00000004.json"]
