"""Objects, checkpoints and sweeps in a real S3 server that fails in the ways that one does."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from s3fs import S3FileSystem

from fsdp_lab.storage.objects import Storage, StorageAway, StorageRefused
from fsdp_lab.training.checkpoint_place import Place
from tests.cluster.conftest import ALL_OF_THEM, KEY_ID, SECRET, Faults, held_in
from tests.conftest import INLINE, PLAIN, TINY, run_cli
from tests.folders import SweepFolder
from tests.servers import lay_store
from tests.sweep import fates
from tests.sweep.conftest import results, runs

pytestmark = pytest.mark.cluster


def test_a_store_that_fails_or_is_away_is_asked_again(address: str, faults: Faults):
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


def published(place: Place, step: int, loss: float = 1.0) -> tuple[str, str]:
    """The names of a whole checkpoint and of its data."""
    name = place.publish(saved(place, step), {"history": [{"val/loss": loss}]})
    return name, next(found.meta["data"] for found in place.saved() if found.name == name)


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
    assert Place(found.name).find_latest()[0] == found, "one checkpoint by its own address"


def test_a_damaged_one_is_passed_over_by_name(address: str):
    place, storage = Place(address), Storage(address)
    (first, _), (second, cut), (third, lost) = (published(place, step) for step in (2, 4, 6))
    storage.delete([f"{lost}/__1_0.distcp"])
    storage.write(f"{cut}/__1_0.distcp", b"cut")
    found, damaged = place.find_latest()
    assert found and found.name == first
    assert damaged[0].startswith(third) and damaged[0].endswith("__1_0.distcp is missing")
    assert damaged[1].startswith(second) and damaged[1].endswith("has 3 bytes and was written with 4")
    storage.write("step_00000002.json", b'{"history": [')
    assert Place(address).find_latest()[0] is None


def test_the_last_and_the_best_are_kept_and_what_kills_left_goes(address: str, faults: Faults):
    place, storage = Place(address), Storage(address)
    best, best_data = published(place, 2, loss=0.5)
    saved(place, 3)  # killed before its marker
    published(place, 4)
    last, last_data = published(place, 6)
    saved(place, 8)  # an attempt that is about to end may be at it
    faults.forbidden = "^DELETE .*distcp"
    with pytest.raises(StorageRefused):
        place.prune(keep_last=1, keep_best=True)
    found, _ = Place(address).find_latest()
    assert found and found.name == last
    assert "step_00000004.json" not in storage.files(), "the marker goes first"
    faults.forbidden = ""
    place.prune(keep_last=1, keep_best=True)
    there = {name.split("/")[0] for name in storage.files() if not name.startswith("step_00000008.")}
    assert there == {best_data, last_data, "step_00000002.json", "step_00000006.json"}
    assert place.best().name == best


def address_of(folder: Path, address: str) -> str:
    """Of the sweep in a folder."""
    return f"{address}/{(folder / '.storage').read_text()}"


def test_what_is_forbidden_is_refused_or_fails_its_trial_by_name(address: str, faults: Faults, tmp_path: Path):
    faults.forbidden = "^PUT"
    done = run_cli(tmp_path, *INLINE, f"cluster.storage_path={address}")
    assert done.returncode == 2 and "the store refuses access (Access Denied)" in done.stderr
    assert runs(tmp_path)[0] == [], "a sweep that was refused has no run"
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
    assert held_in(tmp_path, SECRET) == held_in(tmp_path, KEY_ID) == []
