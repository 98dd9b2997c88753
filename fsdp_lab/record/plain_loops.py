"""`plain_loops.json` of a sweep: what plain loops of the user's own code computed, before its first trial."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from fsdp_lab.config import UserError, from_dict
from fsdp_lab.storage.files import read_object, write_json

_FILE = "plain_loops.json"
_REMEDY = "restore it from a copy, or remove it: settings are then compared among themselves"


@dataclass(frozen=True)
class PlainLoop:
    """A plain loop with the values of one trial.

    Attributes:
        trial: the number of that trial.
        dp_degree: the number of parts of a microbatch.
        figures: metric key -> value; empty without an answer.
        noise: how far each figure is off if gradients are rounded differently.
        eps: the relative rounding of the narrowest of the model's own parameters.
        draws: its forward pass drew random numbers, so only the loss in `eval()` mode can be compared.
        steps: the number of its steps.
        device: `cpu`, or the name of the GPU.
        seconds: that it took.
        missing: why there are no figures; "": there are.
        kept: its figures come from an earlier sweep.
        found: with `check.keys`, the metrics of a trial of the same small model; empty: the sweep's own trials are
            compared.
    """

    trial: int
    dp_degree: int
    figures: dict[str, float] = field(default_factory=dict)
    noise: dict[str, float] = field(default_factory=dict)
    draws: bool = False
    eps: float = 0.0
    steps: int = 0
    device: str = ""
    seconds: float = 0.0
    missing: str = ""
    kept: bool = False
    found: dict[str, float] = field(default_factory=dict)


def write_plain_loops(folder: Path, loops: Sequence[PlainLoop]) -> None:
    """Write the plain loops into the folder of a sweep. Raises OSError if it was removed or the disk is full."""
    write_json(folder / _FILE, {"loops": [asdict(loop) for loop in loops]}, parents=False)


def read_plain_loops(folder: Path) -> list[PlainLoop]:
    """Return the plain loops in the folder of a sweep; none without the file.

    Raises:
        UserError: the file cannot be read.
    """
    path = folder / _FILE
    content = read_object(path, _REMEDY, loops=list[dict[str, Any]])
    try:
        return [from_dict(PlainLoop, loop) for loop in (content or {"loops": []})["loops"]]
    except (ValueError, TypeError, AttributeError) as error:
        raise UserError(f"{path} cannot be read ({error}); {_REMEDY}.") from None
