"""Attempts of a trial whose workers fail: whether another may succeed, and what the trial's folder records."""

from __future__ import annotations

import signal
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from fsdp_lab.engine.failures import write_failure
from fsdp_lab.engine.nodes import dead_node_of
from fsdp_lab.engine.rank_process import RankFailed, RankOutOfMemory, how_it_ended
from fsdp_lab.engine.ray_private import failed_to_be_placed
from fsdp_lab.engine.resources import release_placement_group
from fsdp_lab.engine.trial_files import read_failures, read_progress, set_aside_failures, wait_until_alone
from fsdp_lab.engine.why import first_line
from fsdp_lab.storage import StorageAway, StorageRefused

_PEER_S = 1.0
_ALONE_S = 30.0
_FINAL = ("oom", "timeout", "user", "diverged")  # it would be so again


class Attempts:
    """The attempts of one trial. Plain calls, whoever runs Ray Train's controller.

    Args:
        folder: the trial's.
        begins: called when the workers of an attempt are about to start.
        receive: brings into the folder the files that workers have put elsewhere; may raise OSError.
    """

    def __init__(self, folder: Path, begins: Callable[[], None], receive: Callable[[], None] = lambda: None) -> None:
        self.folder, self._begins, self._receive = folder, begins, receive
        self._kernel_kills_before = _kernel_kills()

    def begin(self) -> None:
        """Prepare for the workers of an attempt: free what those before still hold."""
        release_placement_group(self.folder)
        wait_until_alone(self.folder, _ALONE_S)  # ranks end a moment after the workers that Ray has killed
        self._begins()

    def is_final(self, error: Exception, poll: Callable[[float], dict[int, Exception]] = lambda wait_s: {}) -> bool:
        """Return whether another attempt would fail too. Records the ranks that ended without a failure of their own.

        Args:
            error: Ray Train's.
            poll: waits so many seconds and returns the errors of the workers that still exist, by rank.
        """
        with suppress(OSError):
            self._receive()
        self._note_deaths(getattr(error, "worker_failures", {}))
        failures = read_failures(self.folder)
        if failures and failures[0]["kind"] == "peer":
            # Who lost a peer knows it at once; that the peer was killed, and for want of what, takes Ray a moment.
            time.sleep(_PEER_S)
            errors = poll(_PEER_S)
            with suppress(OSError):
                self._receive()
            self._note_deaths(errors)
            failures = read_failures(self.folder)
        return bool(failures and failures[0]["kind"] in _FINAL) or failed_to_be_placed(error)

    def retry(self) -> None:
        """Prepare for another attempt."""
        set_aside_failures(self.folder)

    def stop(self) -> None:
        """End the workers, and the attempt with them."""
        release_placement_group(self.folder)

    def _note_deaths(self, errors: dict[int, Exception]) -> None:
        note_deaths(self.folder, errors, self._kernel_kills_before)


def note_deaths(folder: Path, worker_failures: dict[int, Exception], kernel_kills_before: int) -> None:
    """Record the ranks that ended without a failure of their own.

    They were killed by a person, by Ray for lack of memory, or by the kernel.
    """
    for rank, error in worker_failures.items():
        if (folder / "failures" / f"rank{rank}.json").exists():
            continue
        step = read_progress(folder).get("step")
        where = f"rank {rank}" + (f", step {step:.0f}" if step else "")
        causes = (error, getattr(error, "health_check_failure", None), error.__cause__)
        if refused := next((cause for cause in causes if isinstance(cause, (StorageRefused, StorageAway))), None):
            kind = "user" if isinstance(refused, StorageRefused) else "error"
            write_failure(folder, rank, kind, f"{where}: {refused}", "".join(traceback.format_exception(error)))
            continue
        if raised := next((cause for cause in causes if cause is not None and _is_raised_in_worker(cause)), None):
            message = f"{where}: {type(raised).__name__}: {first_line(raised)}"
            write_failure(folder, rank, "error", message, "".join(traceback.format_exception(error)))
            continue
        node = dead_node_of(folder, rank)
        by_us = any(isinstance(cause, RankOutOfMemory) for cause in causes)
        by_ray = any(type(cause).__name__ == "OutOfMemoryError" for cause in causes)
        out_of_memory = by_us or by_ray or (node is None and _kernel_kills() > kernel_kills_before)
        why = "its process was killed: the host is out of memory"
        if not out_of_memory:
            ended = next((cause for cause in causes if isinstance(cause, RankFailed)), None)
            alone = str(ended) if ended else how_it_ended(-signal.SIGKILL)
            why = f"its node {node} went down" if node else alone
        text = "".join(traceback.format_exception(error))
        write_failure(folder, rank, "oom" if out_of_memory else "killed", f"{where}: {why}", text)


def _is_raised_in_worker(error: BaseException) -> bool:
    """Whether Ray's worker raised it beside its rank: it found no folder, or could start no process."""
    return not isinstance(error, RankFailed) and type(error).__module__.partition(".")[0] != "ray"


def _kernel_kills() -> int:
    """Return how many processes the kernel has killed for lack of memory; 0 on a machine that does not count."""
    with suppress(OSError):
        for line in Path("/proc/vmstat").read_text().splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return 0
