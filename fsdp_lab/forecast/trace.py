"""The operators of a step that runs on fake tensors, as `fsdp_lab.forecast.speed` prices them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils.flop_counter import flop_registry
from torch.utils.weak import WeakIdKeyDictionary

from fsdp_lab.forecast.speed.program import Kind, Operator, Stream
from fsdp_lab.forecast.torch_private import (
    ALL_GATHER,
    ALL_REDUCE,
    FLAT_GATHER,
    REDUCE_SCATTER,
    argument,
    process_group,
    written_arguments,
)
from fsdp_lab.memory.torch_private import (
    FSDP_COPIES_OUT,
    FSDP_GATHERS,
    FSDP_REDUCES,
    Ranges,
    TorchDispatchMode,
    active_fake_mode,
)
from fsdp_lab.workloads.base import tensors_of
from fsdp_lab.workloads.flops import is_uncounted

_COLLECTIVES = {
    ALL_GATHER: Kind.gather,
    FLAT_GATHER: Kind.gather,
    REDUCE_SCATTER: Kind.scatter,
    ALL_REDUCE: Kind.reduce,
}
_OF_DTENSOR = {  # activations of tensor-parallel layers, and norms of gradients
    "_c10d_functional.all_gather_into_tensor": Kind.gather,
    "_c10d_functional.reduce_scatter_tensor": Kind.scatter,
    "_c10d_functional.all_reduce": Kind.reduce,
    "_c10d_functional.all_reduce_": Kind.reduce,  # in compiled code
}
_WITH_BIAS = {"aten.addmm", "aten.baddbmm"}  # it comes first
_PRODUCTS = {"aten.mm", "aten.bmm", "aten._scaled_mm", *_WITH_BIAS}
_NO_WORK = (
    *("prim.", "profiler.", "aten.empty", "aten.new_empty", "aten.set_", "aten._local_scalar_dense"),
    "_c10d_functional.wait",
)
# Operators that read as much as they return, from a larger tensor.
_PICKS = {"aten.embedding", "aten.index", "aten.gather", "aten.nll_loss_forward", "aten.index_select"}
_BACKWARD_PRODUCTS = 5.0  # the scores again, and the gradients of query, key, value and scores
_OVERWRITES = ("copy_", "split_with_sizes_copy", "chunk_cat", "zero_", "fill_")


class StepTrace(TorchDispatchMode):
    """Records the operators inside a context, in the order in which the host issues them.

    Args:
        host: the device that stands for the host; None: host and accelerator are the same.
    """

    def __init__(self, host: torch.device | None) -> None:
        super().__init__()
        self.program: list[Operator] = []
        self.uncounted = set[str]()  # operators without a known FLOP count
        self.flat_streams: dict[Any, Stream] = {}
        self._host = host
        self._where: Callable[[], tuple[str, str]] | None = None
        self._fake_mode: Any = None
        self._numbers: Any = WeakIdKeyDictionary()
        self._next = 0
        self._ranges = Ranges()
        self._compiled = False  # compiled code runs
        self._unit = ""  # of FSDP; its collective comes next
        self._reducing: Stream | None = None  # of the last collective in the reduction of this unit

    @contextmanager
    def following(self, where: Callable[[], tuple[str, str]]) -> Iterator[None]:
        """Record the operators inside.

        Args:
            where: returns the phase and the innermost active module.
        """
        # No dispatch mode sees a forecast's stand-in, which DDP's hooks and hybrid sharding call.
        reduce: Callable[..., Any] = dist.all_reduce

        def recorded(tensor: Tensor, *args: Any, group: Any = None, **kwargs: Any) -> Any:
            ranks = tuple(dist.get_process_group_ranks(group)) if group is not None else _world()
            self._all_reduce(tensor, ranks)
            return reduce(tensor, *args, group=group, **kwargs)

        self._where, self._fake_mode = where, active_fake_mode()
        try:
            with mock.patch.object(dist, "all_reduce", recorded), self:
                yield
        finally:
            self._where = None

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        kwargs = kwargs or {}
        if DTensor in types:
            return NotImplemented  # DTensor calls again with this rank's parts, and with their collectives
        result = func(*args, **kwargs)
        if active_fake_mode() is not self._fake_mode:
            return result  # DTensor tries an operator on tensors of the whole shape
        if self._ranges.see(func, args).startswith(FSDP_REDUCES):
            self._reducing = None
        name = str(func.overloadpacket)
        if name in _COLLECTIVES:
            self._collective(name, args)
        elif name in _OF_DTENSOR:
            self._functional(name, args, result)
        elif not name.startswith(_NO_WORK):
            if is_uncounted(func):
                self.uncounted.add(name)
            self._record(name, func, args, kwargs, result)
        return result

    @contextmanager
    def in_compiled(self) -> Iterator[None]:
        """Record the operators inside as those of compiled code."""
        self._compiled = True
        try:
            yield
        finally:
            self._compiled = False

    def comes(self, does: str, unit: str) -> None:
        """Note the unit of the next collective; see `collectives_announced`."""
        self._unit = unit

    def kernel(self, name: str, reads: Sequence[Tensor], writes: Sequence[Tensor]) -> None:
        """Record a fused kernel that PyTorch calls only on a GPU."""
        if self._where is not None:
            self.add(name, Kind.memory, Stream.compute, reads, writes, sum(map(_bytes, [*reads, *writes])))

    def _collective(self, name: str, args: Any) -> None:
        kind = _COLLECTIVES[name]
        written, others = tensors_of(args[0]), tensors_of(args[1:])
        stream = Stream.gather if kind is Kind.gather else Stream.scatter
        self._reducing = stream
        num_bytes = max([sum(map(_bytes, written)), *map(_bytes, others)])
        self.add(name, kind, stream, others or written, written, num_bytes, dtype=_dtype(written), group=_ranks(args),
                 unit=self._unit)  # fmt: skip

    def _functional(self, name: str, args: Any, result: Tensor) -> None:
        assert self._where is not None
        stream = Stream.scatter if self._where()[0] == "optimizer" else Stream.layers
        num_bytes, dtype = max(_bytes(args[0]), _bytes(result)), _dtype([args[0]])
        self.add(name, _OF_DTENSOR[name], stream, [args[0]], [result], num_bytes, dtype=dtype, group=_ranks(args))

    def _all_reduce(self, tensor: Tensor, group: tuple[int, ...]) -> None:
        """Record an all-reduce.

        FSDP2 has a stream for all-reduces of replicas; DDP reduces on the stream of scatters.
        """
        in_fsdp2 = self._ranges.innermost.startswith(FSDP_REDUCES)
        stream = self._flat_stream() or (Stream.all_reduce if in_fsdp2 else Stream.scatter)
        self._reducing = stream
        unit = self._unit if stream is Stream.all_reduce else None
        self.add(ALL_REDUCE, Kind.reduce, stream, [tensor], [tensor], _bytes(tensor), dtype=_dtype([tensor]),
                 group=group, unit=unit)  # fmt: skip

    def _record(self, name: str, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        given = tensors_of((args, kwargs))
        written = tensors_of(written_arguments(func, args, kwargs))
        inside = {self._number(tensor) for tensor in given}
        made = [tensor for tensor in tensors_of(result) if self._number(tensor) not in inside]
        if not written and not made:
            return  # a view
        overwritten = set(map(self._number, written))
        read = [tensor for tensor in given if self._number(tensor) not in overwritten]
        twice = 1 if name.endswith(_OVERWRITES) or "out" in kwargs else 2
        num_bytes = sum(map(_bytes, [*read, *made])) + twice * sum(map(_bytes, written))
        if name in _PICKS:
            num_bytes = 2 * sum(map(_bytes, made))
        flops, kind = 0.0, Kind.memory
        shape = _product_shape(args, name in _WITH_BIAS) if name in _PRODUCTS else None
        if func.overloadpacket in flop_registry:
            kind = Kind.attention if name.startswith("aten.") and "attention" in name else Kind.matmul
            if kind is Kind.attention:
                shape = _attention_shape(args, name.endswith("_backward"))
            if kind is Kind.attention and shape is not None:  # PyTorch 2.11 counts no FLOPs with fewer key heads
                flops = (_BACKWARD_PRODUCTS if name.endswith("_backward") else 2.0) * 2 * math.prod(shape)
            else:
                flops = float(flop_registry[func.overloadpacket](*args, **kwargs, out_val=result))
            if kind is Kind.attention and argument(func, "is_causal", args, kwargs):
                flops /= 2
        stream = self._stream(read, [*written, *made])
        if stream is not Stream.host and self._crosses(read, [*written, *made]):
            kind = Kind.transfer
            num_bytes = sum(map(_bytes, [*written, *made]))  # read on one device, written on the other
        self.add(name, kind, stream, read, [*written, *made], num_bytes, flops, _dtype(given), shape)

    def _stream(self, read: Sequence[Tensor], written: Sequence[Tensor]) -> Stream:
        """Return the stream on which FSDP runs an operator: FSDP2 marks ranges for profilers, FSDP1 enters streams."""
        if self._host is not None and all(t.device == self._host for t in (*read, *written)):
            return Stream.host
        if (stream := self._flat_stream()) is not None:
            return stream
        innermost = self._ranges.innermost
        if innermost.startswith(FSDP_REDUCES) and self._reducing is not None:
            return self._reducing
        if innermost.startswith(FSDP_GATHERS) and not innermost.startswith(FSDP_COPIES_OUT):
            return Stream.copy_in
        return Stream.compute

    def _flat_stream(self) -> Stream | None:
        """Return which of FSDP1's own streams is current; None: none."""
        return self.flat_streams.get(torch.cpu.current_stream())

    def _crosses(self, read: Sequence[Tensor], written: Sequence[Tensor]) -> bool:
        on_host = {t.device == self._host for t in (*read, *written)}
        return self._host is not None and len(on_host) > 1

    def add(
        self, name: str, kind: Kind, stream: Stream, reads: Sequence[Tensor], writes: Sequence[Tensor],
        num_bytes: float, flops: float = 0.0, dtype: str = "", shape: Any = None, group: tuple[int, ...] = (),
        unit: str | None = None,
    ) -> None:  # fmt: skip
        """Record an operator, with the host's current phase and module."""
        assert self._where is not None
        read, written = (tuple(dict.fromkeys(map(self._number, tensors))) for tensors in (reads, writes))
        where = self._where()
        self.program.append(
            Operator(
                name, kind, stream, *where, flops, num_bytes, dtype, group, shape, read, written, self._compiled, unit
            )
        )  # fmt: skip

    def _number(self, tensor: Tensor) -> int:
        storage = tensor.untyped_storage()
        if storage not in self._numbers:
            self._numbers[storage] = self._next
            self._next += 1
        return int(self._numbers[storage])


