"""Which folders are whole checkpoints, which of them can go, and in which order they are written and removed."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from fsdp_lab.training.checkpoint_place import OnDisk
from tests.training.checkpoints import cut, names, names_in


def make(folder: Path, step: int, val_loss: float | None = None) -> Path:
    """A whole checkpoint of two files, as `publish` leaves one."""
    making, checkpoint = folder / f".step_{step:08d}.making", folder / names(step)[0]
    making.mkdir(parents=True)
    for name in ("__0_0.distcp", ".metadata"):
        (making / name).write_bytes(b"content")
    OnDisk(folder).publish(making, step, {"history": [] if val_loss is None else [{"val/loss": val_loss}]})
    return checkpoint


def latest(folder: Path) -> Any:
    return OnDisk(folder).find_latest()[0]


def test_what_is_half_written_is_not_taken(tmp_path: Path) -> None:
    good = make(tmp_path, 4)
    make(tmp_path, 8).rename(tmp_path / ".step_00000008.making")
    make(tmp_path, 12).rename(tmp_path / ".step_00000012.trash")
    (tmp_path / "step_00000016").mkdir()
    (tmp_path / "notes").mkdir()
    assert latest(tmp_path) == latest(good) == good
    assert OnDisk(tmp_path).whole() == [good] and latest(tmp_path / ".step_00000008.making") is None
    assert latest(tmp_path / "step_00000016") is None
    assert latest(tmp_path / "absent") is None


def test_each_kind_of_damage_is_seen_and_named(tmp_path: Path) -> None:
    before = make(tmp_path, 4)
    damage = {
        "meta.json cannot be read": lambda folder: cut(folder / "meta.json"),
        "meta.json cannot be read (it lacks `history`)": lambda folder: (folder / "meta.json").write_text("{}"),
        "it has no meta.json": lambda folder: (folder / "meta.json").unlink(),
        "__0_0.distcp has 3 bytes and was written with 7": lambda folder: cut(folder / "__0_0.distcp"),
        "__0_0.distcp is missing": lambda folder: (folder / "__0_0.distcp").unlink(),
        ".metadata has 3 bytes and was written with 7": lambda folder: cut(folder / ".metadata"),
    }
    for words, harm in damage.items():
        newer = make(tmp_path, 8)
        harm(newer)
        found, (wrong,) = OnDisk(tmp_path).find_latest()
        assert found == before and latest(newer) is None
        assert wrong.startswith(f"{newer}: ") and words in wrong
        OnDisk(tmp_path).remove([newer])


def test_a_checkpoint_whose_files_are_not_named_is_damaged(tmp_path: Path) -> None:
    checkpoint = make(tmp_path, 4)
    meta = json.loads((checkpoint / "meta.json").read_text())
    assert meta.pop("files") == {"__0_0.distcp": 7, ".metadata": 7}
    (checkpoint / "meta.json").write_text(json.dumps(meta))
    assert latest(tmp_path) is None


@pytest.mark.parametrize(
    ("losses", "keep_last", "keep_best", "left"),
    [
        ([3, 2, 1], 1, True, [2]),
        ([1, 2, 3], 1, True, [0, 2]),
        ([1, 2, 3], 1, False, [2]),
        ([2, 1, 3, 4], 2, True, [1, 2, 3]),
        ([1, 2, 3, 4, 5], 3, False, [2, 3, 4]),
        ([1, 2], 5, True, [0, 1]),
        ([None, 2, 3], 1, True, [1, 2]),
        ([], 1, True, []),
    ],
)
def test_outdated(tmp_path: Path, losses: list[float | None], keep_last: int, keep_best: bool, left: list[int]) -> None:
    made = [make(tmp_path, i, loss) for i, loss in enumerate(losses)]
    gone = OnDisk(tmp_path).outdated(keep_last, keep_best)
    assert [i for i, f in enumerate(made) if f not in gone] == left


def test_a_damaged_one_stays_until_a_newer_one_is_whole(tmp_path: Path) -> None:
    made = [make(tmp_path, step) for step in (1, 2, 3)]
    for broken in (made[0], made[2]):
        cut(broken / "meta.json")
    assert OnDisk(tmp_path).outdated(keep_last=1, keep_best=True) == [made[0]]
    assert OnDisk(tmp_path / "none").outdated(keep_last=1, keep_best=True) == []


def test_older_checkpoints_are_removed_when_the_new_one_is_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In this order: the names in the new folder synced, the folder renamed, its name synced, the old one removed."""
    done = []
    real = {"fsync": os.fsync, "rename": Path.rename}

    def fsync(handle: int) -> None:
        done.append(f"sync {Path(os.readlink(f'/proc/self/fd/{handle}')).name}")
        real["fsync"](handle)

    def rename(path: Path, target: Path) -> Path:
        done.append(f"rename {path.name}")
        return real["rename"](path, target)

    make(tmp_path, 1)
    making = tmp_path / ".step_00000002.making"
    making.mkdir()
    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(Path, "rename", rename)
    OnDisk(tmp_path).publish(making, 2, {"history": []})
    OnDisk(tmp_path).prune(keep_last=1, keep_best=False)
    assert done == [
        "sync meta.json",
        "sync .step_00000002.making",
        "rename .step_00000002.making",
        f"sync {tmp_path.name}",
        "rename step_00000001",
    ]
    assert names_in(tmp_path) == names(2)
