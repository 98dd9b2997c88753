"""What a sweep tells those who show it, and how it ends."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from fsdp_lab.config.status import ExitCode


@dataclass(frozen=True)
class Ending:
    """How a sweep ends.

    Attributes:
        code: its exit status.
        error: that ended it early, other than an interrupt; None: none did.
        by: when all waits are over, on the monotonic clock, after an interrupt; None: there is no hurry.
    """

    code: ExitCode
    error: BaseException | None = None
    by: float | None = None

    @property
    def early(self) -> bool:
        """Whether it ends before its trials."""
        return self.code is ExitCode.interrupted or self.error is not None


class Events(Protocol):
    """The events of a sweep, which `outputs.Outputs` explains, each after the sweep's state and folder have it."""

    def log(self, text: str) -> None: ...
    def opened(self) -> None: ...
    def added(self, number: int) -> None: ...
    def began(self, number: int) -> None: ...
    def facts(self, number: int) -> None: ...
    def epoch(self, number: int, metrics: dict[str, float]) -> None: ...
    def changed(self, number: int) -> None: ...
    def ended(self, number: int) -> None: ...
    def tick(self) -> None: ...
    def closing(self, ending: Ending) -> None: ...
    def closed(self, ending: Ending) -> None: ...
