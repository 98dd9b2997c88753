"""A training that is killed inside a save goes on from its last whole checkpoint, and leaves no litter."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fsdp_lab.training.checkpoint_place import Place
from tests import forked
from tests.conftest import ROOT
from tests.ranks import Memo, config, run_ranks, selected
from tests.training.checkpoints import SMALL, SYNC, Job, Reported, names, names_in, train_in

# Where it was killed -> the step of the checkpoint that the next start has to find.
KILLED = {"written": 2, "async": 2, "published": 4, "pruning": 6}
FOUR = ("training.epochs=4", "checkpoint.keep_best=false")


def hang_at_second_call(
    reached: Path,
    owner: Any,
    name: str,
    first: Callable[..., Any] = lambda *a, **k: None,
    counts: Callable[..., bool] = lambda *a: True,
) -> None:
    """Stop for ever in the second call that counts, and say so by a file."""
    real, calls = getattr(owner, name), []

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        calls.extend([1] if counts(*args) else [])
        if len(calls) < 2 or not counts(*args):
            return real(*args, **kwargs)
        first(real, args, kwargs)
        reached.touch()
        time.sleep(600)

    setattr(owner, name, wrapper)


def train_and_hang(where: str, folder: Path) -> None:
    """A real training that stops for ever inside its second save, where the test kills it."""
    import fsdp_lab.training.checkpoint as module
    import fsdp_lab.training.checkpoint_place as place
    from fsdp_lab.training.train import train

    def write(real: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return real(*args, **kwargs)

    torch.set_num_threads(1)
    reached = folder / "reached"
    if where == "written":
        hang_at_second_call(reached, module.dcp, "save", write)
    if where == "async":
        hang_at_second_call(reached, module.dcp, "async_save", lambda *call: write(*call).result())
    if where == "published":
        hang_at_second_call(reached, place.Place, "prune")
    if where == "pruning":
        hang_at_second_call(reached, place.shutil, "rmtree")
    mode = "async" if where == "async" else "sync"
    train(config(*SMALL, *FOUR, f"checkpoint.mode={mode}"), folder, Memo())


def kill(where: str, folder: Path) -> None:
    """Train, and kill the process where it hangs."""
    folder.mkdir()
    reached, ended = folder / "reached", folder / "ended"
    with forked.Commands() as commands:
        words = ("tests.training.test_checkpoint_kill", where, str(folder))
        done = commands.run_and_kill(ROOT, words, lambda: reached.exists() or ended.exists())
    assert done.code == -signal.SIGKILL and not ended.exists(), f"{where}: it ended before its second save\n{done.err}"
    reached.unlink()


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> dict[str, Reported]:
    """Each selected kill, and what the next start told; `whole` was not killed."""
    folder = tmp_path_factory.mktemp("killed")
    jobs: dict[str, Job] = {}
    for where in selected(request, "where"):
        kill(where, folder / where)
        found = Place(f"{folder / where}/checkpoints").find_latest()[0]
        assert found is not None and found.step == KILLED[where], where
        jobs[where] = Job(str(folder / where), [SYNC, *FOUR])
    jobs["whole"] = Job(str(folder / "whole"), FOUR)
    results = dict(zip(jobs, run_ranks(1, train_in, list(jobs.values()))[0], strict=True))
    for where in selected(request, "where"):
        results[where].facts["left"] = names_in(folder / where / "checkpoints")
    return results


@pytest.mark.parametrize(
    "where", ["written", *(pytest.param(where, marks=pytest.mark.ci) for where in KILLED if where != "written")]
)
def test_killed_while_saving(killed: dict[str, Reported], where: str) -> None:
    """A real SIGKILL inside a save: the next start goes on from the last whole checkpoint and leaves no litter."""
    assert not killed[where].error
    assert killed[where].losses == killed["whole"].losses[KILLED[where] :]
    assert killed[where].facts["left"] == names(8)


if __name__ == "__main__":
    try:
        train_and_hang(sys.argv[1], Path(sys.argv[2]))
    finally:
        Path(sys.argv[2], "ended").touch()
