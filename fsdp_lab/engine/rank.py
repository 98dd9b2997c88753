"""The training of one rank: its reports, its errors as `RankFailure`, and the check of its GPU."""

from __future__ import annotations

import faulthandler
import os
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from fsdp_lab.config import TrialConfig, UserError
from fsdp_lab.engine.failures import code_of, failure_of
from fsdp_lab.record.reasons import Code
from fsdp_lab.record.trial_files import write_progress
from fsdp_lab.record.trial_json import RankFailure

if TYPE_CHECKING:  # it imports PyTorch
    from fsdp_lab.training.train import Reporter


_GRACE_S = 60.0


class RankReporter:
    """Reports the progress of a rank, and ends its process if a phase or a step takes too long.

    First it writes the stacks of all threads, even if native code holds the GIL.

    Args:
        report: gets the `facts`, or the `metrics` of an epoch.
        progress: the file for phases and steps; None: not of this rank.
        stacks: the file for the stacks.
        limit_s: of a phase or a step; None: no limit.
        exits: whether the process ends at once; else a minute later.
    """

    def __init__(
        self,
        report: Callable[[dict[str, Any]], None],
        progress: IO[str] | None = None,
        stacks: IO[str] | None = None,
        limit_s: float | None = None,
        exits: bool = True,
    ) -> None:
        self._report, self._progress = report, progress
        self._stacks, self._limit_s, self._exits = stacks, limit_s, exits

    def phase(self, name: str) -> None:
        self._begin(phase=name)

    def step(self, step: int) -> None:
        self._begin(step=step)

    def facts(self, facts: dict[str, Any]) -> None:
        self._report({"facts": facts})

    def epoch(self, metrics: dict[str, float]) -> None:
        self._report({"metrics": metrics})

    def _begin(self, **doing: str | int) -> None:
        if self._limit_s is not None and self._stacks is not None:
            faulthandler.dump_traceback_later(self._limit_s, exit=self._exits, file=self._stacks)
            if not self._exits:
                signal.setitimer(signal.ITIMER_REAL, self._limit_s + _GRACE_S)
        if self._progress is not None:
            write_progress(self._progress, **doing)


def train_rank(
    config: TrialConfig,
    folder: Path,
    rank: int,
    reporter: Reporter,
    storage: str | None = None,
    join: Callable[[], None] = lambda: None,
) -> None:
    """Train one rank of a trial in this process.

    Args:
        folder: the trial's, or this rank's own.
        storage: the trial's address in object storage, see `train`.
        join: makes the process group; by default `train` does.

    Raises:
        RankFailure: any error, with its reason. KeyboardInterrupt passes unchanged.
    """
    from fsdp_lab.training.distributed import keep_threads, leave_process_group
    from fsdp_lab.training.divergence import DivergedError
    from fsdp_lab.training.train import train

    try:
        keep_threads()
        join()
        folder.stat()  # `train` would create it again
        train(config, folder, reporter, storage=storage)
        leave_process_group()
    except (RankFailure, KeyboardInterrupt):
        raise
    except DivergedError as error:
        raise failure_of(error, rank, Code.diverged) from error
    except BaseException as error:
        raise failure_of(error, rank, code_of(error)) from error
    finally:
        faulthandler.cancel_dump_traceback_later()
        signal.setitimer(signal.ITIMER_REAL, 0)


def check_gpu(rank: int, wanted: bool) -> None:
    """Compare the GPU that this rank got with what PyTorch sees, before NCCL starts.

    Raises:
        UserError: the rank got a GPU that PyTorch does not see, or PyTorch sees a GPU that Ray did not count.
    """
    from fsdp_lab.training.distributed import sees_cuda

    available, built_for = sees_cuda()
    if available == wanted:
        return
    host, hide = socket.gethostname(), 'or hide the GPUs with CUDA_VISIBLE_DEVICES=""'
    if available:
        raise UserError(
            f"PyTorch sees GPUs on {host}, but Ray counts none, so this trial would train on the CPU; in a container "
            f"allow the driver's utilities (NVIDIA_DRIVER_CAPABILITIES=compute,utility), {hide}."
        )
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    raise UserError(
        f"rank {rank} on {host} was given a GPU and PyTorch sees none: torch.cuda.is_available() is False, "
        f"torch.version.cuda={built_for}, CUDA_VISIBLE_DEVICES={visible}; "
        "`python -c 'import torch; torch.cuda.init()'` there says why. Update the driver or install a PyTorch built "
        f"for its CUDA, {hide} to train on the CPU."
    )
