"""What PyTorch's counter of FLOPs lacks. Importing this file adds the formulas of grouped matrix products to it."""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import flop_registry, register_flop_formula

# Operators that compute more than they move data, and have no formula in the counter.
_HEAVY = (
    *("linalg_", "_linalg_", "_fft_", "_cdist_", "_pdist_", "lu_", "_lu_", "cholesky", "geqrf", "ormqr", "orgqr"),
    *("triangular_solve", "_ctc_loss", "_thnn_fused", "_cudnn_rnn", "mkldnn_rnn", "_trilinear", "conv_tbc", "_int_mm"),
    *("_scaled_mm_v2", "_scaled_grouped_mm_v2"),
)
_LIGHT = ("linalg_vector_norm", "linalg_vecdot", "linalg_cross", "_linalg_check_errors")
# The names of these as Python functions; and those that are counted or light.
_CALLED = ("fft_", "linalg_", "bilinear", "conv_tbc", "cdist", "pdist", "ctc_loss", "cholesky", "triangular_solve")
_COUNTED = ("linalg_matmul", "linalg_multi_dot", "linalg_norm", *_LIGHT)
# Namespaces in which other operators are counted, or only move data.
_OF_PYTORCH = ("aten", "prim", "prims", "c10d", "_c10d_functional", "fsdp", "inductor", "profiler", "_dtensor")


def _grouped_flops(first: torch.Size, second: torch.Size, *_: Any, **__: Any) -> int:
    """Return the FLOPs of grouped matrix products. Groups may divide the rows, the columns, or the inner size.

    Each row of a group is multiplied only with that group's matrix. Offsets divide a tensor of two dimensions.
    """
    groups = first[0] if len(first) == len(second) == 3 else 1
    return int(2 * groups * first[-2] * first[-1] * second[-1])


for _name in ("_grouped_mm", "_scaled_grouped_mm"):
    if (_packet := getattr(torch.ops.aten, _name)) not in flop_registry:
        register_flop_formula(_packet)(_grouped_flops)


def is_uncounted(operator: Any) -> bool:
    """Return whether an operator may compute much and has no formula in PyTorch's counter."""
    packet = getattr(operator, "overloadpacket", operator)
    if type(packet) is not type(torch.ops.aten.mm) or packet in flop_registry:
        return False
    namespace, _, name = str(packet).partition(".")
    return namespace not in _OF_PYTORCH or (name.startswith(_HEAVY) and name not in _LIGHT)


class Uncounted(TorchFunctionMode):
    """Collects the names of what a model calls that may compute much and has no formula."""

    def __init__(self) -> None:
        super().__init__()
        self.names = set[str]()

    def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        name = getattr(func, "__name__", "")
        if is_uncounted(func) or (name.startswith(_CALLED) and name not in _COUNTED):
            self.names.add(name)
        return func(*args, **(kwargs or {}))
