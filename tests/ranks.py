"""Run a function on gloo ranks, each in its own process, and collect what each returns."""

from __future__ import annotations

import os
import pickle
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from fsdp_lab.config import NightlyConfig, UserError
from fsdp_lab.config.without_hydra import read_config
from tests import forked

_LIMIT_S = 3600  # ends ranks that hang; a test has a limit of its own


def run_ranks(world_size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """Call `function(*args)` on `world_size` ranks, with torchrun's ranks in the environment; results in rank order.

    Raises:
        AssertionError: a rank failed; with what it printed.
    """
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "call").write_bytes(pickle.dumps((function, args)))
        jobs = [(Path.cwd(), ("tests.ranks", folder, str(rank), str(world_size))) for rank in range(world_size)]
        for rank, done in forked.run_all(jobs, seconds=_LIMIT_S, together=True):
            if done.returncode:
                raise AssertionError(f"rank {rank} ended with {done.returncode}\n{done.stdout}{done.stderr}")
            print(done.stdout, done.stderr, sep="", end="")
        return [pickle.loads(Path(folder, str(rank)).read_bytes()) for rank in range(world_size)]


def _be_rank(folder: str, rank: int, world_size: int) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    function, args = pickle.loads(Path(folder, "call").read_bytes())
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",  # not a port: another process may take one that was free a moment ago
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=60),  # a rank that fails must not hang the others
    )
    result = function(*args)
    Path(folder, f"{rank}.new").write_bytes(pickle.dumps(result))
    Path(folder, f"{rank}.new").rename(Path(folder, str(rank)))
    while not all(Path(folder, str(other)).exists() for other in range(world_size)):
        time.sleep(0.01)  # no rank hangs up while another still talks
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # torch's threads outlive the interpreter now and then, and abort a process that is done


class Memo:
    """A reporter that remembers."""

    def __init__(self) -> None:
        self.reported: list[dict[str, float]] = []
        self.known: dict[str, Any] = {}

    def facts(self, facts: dict[str, Any]) -> None:
        self.known = facts

    def phase(self, name: str) -> None:
        pass

    def step(self, step: int) -> None:
        pass

    def epoch(self, metrics: dict[str, float]) -> None:
        self.reported.append(dict(metrics))


SMALL = ("data.num_train=128", "data.num_val=30", "training.global_batch_size=32", "training.epochs=1",
         "checkpoint.mode=off", "export=false", "memory_profile=off")  # fmt: skip


def config(*overrides: str) -> NightlyConfig:
    """A small trial: four steps of 32 digits in its epoch."""
    return read_config(None, [*SMALL, *overrides])


def parallel_of(trial: NightlyConfig, model: Any = None, **dims: Any) -> Any:
    """How a trial trains, without a mesh; with the model that it trains."""
    import torch

    from fsdp_lab.training.distributed import ParallelDims
    from fsdp_lab.training.parallel import way_of

    parallel = way_of(trial)(trial, ParallelDims(**{"tp": trial.sharding.tp, **dims}), torch.device("cpu"))
    parallel.model = model
    return parallel


Trained = tuple[list[float], list[dict[str, float]]]  # the loss of every step, the metrics of every epoch


def train_all(cases: list[list[str]], folder: str = "") -> list[Trained]:
    """Train each case."""
    from fsdp_lab.training.train import train

    results = []
    for overrides in cases:
        losses, memo = list[float](), Memo()
        with tempfile.TemporaryDirectory() as own:
            train(config(*overrides), Path(folder or own), memo, losses.extend)
        results.append((losses, memo.reported))
    return results


def outcomes(cases: list[list[str]]) -> list[list[float] | str]:
    """The losses of each case, or the message that refuses it."""
    results: list[list[float] | str] = []
    for case in cases:
        try:
            results.append(train_all([case])[0][0])
        except UserError as error:
            results.append(str(error))
    return results


def train_leaving(pattern: str, cases: list[list[str]]) -> list[tuple[list[float], Any, dict[str, bytes]]]:
    """As `train_all`, and for each the files of these names that this rank left in the trial's folder."""
    results = []
    for overrides in cases:
        with tempfile.TemporaryDirectory() as folder:
            ((losses, reported),) = train_all([overrides], folder)
            files = {path.name: path.read_bytes() for path in Path(folder).glob(pattern)}
        results.append((losses, reported, files))
    return results


def selected(request: pytest.FixtureRequest, argument: str) -> list[Any]:
    """Return the values of a parametrised argument with which tests of this file run: a fixture trains no others."""
    own = [item for item in request.session.items if item.path == request.path]
    cases = [item.callspec.params for item in own if isinstance(item, pytest.Function) and hasattr(item, "callspec")]
    return list(dict.fromkeys(case[argument] for case in cases if argument in case))


if __name__ == "__main__":
    from tests.ranks import _be_rank as be_rank  # functions that were pickled name this module tests.ranks

    be_rank(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
