"""The status of a trial, and the exit status of a command. Imports nothing, so that every package can use it."""

from __future__ import annotations

from enum import IntEnum, StrEnum


class TrialStatus(StrEnum):
    """The status of a trial. Files and MLflow have its name."""

    waiting = "waiting"
    starting = "starting"
    running = "running"
    finished = "finished"
    failed = "failed"
    oom = "oom"
    diverged = "diverged"
    stopped = "stopped"
    skipped = "skipped"
    interrupted = "interrupted"

    @property
    def ended(self) -> bool:
        """Whether this start of the sweep is finished with the trial."""
        return self not in (TrialStatus.waiting, TrialStatus.starting, TrialStatus.running)

    @property
    def is_result(self) -> bool:
        """Whether a resume keeps it. Running out of memory is a result that a sweep looks for."""
        return self.ended and self is not TrialStatus.interrupted


class ExitCode(IntEnum):
    """The exit status of `python -m fsdp_lab`."""

    finished = 0
    failed = 1
    refused = 2
    crashed = 70
    interrupted = 130
