"""Which files are whole checkpoints, in which order they are written and removed, and a kill inside a save."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed.checkpoint as dcp

from fsdp_lab.training.checkpoint_place import Place
from tests import forked
from tests.conftest import ROOT
from tests.ranks import Memo, config, run_ranks
from tests.training.checkpoints import SMALL, SYNC, Job, cut, names, names_in, train_in


def unfinished(folder: Path, step: int) -> Path:
    """Two files of a checkpoint that is not published."""
    making = Path(Place(str(folder)).begin(step))
    making.mkdir()
    for name in ("__0_0.distcp", ".metadata"):
        (making / name).write_bytes(b"content")
    return making


def make(folder: Path, step: int) -> tuple[Path, Path]:
    """A whole checkpoint, as `publish` leaves one: its marker, and the folder of its two files."""
    data = unfinished(folder, step)
    return Path(Place(str(folder)).publish(str(data), {"history": []}) + ".json"), data


def latest(place: Path) -> int | None:
    """The step of the checkpoint that a start finds there."""
    found = Place(str(place)).find_latest()[0]
    return found.step if found else None


@pytest.mark.parametrize(
    ("file", "harm", "words"),
    [
        ("", cut, "step_00000008.json cannot be read"),
        ("", lambda marker: marker.write_text("{}"), "step_00000008.json cannot be read (it lacks `history`)"),
        ("__0_0.distcp", cut, "__0_0.distcp has 3 bytes and was written with 7"),
        ("__0_0.distcp", Path.unlink, "__0_0.distcp is missing"),
    ],
)
def test_each_kind_of_damage_is_named(tmp_path: Path, file: str, harm: Callable[[Path], object], words: str) -> None:
    make(tmp_path, 4)
    marker, data = make(tmp_path, 8)
    assert [latest(place) for place in (tmp_path, marker, data, marker.with_suffix(""))] == [8] * 4
    harm(data / file if file else marker)
    assert latest(tmp_path) == 4 and latest(marker) is None
    (wrong,) = Place(str(tmp_path)).find_latest()[1]
    assert wrong.startswith(f"{tmp_path}/step_00000008: ") and words in wrong


def test_a_damaged_one_stays_until_a_newer_one_is_whole(tmp_path: Path) -> None:
    (first, _), _, (third, data) = [make(tmp_path, step) for step in (1, 2, 3)]
    cut(first)
    cut(third)
    Place(str(tmp_path)).prune(keep_last=1, keep_best=True)
    assert sorted(marker.stem for marker in tmp_path.glob("*.json")) == names(2, 3) and data.exists()


def test_of_equals_the_first_is_the_best_and_a_replaced_one_leaves_nothing(tmp_path: Path) -> None:
    """Two steps without a loss, the second of which is saved again."""
    _, (_, replaced), (_, data) = [make(tmp_path, step) for step in (4, 8, 8)]
    place = Place(str(tmp_path))
    assert place.best().step == 4 and not replaced.exists() and data.exists()
    make(tmp_path, 9)
    place.prune(keep_last=1, keep_best=True)
    assert names_in(tmp_path) == names(4, 9)


def test_what_a_kill_left_goes_when_the_next_is_begun(tmp_path: Path) -> None:
    """Also of a later step, as the next start goes on from one before."""
    unfinished(tmp_path, 8)
    (tmp_path / ".step_00000008.json.1.2.making").touch()
    Place(str(tmp_path)).begin(6)
    assert list(tmp_path.iterdir()) == []


def test_older_checkpoints_go_when_the_new_one_is_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In an order in which a power cut at any time leaves one whole checkpoint."""
    done: list[str] = []

    def note(owner: Any, call: str) -> None:
        real = getattr(owner, call)

        def noted(what: Any, *target: Any, **options: Any) -> Any:
            path = Path(os.readlink(f"/proc/self/fd/{what}") if call == "fsync" else what)
            if path == tmp_path:
                done.append(f"{call} folder")
            elif path.parent == tmp_path:
                done.append(f"{call} {'marker' if '.json' in path.name else 'data'} {path.name.lstrip('.')[12]}")
            return real(what, *target, **options)

        monkeypatch.setattr(owner, call, noted)

    make(tmp_path, 1)
    making = unfinished(tmp_path, 2)
    for owner, call in ((os, "fsync"), (Path, "rename"), (Path, "unlink"), (os, "rmdir")):
        note(owner, call)
    Place(str(tmp_path)).publish(str(making), {"history": []})
    Place(str(tmp_path)).prune(keep_last=1, keep_best=False)
    written = ["fsync data 2", "fsync marker 2", "rename marker 2", "fsync folder"]
    assert done == [*written, "unlink marker 1", "rmdir data 1"]


FOUR = ("training.epochs=4", "checkpoint.keep_best=false")


def train_until_killed(where: str, folder: str) -> None:
    """Train, and kill this process after DCP's second save, or before the second removal of a checkpoint's files."""
    from fsdp_lab.training.train import train

    owner, name = {"written": (dcp, "save"), "pruning": (shutil, "rmtree")}[where]
    real, calls = getattr(owner, name), []

    def second_is_the_last(*args: Any, **options: Any) -> None:
        calls.append(args)
        if len(calls) == 1 or where == "written":
            real(*args, **options)
        if len(calls) == 2:
            os.kill(os.getpid(), signal.SIGKILL)

    setattr(owner, name, second_is_the_last)
    train(config("training.epochs=3", *SMALL, *FOUR, SYNC), Path(folder), Memo())


@pytest.mark.parametrize(("where", "whole"), [("written", 2), pytest.param("pruning", 6, marks=pytest.mark.ci)])
def test_killed_while_saving(where: str, whole: int, tmp_path: Path) -> None:
    """The next start goes on from the last whole checkpoint, of step `whole`, and leaves no litter."""
    killed, undisturbed = tmp_path / "killed", tmp_path / "undisturbed"
    killed.mkdir()
    done = forked.run(ROOT, __name__, where, str(killed))
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert latest(killed / "checkpoints") == whole
    jobs = [Job(str(killed), [SYNC, *FOUR]), Job(str(undisturbed), FOUR)]
    resumed, expected = run_ranks(1, train_in, jobs)[0]
    assert not resumed.error and resumed.losses == expected.losses[whole:]
    assert names_in(killed / "checkpoints") == names(8)


if __name__ == "__main__":
    train_until_killed(*sys.argv[1:])
