"""`reshard_after_forward`: when gathered parameters are freed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, Optional  # OmegaConf reads this on every Python that this project supports

from fsdp_lab.config.axes.base import Axis, Where
from fsdp_lab.config.errors import CombinationError, ConfigError
from fsdp_lab.config.key import at_least_one, divisors, key

if TYPE_CHECKING:
    from fsdp_lab.config.ranks import Ranks
    from fsdp_lab.config.trial import ShardingConfig, TrialConfig


class ReshardPolicy(Enum):
    """When gathered parameters are freed after the forward pass; see `ReshardConfig.policy`."""

    always = "always"
    never = "never"
    default = "default"
    to_size = "to_size"


@dataclass
class ReshardConfig:
    """What happens to gathered parameters after the forward pass."""

    policy: ReshardPolicy = key(ReshardPolicy.default, named_by_option=True)
    """Free gathered parameters (`always`, ZeRO-3), keep them (`never`, ZeRO-2), keep only the root's (`default`), or
    reshard to a smaller mesh (`to_size`)."""
    size: Optional[int] = key(None, at_least_one)
    """Ranks of the smaller mesh of `to_size`; it divides the sharding degree."""

    def effective(self, sharding: ShardingConfig, ranks: Ranks) -> tuple[str, int | None]:
        """Return the policy and size that these settings resolve to; settings that reshard alike have equal ones.

        DDP reshards nothing: `("none", None)`. `default` keeps the root's parameters, so for `root` it is `never`. A
        mesh of one worker is `never` and a mesh of all workers is `always`, as FSDP2 itself reads it. FSDP1 keeps the
        root's in any case, so its `always` is `default`, and shards nothing on one worker.
        """
        if sharding.granularity.name == "ddp":
            return "none", None
        if sharding.api.name == "fsdp1":
            keeps = self.policy is ReshardPolicy.never or ranks.shard == 1
            return ("never" if keeps else "default"), None
        if self.policy is ReshardPolicy.to_size and self.size in (1, ranks.shard):
            return ("never" if self.size == 1 else "always"), None
        if self.policy is ReshardPolicy.default and sharding.granularity.name == "root":
            return "never", None
        return self.policy.name, self.size if self.policy is ReshardPolicy.to_size else None


def _check(trial: TrialConfig, ranks: Ranks) -> None:
    reshard = trial.reshard_after_forward
    if reshard.policy is not ReshardPolicy.to_size or trial.sharding.granularity.name == "ddp":
        return
    if reshard.size is None:
        raise ConfigError(
            "reshard_after_forward.size=null: reshard_after_forward=to_size needs the size of the smaller mesh; "
            f"set reshard_after_forward.size to one of {divisors(ranks.shard)}."
        )
    if ranks.shard % reshard.size:
        by_replicas = f"cluster.num_workers={ranks.workers} / sharding.dp_replicate={ranks.replicas}"
        by_tp = f" / sharding.tp={ranks.tp}" if ranks.tp > 1 else ""
        raise CombinationError(
            f"reshard_after_forward.size={reshard.size} does not divide the sharding degree {ranks.shard} "
            f"({by_replicas}{by_tp}); use one of {divisors(ranks.shard)}.",
        )


def _effective(trial: TrialConfig, ranks: Ranks) -> dict[str, Any]:
    policy, size = trial.reshard_after_forward.effective(trial.sharding, ranks)
    return {"reshard_after_forward.policy": policy, "reshard_after_forward.size": size}


def _notes(trial: TrialConfig, where: Where) -> Iterator[str]:
    if trial.sharding.granularity.name == "ddp" and trial.reshard_after_forward.policy is not ReshardPolicy.default:
        yield "reshard_after_forward has no effect with sharding=ddp: nothing is sharded."


AXIS = Axis(("reshard_after_forward",), plain="always", check=_check, effective=_effective, notes=_notes)
