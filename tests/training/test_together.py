"""Where one rank works and the others wait, every error of the one ends all, on every rank with the same words."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from torch import nn

from fsdp_lab.config import UserError
from fsdp_lab.training.checkpoint import Checkpoints
from fsdp_lab.training.data import load_data
from fsdp_lab.training.distributed import setup_distributed
from fsdp_lab.workloads.base import DataSpec
from tests.ranks import Memo, config, run_ranks


class Strange(Exception):
    """Cannot be sent: it is made of two arguments, and passes one on."""

    def __init__(self, what: str, where: str) -> None:
        super().__init__(f"{what} at {where}")


ERRORS = [UserError("nothing there"), OSError(5, "Input/output error"), KeyError("size"), MemoryError("of the host"),
          ZeroDivisionError("by zero"), Strange("bent", "the end")]  # fmt: skip


class FailsOnTheFirst(nn.Module):
    """Only the first rank computes values (`init=rank0`)."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        if not self.blocks[1].weight.is_meta:
            raise ZeroDivisionError("of a value")


def fail(folder: str) -> list[str]:
    """What is raised on this rank, in turn where the data are prepared, saved, and given their first values."""
    from fsdp_lab.training.train import train

    ranks, raised, prepared = setup_distributed(), list[str](), list[Exception]()

    def note(do: Any) -> None:
        begun = time.monotonic()
        try:
            do()
        except Exception as error:  # noqa: BLE001 (all are tried)
            raised.append(f"{type(error).__name__}: {error}")
        assert time.monotonic() - begun < 30, "no rank waited for another that had failed"

    def throw(error: Exception) -> None:
        prepared.append(error)
        raise error

    for error in ERRORS:
        data = DataSpec(lambda error=error: throw(error), lambda: throw(AssertionError()), lambda size: None)
        note(lambda data=data: load_data(data, ranks))
        checkpoints = Checkpoints(folder, config("checkpoint.mode=sync"), ranks)
        if ranks.is_first:
            checkpoints.place.begin = lambda step, error=error: throw(error)
        note(lambda each=checkpoints: each._on_first_rank(lambda: each.place.begin(1)))
    assert len(prepared) == (2 * len(ERRORS) if ranks.is_first else 0), "one process works, and nothing goes on"
    own = (f"model._target_={__name__}.FailsOnTheFirst", "task=custom", "task.loss=torch.sum")
    note(lambda: train(config(*own), Path(folder), Memo()))
    return raised


def test_every_kind_of_error_is_raised_on_every_rank(tmp_path: Path) -> None:
    first, second = run_ranks(2, fail, str(tmp_path))
    expected = [f"{type(error).__name__}: {error}" for error in ERRORS for _ in range(2)]
    assert first == [*expected, "ZeroDivisionError: of a value"]
    assert [each.removeprefix("RuntimeError: ") for each in second] == first, "what cannot be sent has its text"
