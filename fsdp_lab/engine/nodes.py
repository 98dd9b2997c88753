"""The nodes of a cluster, and their changes while a sweep runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fsdp_lab.wording import resources_text

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
