"""What FSDP1 and FSDP2 have in common."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from torch import nn

from fsdp_lab.config.parallel import ShardingConfig
from fsdp_lab.training.parallel.base import Parallel
from fsdp_lab.training.parallel.units import in_groups
from fsdp_lab.training.shardable import check_parameters, make_contiguous
from fsdp_lab.training.unit_hooks import UnitHooks, check_own_parameters


class Sharded(Parallel):
    """Each rank has a part of each parameter, and units of the model are gathered when they are used."""

    is_sharded: ClassVar[bool] = True
    _units: Sequence[nn.Module]
    _groups: Sequence[Sequence[nn.Module]]  # what shares a unit, without the root

    @staticmethod
    def axes(sharding: ShardingConfig, world_size: int) -> dict[str, int]:
        """Return the ranks that share a model, within replicas of it."""
        shards = {"dp_shard": sharding.dp_shard(world_size)}
        return shards if sharding.dp_replicate == 1 else {"dp_replicate": sharding.dp_replicate, **shards}

    def divide(self, model: nn.Module, units: Sequence[nn.Module], last: Sequence[nn.Module]) -> None:
        """Check the model's units, and let them be looked at."""
        self._units, groups = units, in_groups(model, units, self.config.sharding.blocks_per_unit)
        self._groups = [*groups, [*last]] if last else groups
        check_parameters(model, self._groups, self.config)
        make_contiguous(model)
        names = {id(module): name for name, module in model.named_modules()}
        for unit in units:
            UnitHooks(unit, names[id(unit)], self.config)  # before FSDP2's own hooks, which run after these

    def wrap(self, model: nn.Module, find_unused: bool) -> None:
        """Let modules check that they are called with their own parameters."""
        super().wrap(model, find_unused)
        check_own_parameters(model, self.config)
