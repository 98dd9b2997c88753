"""Failures of a rank: which code an error is."""

from __future__ import annotations

import re
import traceback
from contextlib import suppress

from fsdp_lab.config.errors import UserError
from fsdp_lab.config.target import user_line
from fsdp_lab.record.reasons import Code, Reason
from fsdp_lab.record.trial_json import RankFailure

_RAISED = re.compile(r"^[\w.]+Error: ", re.MULTILINE)  # before the message in Python's traceback


def failure_of(error: BaseException, rank: int, code: Code) -> RankFailure:
    """Return an error as plain values; without its traceback if the message tells the user what to fix."""
    if code is Code.user_error:
        # a loader process returns a whole traceback, with the message at its end
        from_loader = str(error).startswith("Caught ")
        text = _RAISED.split(str(error))[-1].strip() if from_loader else str(error)
        trace = _traceback(error) if from_loader or error.__cause__ is not None else ""
        return RankFailure(Reason.of(code, rank=rank, text=text), trace)
    text = next((line for line in reversed(str(error).splitlines()) if line.strip()), type(error).__name__)
    reason = Reason.of(
        code,
        rank=rank,
        at=", ".join(getattr(error, "__notes__", ())),  # the step
        error=type(error).__name__,
        text=text.strip()[:300],
        line=user_line(error) if code is Code.error else None,
    )
    return RankFailure(reason, "" if code is Code.diverged else _traceback(error))


def _traceback(error: BaseException) -> str:
    return "".join(traceback.format_exception(error))


# PyTorch's allocators for GPUs, for the CPU and for pinned memory raise RuntimeErrors, of several classes.
_OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "CUBLAS_STATUS_ALLOC_FAILED")
_CUBLAS_BYTES = 2**28  # more than cuBLAS allocates when it starts
_PEER_LOST = ("Connection closed by peer", "Connection reset by peer", "Broken pipe")  # in the middle of a message


def code_of(error: BaseException) -> Code:
    text = str(error)
    if isinstance(error, UserError):
        return Code.user_error
    if isinstance(error, MemoryError):
        return Code.out_of_memory
    if isinstance(error, RuntimeError) and any(sign in text for sign in _OUT_OF_MEMORY):
        return Code.out_of_memory
    if isinstance(error, RuntimeError) and "CUBLAS_STATUS_NOT_INITIALIZED" in text and _gpu_is_full():
        return Code.out_of_memory
    return Code.peer_lost if any(sign in text for sign in _PEER_LOST) else Code.error


def _gpu_is_full() -> bool:
    from fsdp_lab.training.distributed import free_on_gpu

    with suppress(RuntimeError, AssertionError):  # no GPU, or a GPU that has failed
        return free_on_gpu() < _CUBLAS_BYTES
    return False
