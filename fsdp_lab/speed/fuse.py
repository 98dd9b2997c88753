"""A step whose blocks are compiled: chains of memory-bound operators become kernels of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby

from fsdp_lab.speed.program import Kind, Operator, Stream


def fuse(program: Sequence[Operator], is_compiled: Callable[[str], bool]) -> list[Operator]:
    """Return the program with every chain of memory-bound operators of a compiled module as one operator.

    A fused kernel reads what the chain has not written itself, once, and writes what is read after it; values in
    between stay in registers. Matrix products, attention and collectives end a chain.

    Args:
        program: the operators of a step.
        is_compiled: returns whether a module is compiled, by its name.
    """
    last_read: dict[int, int] = {}
    for place, operator in enumerate(program):
        for storage in operator.reads:
            last_read[storage] = place

    def chain(indexed: tuple[int, Operator]) -> object:
        place, operator = indexed
        fusible = operator.kind is Kind.memory and operator.stream is Stream.compute and is_compiled(operator.module)
        return operator.phase if fusible and operator.phase != "optimizer" else place

    fused: list[Operator] = []
    for _, members in groupby(enumerate(program), chain):
        fused += _one(list(members), last_read)
    return fused


def _one(members: list[tuple[int, Operator]], last_read: dict[int, int]) -> Iterator[Operator]:
    if len(members) == 1:
        yield members[0][1]
        return
    end = members[-1][0]
    reads: dict[int, int] = {}
    writes: dict[int, int] = {}
    for _, operator in members:
        sizes = iter(operator.sizes)
        for storage in operator.reads:
            size = next(sizes)
            if storage not in writes:
                reads[storage] = max(reads.get(storage, 0), size)
        for storage in operator.writes:
            writes[storage] = max(writes.get(storage, 0), next(sizes))
    kept = {storage: size for storage, size in writes.items() if last_read.get(storage, -1) > end}
    first = members[0][1]
    num_bytes = float(sum(reads.values()) + sum(kept.values()))
    yield Operator(
        "fused", Kind.memory, Stream.compute, first.phase, first.module, num_bytes=num_bytes, reads=tuple(reads),
        writes=tuple(writes), sizes=(*reads.values(), *writes.values()),
    )  # fmt: skip
