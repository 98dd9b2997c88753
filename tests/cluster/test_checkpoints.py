"""Checkpoints as objects: what a kill at any moment leaves, and what is found of it."""

from __future__ import annotations

import pytest

from fsdp_lab.storage.objects import Storage, StorageRefused
from fsdp_lab.training.checkpoint_place import InStorage, place_of
from tests.s3 import Faults

pytestmark = pytest.mark.cluster


def saved(place: InStorage, step: int) -> str:
    """A checkpoint in the making, with the objects that two ranks put; its address."""
    making = str(place.begin(step))
    for name in ("__0_0.distcp", "__1_0.distcp", ".metadata"):
        Storage(making).write(name, b"data")
    return making


def published(place: InStorage, step: int, loss: float = 1.0) -> str:
    return str(place.publish(saved(place, step), step, {"history": [{"val/loss": loss}]}))


def test_a_checkpoint_is_there_once_its_marker_is(address: str):
    place = InStorage(address)
    assert place.find_latest() == (None, [])
    making = saved(place, 4)
    assert place.find_latest() == (None, []), "killed before the marker"
    assert place.size(making) == 12
    assert place.publish(making, 4, {"history": []}) == f"{address}/step_00000004"
    latest = place.find_latest()
    assert latest == (f"{address}/step_00000004", []) and place.has(latest[0])
    assert place.meta(latest[0])["files"] == {"__0_0.distcp": 4, "__1_0.distcp": 4, ".metadata": 4}
    assert place_of(f"{address}/step_00000004").find_latest() == latest, "one checkpoint by its own address"


def test_a_damaged_one_is_passed_over_by_name(address: str):
    place = InStorage(address)
    first, second, third = (published(place, step) for step in (2, 4, 6))
    Storage(address).delete([f"{place.meta(third)['data']}/__1_0.distcp"])
    Storage(address).write(f"{place.meta(second)['data']}/__1_0.distcp", b"cut")
    latest, damaged = InStorage(address).find_latest()
    assert latest == first
    assert damaged[0].startswith(third) and damaged[0].endswith("__1_0.distcp is missing")
    assert damaged[1].startswith(second) and damaged[1].endswith("has 3 bytes and was written with 4")
    Storage(address).write("step_00000002.json", b'{"history": [')
    assert InStorage(address).find_latest()[0] is None


def test_an_attempt_that_saves_a_step_again_takes_the_place_of_the_one_before(address: str):
    place = InStorage(address)
    before = place.meta(published(place, 4))["data"]
    after = place.meta(published(place, 4))["data"]
    assert before != after
    assert {name.split("/")[0] for name in Storage(address).files()} == {after, "step_00000004.json"}


def test_the_last_and_the_best_are_kept_and_what_kills_left_goes(address: str, faults: Faults):
    place = InStorage(address)
    published(place, 2, loss=0.5)
    saved(place, 3)  # killed before its marker
    for step in (4, 6):
        published(place, step)
    saved(place, 8)  # an attempt that is about to end may be at it
    faults.forbidden = "^DELETE .*distcp"
    with pytest.raises(StorageRefused):
        place.prune(keep_last=1, keep_best=True)
    assert InStorage(address).find_latest()[0] == f"{address}/step_00000006"
    assert "step_00000004.json" not in Storage(address).files(), "the marker goes first"
    faults.forbidden = ""
    place.prune(keep_last=1, keep_best=True)
    kept = {place.meta(f"{address}/step_0000000{step}")["data"] for step in (2, 6)}
    there = {name.split("/")[0] for name in Storage(address).files()}
    assert {name for name in there if not name.startswith("step_00000008.")} == {
        *kept, "step_00000002.json", "step_00000006.json",
    }  # fmt: skip
    assert place.best() == f"{address}/step_00000002"
