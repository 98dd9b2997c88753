"""The nodes of a cluster, and their changes while a sweep runs."""

from __future__ import annotations

import socket
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fsdp_lab.record.trial_files import read_places, write_places
from fsdp_lab.wording import resources_text

_ANSWER_S = 2.0
_ROUNDING = 1e-6  # of quotients of shares of a core


@dataclass(frozen=True)
class Node:
    """A node of the cluster, alive or dead.

    Attributes:
        id: Ray's.
        port: of its raylet.
        host: its name.
        resources: by Ray's names.
    """

    id: str
    address: str
    port: int
    host: str
    alive: bool
    resources: Mapping[str, float]

    def __str__(self) -> str:
        return f"{self.address} ({self.host})"


def nodes() -> list[Node]:
    """Return all nodes that Ray remembers, dead ones too."""
    import ray

    names = ("NodeID", "NodeManagerAddress", "NodeManagerPort", "NodeManagerHostname", "Alive", "Resources")
    return [Node(*(node[name] for name in names)) for node in ray.nodes()]


def nodes_asked() -> list[Node]:
    """Return `nodes`, with a node that does not answer as dead: Ray takes some twenty seconds to notice."""
    return [node if not node.alive or answers(node) else replace(node, alive=False) for node in nodes()]


def answers(node: Node) -> bool:
    """Whether a node's raylet takes connections; all nodes of a cluster have to reach it."""
    try:
        socket.create_connection((node.address, node.port), _ANSWER_S).close()
    except OSError:
        return False
    return True


def lost(known: Collection[str], now: Sequence[Node]) -> list[Node]:
    """Return the nodes, of some ids, that died and have not come back.

    A node that comes back has another id, and the same address.
    """
    there = {node.address for node in now if node.alive}
    return list({n.address: n for n in now if n.id in known and not n.alive and n.address not in there}.values())


def groups_that_fit(group: Mapping[str, float], now: Sequence[Node]) -> int:
    """Return how many groups of workers the nodes can hold, each group on one node."""
    return sum(
        min(
            (int(node.resources.get(name, 0.0) / amount + _ROUNDING) for name, amount in group.items() if amount),
            default=0,
        )
        for node in now
        if node.alive
    )


class NodeWatch:
    """Tracks the nodes that a sweep has seen.

    Attributes:
        known: their ids.
    """

    def __init__(self, now: Sequence[Node]) -> None:
        self._alive = {node.id: node for node in now if node.alive}
        self.known = set(self._alive)

    def changes(self, now: Sequence[Node]) -> list[str]:
        """Return messages about changes since the last call."""
        before, self._alive = self._alive, {node.id: node for node in now if node.alive}
        self.known |= set(self._alive)
        lines = [
            f"node {node} joined with {resources_text(node.resources)}; the next trials use it"
            for number, node in self._alive.items()
            if number not in before
        ]
        lines += [
            f"node {node} went down with {resources_text(node.resources)}; its trials resume from their last "
            "checkpoint once resources are free"
            for number, node in before.items()
            if number not in self._alive
        ]
        return lines


def own_node() -> dict[str, str]:
    """Return the node of this process, by Ray's name and its address."""
    import ray

    return {"node": ray.get_runtime_context().get_node_id(), "address": ray.util.get_node_ip_address()}


def write_rank_nodes(folder: Path, worker_group: Any) -> set[str]:
    """Write down which node each rank of a trial is on, in the order of the ranks; returns these nodes."""
    rank_nodes = worker_group.execute(own_node)
    write_places(folder, rank_nodes)
    return {node["node"] for node in rank_nodes}


def dead_node_of(folder: Path, rank: int) -> Node | None:
    """Return the node that a rank was on, if that node has died; else None."""
    own_id = read_places(folder)[rank : rank + 1]
    return next((node for node in nodes() if node.id in own_id and not (node.alive and answers(node))), None)
