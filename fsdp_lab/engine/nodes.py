"""The nodes of a cluster: which are there, and what becomes of them while a sweep runs."""

from __future__ import annotations

import socket
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fsdp_lab.engine import ray_private
from fsdp_lab.engine.files import read_object
from fsdp_lab.files import write_json

_PLACES = "places.json"
_ANSWER_S = 2.0
_COUNTED = ("CPU", "GPU")


@dataclass(frozen=True)
class Node:
    """A node that is there, or was. `port`: of its raylet. `draining`: the cluster is about to take it away."""

    id: str
    address: str
    port: int
    host: str
    alive: bool
    resources: Mapping[str, float]
    draining: bool = False

    def __str__(self) -> str:
        return f"{self.address} ({self.host})"

    @property
    def holds(self) -> str:
        return words_for(self.resources)


def words_for(resources: Mapping[str, float]) -> str:
    """`2 CPU and 1 GPU`; only what trials take."""
    return " and ".join(f"{resources[name]:g} {name}" for name in _COUNTED if resources.get(name)) or "no cores"


def nodes() -> list[Node]:
    """All that Ray remembers, dead ones too."""
    import ray

    draining = ray_private.draining_nodes()
    return [
        Node(
            node["NodeID"],
            node["NodeManagerAddress"],
            node["NodeManagerPort"],
            node["NodeManagerHostname"],
            node["Alive"],
            node["Resources"],
            node["NodeID"] in draining,
        )
        for node in ray.nodes()
    ]


def nodes_asked() -> list[Node]:
    """As `nodes`, but a node that does not answer counts as dead: Ray takes some twenty seconds to find out."""
    return [node if not node.alive or answers(node) else replace(node, alive=False) for node in nodes()]


def answers(node: Node) -> bool:
    """Whether a node's raylet takes connections; all nodes of a cluster have to reach it."""
    try:
        socket.create_connection((node.address, node.port), _ANSWER_S).close()
    except OSError:
        return False
    return True


def lost(known: Collection[str], now: Sequence[Node]) -> list[Node]:
    """Return those nodes, of some ids, that died and have not come back: a node that does has another id, and its
    address."""
    there = {node.address for node in now if node.alive}
    return list({n.address: n for n in now if n.id in known and not n.alive and n.address not in there}.values())


def groups_that_fit(group: Mapping[str, float], now: Sequence[Node]) -> int:
    """Return how many groups of workers the nodes can hold, each group on one node."""
    return sum(
        min((int(node.resources.get(name, 0.0) / amount) for name, amount in group.items() if amount), default=0)
        for node in now
        if node.alive
    )


class NodeWatch:
    """Follows which nodes a sweep has seen. `known`: their ids."""

    def __init__(self, now: Sequence[Node]) -> None:
        self._alive = {node.id: node for node in now if node.alive}
        self.known = set(self._alive)

    def changes(self, now: Sequence[Node]) -> list[str]:
        """Return what to tell the user of changes since the last call."""
        before, self._alive = self._alive, {node.id: node for node in now if node.alive}
        self.known |= set(self._alive)
        told = [
            f"node {node} joined with {node.holds}; the next trials use it"
            for number, node in self._alive.items()
            if number not in before
        ]
        told += [
            f"node {node} went down with {node.holds}; its trials resume from their last checkpoint once there is room"
            for number, node in before.items()
            if number not in self._alive
        ]
        told += [
            f"node {node} is draining: it gets no new workers, and those on it are ended with it"
            for number, node in self._alive.items()
            if node.draining and not (number in before and before[number].draining)
        ]
        return told


def own_place() -> dict[str, str]:
    """The node that this process is on, by Ray's name and its address."""
    import ray

    return {"node": ray.get_runtime_context().get_node_id(), "address": ray.util.get_node_ip_address()}


def keep_places(folder: Path, worker_group: Any) -> set[str]:
    """Write down which node each rank of a trial is on, in the order of the ranks; returns these nodes."""
    places = worker_group.execute(own_place)
    ids = [place["node"] for place in places]
    write_json(folder / _PLACES, {"nodes": ids, "addresses": [place["address"] for place in places]}, parents=False)
    return set(ids)


def dead_node_of(folder: Path, rank: int) -> Node | None:
    """Return the node that a rank was on, where that node has died."""
    ids = (read_object(folder / _PLACES, nodes=list) or {"nodes": []})["nodes"]
    place = ids[rank : rank + 1]
    return next((node for node in nodes() if node.id in place and not (node.alive and answers(node))), None)
