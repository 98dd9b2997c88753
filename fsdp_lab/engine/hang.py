"""The stacks that faulthandler writes into a rank's file when a phase or a step takes too long."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fsdp_lab.record.reasons import Code, Reason
from fsdp_lab.record.trial_json import RankFailure

_FRAME = re.compile(r'^  File "(.+)", line (\d+) in (.+)$', re.MULTILINE)
_LIBRARY = re.compile(r"/(site-packages|dist-packages|python3\.\d+)/|<frozen")
_COLLECTIVES, _LOADER = "/torch/distributed/", "/torch/utils/data/dataloader.py"


def stacks_file(folder: Path, rank: int) -> Path:
    """Return the file in a trial's folder for the stacks of a hung rank; it is empty or missing for any other rank."""
    return folder / "logs" / f"stuck.rank{rank}.txt"


def timeout_of(folder: Path, limit_s: float, progress: Mapping[str, Any], num_ranks: int) -> RankFailure | None:
    """Return the failure of the first rank that hangs outside of a collective, while others wait in one.

    A rank whose process is suspended writes no stacks.

    Args:
        folder: the trial's.
        limit_s: `trial_timeout_s`.
        progress: see `read_progress`.
        num_ranks: 0: not known.
    """
    files = {int(file.stem.removeprefix("stuck.rank")): file for file in (folder / "logs").glob("stuck.rank*.txt")}
    places = {rank: place(text) for rank, file in files.items() if (text := file.read_text(errors="replace"))}
    if not places:
        return None
    rank = min(places, key=lambda rank: (_COLLECTIVES in places[rank], rank))
    stuck = {"rank": rank, "place": places[rank], "log": str(files[rank])}
    silent = [other for other in range(num_ranks) if other not in places]
    if silent and _COLLECTIVES in places[rank]:
        rank, stuck = silent[0], {"rank": silent[0]}
    since = {key: progress[key] for key in ("phase", "step") if key in progress}
    reason = Reason.of(Code.timed_out, rank=rank, limit_s=limit_s, stuck=stuck, **since)
    # earlier than any error that this rank's end caused in others
    return RankFailure(reason, time=progress.get("time", 0.0))


def place(stacks: str) -> str:
    """Return the innermost line of the training thread outside of libraries, or that of a collective or a loader.

    faulthandler writes at most a hundred lines per thread. If it cut the start of the training thread, the deepest
    thread counts.
    """
    threads = [_FRAME.findall(thread) for thread in stacks.split("\n\n")]
    trains = (frames for frames in threads if any(name == "train_rank" for *_, name in frames))
    frames = next(trains, max(threads, key=len))
    in_collective = bool(frames) and _COLLECTIVES in frames[0][0]
    shown = [f for f in frames if in_collective or _LOADER in f[0] or not _LIBRARY.search(f[0])] or frames
    return next((f"{file}:{line} in {name}" for file, line, name in shown), "an unknown place")
