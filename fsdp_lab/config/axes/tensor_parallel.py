"""`sharding.tp`: neighbouring ranks share each layer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import gcd
from typing import TYPE_CHECKING

from fsdp_lab.config.axes.base import Axis, Where, refuse
from fsdp_lab.config.errors import CombinationError, ConfigError, UserError
from fsdp_lab.config.key import at_least_one, divisors, key
from fsdp_lab.config.target import argument
from fsdp_lab.config.workload import TP_WORDS

if TYPE_CHECKING:
    from fsdp_lab.config.ranks import Ranks
    from fsdp_lab.config.trial import TrialConfig


@dataclass
class TensorParallelKeys:
    tp: int = key(1, at_least_one)
    """Tensor-parallel ranks, which share each layer and the samples of a microbatch."""


def _check(trial: TrialConfig, ranks: Ranks) -> None:
    if ranks.tp == 1:
        return
    refused = {
        "sharding.api=fsdp1": (
            trial.sharding.api.name == "fsdp1",
            "FSDP1 cannot shard what tensor parallelism has divided; use sharding.api=fsdp2",
        ),
        "precision.float8=true": (
            trial.precision.float8,
            "layers that multiply in float8 are not divided here; use precision=bf16_mixed",
        ),
    }
    refuse(f"sharding.tp={ranks.tp}", refused, ", or sharding.tp=1.")
    plan = trial.model.known_tp_plan()
    for name, word in (plan or {}).items():
        if word not in TP_WORDS:
            raise ConfigError(f"model.tp_plan.{name}={word} is not a way to divide; use one of {', '.join(TP_WORDS)}.")
    workers = ranks.shown("dp_replicate")
    sizes = {workers: ranks.workers // ranks.replicas, **(_sizes(trial, plan or {}) if plan != {} else {})}
    for name, size in sizes.items():
        if size % ranks.tp:
            shown = name if name == workers else f"{name}={size}"
            raise CombinationError(
                f"sharding.tp={ranks.tp} does not divide {shown}; use one of {divisors(gcd(*sizes.values()))}."
            )
    if plan == {}:
        config = trial.model.arguments.get("config")
        model = f"model.config={config}" if isinstance(config, str) else f"model._target_={trial.model.target}"
        raise CombinationError(
            f"sharding.tp={ranks.tp}: {model} has no plan for tensor parallelism; give one by "
            "model.tp_plan={<module>: colwise, <module>: rowwise}, or use sharding.tp=1.",
        )


def _sizes(trial: TrialConfig, plan: Mapping[str, str]) -> dict[str, int]:
    """Return the sizes that tensor parallelism divides, as far as keys and model configurations have them."""
    sizes = {f"model.{name}": size for name, size in trial.model.tp_sizes().items()}
    if "rowwise_split" in plan.values():  # each rank has all heads
        sizes = {name: size for name, size in sizes.items() if "heads" not in name}
    length = argument(trial.data.function(), trial.data.arguments, "seq_len")
    if "sequence" in plan.values() and isinstance(length, int):
        sizes["data.seq_len"] = length
    return sizes


def check_placement(tp: int, spread: bool) -> None:
    """Raise CombinationError if the placement spreads the workers that share a layer over nodes."""
    if tp > 1 and spread:
        raise CombinationError(
            f"sharding.tp={tp} with cluster.placement=spread: the {tp} workers that divide a layer have to share a "
            "node; use cluster.placement=pack or strict_pack."
        )


def check_nodes(tp: int, nodes: Sequence[str]) -> None:
    """Check that each tensor-parallel group is within a node.

    Args:
        nodes: the node of each rank.

    Raises:
        UserError: for the first group that is not.
    """
    for first in range(0, len(nodes), tp):
        group = nodes[first : first + tp]
        if len(set(group)) > 1:
            raise UserError(
                f"sharding.tp={tp}: ranks {first} to {first + len(group) - 1} divide each layer among them, "
                f"but are on {len(set(group))} nodes, so every layer would wait for the network. Start a multiple of "
                f"{tp} workers on each node: choose cluster.num_workers as a multiple of a node's GPUs or "
                "free the nodes of other trials, use cluster.placement=strict_pack if one node holds all workers, or "
                "use a smaller sharding.tp."
            )


def _notes(trial: TrialConfig, where: Where) -> Iterator[str]:
    if trial.sharding.tp > 1 and not where.trains:
        yield (
            "with sharding.tp the workers of a group share their items: numbers of items are of a group, tokens/s of "
            "each worker."
        )


AXIS = Axis(("sharding.tp",), plain="1", divides=True, check=_check, notes=_notes)
