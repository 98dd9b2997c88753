"""`sharding.api`: PyTorch's implementation of sharding."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from fsdp_lab.config.axes.base import Axis, Where, refuse
from fsdp_lab.config.axes.sharding import Granularity
from fsdp_lab.config.errors import CombinationError
from fsdp_lab.config.key import key

if TYPE_CHECKING:
    from fsdp_lab.config.ranks import Ranks
    from fsdp_lab.config.trial import TrialConfig


class Api(Enum):
    """PyTorch's implementation of sharding: `fully_shard`, or the older `FullyShardedDataParallel`."""

    fsdp2 = "fsdp2"
    fsdp1 = "fsdp1"


@dataclass
class ApiKeys:
    api: Api = key(Api.fsdp2)
    """`fsdp2` (`fully_shard`) or `fsdp1` (`FullyShardedDataParallel`)."""
    limit_all_gathers: bool = key(True)
    """FSDP1's option of that name: at most two gathered units at once. FSDP2 always limits them."""
    find_unused_parameters: bool = key(False)
    """For ranks that leave out other parameters: DDP looks for them in every step, FSDP2 reduces zeros for them."""

    @property
    def api_name(self) -> str:
        return self.api.name.upper()


def _check(trial: TrialConfig, ranks: Ranks) -> None:
    sharding = trial.sharding
    if sharding.api is Api.fsdp2:
        if not sharding.limit_all_gathers:
            raise CombinationError(
                "sharding.limit_all_gathers=false with sharding.api=fsdp2: FSDP2 always limits them; use "
                "sharding.limit_all_gathers=true, or sharding.api=fsdp1."
            )
        return
    _check_fsdp1(trial)
    if ranks.replicas > 1 and ranks.shard == 1:
        raise CombinationError(
            f"sharding.dp_replicate={ranks.replicas} with sharding.api=fsdp1 and "
            f"{ranks.shown()}: with one worker in each shard group, FSDP1 would not average the "
            "gradients of the replicas; use sharding=ddp sharding.api=fsdp2.",
        )


def _check_fsdp1(trial: TrialConfig) -> None:
    sharding, training, offload = trial.sharding, trial.training, trial.offload.target.name
    lacks = {
        "sharding=ddp": (sharding.granularity.name == "ddp", "DDP is no FSDP; use a sharded setting"),
        f"sharding.blocks_per_unit={sharding.blocks_per_unit}": (
            sharding.blocks_per_unit > 1,
            "FSDP1 wraps each block on its own; use sharding.blocks_per_unit=1",
        ),
        f"sharding.embeddings={sharding.embeddings.name}": (
            sharding.embeddings.name == "own",
            "FSDP1's units are the blocks and the root here; use sharding.embeddings=root",
        ),
        "sharding.separate_reduce_scatter_group=true": (
            sharding.separate_reduce_scatter_group,
            "FSDP1 has one communicator; use sharding.separate_reduce_scatter_group=false",
        ),
        "sharding.find_unused_parameters=true": (
            sharding.find_unused_parameters,
            "FSDP1 reduces zeros for them in any case; use sharding.find_unused_parameters=false",
        ),
        **{
            f"sharding.{name}={ahead}": (
                ahead is not None and ahead > 1,
                f"FSDP1 gathers one unit ahead, or none; use sharding.{name}=1 or 0",
            )
            for name, ahead in (
                ("forward_prefetch", sharding.forward_prefetch),
                ("backward_prefetch", sharding.backward_prefetch),
            )
        },
        "reshard_after_forward=to_size": (
            trial.reshard_after_forward.policy.name == "to_size",
            "FSDP1 frees or keeps what is gathered; use reshard_after_forward=default or never",
        ),
        "offload=cpu_unpinned": (offload == "cpu_unpinned", "FSDP1 pins what it offloads; use offload=cpu"),
        "training.sync_each_microbatch=true and offload=cpu": (
            offload == "cpu" and training.grad_accum_steps > 1 and training.sync_each_microbatch,
            "FSDP1 would keep the gradients of the last microbatch only; use training.sync_each_microbatch=false",
        ),
        "precision.float8=true": (
            trial.precision.float8,
            "its rows are not those of flat parameters; use precision=bf16",
        ),
        f"model.forward_methods={trial.model.forward_methods}": (
            bool(trial.model.forward_methods),
            "FSDP1 gathers weights for forward only; leave it out",
        ),
    }
    refuse("sharding.api=fsdp1", lacks, ", or sharding.api=fsdp2.")


def kind_of(granularity: Granularity, api: Api, tp: int) -> str:
    """Return the name of the file in `fsdp_lab/training/parallel` that trains this way."""
    if granularity is Granularity.ddp:
        return "ddp"
    return "tensor" if tp > 1 else api.name


def strategy_of(trial: TrialConfig) -> str:
    """Return FSDP1's word for `reshard_after_forward` and `sharding.dp_replicate`, a name of `ShardingStrategy`."""
    keeps = trial.reshard_after_forward.policy.name == "never"
    if trial.sharding.dp_replicate > 1:
        return "_HYBRID_SHARD_ZERO2" if keeps else "HYBRID_SHARD"
    return "SHARD_GRAD_OP" if keeps else "FULL_SHARD"


def _notes(trial: TrialConfig, where: Where) -> Iterator[str]:
    """Yield a sentence for each setting that FSDP1 and FSDP2 treat differently."""
    training, precision = trial.training, trial.precision
    if trial.sharding.api is not Api.fsdp1:
        return
    if trial.reshard_after_forward.policy.name == "always":
        yield (
            "sharding.api=fsdp1 with reshard_after_forward=always: FSDP1 keeps the root's parameters after the "
            "forward pass (FULL_SHARD)."
        )
    adds_up = training.grad_accum_steps > 1 and not training.sync_each_microbatch
    if adds_up and precision.param_dtype is not precision.reduce_dtype:
        yield (
            f"sharding.api=fsdp1 adds up the gradients of microbatches in {precision.param_dtype.value}, FSDP2 in "
            f"{precision.reduce_dtype.value}. training.sync_each_microbatch=true adds them up in "
            f"{precision.storage_dtype.value}."
        )
    if trial.optimizer.target is not None and not where.groups_compared:
        yield (
            "sharding.api=fsdp1 gives the optimizer flat parts of parameters, of which a rank may have none: one that "
            "looks at a parameter's shape, or computes over all of it, does something else than with FSDP2."
        )


AXIS = Axis(
    ("sharding.api", "sharding.limit_all_gathers", "sharding.find_unused_parameters"),
    plain="fsdp2",
    divides=True,
    # in 2.15, not looked for before
    since={"sharding.find_unused_parameters": ("set_reduce_scatter_unused_params", (2, 15))},
    check=_check,
    notes=_notes,
)
