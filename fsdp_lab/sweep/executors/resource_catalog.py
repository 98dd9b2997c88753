"""Resources that trials need, and those of the cluster: which trials may run side by side."""

from __future__ import annotations

import ray

from fsdp_lab.config import SweepConfig, workers_of
from fsdp_lab.engine import resources

_ROUNDING = 1e-6  # of sums of shares of a core


class ResourceCatalog:
    """The resources that trials need, and those of the cluster, which change with its nodes.

    Attributes:
        taken: Tune's name of a running trial -> its resources.
    """

    def __init__(self) -> None:
        self._needs: dict[str, dict[str, float]] = {}
        self._checked: set[int] = set()  # configurations, which their trials keep
        self.taken: dict[str, dict[str, float]] = {}

    def of(self, config: SweepConfig) -> dict[str, float]:
        """Return the resources of a trial's workers together.

        Raises:
            ConfigError: the cluster could not hold them when they were first compared; or the settings do not suit
                their number.
        """
        key = str(config.cluster)
        if id(config) not in self._checked:
            config.check(workers_of(config))
            self._checked.add(id(config))
        if key not in self._needs:
            self._needs[key] = resources.check_capacity(config.cluster, workers_of(config))
        return self._needs[key]

    def has_room(self, config: SweepConfig) -> bool:
        """Return whether a trial fits beside the running ones. The first always does: it waits for nodes that died."""
        if not self.taken:
            return True
        total, all_taken = ray.cluster_resources(), self.taken.values()
        return all(
            amount + sum(taken.get(name, 0.0) for taken in all_taken) <= total.get(name, 0.0) + _ROUNDING
            for name, amount in self.of(config).items()
        )
