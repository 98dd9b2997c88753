"""Which files are whole checkpoints, in which order they are written and removed, and a kill inside a save."""

from __future__ import annotations

import os
import signal
import sys
import time
import uuid
from pathlib import Path
from typing import Any

import pytest
import torch

from fsdp_lab.training.checkpoint_place import Place
from tests import forked
from tests.conftest import ROOT
from tests.ranks import Memo, config, run_ranks, selected
from tests.training.checkpoints import SMALL, SYNC, Job, Reported, cut, data_of, names, names_in, train_in


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


# A real SIGKILL inside the second save. Where -> the step of the checkpoint that the next start has to find.
KILLED = {"written": 2, "pruning": 6}
FOUR = ("training.epochs=4", "checkpoint.keep_best=false")


def hang_at_second_call(reached: Path, owner: Any, name: str, does_it: bool) -> None:
    """Stop for ever in the second call, before or after it does what it does, and say so by a file."""
    real, calls = getattr(owner, name), []

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if len(calls) < 2:
            return real(*args, **kwargs)
        if does_it:
            real(*args, **kwargs)
        reached.touch()
        time.sleep(600)

    setattr(owner, name, wrapper)


def train_and_hang(where: str, folder: Path) -> None:
    """A real training that stops for ever inside its second save, where the test kills it."""
    import fsdp_lab.training.checkpoint as module
    import fsdp_lab.training.checkpoint_place as place
    from fsdp_lab.training.train import train

    torch.set_num_threads(1)
    owner, name = {"written": (module.dcp, "save"), "pruning": (place.shutil, "rmtree")}[where]
    hang_at_second_call(folder / "reached", owner, name, does_it=where == "written")
    train(config(*SMALL, *FOUR, SYNC), folder, Memo())


def kill(where: str, folder: Path) -> None:
    """Train, and kill the process where it hangs."""
    folder.mkdir()
    reached, ended = folder / "reached", folder / "ended"
    words = (__name__, where, str(folder))
    done = forked.run_and_kill(ROOT, words, lambda: reached.exists() or ended.exists())
    assert done.code == -signal.SIGKILL and not ended.exists(), f"{where}: it ended before its second save\n{done.err}"
    reached.unlink()


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> dict[str, Reported]:
    """Each selected kill, and what the next start told; `whole` was not killed."""
    folder = tmp_path_factory.mktemp("killed")
    jobs = {"whole": Job(str(folder / "whole"), FOUR)}
    for where in selected(request, "where"):
        kill(where, folder / where)
        found = Place(f"{folder / where}/checkpoints").find_latest()[0]
        assert found is not None and found.step == KILLED[where], where
        jobs[where] = Job(str(folder / where), [SYNC, *FOUR])
    results = dict(zip(jobs, run_ranks(1, train_in, list(jobs.values()))[0], strict=True))
    for where in selected(request, "where"):
        results[where].facts["left"] = names_in(folder / where / "checkpoints")
    return results


@pytest.mark.parametrize("where", ["written", pytest.param("pruning", marks=pytest.mark.ci)])
def test_killed_while_saving(killed: dict[str, Reported], where: str) -> None:
    """The next start goes on from the last whole checkpoint and leaves no litter."""
    assert not killed[where].error
    assert killed[where].losses == killed["whole"].losses[KILLED[where] :]
    assert killed[where].facts["left"] == names(8)


if __name__ == "__main__":
    try:
        train_and_hang(sys.argv[1], Path(sys.argv[2]))
    finally:
        Path(sys.argv[2], "ended").touch()
