"""Which files are whole checkpoints, which of them can go, and in which order they are written and removed."""

from __future__ import annotations

import os
import uuid
from pathlib import Path

import pytest

from fsdp_lab.training.checkpoint_place import Place
from tests.training.checkpoints import cut, data_of, names, names_in


def unfinished(folder: Path, step: int) -> Path:
    """Two files of a checkpoint that is not published."""
    folder.mkdir(exist_ok=True)
    making = folder / f"step_{step:08d}.{uuid.uuid4().hex[:12]}"
    making.mkdir()
    for name in ("__0_0.distcp", ".metadata"):
        (making / name).write_bytes(b"content")
    return making


def make(folder: Path, step: int, val_loss: float | None = None) -> Path:
    """A whole checkpoint of two files, as `publish` leaves one."""
    history = [] if val_loss is None else [{"val/loss": val_loss}]
    return Path(Place(str(folder)).publish(str(unfinished(folder, step)), {"history": history}))


def latest(place: Path) -> Path | None:
    found = Place(str(place)).find_latest()[0]
    return Path(found.name) if found else None


def test_what_is_half_written_is_not_taken(tmp_path: Path) -> None:
    good = make(tmp_path, 4)
    half = unfinished(tmp_path, 8)
    (tmp_path / ".step_00000008.json.making").write_text("{")
    (tmp_path / "notes").mkdir()
    assert latest(tmp_path) == latest(good) == latest(data_of(good)) == latest(good.with_suffix(".json")) == good
    assert [checkpoint.name for checkpoint in Place(str(tmp_path)).saved()] == [str(good)]
    assert latest(half) is latest(tmp_path / "absent") is None
    assert Path(Place(str(tmp_path)).begin(8)).parent == tmp_path and not half.exists()
    assert not list(tmp_path.glob(".*"))


def test_a_file_that_goes_while_checkpoints_are_listed_is_missing(tmp_path: Path) -> None:
    """As where a trial replaces a checkpoint while the command looks; a link to nothing has a name and no size."""
    older, newer = make(tmp_path, 4), make(tmp_path, 8)
    file = data_of(newer) / "__0_0.distcp"
    file.unlink()
    file.symlink_to("gone")
    assert latest(tmp_path) == older
    assert next(Place(str(tmp_path)).saved()).damage == "its __0_0.distcp is missing"


def test_each_kind_of_damage_is_seen_and_named(tmp_path: Path) -> None:
    before = make(tmp_path, 4)
    damage = {
        "step_00000008.json cannot be read": lambda marker, _: cut(marker),
        "step_00000008.json cannot be read (it lacks `history`)": lambda marker, _: marker.write_text("{}"),
        "step_00000008.json cannot be read (it lacks `files`)": lambda marker, _: marker.write_text('{"history": 0}'),
        "__0_0.distcp has 3 bytes and was written with 7": lambda marker, data: cut(data / "__0_0.distcp"),
        "__0_0.distcp is missing": lambda marker, data: (data / "__0_0.distcp").unlink(),
        ".metadata has 3 bytes and was written with 7": lambda marker, data: cut(data / ".metadata"),
    }
    for words, harm in damage.items():
        newer = make(tmp_path, 8)
        harm(newer.with_suffix(".json"), data_of(newer))
        found, (wrong,) = Place(str(tmp_path)).find_latest()
        assert found and Path(found.name) == before and latest(newer) is None
        assert wrong.startswith(f"{newer}: ") and words in wrong


def test_a_step_that_is_saved_again_takes_the_place_of_the_one_before(tmp_path: Path) -> None:
    before = data_of(make(tmp_path, 4))
    assert make(tmp_path, 4) == latest(tmp_path) and not before.exists()
    assert names_in(tmp_path) == names(4)


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
def test_what_is_outdated_goes(
    tmp_path: Path, losses: list[float | None], keep_last: int, keep_best: bool, left: list[int]
) -> None:
    for step, loss in enumerate(losses):
        make(tmp_path, step, loss)
    Place(str(tmp_path)).prune(keep_last, keep_best)
    assert names_in(tmp_path) == names(*left)


def test_a_damaged_one_stays_until_a_newer_one_is_whole(tmp_path: Path) -> None:
    made = [make(tmp_path, step) for step in (1, 2, 3)]
    for broken in (made[0], made[2]):
        cut(broken.with_suffix(".json"))
    Place(str(tmp_path)).prune(keep_last=1, keep_best=True)
    assert [marker.stem for marker in sorted(tmp_path.glob("*.json"))] == names(2, 3) and data_of(made[2]).exists()


def test_older_checkpoints_are_removed_when_the_new_one_is_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In this order: the names of the files synced, the marker synced, renamed, and its name; the old marker removed,
    and its data."""
    done = []
    real = {"fsync": os.fsync, "rename": Path.rename, "unlink": Path.unlink, "rmdir": os.rmdir}

    def plain(path: str | Path) -> str:
        name = Path(path).name.removeprefix(".")
        return name if name.endswith(".json") else name.partition(".")[0]

    def fsync(handle: int) -> None:
        done.append(f"sync {plain(os.readlink(f'/proc/self/fd/{handle}'))}")
        real["fsync"](handle)

    def rename(path: Path, target: Path) -> Path:
        done.append(f"rename to {plain(target)}")
        return real["rename"](path, target)

    def unlink(path: Path, missing_ok: bool = False) -> None:
        done.extend([f"remove {plain(path)}"] if path.parent == tmp_path else [])
        real["unlink"](path, missing_ok=missing_ok)

    def rmdir(path: str, **options: object) -> None:
        done.append(f"remove {plain(path)}")
        real["rmdir"](path, **options)

    make(tmp_path, 1)
    making = unfinished(tmp_path, 2)
    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "rmdir", rmdir)
    monkeypatch.setattr(Path, "rename", rename)
    monkeypatch.setattr(Path, "unlink", unlink)
    Place(str(tmp_path)).publish(str(making), {"history": []})
    Place(str(tmp_path)).prune(keep_last=1, keep_best=False)
    assert done == [
        "sync step_00000002",  # the names of the data
        "sync step_00000002",  # the marker before it is renamed
        "rename to step_00000002.json",
        f"sync {tmp_path.name}",
        "remove step_00000001.json",
        "remove step_00000001",
    ]
    assert names_in(tmp_path) == names(2)
