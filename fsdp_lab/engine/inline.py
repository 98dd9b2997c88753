"""A trial in this very process, for a debugger: one worker, without Ray."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from fsdp_lab.config import TrialConfig
from fsdp_lab.engine.failures import PLAIN, code_of, failure_of
from fsdp_lab.engine.files_of_ranks import Uploads, at_end
from fsdp_lab.engine.job import outcome_of
from fsdp_lab.engine.rank import check_gpu, train_rank
from fsdp_lab.hardware import num_gpus
from fsdp_lab.record.failures import RankFailure, record_failure, set_aside_failures
from fsdp_lab.record.trial_files import Progress, TrialWriter, write_outcome, write_progress
from fsdp_lab.storage import Storage

_PROGRESS_S = 1.0  # between two writes of a step


class InlineReporter:
    """Writes into the trial's folder.

    Args:
        folder: the trial's.
        data_name: of the data set, a fact of the trial.
        on_epoch: called when the folder has the metrics of another epoch.
    """

    def __init__(self, folder: Path, data_name: str, on_epoch: Callable[[], None] = lambda: None) -> None:
        self._folder, self._data_name, self._on_epoch = folder, data_name, on_epoch
        self._writer, self._progress, self._written = TrialWriter(folder), Progress(), 0.0

    def facts(self, facts: dict[str, Any]) -> None:
        """Write `facts.json`, with the name of the data set."""
        self._writer.facts({**facts, "data": self._data_name})

    def phase(self, name: str) -> None:
        """Record the phase."""
        self._progress.phase(name)
        self._write()

    def step(self, step: int) -> None:
        """Record the step, at most once a second."""
        leaves_phase = "phase" in self._progress.content
        self._progress.step(step)
        if leaves_phase or time.monotonic() - self._written > _PROGRESS_S:
            self._write()

    def epoch(self, metrics: dict[str, float], checkpoint: Path | str | None) -> None:
        """Write the metrics. Raises as `TrialWriter.epoch`."""
        self._writer.epoch(metrics)
        self._progress.reported()
        self._write()
        self._on_epoch()

    def _write(self) -> None:
        self._written = time.monotonic()
        write_progress(self._folder, self._progress.content)


def run_inline(config: TrialConfig, folder: Path, on_epoch: Callable[[], None], storage: str | None = None) -> None:
    """Train with one worker, and write `outcome.json` as a trial in separate processes does.

    There is no second attempt, and nothing ends a trial that hangs.

    Args:
        config: the trial.
        folder: the trial's.
        on_epoch: called when the folder has the metrics of another epoch.
        storage: the trial's address in object storage, which also gets its checkpoints and files; None: only the
            folder.
    """
    begun = time.time()
    set_aside_failures(folder)  # of a start before this one
    uploads: Uploads | None = None

    def send() -> None:
        if uploads is not None:
            uploads.send()

    def on_report() -> None:
        send()
        on_epoch()

    try:
        uploads = Uploads(Storage(storage), folder) if storage else None
        join = (lambda: check_gpu(0, True)) if num_gpus() else lambda: None
        reporter = InlineReporter(folder, config.data.name, on_report)
        with at_end(send):
            train_rank(config, folder, 0, reporter, storage=storage, join=join)
    except RankFailure as failure:
        record_failure(folder, failure)
        if failure.reason.code not in PLAIN:
            with suppress(OSError):
                (folder / "error.txt").write_text(failure.traceback)
    except Exception as error:  # noqa: BLE001 - any end is a result of the trial
        record_failure(folder, failure_of(error, 0, code_of(error), folder))
    finally:
        from fsdp_lab.training.distributed import leave_process_group

        leave_process_group()  # a forecast in this process needs a group of its own
    with suppress(OSError):
        write_outcome(folder, replace(outcome_of(folder), seconds=time.time() - begun))
