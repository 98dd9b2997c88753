"""Checkpoints as objects: what a kill at any moment leaves, and what is found of it."""

from __future__ import annotations

import pytest

from fsdp_lab.storage.objects import Storage, StorageRefused
from fsdp_lab.training.checkpoint_place import Place
from tests.servers import Faults

pytestmark = pytest.mark.cluster


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


def test_an_attempt_that_saves_a_step_again_takes_the_place_of_the_one_before(address: str):
    place = Place(address)
    before, after = (data_of(address, published(place, 4)) for _ in range(2))
    assert before != after
    assert {name.split("/")[0] for name in Storage(address).files()} == {after, "step_00000004.json"}


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
