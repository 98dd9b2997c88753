"""Failures of a trial's ranks: `failures/rank<r>.json` in its folder, one a rank."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path

from fsdp_lab.record.reasons import Code, Reason
from fsdp_lab.storage.files import RESTORE, read_object, write_json


class RankFailure(Exception):
    """An error of a rank, as plain values: it crosses process boundaries, where the error's own class may be unknown.

    Attributes:
        reason: with the `rank`.
        traceback: of the error; "": none, or the reason says it all.
        time: when it failed, in seconds since 1970 by its node's clock; by default now.
    """

    def __init__(self, reason: Reason, traceback: str = "", at: float | None = None) -> None:
        self.reason, self.traceback = reason, traceback
        self.time = time.time() if at is None else at
        super().__init__(reason, traceback, self.time)  # by which pickle makes it again

    def __str__(self) -> str:
        return str(self.reason)

    @property
    def rank(self) -> int:
        rank: int = self.reason.values["rank"]
        return rank


def record_failure(folder: Path, failure: RankFailure) -> None:
    """Write `failures/rank<r>.json`; does nothing if the folder cannot be written."""
    with suppress(OSError):  # the outcome cannot be written either, and the driver logs why
        (folder / "failures").mkdir(exist_ok=True)
        content = {"reason": failure.reason.to_dict(), "traceback": failure.traceback, "time": failure.time}
        write_json(folder / "failures" / f"rank{failure.rank}.json", content, parents=False)


def read_failures(folder: Path) -> list[RankFailure]:
    """Return the failures of ranks, the cause first. A rank that lost its peers is not the cause."""
    failures = [failure for path in (folder / "failures").glob("rank*.json") if (failure := _read(path))]
    return sorted(failures, key=lambda failure: (failure.reason.code is Code.peer_lost, failure.time, failure.rank))


def _read(path: Path) -> RankFailure | None:
    remedy = f"{RESTORE}: why this rank failed is then not known"
    content = read_object(path, remedy, reason=dict, traceback=str, time=float)
    reason = Reason.read(content["reason"]) if content else None
    return RankFailure(reason, content["traceback"], content["time"]) if content and reason else None


def set_aside_failures(folder: Path) -> None:
    """Move an attempt's failures to a numbered folder, so that those of the next attempt are separate."""
    number = 1 + sum(1 for _ in folder.glob("failures.*"))
    with suppress(FileNotFoundError):
        (folder / "failures").rename(folder / f"failures.{number}")
