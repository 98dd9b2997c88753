"""A trial in this very process, for a debugger: one worker, without Ray."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from fsdp_lab.config import TrialConfig
from fsdp_lab.engine.job import outcome_of
from fsdp_lab.engine.mirror import Sender
from fsdp_lab.engine.rank import FolderReporter, refuse_unseen_gpu, train_and_record
from fsdp_lab.engine.trial_files import Outcome, read_failures, set_aside_failures, write_outcome
from fsdp_lab.engine.why import first_line
from fsdp_lab.hardware import num_gpus
from fsdp_lab.storage import Storage


class InlineReporter(FolderReporter):
    """Writes into the trial's folder, and calls `on_epoch` after each epoch."""

    def __init__(self, folder: Path, data_name: str, on_epoch: Callable[[], None]) -> None:
        super().__init__(folder, 0, data_name)
        self.on_epoch = on_epoch

    def wake(self, epoch: float) -> None:
        """Call `on_epoch`."""
        self.on_epoch()


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
    try:
        sender = Sender(Storage(storage), folder) if storage else None

        def on_report() -> None:
            if sender:
                sender.send()
            on_epoch()

        reporter = InlineReporter(folder, config.data.name, on_report)
        try:
            join = (lambda: refuse_unseen_gpu(0)) if num_gpus() else lambda: None
            train_and_record(config, folder, 0, reporter, has_log=False, storage=storage, join=join)
        finally:
            if sender:
                sender.end()
        outcome = outcome_of(read_failures(folder))
    except Exception as error:  # noqa: BLE001 - any end is a result of the trial
        with suppress(OSError):
            (folder / "error.txt").write_text(traceback.format_exc())
        outcome = outcome_of(read_failures(folder) or [{"kind": "error", "message": first_line(error)}])
    with suppress(OSError):
        write_outcome(folder, Outcome(outcome.status, outcome.error, time.time() - begun))
