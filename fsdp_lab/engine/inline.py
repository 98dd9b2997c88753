"""A trial in this very process, for a debugger: one worker, without Ray."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fsdp_lab.config import TrialConfig
from fsdp_lab.engine.failures import code_of, failure_of
from fsdp_lab.engine.files_of_ranks import Uploads, at_end
from fsdp_lab.engine.job import Reports, Watch, end_trial
from fsdp_lab.engine.rank import RankReporter, check_gpu, train_rank
from fsdp_lab.hardware import num_gpus
from fsdp_lab.record.failures import RankFailure, record_failure, set_aside_failures
from fsdp_lab.record.trial_files import Progress
from fsdp_lab.storage import Storage


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
    begun, failure = time.monotonic(), None
    set_aside_failures(folder)  # of a start before this one
    uploads: Uploads | None = None
    reports, progress = Reports(folder, config.training, lambda metrics: on_epoch()), Progress()
    watch = Watch(folder, None, 0.0)
    watch.ask = lambda: progress.content

    def send() -> None:
        if uploads is not None:
            uploads.send()

    def report(content: dict[str, Any]) -> None:
        send()
        reports.receive(content)

    try:
        uploads = Uploads(Storage(storage), folder) if storage else None
        join = (lambda: check_gpu(0, True)) if num_gpus() else lambda: None
        with at_end(send), watch.watching():
            train_rank(config, folder, 0, RankReporter(config.data.name, progress, report), storage=storage, join=join)
        reports.finish()
    except Exception as raised:  # noqa: BLE001 - any end is a result of the trial
        failure = raised if isinstance(raised, RankFailure) else failure_of(raised, 0, code_of(raised), folder)
        record_failure(folder, failure)
    finally:
        from fsdp_lab.training.distributed import leave_process_group

        leave_process_group()  # a forecast in this process needs a group of its own
    end_trial(folder, time.monotonic() - begun, failure, lambda error: failure.reason if failure else None)
