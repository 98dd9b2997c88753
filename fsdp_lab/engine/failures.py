"""Failures of a rank: what kind an error is, and how `failures/` in the trial's folder records it."""

from __future__ import annotations

import sys
import time
import traceback
from contextlib import suppress
from pathlib import Path

from fsdp_lab.config.errors import UserError
from fsdp_lab.config.target import user_line
from fsdp_lab.files import write_json
from fsdp_lab.record.trial_files import no_space


class RankFailure(Exception):
    """An error of a rank, as plain values: it crosses process boundaries, where the error's own class may be unknown.

    Attributes:
        rank: that failed.
        kind: `oom`, `peer` (only another rank's failure), `user`, `diverged`, `timeout`, `killed` or `error`.
        message: a line for people.
        traceback: of the error; "": none.
        time: when it failed, in seconds since 1970 by its node's clock; by default now.
    """

    def __init__(self, rank: int, kind: str, message: str, traceback: str = "", at: float | None = None) -> None:
        self.rank, self.kind, self.message, self.traceback = rank, kind, message, traceback
        self.time = time.time() if at is None else at
        super().__init__(rank, kind, message, traceback, self.time)  # by which pickle makes it again

    def __str__(self) -> str:
        return self.message


def failure_of(error: BaseException, rank: int, kind: str, folder: Path) -> RankFailure:
    """Return the failure of a rank that raised an error.

    Args:
        error: that was raised.
        rank: of this process.
        kind: see `RankFailure`.
        folder: the trial's, for the message about a full disk.
    """
    text = next((line for line in reversed(str(error).splitlines()) if line.strip()), type(error).__name__)
    where = "".join(f", {note}" for note in getattr(error, "__notes__", ()))  # the step
    message = f"rank {rank}{where}: {type(error).__name__}: {text.strip()[:300]}"
    if kind == "user":  # a process that loads data gives back a whole traceback, with the message at its end
        message = text.partition("UserError: ")[2] if str(error).startswith("Caught ") else str(error)
    elif kind == "error" and (line := user_line(error)):
        message += f" ({line})"
    if "No space left on device" in str(error):
        message = f"rank {rank}: {no_space(folder)}"
    return RankFailure(rank, kind, message, "".join(traceback.format_exception(error)))


def print_failure(failure: RankFailure) -> None:
    """Print an error into the rank's log: its traceback, or only the message of a user's error."""
    if failure.kind == "user":
        print(failure.message, file=sys.stderr, flush=True)
    elif failure.kind != "diverged":
        print(failure.traceback, end="", file=sys.stderr, flush=True)


def record_failure(folder: Path, failure: RankFailure) -> None:
    """Write `failures/rank<r>.json`; does nothing if the disk is full or the folder is gone."""
    with suppress(OSError):  # the driver looks at the disk when it finds no outcome
        (folder / "failures").mkdir(exist_ok=True)
        content = {name: getattr(failure, name) for name in ("rank", "kind", "message", "traceback", "time")}
        write_json(folder / "failures" / f"rank{failure.rank}.json", content, parents=False)


def kind_of(error: BaseException) -> str:
    """Return the kind of an error: `user`, `oom`, `peer` (only another rank's failure) or `error`."""
    if isinstance(error, UserError):
        return "user"
    if is_out_of_memory(error):
        return "oom"
    return "peer" if is_peer_failure(error) else "error"


_OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "CUBLAS_STATUS_ALLOC_FAILED")
_CUBLAS_BYTES = 64 * 2**20  # what cuBLAS and cuBLASLt want on Hopper, 32 MiB each


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether memory ran out: on a GPU, in Python, or in PyTorch's allocators for the CPU and for pinned memory.

    PyTorch's allocators raise plain RuntimeErrors. Errors are identified by name, because PyTorch may not be
    importable.
    """
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    if not isinstance(error, RuntimeError):
        return False
    if "CUBLAS_STATUS_NOT_INITIALIZED" in str(error):  # cuBLAS does not say why it could not start
        free = free_gpu_bytes()
        return free is not None and free < _CUBLAS_BYTES
    return any(sign in str(error) for sign in _OUT_OF_MEMORY)


def free_gpu_bytes() -> int | None:
    """Return the free bytes of the current GPU; None without PyTorch, or if it cannot tell after the error."""
    with suppress(Exception):
        return int(sys.modules["torch"].cuda.mem_get_info()[0])
    return None


def is_peer_failure(error: BaseException) -> bool:
    """Whether this rank failed only because another one went away in the middle of a message."""
    text = str(error)
    return any(sign in text for sign in ("Connection closed by peer", "Connection reset by peer", "Broken pipe"))
