"""How the workers of a trial are divided."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Self

if TYPE_CHECKING:
    from fsdp_lab.config.trial import ShardingConfig


class Ranks(NamedTuple):
    """The degrees of a trial.

    Neighbouring ranks share a layer (`tp`); the next dimension shards parameters (`shard`); the last is the replicas.

    Attributes:
        workers: all ranks.
        replicas: of the sharded model.
        tp: ranks that share each layer, and the samples of a microbatch.
    """

    workers: int
    replicas: int
    tp: int

    @classmethod
    def of(cls, sharding: ShardingConfig, workers: int) -> Self:
        return cls(workers, sharding.dp_replicate, sharding.tp)

    @property
    def dp(self) -> int:
        """The number of parts of a batch."""
        return self.workers // self.tp

    @property
    def shard(self) -> int:
        """The number of ranks that a parameter is sharded over."""
        return self.workers // (self.replicas * self.tp)

    def shown(self, *divided_by: str) -> str:
        """Return text with the number of workers and the degrees above 1 that divide it, by their keys."""
        degrees = {"dp_replicate": self.replicas, "tp": self.tp}
        by = "".join(f" / sharding.{name}={degrees[name]}" for name in divided_by if degrees[name] > 1)
        return f"cluster.num_workers={self.workers}{by}"
