"""How a trial ends: why its ranks failed, whether another attempt may succeed, and what its folder records."""

from __future__ import annotations

import re
import time
import traceback
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from fsdp_lab.config.errors import UserError
from fsdp_lab.config.status import TrialStatus
from fsdp_lab.engine.hang import timeout_of
from fsdp_lab.record.reasons import Code, Reason
from fsdp_lab.record.trial_files import read_progress, write_error
from fsdp_lab.record.trial_json import Outcome, RankFailure, changing, read_trial, write_outcome

_TAIL_LINES = 50  # lines of a log in the report of a failure
# The last output of faulthandler in a rank's log before the process ends.
_CRASH = re.compile(r"Fatal Python error: (.+)$", re.MULTILINE)
# In the traceback of a rank that lost a loader process: PyTorch waits for the process, fetches a tensor from it, or
# raises in any line, from a signal handler.
_LOADER_LOST = re.compile(r"in (_try_get_data|rebuild_storage_fd)\n|DataLoader worker .* killed by signal: Killed")
_OTHER_SIGNAL = re.compile(r"DataLoader worker .* killed by signal: (?!Killed)")
_SIZES_DIFFER = "Received data size doesn't match expected size"  # gloo prints this before it aborts the process
# Another attempt would fail the same way.
_FINAL = (Code.out_of_memory, Code.host_out_of_memory, Code.timed_out, Code.user_error, Code.diverged)


def is_final(folder: Path, error: Exception) -> bool:
    """Return whether another attempt would fail too, according to the ranks' failures and Ray Train's error."""
    cause = read_trial(folder).cause
    return bool(cause and cause.reason.code in _FINAL) or failed_to_be_placed(error)


def log_sizes(folder: Path) -> dict[str, int]:
    """Return the sizes of the ranks' logs by name, at the start of an attempt."""
    return {log.name: log.stat().st_size for log in (folder / "logs").glob("rank*.log")}


def note_deaths(
    folder: Path,
    errors: Mapping[int, Exception],
    limit_s: float | None = None,
    before: Mapping[str, int] | None = None,
    here: str | None = None,
    kernel_killed: bool = False,
) -> None:
    """Record why ranks failed: the error that a rank raised, or the cause of its process's end.

    A person, the kernel, or Ray's memory monitor kills a process; or it crashes or exceeds a limit. If the kernel has
    killed a process, a rank that lost a loader process is out of memory, too.

    Args:
        errors: Ray Train's, by rank.
        limit_s: `trial_timeout_s`.
        before: `log_sizes` when the attempt began.
        here: Ray's name of this node.
        kernel_killed: its kernel has just killed a process because memory ran out.
    """
    nodes, progress = read_trial(folder).nodes, read_progress(folder)
    timeout = timeout_of(folder, limit_s, progress, len(nodes)) if limit_s is not None else None
    failures = [timeout] if timeout else []
    for rank, error in errors.items():
        if timeout and rank == timeout.rank:
            continue
        node, address = (nodes[rank]["node"], nodes[rank]["address"]) if nodes else (None, None)
        is_here = node == here
        if isinstance(error, RankFailure):
            failures.append(_of_lost_loader(error) if kernel_killed and is_here else error)
            continue
        log = folder / "logs" / f"rank{rank}.log"
        code, values = _why_ended(error, log, _written(log, before or {}), address, is_here, kernel_killed)
        step = f"step {progress['step']}" if "step" in progress else None
        trace = "".join(traceback.format_exception(error))
        failures.append(RankFailure(Reason.of(code, rank=rank, at=step, **values), trace))
    # if this fails, writing the outcome fails too, and the driver logs the reason
    with suppress(OSError, UserError), changing(folder) as trial:
        trial.failures += failures


def _of_lost_loader(failure: RankFailure) -> RankFailure:
    """Return the failure of a rank on a host that is out of memory, with that reason if it lost a loader process."""
    if not _LOADER_LOST.search(failure.traceback) or _OTHER_SIGNAL.search(failure.traceback):
        return failure
    known = {"rank": failure.rank, "at": failure.reason.values.get("at"), "loader": True}
    return replace(failure, reason=Reason.of(Code.host_out_of_memory, **known))


def _why_ended(
    error: Exception, log: Path, written: str, address: str | None, is_here: bool, kernel_killed: bool
) -> tuple[Code, dict[str, Any]]:
    """Return why the process of a rank ended without raising an error, with the values of the reason.

    Args:
        written: its log of this attempt.
        address: of its node; None: not known.
    """
    causes = (error, getattr(error, "health_check_failure", None), error.__cause__)
    if any(type(cause).__name__ == "OutOfMemoryError" for cause in causes):
        return Code.host_out_of_memory, {}
    if crashes := _CRASH.findall(written):
        return Code.crashed, {"signal": crashes[-1], "log": str(log), "sizes_differ": _SIZES_DIFFER in written or None}
    if kernel_killed and is_here:
        return Code.host_out_of_memory, {}
    if "node has died" in str(error):
        return Code.node_lost, {"node": address or "unknown"}
    return Code.killed, {} if is_here else {"node": address}


def _written(log: Path, before: Mapping[str, int]) -> str:
    """Return a rank's log of this attempt; "" without one."""
    with suppress(OSError):
        return log.read_bytes()[before.get(log.name, 0) :].decode(errors="replace")
    return ""


def failed_to_be_placed(error: Exception) -> bool:
    """Return whether workers found no free resources within `cluster.wait_timeout_s`."""
    return type(getattr(error, "controller_failure", None)).__name__ == "WorkerGroupStartupTimeoutError"


def why(error: Exception, each: Mapping[str, float], num_workers: int, wait_timeout_s: float) -> Reason:
    """Return the reason behind Ray's error.

    Args:
        each: the resources of one worker.
    """
    if failed_to_be_placed(error):
        import ray

        return Reason.of(
            Code.no_place,
            num_workers=num_workers,
            each=dict(each),
            wait_timeout_s=wait_timeout_s,
            total=ray.cluster_resources(),
            free=ray.available_resources(),
        )
    if type(getattr(error, "controller_failure", None)).__name__ == "WorkerGroupStartupFailedError":
        return Reason.of(Code.not_started)
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return Reason.of(Code.job_failed, text=(lines[-1] if lines else type(error).__name__)[:300])


def end_trial(
    folder: Path,
    seconds: float,
    error: Exception | None,
    otherwise: Reason | None = None,
) -> None:
    """Write how a trial ended; first write `error.txt` for an error whose message is not enough.

    Args:
        folder: the trial's, with the failures of its ranks.
        error: that ended it; None: no error did.
        otherwise: the reason for an error that no rank recorded.
    """
    cause = error if isinstance(error, RankFailure) else read_trial(folder).cause
    if error is not None and (cause is None or cause.traceback):
        write_error(folder, report_of(folder, cause, error))
    reason = cause.reason if cause else otherwise
    with suppress(OSError, UserError):  # the driver logs why
        status = reason.status if reason else TrialStatus.finished
        write_outcome(folder, Outcome(status, reason, seconds, time.time()))


def report_of(folder: Path, cause: RankFailure | None, error: Exception) -> str:
    """Return the traceback of the rank that failed first, or else the job's own, and the end of its log."""
    text = cause.traceback if cause else "".join(traceback.format_exception(error))
    log = folder / "logs" / f"rank{cause.rank if cause else 0}.log"
    if not log.exists():
        return text
    lines = log.read_text(errors="replace").splitlines()[-_TAIL_LINES:]
    return "\n".join([text, f"--- the end of {log.relative_to(folder)} ---", *lines, ""])
