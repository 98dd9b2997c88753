"""`sharding`: which modules become FSDP units, and how many replicas of the sharded model there are."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Optional  # OmegaConf reads this on every Python that this project supports

from fsdp_lab.config.axes.base import Axis, Where, refuse
from fsdp_lab.config.errors import CombinationError, ConfigError
from fsdp_lab.config.key import at_least_one, divisors, key

if TYPE_CHECKING:
    from fsdp_lab.config.ranks import Ranks
    from fsdp_lab.config.trial import TrialConfig


class Granularity(Enum):
    """Which modules become FSDP units; see `GranularityKeys.granularity`."""

    ddp = "ddp"
    root = "root"
    per_block = "per_block"
    per_layer = "per_layer"
    size_based = "size_based"


FEWEST_UNITS = ("ddp", "root", "per_block", "size_based", "per_layer")


@dataclass
class GranularityKeys:
    granularity: Granularity = key(Granularity.per_block, named_by_option=True)
    """What becomes an FSDP unit: none (`ddp`), the whole model, each block, each layer, or each module above a size."""
    dp_replicate: int = key(1, at_least_one)
    """Replicas of the sharded model; above 1 sharding is hybrid, over workers / (dp_replicate * tp) ranks."""
    min_num_params: Optional[int] = key(None, at_least_one)
    """Smallest number of parameters of a unit; `size_based` requires it."""
    blocks_per_unit: int = key(1, at_least_one)
    """Consecutive blocks that share one unit of `per_block`."""


def _check(trial: TrialConfig, ranks: Ranks) -> None:
    sharding = trial.sharding
    if sharding.granularity is Granularity.ddp:
        _check_ddp(trial)
    if sharding.blocks_per_unit > 1 and sharding.granularity is not Granularity.per_block:
        raise CombinationError(
            f"sharding.blocks_per_unit={sharding.blocks_per_unit} with sharding={sharding.granularity.name}: only "
            "sharding=per_block makes units of blocks; use sharding.blocks_per_unit=1 or sharding=per_block.",
        )
    if ranks.workers % ranks.replicas:
        raise CombinationError(
            f"sharding.dp_replicate={ranks.replicas} does not divide {ranks.shown()}; use one of "
            f"{divisors(ranks.workers)}.",
        )
    if sharding.granularity is Granularity.size_based and sharding.min_num_params is None:
        raise ConfigError(
            "sharding.min_num_params=null: sharding=size_based needs the smallest number of parameters of a unit; "
            "set for example sharding.min_num_params=20000."
        )


def _check_ddp(trial: TrialConfig) -> None:
    sharding, target = trial.sharding, trial.offload.target
    needs_sharding = {
        f"offload={target.name}": (
            target.name != "none",
            "DDP keeps every parameter on its device, so there is nothing to offload; use offload=none",
        ),
        f"sharding.dp_replicate={sharding.dp_replicate}": (
            sharding.dp_replicate > 1,
            "DDP replicates over all workers already; use sharding.dp_replicate=1",
        ),
        f"sharding.tp={sharding.tp}": (
            sharding.tp > 1,
            "DDP averages the gradients of all workers, and these hold different parts of a layer; use sharding.tp=1",
        ),
        "sharding.separate_reduce_scatter_group=true": (
            sharding.separate_reduce_scatter_group,
            "DDP has no reduce-scatter; use sharding.separate_reduce_scatter_group=false",
        ),
    }
    for name in ("forward_prefetch", "backward_prefetch"):
        needs_sharding[f"sharding.{name}={getattr(sharding, name)}"] = (
            getattr(sharding, name) is not None,
            f"DDP gathers no parameters, so it cannot prefetch them; use sharding.{name}=null",
        )
    refuse("sharding=ddp", needs_sharding, " or a sharded setting.")


def _notes(trial: TrialConfig, where: Where) -> Iterator[str]:
    sharding = trial.sharding
    if sharding.granularity is Granularity.root and trial.task.step is None:
        yield (
            "sharding=root makes the whole model one unit: a GPU holds all of it while a pass runs, and communication "
            "does not overlap with computation. sharding=per_block gathers block by block."
        )
    if sharding.dp_replicate == 1 or not where.nodes:
        return
    size = len(where.nodes) // sharding.dp_replicate
    groups = [where.nodes[first : first + size] for first in range(0, len(where.nodes), size)]
    if split := sum(len(set(group)) > 1 for group in groups):
        yield (
            f"sharding.dp_replicate={sharding.dp_replicate}: {split} of {len(groups)} replicas, each of {size} "
            f"ranks, are on more than one node: their parameters cross the network. On each node use a multiple of "
            f"{size} workers."
        )


AXIS = Axis(("sharding",), plain="ddp", divides=True, check=_check, notes=_notes)
