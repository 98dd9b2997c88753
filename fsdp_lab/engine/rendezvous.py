"""How the ranks of a trial meet: by PyTorch's own store at rank 0, as under `torchrun`.

Ray Train runs `on_start` when the workers exist and before they train. Ranks get the variables that launchers set, and
join the process group themselves when they begin to train.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

from fsdp_lab.record.trial_json import changing

_kept: list[socket.socket] = []


def backend_config(folder: Path | None) -> Any:
    """Return what Ray Train does with workers before they train.

    Args:
        folder: a trial's, which gets where its workers are; None: they train none.
    """
    from ray.train.backend import Backend, BackendConfig

    class Meeting(Backend):
        share_cuda_visible_devices = True  # NCCL wants to see the GPUs of all ranks on a node

        def on_start(self, worker_group: Any, backend_config: Any) -> None:
            places = worker_group.execute(own_node)
            if folder is not None:
                with changing(folder) as trial:
                    trial.nodes = places
            worker_group.execute(set_variables, places[0]["address"], worker_group.execute_single(0, keep_port))

    class Config(BackendConfig):
        backend_cls, backend = Meeting, None  # as a `TorchConfig` has them

    return Config()


def own_node() -> dict[str, str]:
    """Return the node of this process, by Ray's name and its address."""
    import ray

    return {"node": ray.get_runtime_context().get_node_id(), "address": ray.util.get_node_ip_address()}


def keep_port() -> int:
    """Return a port at which only a process that asks for it by number can listen.

    PyTorch's store listens there seconds later, and every connection of this machine takes a free port. A socket that
    is bound and does not listen keeps others away; the store, which reuses addresses as this socket does, binds beside.
    """
    _kept[:] = [keeper := socket.socket()]
    keeper.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    keeper.bind(("", 0))
    port: int = keeper.getsockname()[1]
    return port


def set_variables(address: str, port: int) -> None:
    """Set what launchers set, for this worker's rank; rank 0 listens at the address and the port."""
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
    for name, addresses in interfaces:  # none has it behind address translation
        if any(each.address.partition("%")[0] == address for each in addresses):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
            os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={name}")  # without "=" it is a prefix
            return
