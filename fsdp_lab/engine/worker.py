"""The function of Ray Train's workers: each has its rank trained in a process of its own, and passes on the reports."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fsdp_lab import quick_imports
from fsdp_lab.engine.mirror import Sender, scratch_folder
from fsdp_lab.engine.rank import Work
from fsdp_lab.engine.rank_process import RankFailed, RankOutOfMemory, how_it_ended, rank_process
from fsdp_lab.engine.rendezvous import gpu_index, take_meeting
from fsdp_lab.storage import Storage


def train_worker(job: dict[str, Any]) -> None:
    """Have a rank trained: the function of Ray Train.

    Ray gets no checkpoint: its manager would refuse a run whose older ones were removed.

    Raises:
        RankFailed: the rank did not train to the end. `Attempts` decides whether the workers start again.
    """
    import ray.train

    quick_imports.end()
    rank = ray.train.get_context().get_world_rank()
    meeting, listener = take_meeting()
    with own_folder(job, rank) as (folder, sender):
        work = Work(job, rank, str(folder), meeting, gpu_index() if job["use_gpu"] else None)
        with rank_process(asdict(work), listener) as process:
            for epoch in process.epochs():
                if sender is not None:
                    sender.send()  # the driver is to find the epoch
                ray.train.report({"epoch": epoch})
            status, done = process.wait(), process.done
    if process.out_of_memory:
        raise RankOutOfMemory(f"rank {rank} was killed: the host is out of memory")
    if not done or status:
        raise RankFailed(how_it_ended(status))


@contextmanager
def own_folder(job: dict[str, Any], rank: int) -> Iterator[tuple[Path, Sender | None]]:
    """Yield the folder that a rank writes into, and what sends its files if it is not the trial's.

    Raises:
        FileNotFoundError: the trial's folder is not on this node.
    """
    if job["storage"] is not None:
        with scratch_folder() as scratch:
            sender = Sender(Storage(job["storage"]), scratch)
            sender.begin(rank)
            try:
                yield scratch, sender
            finally:
                sender.end()
        return
    folder = Path(job["folder"])
    if not folder.is_dir():
        raise FileNotFoundError(
            f"{folder} is not on {socket.gethostname()}: it was removed, or this node does not mount it; set "
            "cluster.storage_path to a folder on a disk that every node mounts, or to an address in object storage"
        )
    yield folder, None
