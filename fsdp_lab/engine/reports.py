"""What the ranks of a trial report, in the trial's folder; and how the trial ended."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from fsdp_lab.config.training import TrainingConfig
from fsdp_lab.engine.attempts import report_of
from fsdp_lab.engine.failures import PLAIN
from fsdp_lab.record.failures import RankFailure, read_failures
from fsdp_lab.record.reasons import Reason
from fsdp_lab.record.trial_files import Outcome, TrialWriter, write_error, write_outcome, write_progress
from fsdp_lab.status import TrialStatus

_PROGRESS_S = 1.0  # between two writes of a step


class Reports:
    """Writes the reports of rank 0 into the trial's folder, and passes each epoch on, once.

    The last epoch is passed on when the trial has ended: a scheduler would stop a trial that has yet to export its
    model.

    Args:
        training: how many epochs and steps it trains.
        pass_on: gets the metrics of an epoch, when the folder has them.
    """

    def __init__(
        self, folder: Path, training: TrainingConfig, pass_on: Callable[[dict[str, Any]], None] = lambda metrics: None
    ) -> None:
        self._folder, self._training, self._pass_on = folder, training, pass_on
        self._writer = TrialWriter(self._folder)
        self._passed_on: set[float] = set()
        self._last: dict[str, Any] | None = None
        self._written: dict[str, Any] = {}
        self._written_at = 0.0

    def receive(self, content: dict[str, Any]) -> None:
        """Handle a report of rank 0: `progress`, and `facts` or the `metrics` of an epoch."""
        if "facts" in content:
            self._writer.facts(content["facts"])
        if metrics := content.get("metrics"):
            self._writer.epoch(metrics)
        self._write_progress(content["progress"])
        if metrics:
            if self._training.is_through(metrics["epoch"], metrics.get("step", 0)):
                self._last = metrics
            else:
                self._pass_on_once(metrics)

    def progress(self, content: dict[str, Any]) -> None:
        """Write what rank 0 is doing: a phase at once, and a step at most once a second."""
        is_phase = "phase" in content or "phase" in self._written
        if is_phase or time.monotonic() - self._written_at > _PROGRESS_S:
            self._write_progress(content)

    def finish(self) -> None:
        if self._last is not None:
            self._pass_on_once(self._last)

    def _write_progress(self, content: dict[str, Any]) -> None:
        self._written, self._written_at = content, time.monotonic()
        write_progress(self._folder, content)

    def _pass_on_once(self, metrics: dict[str, Any]) -> None:
        if metrics["epoch"] not in self._passed_on:
            self._passed_on.add(metrics["epoch"])
            self._pass_on(metrics)


def end_trial(
    folder: Path,
    seconds: float,
    error: Exception | None,
    reason_of: Callable[[Exception], Reason] | None = None,
) -> None:
    """Write `outcome.json`, and before it `error.txt` for an error without a plain message.

    Args:
        folder: the trial's, with the failures of its ranks.
        error: that ended it; None: none did.
        reason_of: returns the reason for an error that no rank recorded, other than a `RankFailure`.
    """
    failures = read_failures(folder)
    if error is not None and not (failures and failures[0].reason.code in PLAIN):
        write_error(folder, report_of(folder, error))
    reason = failures[0].reason if failures else error.reason if isinstance(error, RankFailure) else None
    if reason is None and error is not None and reason_of is not None:
        reason = reason_of(error)
    with suppress(OSError):
        status = reason.status if reason else TrialStatus.finished
        write_outcome(folder, Outcome(status, reason, seconds, time.time()))