def _dtype(tensors: Sequence[Tensor]) -> str:
    return str(tensors[0].dtype).removeprefix("torch.") if tensors else ""


def _bytes(tensor: Tensor) -> int:
    """Return the bytes read from a tensor; from an expanded one, each element once."""
    count = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        count *= size if stride else min(size, 1)
    return count * tensor.element_size()


def _product_shape(args: Any, bias: bool) -> tuple[int, int, int, int]:
    first, second = [a for a in args if isinstance(a, Tensor)][bias : bias + 2]
    batch = first.shape[0] if first.dim() == 3 else 1
    return (batch, first.shape[-2], second.shape[-1], first.shape[-1])


def _attention_shape(args: Any, backward: bool) -> tuple[int, int, int, int] | None:
    """Return the shape of an attention. Backward, the gradient comes first and has the query's shape."""
    four = [a for a in args if isinstance(a, Tensor) and a.dim() == 4]
    if len(four) < 3:
        return None
    query, key = four[0], four[2 if backward else 1]
    return (query.shape[0] * query.shape[1], query.shape[2], key.shape[2], query.shape[3])


def _world() -> tuple[int, ...]:
    return tuple(range(dist.get_world_size()))


def _ranks(args: Any) -> tuple[int, ...]:
    for value in args:
        if (group := process_group(value)) is not None:
            return tuple(dist.get_process_group_ranks(group))
    return _world()
