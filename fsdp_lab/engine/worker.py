"""The function of Ray Train's workers: trains a rank in a Ray worker, which reports to the driver."""

from __future__ import annotations

import faulthandler
import os
import shutil
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from fsdp_lab.config import TrialConfig, from_dict
from fsdp_lab.engine.failures import code_of, failure_of
from fsdp_lab.engine.files_of_ranks import Uploads, at_end, scratch_folder
from fsdp_lab.engine.hang import stacks_file
from fsdp_lab.engine.rank import RankReporter, check_gpu, train_rank
from fsdp_lab.machine.hardware import WORKER_CPUS
from fsdp_lab.record.reasons import Code
from fsdp_lab.record.trial_json import RankFailure
from fsdp_lab.storage.locks import share_until_exit
from fsdp_lab.storage.objects import Storage

_SENT_S = 3.0  # for the other hung ranks to send their stacks: the first rank that ends takes them down
_PEER_S = 1.0  # so that Ray learns of the peer's error, which is the cause, before this rank's


def train_worker(job: dict[str, Any]) -> None:
    """Train a rank: the function that Ray Train calls.

    Ray gets no checkpoint: its manager would reject a run after older checkpoints were removed.

    Args:
        job: a `Job`, as plain values.

    Raises:
        RankFailure: the rank did not train to the end.
    """
    import ray.train

    rank = ray.train.get_context().get_world_rank()
    try:
        with own_folder(job, rank) as (folder, uploads):
            prepare_process(job, folder, rank)
            config = from_dict(TrialConfig, job["config"])
            stacks = stacks_file(folder, rank)
            with stacks.open("w") as file:
                if uploads is not None:
                    threading.Thread(target=end_when_stuck, args=(uploads, stacks), daemon=True).start()
                reporter = RankReporter(
                    lambda content: report(content, uploads),
                    (folder / "progress.json").open("w") if rank == 0 else None,
                    file,
                    job["timeout_s"],
                    exits=uploads is None,
                )
                reporter.phase("importing PyTorch and joining the other workers")
                try:
                    join = partial(join_ranks, rank, job["use_gpu"], config)
                    train_rank(config, folder, rank, reporter, job["storage"], join)
                finally:
                    stacks.unlink(missing_ok=True)
        ray.train.report({})  # the trial need not wait for Ray Train, which ends slowly
    except RankFailure as failure:
        if failure.reason.code is Code.peer_lost:
            time.sleep(_PEER_S)
        raise
    except BaseException as error:
        raise failure_of(error, rank, code_of(error)) from error


def end_when_stuck(uploads: Uploads, stacks: Path) -> None:
    """Wait for the stacks of a hung rank, send its files, because nobody looks on its node, and end the process."""
    while not (stacks.exists() and stacks.stat().st_size):
        time.sleep(1.0)
    try:
        uploads.send()
        time.sleep(_SENT_S)
    finally:
        os._exit(1)


def report(content: dict[str, Any], uploads: Uploads | None) -> None:
    """Report to the trial through Ray Train; with an epoch, send this rank's files first, if the folder is not shared.

    Every rank must call this, because a Ray report waits for all ranks.
    """
    import ray.train

    if uploads is not None and "metrics" in content:
        uploads.send()
    ray.train.report(content)


def prepare_process(job: dict[str, Any], folder: Path, rank: int) -> None:
    """Set up the working directory, the log and the lock of a rank in this process."""
    if os.path.isdir(job["launched_in"]):  # another node may lack that folder; its paths are then its own
        os.chdir(job["launched_in"])
    os.environ[WORKER_CPUS] = str(job["cpus_per_worker"])
    share_until_exit(folder / ".alive")
    redirect_output(folder / "logs" / f"rank{rank}.log")
    faulthandler.enable()


def join_ranks(rank: int, use_gpu: bool, config: TrialConfig) -> None:
    """Choose the GPU that Ray gave to this rank, and join the process group."""
    from fsdp_lab.training.distributed import choose_gpu, join_process_group

    check_gpu(rank, use_gpu)
    if use_gpu:
        from ray.train.torch import get_device

        choose_gpu(get_device().index)
    join_process_group(config.offload.backend(use_gpu))


def redirect_output(path: Path) -> None:
    """Redirect everything that this process prints, from C too, to a file of the trial."""
    path.parent.mkdir(exist_ok=True)  # without parents: the trial's folder may have been removed
    out = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(out, 1)
    os.dup2(out, 2)
    os.close(out)
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115 - open as long as the process lives
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115


@contextmanager
def own_folder(job: dict[str, Any], rank: int) -> Iterator[tuple[Path, Uploads | None]]:
    """Yield the folder that a rank writes into, and its uploads if that is not the trial's folder."""
    if job["storage"] is not None:
        scratch = scratch_folder()
        try:
            storage = Storage(job["storage"])
            uploads = Uploads(storage, scratch)
            log = scratch / "logs" / f"rank{rank}.log"
            log.parent.mkdir()
            with suppress(FileNotFoundError):  # of an earlier attempt
                storage.get(f"logs/{log.name}", log)
            with at_end(uploads.send):
                yield scratch, uploads
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
        return
    folder = Path(job["folder"])
    if not folder.is_dir():
        raise FileNotFoundError(
            f"{folder} is not on {socket.gethostname()}: it was removed, or this node does not mount it; set "
            "cluster.storage_path to a folder on a disk that every node mounts, or to an address in object storage"
        )
    yield folder, None
