"""A trial in this very process, without Ray: for a debugger, and for trials that take less than a process."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from fsdp_lab.config import TrialConfig
from fsdp_lab.engine.files import Outcome, read_failures, set_aside_failures, write_outcome
from fsdp_lab.engine.job import outcome_of
from fsdp_lab.engine.why import first_line
from fsdp_lab.engine.worker import FolderReporter, check_gpu, train_and_record
from fsdp_lab.hardware import num_gpus


class InlineReporter(FolderReporter):
    def __init__(self, folder: Path, data_name: str, on_epoch: Callable[[], None]) -> None:
        super().__init__(folder, 0, data_name)
        self.on_epoch = on_epoch

    def wake(self, epoch: float) -> None:
        self.on_epoch()


def run_inline(config: TrialConfig, folder: Path, on_epoch: Callable[[], None]) -> None:
    """Train with one worker; leaves `outcome.json`, as a trial in processes of its own does. There is no second
    attempt, and nobody who ends a trial that hangs.

    Args:
        on_epoch: called when the folder has the metrics of one more epoch.
    """
    begun = time.time()
    set_aside_failures(folder)  # of a start before this one
    try:
        if num_gpus():
            check_gpu(str(folder), 0)
        train_and_record(config, folder, 0, InlineReporter(folder, config.data.name, on_epoch), has_log=False)
        outcome = outcome_of(read_failures(folder))
    except Exception as error:  # noqa: BLE001 - any end is a result of the trial
        with suppress(OSError):
            (folder / "error.txt").write_text(traceback.format_exc())
        outcome = outcome_of(read_failures(folder) or [{"kind": "error", "message": first_line(error)}])
    with suppress(OSError):
        write_outcome(folder, Outcome(outcome.status, outcome.error, time.time() - begun))
