"""The stacks of ranks that make no progress: the trial's own process asks each rank, and finds the stuck one."""

from __future__ import annotations

import faulthandler
import re
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_LONG_S = 60.0  # a phase or a step beyond it is unusually long
_FRAME = re.compile(r'^  File "(.+)", line (\d+) in (.+)$', re.MULTILINE)
_LIBRARY = re.compile(r"/(site-packages|dist-packages|python3\.\d+)/|<frozen")

Frame = tuple[str, str, str]  # file, line, function


def long_s(timeout_s: float | None) -> float:
    """Return the seconds beyond which a phase or a step is unusually long.

    Args:
        timeout_s: `trial_timeout_s`. The stacks are dumped before it ends the trial.
    """
    return _LONG_S if timeout_s is None else min(_LONG_S, timeout_s / 2)


def dump_stacks() -> list[Frame]:
    """Write the stacks of this process into its log, and return that of the thread that trains, the innermost first."""
    with tempfile.TemporaryFile("w+") as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        dump = file.read()
    print(dump, file=sys.stderr, flush=True)
    threads = re.split(r"^(?:Current t|T)hread 0x", dump, flags=re.MULTILINE)
    return next((_FRAME.findall(thread) for thread in threads if "in train_rank" in thread), [])


@dataclass(frozen=True)
class Stuck:
    """Where a rank stood when its stack was dumped. `place`: `net.py:31 in init_weights`."""

    rank: int
    place: str
    log: Path

    def to_dict(self) -> dict[str, Any]:
        """Return plain values."""
        return {"rank": self.rank, "place": self.place, "log": str(self.log)}


def find_stuck(folder: Path, stacks: Mapping[int, list[Frame]]) -> Stuck | None:
    """Return the first rank that stands outside of a collective, while others wait for it.

    Args:
        folder: the trial's.
        stacks: of the ranks that answer. The first rank if all wait; None for no stack.
    """
    waits = {rank: "/torch/distributed/" in frames[0][0] for rank, frames in sorted(stacks.items()) if frames}
    if not waits:
        return None
    rank = min(waits, key=lambda rank: waits[rank])
    frames = stacks[rank]
    file, line, function = next((frame for frame in frames if not _LIBRARY.search(frame[0])), frames[0])
    return Stuck(rank, f"{file}:{line} in {function}", folder / "logs" / f"rank{rank}.log")
