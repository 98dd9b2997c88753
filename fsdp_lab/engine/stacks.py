"""The stacks of ranks that make no progress: the trial's own process asks each rank, and finds the stuck one."""

from __future__ import annotations

import faulthandler
import re
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_LONG_S = 60.0  # a phase or a step beyond it is unusually long
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
    faulthandler.dump_traceback(all_threads=True)
    # without `extract_stack`, which reads the source: its disk may be what the rank waits for
    stacks = (
        [(frame.f_code.co_filename, str(line), frame.f_code.co_name) for frame, line in traceback.walk_stack(top)]
        for top in sys._current_frames().values()
    )
    return next((stack for stack in stacks if any(name == "train_rank" for _, _, name in stack)), [])


def find_stuck(folder: Path, stacks: Mapping[int, list[Frame]]) -> dict[str, Any] | None:
    """Return the first rank that stands outside of a collective, while others wait for it.

    Returns:
        Its `rank`, `place` ("net.py:31 in init_weights") and `log`. The first rank if all wait; None for no stack.
    """
    waits = {rank: "/torch/distributed/" in frames[0][0] for rank, frames in sorted(stacks.items()) if frames}
    if not waits:
        return None
    rank = min(waits, key=lambda rank: waits[rank])
    frames = stacks[rank]
    file, line, function = next((frame for frame in frames if not _LIBRARY.search(frame[0])), frames[0])
    return {"rank": rank, "place": f"{file}:{line} in {function}", "log": str(folder / "logs" / f"rank{rank}.log")}
