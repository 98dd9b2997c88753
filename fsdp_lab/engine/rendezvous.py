"""How the ranks of a trial meet: by a file on one machine, by a port of rank 0's node between machines.

PyTorch's store for the latter listens on every interface and asks nobody who he is: whoever reaches the port may send
ranks elsewhere. A file in a folder that only this user enters has no port.
"""

from __future__ import annotations

import os
import sys
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_DRIVER_FOLDER = "FSDP_LAB_MEETING"  # in the environment of every process of a Ray that was started here
_kept: list[tempfile.TemporaryDirectory[str]] = []


def _private_folder(inside: str | None = None) -> tempfile.TemporaryDirectory[str]:
    # processes that are being killed may still write
    return tempfile.TemporaryDirectory(prefix="fsdp_lab_", dir=inside, ignore_cleanup_errors=True)


def keep_meetings_here() -> None:
    """Keep the folders of all trials in one of this process, which is gone after `end_meetings`: a trial's own process
    is often killed. What a kill of this one leaves is empty but for sockets' names, and the system's to clear."""
    _kept.append(_private_folder())
    os.environ[_DRIVER_FOLDER] = _kept[-1].name


def end_meetings() -> None:
    """Remove what `keep_meetings_here` made."""
    while _kept:
        _kept.pop().cleanup()
        os.environ.pop(_DRIVER_FOLDER, None)


@contextmanager
def meeting_folder() -> Iterator[str]:
    """A folder of this machine's that only this user enters, for as long as a trial takes."""
    driver = os.environ.get(_DRIVER_FOLDER)
    with _private_folder(driver if driver and os.path.isdir(driver) else None) as folder:
        yield folder


def node_id() -> str:
    """Ray's name of the node that this process is on."""
    import ray

    return ray.get_runtime_context().get_node_id()


def all_on(node: str, worker_group: Any) -> bool:
    """Whether every worker of a group is on the node."""
    return set(worker_group.execute(node_id)) == {node}


def meet_by_file(worker_group: Any, folder: str, backend: str, timeout_s: float) -> None:
    """Make the process group of workers that are all on this machine; a new file for each attempt."""
    import ray

    path = str(Path(folder, uuid.uuid4().hex))
    ranks = range(len(worker_group))
    ray.get([worker_group.execute_single_async(rank, join_by_file, path, backend, timeout_s) for rank in ranks])


def join_by_file(path: str, backend: str, timeout_s: float) -> None:
    """Join the process group as the rank that Ray Train made of this worker. Sets the variables that launchers set, but
    for MASTER_ADDR and MASTER_PORT: there is no such port."""
    import ray.train

    from fsdp_lab.training.distributed import join_by_file_store

    context = ray.train.get_context()
    rank, world_size = context.get_world_rank(), context.get_world_size()
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_RANK=str(context.get_local_rank()),
        LOCAL_WORLD_SIZE=str(context.get_local_world_size()),
        NODE_RANK=str(context.get_node_rank()),
    )
    if "nccl" in backend:  # as Ray does: a rank that fails ends the others
        os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
    if sys.platform == "linux":  # else gloo listens where the host's name points, which may be the network
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    join_by_file_store(path, backend, rank, world_size, timeout_s)
