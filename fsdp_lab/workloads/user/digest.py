"""A digest that distinguishes the states of a user's data set without reading all of it."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fsdp_lab.workloads.base import parts_of

_ENDS = 4  # items at each end of a split


def digest_of(splits: Sequence[Any]) -> str:
    """Return a digest of 16 digits.

    It covers each data set's own attribute `digest`, or else its length and its first and last four items. Of items
    that differ when they are read again, as augmented ones do, only the structure counts.
    """
    sha = hashlib.sha256()
    for items in splits:
        own = getattr(items, "digest", None)
        sha.update(str(len(items)).encode())
        sha.update(str(own).encode() if isinstance(own, str | int) else _of_items(items))
    return sha.hexdigest()[:16]


def _of_items(items: Any) -> bytes:
    ends = dict.fromkeys([*range(min(_ENDS, len(items))), *range(max(0, len(items) - _ENDS), len(items))])
    with torch.random.fork_rng(devices=[]):
        once, again = (["".join(_describe(items[i], True)) for i in ends] for _ in range(2))
        descriptions = once if once == again else ["".join(_describe(items[i], False)) for i in ends]
    return "\n".join(descriptions).encode()


def _describe(item: Any, with_values: bool) -> list[str]:
    """Return an item as text: nesting, types, shapes and, where asked for, values."""
    if isinstance(item, tuple | list):
        return ["[", *(part for value in item for part in _describe(value, with_values)), "]"]
    if isinstance(item, Tensor):
        item = item.detach().cpu()
        values = (
            hashlib.sha256(item.contiguous().reshape(-1).view(torch.uint8).numpy().data).hexdigest()
            if with_values
            else ""
        )
        return [f"{item.dtype}{tuple(item.shape)}{values};"]
    if parts := parts_of(item):
        return [text for key, value in parts for text in (f"{key}:", *_describe(value, with_values))]
    if hasattr(item, "tobytes") and hasattr(item, "shape"):  # NumPy's
        values = hashlib.sha256(item.tobytes()).hexdigest() if with_values else ""
        return [f"{item.dtype}{tuple(item.shape)}{values};"]
    if isinstance(item, str | bytes | int | float | bool | None):
        return [f"{type(item).__name__}{repr(item) if with_values else ''};"]
    return [f"{type(item).__name__};"]
