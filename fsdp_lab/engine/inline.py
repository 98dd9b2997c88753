"""A trial in this process, for a debugger: one worker, without Ray."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from fsdp_lab.config import TrialConfig
from fsdp_lab.config.errors import UserError
from fsdp_lab.engine.failures import code_of, failure_of
from fsdp_lab.engine.files_of_ranks import Uploads, at_end
from fsdp_lab.engine.outcome import end_trial
from fsdp_lab.engine.rank import RankReporter, check_gpu, train_rank
from fsdp_lab.machine.hardware import num_gpus
from fsdp_lab.record.trial_files import TrialWriter
from fsdp_lab.record.trial_json import RankFailure, changing, set_aside_failures
from fsdp_lab.storage.objects import Storage


def run_inline(
    config: TrialConfig, folder: Path, on_epoch: Callable[[dict[str, Any]], None], storage: str | None = None
) -> None:
    """Train with one worker, and write the outcome as a trial in separate processes does.

    There is no retry, and a trial that hangs is not ended.

    Args:
        on_epoch: gets the metrics of an epoch, after they are in the folder.
        storage: the trial's address in object storage, which also gets its checkpoints and files; None: only the
            folder.
    """
    begun, failure = time.monotonic(), None
    set_aside_failures(folder)  # of an earlier start
    writer = TrialWriter(folder)
    try:
        send = Uploads(Storage(storage), folder).send if storage else lambda: None

        def write_and_send(content: dict[str, Any]) -> None:
            writer.receive(content)
            if "metrics" in content:
                send()
                on_epoch(content["metrics"])

        join = (lambda: check_gpu(0, True)) if num_gpus() else lambda: None
        reporter = RankReporter(write_and_send, (folder / "progress.json").open("w"))
        with at_end(send):
            train_rank(config, folder, 0, reporter, storage=storage, join=join)
    except Exception as error:  # noqa: BLE001 - any end is a result of the trial
        failure = error if isinstance(error, RankFailure) else failure_of(error, 0, code_of(error))
        with suppress(OSError, UserError), changing(folder) as trial:
            trial.failures.append(failure)
    finally:
        if distributed := sys.modules.get("fsdp_lab.training.distributed"):  # missing if Ctrl-C interrupted the import
            distributed.leave_process_group()  # a forecast in this process needs a group of its own
    end_trial(folder, time.monotonic() - begun, failure)
