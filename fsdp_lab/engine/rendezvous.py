"""The rendezvous of a trial's ranks: PyTorch's own store at rank 0, as under `torchrun`.

Ray Train runs `on_start` when the workers exist and before they train. Ranks get the variables that launchers set, and
join the process group themselves when they start to train.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

from fsdp_lab.record.trial_json import changing

_kept: list[socket.socket] = []


def backend_config(folder: Path | None) -> Any:
    """Return the Ray Train backend that prepares workers before they train.

    Args:
        folder: of the trial, to record the workers' nodes; None: the workers train no trial.
    """
    from ray.train.backend import Backend, BackendConfig

    class Meeting(Backend):
        share_cuda_visible_devices = True  # NCCL needs to see the GPUs of all ranks on a node

        def on_start(self, worker_group: Any, backend_config: Any) -> None:
            places = worker_group.execute(own_node)
            if folder is not None:
                with changing(folder) as trial:
                    trial.nodes = places
            worker_group.execute(set_variables, places[0]["address"], worker_group.execute_single(0, keep_port))

    class Config(BackendConfig):
        backend_cls, backend = Meeting, None  # as in `TorchConfig`

    return Config()


def own_node() -> dict[str, str]:
    """Return the node of this process, by Ray's name and its address."""
    import ray

    return {"node": ray.get_runtime_context().get_node_id(), "address": ray.util.get_node_ip_address()}


def keep_port() -> int:
    """Reserve a port, and return it: only a process that asks for its number can listen there.

    PyTorch's store listens there seconds later, and meanwhile any connection of this machine could get a free port. A
    socket that is bound and does not listen prevents that. The store can still bind, because both reuse addresses.
    """
    _kept[:] = [keeper := socket.socket()]
    keeper.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    keeper.bind(("", 0))
    port: int = keeper.getsockname()[1]
    return port


def set_variables(address: str, port: int) -> None:
    """Set the variables that launchers set, for this worker's rank; rank 0 listens at the address and the port."""
    import ray.train

    context = ray.train.get_context()
    os.environ.update(
        MASTER_ADDR=address,
        MASTER_PORT=str(port),
        RANK=str(context.get_world_rank()),
        WORLD_SIZE=str(context.get_world_size()),
        LOCAL_RANK=str(context.get_local_rank()),
        LOCAL_WORLD_SIZE=str(context.get_local_world_size()),
        NODE_RANK=str(context.get_node_rank()),
    )
    set_interface(ray.util.get_node_ip_address())


def set_interface(address: str) -> None:
    """Let gloo and NCCL use the interface with this address, unless the user has named one.

    gloo would use the interface that the host's name resolves to, which is the loopback on many machines.
    """
    import psutil

    interfaces = psutil.net_if_addrs().items()
    for name, addresses in interfaces:  # no interface has the address behind NAT
        if any(each.address.partition("%")[0] == address for each in addresses):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
            os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={name}")  # without "=" the name is a prefix
            return
