"""The stacks that faulthandler writes into a rank's log when a phase or a step takes too long."""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from fsdp_lab.record.failures import RankFailure
from fsdp_lab.record.reasons import Code, Reason
from fsdp_lab.record.trial_files import TrialProgress

_TIMED_OUT = re.compile(r"^Timeout \([\d:.]+\)!$", re.MULTILINE)
_FRAME = re.compile(r'^  File "(.+)", line (\d+) in (.+)$', re.MULTILINE)
_LIBRARY = re.compile(r"/(site-packages|dist-packages|python3\.\d+)/|<frozen")
_COLLECTIVES = "/torch/distributed/"


def read_stacks(log: Path, since: int = 0) -> str:
    """Return the stacks of all threads in a log, beyond so many bytes; "": none."""
    with suppress(OSError):
        written = log.read_bytes()[since:].decode(errors="replace")
        return written[found[-1].end() :] if (found := list(_TIMED_OUT.finditer(written))) else ""
    return ""


def timeout_of(stacks: Mapping[int, str], logs: Path, limit_s: float | None, progress: TrialProgress) -> RankFailure:
    """Return the failure of the first rank that stands outside of a collective, in which others wait for it.

    Args:
        stacks: by rank.
        logs: the folder of the ranks' logs.
        limit_s: `trial_timeout_s`.
    """
    places = {rank: place(text) for rank, text in stacks.items()}
    rank = min(places, key=lambda rank: (_COLLECTIVES in places[rank], rank))
    stuck = {"rank": rank, "place": places[rank], "log": str(logs / f"rank{rank}.log")}
    since = {"phase": progress.phase} if progress.phase else {"step": progress.step}
    return RankFailure(Reason.of(Code.timed_out, rank=rank, limit_s=limit_s, stuck=stuck, **since))


def place(stacks: str) -> str:
    """Return the innermost line, outside of libraries, of the thread that trains; in a collective, the collective's."""
    threads = [_FRAME.findall(thread) for thread in stacks.split("\n\n")]
    frames = next((frames for frames in threads if any(name == "train_rank" for *_, name in frames)), [])
    in_collective = bool(frames) and _COLLECTIVES in frames[0][0]
    own = (frame for frame in frames if in_collective or not _LIBRARY.search(frame[0]))
    return next((f"{file}:{line} in {name}" for file, line, name in own), "an unknown place")
