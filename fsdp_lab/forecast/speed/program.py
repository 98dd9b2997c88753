"""The operators of one optimizer step of one rank, in order: plain values from a trace."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

FUSED = "fused"  # the name of a kernel that the compiler generated


class Kind(StrEnum):
    """What bounds an operator. `memory` bounds every operator that only reads and writes."""

    matmul = "matmul"
    attention = "attention"
    memory = "memory"
    gather = "gather"
    scatter = "scatter"
    reduce = "reduce"
    transfer = "transfer"

    @property
    def is_collective(self) -> bool:
        return self in _COLLECTIVES


_COLLECTIVES = frozenset({Kind.gather, Kind.scatter, Kind.reduce})


class Stream(StrEnum):
    """A queue whose operators run one after the other.

    FSDP2 copies shards into one buffer on `copy_in`, and has a stream for each kind of collective. DDP reduces on
    `scatter`. Tensor-parallel layers send activations on `layers`. `host` is the CPU, for offloaded tensors.
    """

    compute = "compute"
    host = "host"
    copy_in = "copy_in"
    gather = "gather"
    scatter = "scatter"
    all_reduce = "all_reduce"
    layers = "layers"


@dataclass(frozen=True)
class Operator:
    """One call of a kernel or of a collective.

    Attributes:
        name: PyTorch's, such as `aten.mm`.
        phase: forward, backward or optimizer.
        module: the innermost active one; "" outside of all.
        flops: of a matrix product or of attention, multiplications and additions counted separately; masked parts of
            causal attention do not count.
        num_bytes: read and written; of a collective, the bytes over all its ranks.
        dtype: of the first input tensor, such as `bfloat16`: the type that matrix products are computed in.
        group: the ranks of a collective.
        shape: of a matrix product, (batch, rows, columns, inner size); of attention, (heads of all samples, queries,
            keys, size of a head).
        compiled: compiled code launches it.
        unit: of a collective of FSDP, the names of the modules that it gathers or reduces; "": the root; None: another.
        reads: storages that it reads, as numbers. The schedule derives dependencies from them.
    """

    name: str
    kind: Kind
    stream: Stream
    phase: str
    module: str
    flops: float = 0.0
    num_bytes: float = 0.0
    dtype: str = ""
    group: tuple[int, ...] = ()
    shape: tuple[int, int, int, int] | None = None
    reads: tuple[int, ...] = ()
    writes: tuple[int, ...] = ()
    compiled: bool = False
    unit: str | None = None


def num_nodes(group: Sequence[int], node_size: int) -> int:
    """Return the number of nodes of a group's ranks."""
    return len({rank // node_size for rank in group})
