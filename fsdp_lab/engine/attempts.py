"""Attempts of a trial whose workers fail: whether another may succeed, and what the trial's folder records."""

from __future__ import annotations

import re
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from fsdp_lab.engine.failures import RankFailure, record_failure
from fsdp_lab.engine.nodes import dead_node_of
from fsdp_lab.engine.resources import release_placement_group
from fsdp_lab.record.trial_files import read_failures, read_progress, set_aside_failures, wait_until_alone

_PEER_S = 1.0
_ALONE_S = 30.0
_CRASH = re.compile(r"^Fatal Python error: (.+)$", re.MULTILINE)
_FINAL = ("oom", "timeout", "user", "diverged")  # it would be so again


class Attempts:
    """The attempts of one trial. Plain calls, whoever runs Ray Train's controller.

    Args:
        folder: the trial's.
        begins: called when the workers of an attempt are about to start.

    Attributes:
        group: returns Ray Train's worker group; None: there is none.
    """

    def __init__(self, folder: Path, begins: Callable[[], None]) -> None:
        self.folder, self._begins = folder, begins
        self.group: Callable[[], Any] = lambda: None
        self._kernel_kills_before = _kernel_kills()
        self._log_sizes: dict[str, int] = {}  # at the beginning of the attempt

    def begin(self) -> None:
        """Prepare for the workers of an attempt: free what those before still hold."""
        release_placement_group(self.folder)
        wait_until_alone(self.folder, _ALONE_S)  # workers end a moment after Ray has killed them
        self._log_sizes = {log.name: log.stat().st_size for log in (self.folder / "logs").glob("rank*.log")}
        self._begins()

    def is_final(self, error: Exception, poll: Callable[[float], dict[int, Exception]] = lambda wait_s: {}) -> bool:
        """Return whether another attempt would fail too. Records why each rank failed.

        Args:
            error: Ray Train's.
            poll: waits so many seconds and returns the errors of the workers that still exist, by rank.
        """
        self._note_deaths(getattr(error, "worker_failures", {}))
        failures = read_failures(self.folder)
        if failures and failures[0]["kind"] == "peer":
            # Who lost a peer knows it at once; that the peer was killed, and for want of what, takes Ray a moment.
            time.sleep(_PEER_S)
            self._note_deaths(poll(_PEER_S))
            failures = read_failures(self.folder)
        return bool(failures and failures[0]["kind"] in _FINAL) or failed_to_be_placed(error)

    def retry(self) -> None:
        """Prepare for another attempt."""
        set_aside_failures(self.folder)

    def stop(self) -> None:
        """End the workers, and the attempt with them."""
        release_placement_group(self.folder)

    def _note_deaths(self, errors: dict[int, Exception]) -> None:
        note_deaths(self.folder, errors, self._kernel_kills_before, self._log_sizes)


def note_deaths(
    folder: Path, worker_failures: dict[int, Exception], kernel_kills_before: int, log_sizes: Mapping[str, int]
) -> None:
    """Record why ranks failed: by the error that a rank raised, or by what ended its process.

    A process is killed by a person, by Ray for lack of memory, by the kernel, or by its own crash.
    """
    for rank, error in worker_failures.items():
        if (folder / "failures" / f"rank{rank}.json").exists():
            continue
        if isinstance(error, RankFailure):
            record_failure(folder, error)
            continue
        step = read_progress(folder).get("step")
        where = f"rank {rank}" + (f", step {step:.0f}" if step else "")
        causes = (error, getattr(error, "health_check_failure", None), error.__cause__)
        node = dead_node_of(folder, rank)
        by_ray = any(type(cause).__name__ == "OutOfMemoryError" for cause in causes)
        if by_ray or (node is None and _kernel_kills() > kernel_kills_before):
            kind, why = "oom", "its process was killed: the host is out of memory"
        else:
            kind, why = "killed", f"its node {node} went down" if node else how_it_ended(folder, rank, log_sizes)
        text = "".join(traceback.format_exception(error))
        record_failure(folder, RankFailure(rank, kind, f"{where}: {why}", text))


def how_it_ended(folder: Path, rank: int, log_sizes: Mapping[str, int]) -> str:
    """Return how the process of a rank ended that raised no error. faulthandler writes about a crash into its log.

    Args:
        folder: the trial's.
        rank: of the process.
        log_sizes: of the logs before this attempt, in bytes.
    """
    log = folder / "logs" / f"rank{rank}.log"
    with suppress(OSError):
        written = log.read_bytes()[log_sizes.get(log.name, 0) :].decode(errors="replace")
        if crashes := _CRASH.findall(written):
            return f"its process crashed: {crashes[-1]}; its stack is in {log}"
    return "its process ended without an error, as if killed"


def failed_to_be_placed(error: Exception) -> bool:
    """Whether workers waited for their places as long as they may, and there were none."""
    return type(getattr(error, "controller_failure", None)).__name__ == "WorkerGroupStartupTimeoutError"


def failed_to_start(error: Exception) -> bool:
    """Return whether workers ended after they were created and before they trained."""
    from ray.exceptions import OutOfMemoryError, RayActorError

    failure = getattr(error, "controller_failure", None)
    started = type(failure).__name__ != "WorkerGroupStartupFailedError"
    return not started or isinstance(failure, (RayActorError, OutOfMemoryError))


def _kernel_kills() -> int:
    """Return how many processes the kernel has killed for lack of memory; 0 on a machine that does not count."""
    with suppress(OSError):
        for line in Path("/proc/vmstat").read_text().splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return 0
