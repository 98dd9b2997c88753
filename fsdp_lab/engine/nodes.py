"""The nodes of a cluster."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

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
