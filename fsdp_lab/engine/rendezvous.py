"""How the ranks of a trial meet, and which network interfaces they use.

Ranks on the driver's node meet by a file in a folder that only this user can enter. Others meet at a port of rank 0's.
PyTorch's store has no authentication: whoever reaches the port can redirect ranks. So it listens at one address only:
the loopback if all ranks are on one node, else the one by which Ray knows the node.
"""

from __future__ import annotations

import os
import socket
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_DRIVER_FOLDER = "FSDP_LAB_MEETING"  # in the environment of every process of a Ray that was started here
_kept: list[tempfile.TemporaryDirectory[str]] = []


def _private_folder(inside: str | None = None) -> tempfile.TemporaryDirectory[str]:
    # processes that are being killed may still write
    return tempfile.TemporaryDirectory(prefix="fsdp_lab_", dir=inside, ignore_cleanup_errors=True)


def keep_meetings_here() -> str:
    """Keep the folders of all trials in one folder of this process, which `end_meetings` removes; returns the folder.

    A trial's own process is often killed. If this one is killed, empty folders with names of sockets remain for the
    system to clear.
    """
    _kept.append(_private_folder())
    os.environ[_DRIVER_FOLDER] = _kept[-1].name
    return _kept[-1].name


def end_meetings() -> None:
    """Remove the folder that `keep_meetings_here` made."""
    while _kept:
        _kept.pop().cleanup()
        os.environ.pop(_DRIVER_FOLDER, None)


@contextmanager
def meeting_folder() -> Iterator[str]:
    """Yield a folder on this machine that only this user can enter, for the time of a trial."""
    driver = os.environ.get(_DRIVER_FOLDER)
    with _private_folder(driver if driver and os.path.isdir(driver) else None) as folder:
        yield folder


def arrange_meeting(worker_group: Any, nodes: set[str], here: str, folder: str, backend: str, timeout_s: float) -> None:
    """Tell a trial's workers where their ranks meet.

    Args:
        worker_group: Ray Train's.
        nodes: the nodes of the workers.
        here: the node of this process.
        folder: on the node `here`, for workers that are all on it.
        backend: of the process group.
        timeout_s: of joining and of collectives.
    """
    if nodes == {here}:
        path = str(Path(folder, uuid.uuid4().hex))  # a new file for each attempt
        execute_on_all(worker_group, meet_at_file, path, backend, timeout_s)
    else:
        (opened,) = execute_on_all(worker_group, open_port, len(nodes) == 1, only_first=True)
        execute_on_all(worker_group, meet_at_port, *opened, backend, timeout_s)


def execute_on_all(worker_group: Any, function: Callable[..., Any], *arguments: Any, only_first: bool = False) -> Any:
    """Return the results of a function on every worker, or only on rank 0. Raises the first error."""
    import ray

    ranks = range(1 if only_first else len(worker_group))
    return ray.get([worker_group.execute_single_async(rank, function, *arguments) for rank in ranks])


def meet_at_file(path: str, backend: str, timeout_s: float) -> None:
    """Let the ranks of workers on one machine meet. There is no MASTER_ADDR: no process listens."""
    rank, world_size = set_launcher_variables(backend)
    if sys.platform == "linux":  # else gloo listens where the host's name points, which may be the network
        set_interface(_LOOPBACK)
    _meeting.update(path=path, backend=backend, rank=rank, world_size=world_size, timeout_s=timeout_s)


_LOOPBACK = "127.0.0.1"
_meeting: dict[str, Any] = {}  # this worker's
_port: list[socket.socket] = []  # rank 0's, from `open_port` to `take_meeting`


def open_port(one_node: bool) -> tuple[str, int]:
    """Listen for the other ranks at a free port, and return the address and the port.

    The address is the one by which Ray knows this node, or the loopback if all ranks are on this node. PyTorch itself
    would listen on every interface.
    """
    import ray

    address = _LOOPBACK if one_node else ray.util.get_node_ip_address()
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    _port[:] = [socket.create_server((address, 0), family=family, backlog=socket.SOMAXCONN)]
    return address, _port[0].getsockname()[1]


def meet_at_port(address: str, port: int, backend: str, timeout_s: float) -> None:
    """Let the ranks meet at rank 0's port."""
    import ray

    rank, world_size = set_launcher_variables(backend)
    os.environ.update(MASTER_ADDR=address, MASTER_PORT=str(port))
    set_interface(address if address == _LOOPBACK else ray.util.get_node_ip_address())
    _meeting.update(
        host=address, port=port, backend=backend, rank=rank, world_size=world_size, timeout_s=timeout_s,
        listener=_port[0].fileno() if rank == 0 else None,
    )  # fmt: skip


def take_meeting() -> tuple[dict[str, Any], int | None]:
    """Return how the rank of this worker meets the others, and the listening socket that it inherits; None: none."""
    listener = _port.pop().detach() if _port else None
    return dict(_meeting), listener


def join(meeting: dict[str, Any]) -> None:
    """Join the process group, in the rank's process.

    Args:
        meeting: from `take_meeting`.
    """
    from fsdp_lab.training.distributed import join_by_file_store, join_by_tcp_store

    if "path" in meeting:
        join_by_file_store(**meeting)
    else:
        join_by_tcp_store(**meeting)


def gpu_index() -> int:
    """Return the index of this worker's GPU among those that it sees: Ray shows it all of the trial's on this node.

    Raises:
        RuntimeError: it does not see its GPU.
    """
    import ray

    own = str(ray.get_gpu_ids()[0])
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:  # Ray was told not to set it
        return int(own)
    if own not in visible.split(","):
        raise RuntimeError(f"Ray gave GPU {own} to this worker, which is not in CUDA_VISIBLE_DEVICES={visible}")
    return visible.split(",").index(own)


def set_launcher_variables(backend: str) -> tuple[int, int]:
    """Set the variables that launchers set, for the rank's process; returns its rank and the number of ranks."""
    import ray.train

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
    return rank, world_size


def set_interface(address: str) -> None:
    """Let gloo and NCCL use the interface with this address, unless the user has named one.

    gloo would use the interface that the host's name resolves to, which is the loopback on many machines.
    """
    name = interface_of(address)
    if name is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={name}")  # without "=" it is a prefix


def interface_of(address: str) -> str | None:
    """Return the name of this machine's interface with an address; None without one, as behind address translation."""
    import psutil  # here: a rank imports this module, and needs PyTorch alone

    interfaces = psutil.net_if_addrs().items()
    return next(
        (name for name, all_of in interfaces if any(a.address.partition("%")[0] == address for a in all_of)), None
    )
