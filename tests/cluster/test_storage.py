"""Objects, in a real S3 server that fails in the ways that one does."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from s3fs import S3FileSystem

from fsdp_lab.storage.objects import Storage, StorageAway, StorageRefused
from tests.conftest import PLAIN, TINY, run_cli
from tests.servers import ALL_OF_THEM, Faults, lay_store
from tests.sweep import fates
from tests.sweep.conftest import results

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


def test_a_store_that_fails_now_and_then_or_is_away_for_a_while_is_asked_again(address: str, faults: Faults):
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
