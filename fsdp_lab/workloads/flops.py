"""What PyTorch's counter of FLOPs lacks. Importing this file adds the formulas of grouped matrix products to it."""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import flop_registry, register_flop_formula

# Operators that compute more than they move, which the counter has no formula for.
_HEAVY = (
    *("linalg_", "_linalg_", "_fft_", "_cdist_", "_pdist_", "lu_", "_lu_", "cholesky", "geqrf", "ormqr", "orgqr"),
    *("triangular_solve", "_ctc_loss", "_thnn_fused", "_cudnn_rnn", "mkldnn_rnn", "_trilinear", "conv_tbc", "_int_mm"),
    *("_scaled_mm_v2", "_scaled_grouped_mm_v2"),
)
_LIGHT = ("linalg_vector_norm", "linalg_vecdot", "linalg_cross", "_linalg_check_errors")
# How a model calls these from Python, where they are not operators yet; and what of these is counted or light.
_CALLED = ("fft_", "linalg_", "bilinear", "conv_tbc", "cdist", "pdist", "ctc_loss", "cholesky", "triangular_solve")
_COUNTED = ("linalg_matmul", "linalg_multi_dot", "linalg_norm", *_LIGHT)
# Whose operators either are counted, or move data only.
_OF_PYTORCH = ("aten", "prim", "prims", "c10d", "_c10d_functional", "fsdp", "inductor", "profiler", "_dtensor")


def _grouped_flops(first: torch.Size, second: torch.Size, *_: Any, **__: Any) -> int:
    """Return the FLOPs of matrix products of groups: of a tensor of rows, of columns or of the inner size, or of both.

    Each row of a group is multiplied with that group's matrix alone; offsets divide what has two dimensions.
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
