"""Training of one rank: the training core, its errors as `RankFailure`, and the check that PyTorch sees its GPU."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from fsdp_lab.config import TrialConfig, UserError
from fsdp_lab.engine.failures import code_of, failure_of
from fsdp_lab.hardware import driver, num_gpus
from fsdp_lab.record.failures import RankFailure
from fsdp_lab.record.reasons import Code

if TYPE_CHECKING:  # it imports PyTorch
    from fsdp_lab.training.train import Reporter


def train_rank(
    config: TrialConfig,
    folder: Path,
    rank: int,
    reporter: Reporter,
    on_cpu: bool = False,
    storage: str | None = None,
    join: Callable[[], None] = lambda: None,
) -> None:
    """Train one rank of a trial in this process.

    Args:
        config: the trial.
        folder: the trial's, or this rank's own.
        rank: of this process.
        reporter: where results go.
        on_cpu: whether the trial is meant to train on a CPU; then a GPU that PyTorch sees is an error.
        storage: the trial's address in object storage, see `train`.
        join: makes the process group; by default `train` does.

    Raises:
        RankFailure: any error, with its reason. KeyboardInterrupt is raised as it is.
    """
    from fsdp_lab.training import DivergedError, train
    from fsdp_lab.training.distributed import keep_threads

    try:
        keep_threads()
        if on_cpu:
            check_no_gpu()
        join()
        if not folder.is_dir():  # `train` would make it again
            raise FileNotFoundError(f"{folder} is gone: it was removed or moved before the training began")
        train(config, folder, reporter, storage=storage)
    except (RankFailure, KeyboardInterrupt):
        raise
    except DivergedError as error:
        raise failure_of(error, rank, Code.diverged, folder) from error
    except BaseException as error:
        raise failure_of(error, rank, code_of(error), folder) from error


def unseen_gpu(rank: int) -> str | None:
    """Compare this worker's GPU with what PyTorch sees, before NCCL is started on it.

    Returns:
        the problem; None: PyTorch sees the GPU.
    """
    from fsdp_lab.training.distributed import sees_cuda

    available, built_for = sees_cuda()
    if available:
        return None
    installed, visible = driver(), os.environ.get("CUDA_VISIBLE_DEVICES")
    count = f"the driver's NVML counts {num_gpus()}"
    if installed is not None:
        count += f" ({installed.version}, up to CUDA {'.'.join(map(str, installed.cuda or ('?',)))})"
    return (
        f"rank {rank} on {socket.gethostname()} was given a GPU and PyTorch sees none: torch.cuda.is_available() is "
        f"False, torch.version.cuda={built_for}, CUDA_VISIBLE_DEVICES={visible}, {count}; `python -c 'import "
        "torch; torch.cuda.init()'` there says why. Update the driver or install a PyTorch built for its CUDA, or hide "
        'the GPUs with CUDA_VISIBLE_DEVICES="" to train on the CPU.'
    )


def refuse_unseen_gpu(rank: int) -> None:
    """Raise a UserError if PyTorch does not see the GPU of this rank."""
    if problem := unseen_gpu(rank):
        raise UserError(problem)


def check_no_gpu() -> None:
    """Refuse to train on a CPU if PyTorch sees GPUs that the driver did not count.

    Raises:
        UserError: it does.
    """
    from fsdp_lab.training.distributed import sees_cuda

    if sees_cuda()[0]:
        raise UserError(
            f"PyTorch sees GPUs on {socket.gethostname()}, but NVML (libnvidia-ml.so.1), which Ray and fsdp_lab ask, "
            "counts none, so this trial would train on the CPU; in a container allow the driver's utilities "
            '(NVIDIA_DRIVER_CAPABILITIES=compute,utility), or hide the GPUs with CUDA_VISIBLE_DEVICES="".'
        )
