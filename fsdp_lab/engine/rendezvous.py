"""How the ranks of a trial meet, and which network interfaces they use.

Ranks on one node meet by a file in a folder that only this user can enter. Others meet at a port of rank 0's. PyTorch's
store has no authentication: whoever reaches the port can redirect ranks. So it listens only at the address by which
Ray knows the node, where PyTorch itself (and Ray's `TorchConfig`) would listen on every interface.
"""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path
from typing import Any

from fsdp_lab.engine.files_of_ranks import scratch_folder
from fsdp_lab.engine.nodes import write_rank_nodes
from fsdp_lab.hardware import visible_devices

_LOOPBACK = "127.0.0.1"
_JOIN_S = 1800.0  # for ranks to join, and for a collective: PyTorch's own limit for gloo

Place = str | tuple[str, int]  # a file in a private folder on one machine; or rank 0's host and port
_meeting: dict[str, Any] = {}  # this worker's
_port: list[socket.socket] = []  # rank 0's, until it joins


def backend_config(folder: Path, backend_name: str) -> Any:
    """Return what Ray Train does with workers before they train: they get to know where their ranks meet.

    Args:
        folder: the trial's, which gets the nodes of its ranks.
    """
    from ray.train.backend import Backend, BackendConfig

    class Meeting(Backend):
        share_cuda_visible_devices = True  # NCCL wants to see the GPUs of all ranks on a node

        def on_start(self, worker_group: Any, backend_config: Any) -> None:
            one_node = len(write_rank_nodes(folder, worker_group)) == 1
            place = worker_group.execute_single(0, name_file if one_node else open_port)
            worker_group.execute(meet, place, backend_name)

    class Config(BackendConfig):
        backend_cls = Meeting
        backend = backend_name  # as a `TorchConfig` has it

    return Config()


def name_file() -> str:
    """Return a new file in a folder that only this user can enter."""
    return str(scratch_folder() / "store")


def open_port() -> tuple[str, int]:
    """Listen for the other ranks at a free port, and return the address by which Ray knows this node, and the port."""
    import ray

    address = ray.util.get_node_ip_address()
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    _port[:] = [socket.create_server((address, 0), family=family, backlog=socket.SOMAXCONN)]
    return address, _port[0].getsockname()[1]


def meet(place: Place, backend: str) -> None:
    """Let the rank of this worker meet the others at a place; on one machine no process listens."""
    import ray

    rank, world_size = set_launcher_variables(backend)
    if not isinstance(place, str):
        os.environ.update(MASTER_ADDR=place[0], MASTER_PORT=str(place[1]))
        set_interface(ray.util.get_node_ip_address())
    elif sys.platform == "linux":  # else gloo listens where the host's name points, which may be the network
        set_interface(_LOOPBACK)
    _meeting.update(place=place, backend=backend, rank=rank, world_size=world_size)


def join() -> None:
    from fsdp_lab.training.distributed import join_by_file_store, join_by_tcp_store

    meeting = dict(_meeting, timeout_s=_JOIN_S)
    place = meeting.pop("place")
    if isinstance(place, str):
        join_by_file_store(place, **meeting)
    else:
        join_by_tcp_store(place[0], place[1], listener=_port.pop().detach() if _port else None, **meeting)


def gpu_index() -> int:
    """Return the index of this worker's GPU among those that it sees: Ray shows it all of the trial's on this node."""
    import ray

    own = str(ray.get_gpu_ids()[0])
    visible = visible_devices()
    if visible is None:  # Ray was told not to set it
        return int(own)
    if own not in visible.split(","):
        raise RuntimeError(f"Ray gave GPU {own} to this worker, which is not in CUDA_VISIBLE_DEVICES={visible}")
    return visible.split(",").index(own)


def set_launcher_variables(backend: str) -> tuple[int, int]:
    """Set the variables that launchers set; returns the rank and the number of ranks."""
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
    import psutil

    interfaces = psutil.net_if_addrs().items()
    for name, addresses in interfaces:  # none has it behind address translation
        if any(each.address.partition("%")[0] == address for each in addresses):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
            os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={name}")  # without "=" it is a prefix
            return
