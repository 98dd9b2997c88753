"""Objects, checkpoints and sweeps in a real S3 server that fails in the ways that one does."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from s3fs import S3FileSystem

from fsdp_lab.storage.objects import Storage, StorageAway, StorageRefused
from fsdp_lab.training.checkpoint_place import Place
from tests.cluster.conftest import ALL_OF_THEM, KEY_ID, SECRET, Faults, held_in
from tests.cluster.namespaces import epochs
from tests.conftest import INLINE, PLAIN, TINY, run_cli
from tests.folders import Store, SweepFolder
from tests.servers import lay_store
from tests.sweep import fates
from tests.sweep.conftest import results, runs, started, wait_for

pytestmark = pytest.mark.cluster


def test_objects_come_back_as_they_were_put(address: str, tmp_path: Path):
    storage = Storage(address)
    assert storage.files() == {}
    (tmp_path / "a.json").write_text("1")
    storage.put(tmp_path / "a.json", "x/a.json")
    storage.write("x/b", b"22")
    first = storage.files()
    assert {name: stamp[0] for name, stamp in first.items()} == {"x/a.json": 1, "x/b": 2}
    assert list(Storage(f"{storage.address}/x").files()) == ["a.json", "b"] and list(storage.files("x/b")) == ["x/b"]
    storage.write("x/b", b"33")
    assert storage.files()["x/b"] != first["x/b"], "another content has another stamp"
    storage.get("x/b", tmp_path / "b")
    assert (tmp_path / "b").read_bytes() == storage.read("x/b") == b"33"
    storage.delete(["x/b", "x/none"])
    assert list(storage.files()) == ["x/a.json"]
    with pytest.raises(FileNotFoundError):
        storage.get("x/b", tmp_path / "c")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.json", "b"], "nothing half is left"


def test_a_store_that_fails_or_is_away_for_a_while_is_asked_again(address: str, faults: Faults):
    storage = Storage(address)
    faults.every = 3
    for number in range(6):
        storage.write(str(number), b"1")
    assert len(storage.files()) == 6
    faults.every, faults.cuts = 0, 3
    storage.write("6", b"1")
    assert faults.cuts == 0 and len(storage.files()) == 7


def test_refusals_name_the_address_and_what_to_do(address: str, faults: Faults, monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(StorageRefused, match="this bucket does not exist; create it"):
        Storage("s3://nowhere/x").write("a", b"1")
    faults.forbidden = "^PUT"
    with pytest.raises(StorageRefused, match=f"{address}: the store refuses access .*may list, read, write and delete"):
        Storage(address).write("a", b"1")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    S3FileSystem.clear_instance_cache()
    faults.cuts = ALL_OF_THEM
    with pytest.raises(StorageAway, match=f"{address}: the store does not answer"):
        Storage(address).write("a", b"1")


@pytest.mark.full
@pytest.mark.timeout(300)
def test_a_rank_that_hangs_sends_its_log_and_its_line_is_named(address: str, tmp_path: Path):
    """Its scratch folder goes with its process."""
    shutil.copy(Path(fates.__file__), tmp_path)
    lay_store(tmp_path)
    words = (*PLAIN, *TINY, "model._target_=fates.Fate", "model.fate=hangs", "model.mark=X", "trial_timeout_s=15")
    done = run_cli(tmp_path, *words, f"cluster.storage_path={address}", "training.epochs=2", timeout=200)
    assert done.returncode == 1, done.stdout + done.stderr
    (row,) = results(tmp_path)
    assert row["error"].startswith("no progress for trial_timeout_s=15 s since"), row["error"]
    assert "fates.py" in row["error"] and " in hangs; its stack is in " in row["error"]
    assert "Timeout (0:00:15)!" in (tmp_path / "out" / "logs" / "stuck.rank1.txt").read_text()


def saved(place: Place, step: int) -> str:
    """A checkpoint in the making, with the objects that two ranks put; its address."""
    making = place.begin(step)
    for name in ("__0_0.distcp", "__1_0.distcp", ".metadata"):
        Storage(making).write(name, b"data")
    return making


def published(place: Place, step: int, loss: float = 1.0) -> str:
    return place.publish(saved(place, step), {"history": [{"val/loss": loss}]})


def latest(address: str) -> str:
    found = Place(address).find_latest()[0]
    return found.name if found else ""


def data_of(address: str, checkpoint: str) -> str:
    return next(saved.meta["data"] for saved in Place(address).saved() if saved.name == checkpoint)


def test_a_checkpoint_is_there_once_its_marker_is(address: str):
    place = Place(address)
    assert place.find_latest() == (None, [])
    making = saved(place, 4)
    assert place.find_latest() == (None, []), "killed before the marker"
    assert place.size(making) == 12
    assert place.publish(making, {"history": []}) == f"{address}/step_00000004"
    found, damaged = place.find_latest()
    assert found and found.name == f"{address}/step_00000004" and damaged == []
    assert found.meta["files"] == {"__0_0.distcp": 4, "__1_0.distcp": 4, ".metadata": 4}
    assert latest(f"{address}/step_00000004") == found.name, "one checkpoint by its own address"


def test_a_damaged_one_is_passed_over_by_name(address: str):
    place = Place(address)
    first, second, third = (published(place, step) for step in (2, 4, 6))
    Storage(address).delete([f"{data_of(address, third)}/__1_0.distcp"])
    Storage(address).write(f"{data_of(address, second)}/__1_0.distcp", b"cut")
    found, damaged = place.find_latest()
    assert found and found.name == first
    assert damaged[0].startswith(third) and damaged[0].endswith("__1_0.distcp is missing")
    assert damaged[1].startswith(second) and damaged[1].endswith("has 3 bytes and was written with 4")
    Storage(address).write("step_00000002.json", b'{"history": [')
    assert not latest(address)


def test_the_last_and_the_best_are_kept_and_what_kills_left_goes(address: str, faults: Faults):
    place = Place(address)
    published(place, 2, loss=0.5)
    saved(place, 3)  # killed before its marker
    for step in (4, 6):
        published(place, step)
    saved(place, 8)  # an attempt that is about to end may be at it
    faults.forbidden = "^DELETE .*distcp"
    with pytest.raises(StorageRefused):
        place.prune(keep_last=1, keep_best=True)
    assert latest(address) == f"{address}/step_00000006"
    assert "step_00000004.json" not in Storage(address).files(), "the marker goes first"
    faults.forbidden = ""
    place.prune(keep_last=1, keep_best=True)
    kept = {data_of(address, f"{address}/step_0000000{step}") for step in (2, 6)}
    there = {name.split("/")[0] for name in Storage(address).files()}
    assert {name for name in there if not name.startswith("step_00000008.")} == {
        *kept, "step_00000002.json", "step_00000006.json",
    }  # fmt: skip
    assert place.best().name == f"{address}/step_00000002"


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
def test_a_killed_sweep_resumes_with_checkpoints_in_storage(address: str, faults: Faults, tmp_path: Path):
    out = tmp_path / "out"
    faults.every, faults.delay_s = 10, 0.01
    rates = ("-m", *TINY, *PLAIN, "optimizer.lr=1e-3,2e-3", "training.epochs=8", f"cluster.storage_path={address}")
    with started(tmp_path, *rates) as process:
        wait_for(lambda: any(epochs(out / "0")), process)
        faults.cuts = 12  # of the ranks' connections, which wait longer each time
        wait_for(lambda: len(epochs(out / "0")[0]) > 1, process)
        process.kill()
    assert len(epochs(out / "0")[0]) < 8
    faults.every = 0  # for the test's sake

    done = run_cli(tmp_path, "resume=out")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "trial 0 starts, from epoch" in done.stdout
    assert epochs(out) == [[*range(1, 9)]] * 2
    for run in runs(tmp_path)[1]:
        assert [step for step, _ in Store(tmp_path).history(run, "train/loss")] == [*range(1, 9)]
    resumed_from = SweepFolder(out).trials[0].facts["resumed_from"]
    assert f"{address_of(out, address)}/0/checkpoints/step_" in resumed_from
    assert not list(out.glob("*/checkpoints")), "checkpoints are in storage alone"
    assert len(SweepFolder(out).trials[0].addresses) == 2, "the driver knows where ranks are"
    assert leaks(tmp_path, address) == []


def test_a_store_that_forbids_is_reported_before_anything_starts(address: str, faults: Faults, tmp_path: Path):
    faults.forbidden = "^PUT"
    done = run_cli(tmp_path, *TINY, *PLAIN, f"cluster.storage_path={address}")
    assert done.returncode == 2 and "the store refuses access (Access Denied)" in done.stderr
    assert "Ray starts" not in done.stdout and "Traceback" not in done.stderr
    assert runs(tmp_path)[0] == [], "a sweep that was refused has no run"


def test_a_checkpoint_that_is_forbidden_fails_its_trial_by_name(address: str, faults: Faults, tmp_path: Path):
    faults.forbidden = "^PUT .*/checkpoints/step_00000008"
    done = run_cli(tmp_path, *INLINE, "training.epochs=2", f"cluster.storage_path={address}")
    assert done.returncode == 1
    assert (
        "saving the checkpoint s3://" in done.stdout and "step_00000008: PermissionError: Access Denied" in done.stdout
    )
    assert SweepFolder(tmp_path / "out").trials[0].outcome["status"] == "failed"
    stored = Storage(address_of(tmp_path / "out", address)).files()
    markers = [name for name in stored if name.startswith("checkpoints/") and name.endswith(".json")]
    assert markers == ["checkpoints/step_00000004.json"]
