"""The stacks of ranks that make no progress: each dumps its own into its log, and the driver finds the stuck one."""

from __future__ import annotations

import faulthandler
import re
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_LONG_S = 60.0  # a phase or a step beyond it is unusually long
_LOOK_S = 1.0  # between two looks at the clock
_TAIL_BYTES = 2**20
HEAD = "Timeout ("  # of a dump
_FRAME = re.compile(r'^  File "(.+)", line (\d+) in (.+)$', re.MULTILINE)
_TRAINS = "in train_rank"  # a frame of the thread that trains
_LIBRARY = re.compile(r"/(site-packages|dist-packages|python3\.\d+)/|<frozen")


def long_s(timeout_s: float | None) -> float:
    """Return the seconds beyond which a phase or a step is unusually long.

    Args:
        timeout_s: `trial_timeout_s`. The stacks are dumped before it ends the trial.
    """
    return _LONG_S if timeout_s is None else min(_LONG_S, timeout_s / 2)


class StackDump:
    """Dumps the stacks of this process to standard error, its log, when a phase or a step lasts too long.

    A thread does it that holds the GIL. faulthandler's own timer does not, and may crash a process whose threads run.
    """

    def __init__(self, after_s: float) -> None:
        self._after_s, self._begun = after_s, float("inf")
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def begin(self) -> None:
        """Restart the count, because a phase or a step begins."""
        self._begun = time.monotonic()
        if self._thread is None:
            self._thread = threading.Thread(target=self._watch, name="stacks", daemon=True)
            self._thread.start()

    def end(self) -> None:
        """Dump no more."""
        self._over.set()

    def _watch(self) -> None:
        dumped = 0.0  # the phase or the step of which there is a dump, by its begin
        while not self._over.wait(min(_LOOK_S, self._after_s / 2)):
            begun = self._begun
            if begun != dumped and time.monotonic() - begun > self._after_s:
                dumped = begun
                print(f"{HEAD}{self._after_s:g} s)!", file=sys.stderr, flush=True)
                faulthandler.dump_traceback(all_threads=True)


@dataclass(frozen=True)
class Stuck:
    """Where a rank stood when its stack was dumped. `place`: `net.py:31 in init_weights`."""

    rank: int
    place: str
    log: Path

    def to_dict(self) -> dict[str, Any]:
        """Return plain values."""
        return {"rank": self.rank, "place": self.place, "log": str(self.log)}


def find_stuck(folder: Path) -> Stuck | None:
    """Return the first rank of a trial whose last dump shows it outside of a collective, while others wait for it.

    The first rank if all wait; None if no rank has dumped its stack.
    """
    candidates: list[tuple[bool, Stuck]] = []
    for log in sorted((folder / "logs").glob("rank*.log"), key=_rank):
        frames = last_stack(log)
        if frames:
            own = next((frame for frame in frames if not _LIBRARY.search(frame[0])), frames[0])
            place = f"{own[0]}:{own[1]} in {own[2]}"
            candidates.append(("/torch/distributed/" in frames[0][0], Stuck(_rank(log), place, log)))
    return min(candidates, key=lambda pair: pair[0])[1] if candidates else None


def last_stack(log: Path) -> list[tuple[str, str, str]]:
    """Return the frames of the training thread in a log's last dump, the innermost first: file, line, function."""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - _TAIL_BYTES))
        text = file.read().decode(errors="replace")
    _, head, dump = text.rpartition(HEAD)
    threads = re.split(r"^(?:Current t|T)hread 0x", dump, flags=re.MULTILINE) if head else []
    return next((_FRAME.findall(thread) for thread in threads if _TRAINS in thread), [])


def _rank(log: Path) -> int:
    return int(log.stem.removeprefix("rank"))
