"""Attempts of a trial whose workers fail: why they did, whether another may succeed, and what the folder records."""

from __future__ import annotations

import re
import time
import traceback
from collections import deque
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from fsdp_lab.engine.nodes import dead_node_of, lost, nodes_asked
from fsdp_lab.engine.resources import release_placement_group
from fsdp_lab.record.failures import RankFailure, read_failures, record_failure, set_aside_failures
from fsdp_lab.record.reasons import Code, Reason
from fsdp_lab.record.trial_files import read_progress, wait_until_alone

_PEER_S = 1.0
_ALONE_S = 30.0
_RECENT_LOOKS = 30  # one a second
_TAIL_LINES = 50  # of a log, for the report of a failure
_CRASH = re.compile(r"^Fatal Python error: (.+)$", re.MULTILINE)
_SIZES_DIFFER = "Received data size doesn't match expected size"  # gloo's, before it aborts the process
# It would be so again.
_FINAL = (Code.out_of_memory, Code.host_out_of_memory, Code.timed_out, Code.user_error, Code.diverged)


class Attempts:
    """The attempts of one trial. Plain calls, whoever runs Ray Train's controller.

    Args:
        begins: called when the workers of an attempt are about to start.

    Attributes:
        group: returns Ray Train's worker group; None: there is none.
    """

    def __init__(self, folder: Path, begins: Callable[[], None]) -> None:
        self.folder, self._begins = folder, begins
        self.group: Callable[[], Any] = lambda: None
        self._kernel_kills: deque[int] = deque(maxlen=_RECENT_LOOKS)
        self._log_sizes: dict[str, int] = {}  # at the beginning of the attempt

    def begin(self) -> None:
        """Prepare for the workers of an attempt: free what those before still hold."""
        release_placement_group(self.folder)
        with suppress(TimeoutError):  # NFS keeps the locks of a node that died for longer
            wait_until_alone(self.folder, _ALONE_S)  # workers end a moment after Ray has killed them
        self.look()
        self._log_sizes = {log.name: log.stat().st_size for log in (self.folder / "logs").glob("rank*.log")}
        self._begins()

    def look(self) -> None:
        """Count what the kernel has killed for lack of memory: the kills of the last looks may be of a rank."""
        self._kernel_kills.append(_kernel_kills())

    def is_final(self, error: Exception, poll: Callable[[float], dict[int, Exception]] = lambda wait_s: {}) -> bool:
        """Return whether another attempt would fail too. Records why each rank failed.

        Args:
            error: Ray Train's.
            poll: waits so many seconds and returns the errors of the workers that still exist, by rank.
        """
        self.note_deaths(getattr(error, "worker_failures", {}))
        failures = read_failures(self.folder)
        if failures and failures[0].reason.code is Code.peer_lost:
            # A rank that lost its peer knows it at once. Ray takes a moment to report why the peer ended.
            time.sleep(_PEER_S)
            self.note_deaths(poll(_PEER_S))
            failures = read_failures(self.folder)
        return bool(failures and failures[0].reason.code in _FINAL) or failed_to_be_placed(error)

    def retry(self) -> None:
        set_aside_failures(self.folder)

    def note_deaths(self, errors: Mapping[int, Exception]) -> None:
        """Record why ranks failed: by the error that a rank raised, or by what ended its process.

        A process is killed by a person, by Ray for lack of memory, by the kernel, or by its own crash.
        """
        folder = self.folder
        known = {failure.rank for failure in read_failures(folder)}
        for rank, error in errors.items():
            if rank in known:
                continue
            if isinstance(error, RankFailure):
                record_failure(folder, error)
                continue
            step = read_progress(folder).step
            at = f"step {step}" if step else None
            causes = (error, getattr(error, "health_check_failure", None), error.__cause__)
            node = dead_node_of(folder, rank)
            by_ray = any(type(cause).__name__ == "OutOfMemoryError" for cause in causes)
            signal = self._crash_of(log := folder / "logs" / f"rank{rank}.log")
            if node is not None and not by_ray:
                reason = Reason.of(Code.node_lost, rank=rank, at=at, node=str(node))
            elif signal:
                sizes = {"sizes_differ": True} if _SIZES_DIFFER in log.read_text(errors="replace") else {}
                reason = Reason.of(Code.crashed, rank=rank, at=at, signal=signal, log=str(log), **sizes)
            elif by_ray or (self._kernel_kills and _kernel_kills() > self._kernel_kills[0]):
                reason = Reason.of(Code.host_out_of_memory, rank=rank, at=at)
            else:
                reason = Reason.of(Code.killed, rank=rank, at=at)
            record_failure(folder, RankFailure(reason, "".join(traceback.format_exception(error))))

    def _crash_of(self, log: Path) -> str:
        """Return by what a rank's process crashed in this attempt, as faulthandler wrote into its log; "": not."""
        with suppress(OSError):
            written = log.read_bytes()[self._log_sizes.get(log.name, 0) :].decode(errors="replace")
            return next(iter(reversed(_CRASH.findall(written))), "")
        return ""


def failed_to_be_placed(error: Exception) -> bool:
    """Whether workers waited for their places as long as they may, and there were none."""
    return type(getattr(error, "controller_failure", None)).__name__ == "WorkerGroupStartupTimeoutError"


def failed_to_start(error: Exception) -> bool:
    """Return whether workers ended after they were created and before they trained."""
    from ray.exceptions import OutOfMemoryError, RayActorError

    failure = getattr(error, "controller_failure", None)
    started = type(failure).__name__ != "WorkerGroupStartupFailedError"
    return not started or isinstance(failure, (RayActorError, OutOfMemoryError))


def why(
    error: Exception, each: Mapping[str, float], num_workers: int, wait_timeout_s: float, known: Collection[str]
) -> Reason:
    """Return the meaning of Ray's error.

    Args:
        each: resources of a worker.
        known: ids of the nodes that the sweep has seen.
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
            nodes=_lost(known),
        )
    if failed_to_start(error):
        return Reason.of(Code.not_started, nodes=_lost(known))
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return Reason.of(Code.job_failed, text=(lines[-1] if lines else type(error).__name__)[:300])


def _lost(known: Collection[str]) -> list[str]:
    return [str(node) for node in lost(known, nodes_asked())]


def report_of(folder: Path, error: Exception) -> str:
    """Return the traceback of the rank that failed first, or else the job's own, and the end of its log."""
    failures = read_failures(folder)
    text = (failures[0].traceback if failures else "") or "".join(traceback.format_exception(error))
    log = folder / "logs" / f"rank{failures[0].rank if failures else 0}.log"
    if not log.exists():
        return text
    lines = log.read_text(errors="replace").splitlines()[-_TAIL_LINES:]
    return "\n".join([text, f"--- the end of {log.relative_to(folder)} ---", *lines, ""])


def _kernel_kills() -> int:
    """Return how many processes the kernel has killed for lack of memory; 0 on a machine that does not count."""
    with suppress(OSError):
        for line in Path("/proc/vmstat").read_text().splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return 0
