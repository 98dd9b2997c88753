"""How a trial stands, and how a command ends. Imports nothing, so that every package can."""

from __future__ import annotations

from enum import IntEnum, StrEnum


class TrialStatus(StrEnum):
    """How a trial stands. Written to files and to MLflow by its name."""

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
        """Whether this start of the sweep is done with the trial."""
        return self not in (TrialStatus.waiting, TrialStatus.starting, TrialStatus.running)

    @property
    def is_result(self) -> bool:
        """Whether a resume keeps it: a setting that runs out of memory is what the sweep was to find out."""
        return self.ended and self is not TrialStatus.interrupted


class ExitCode(IntEnum):
    """What `python -m fsdp_lab` leaves with."""

    finished = 0
    failed = 1
    refused = 2
    interrupted = 130
