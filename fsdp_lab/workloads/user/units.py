"""How many items and how many tokens a user's batch has."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from fsdp_lab.workloads.base import Batch, parts_of, tensors_of

_NOT_TOKENS = {"uint8", "bool"}  # types of images and masks


def num_items(batch: Batch) -> int:
    """Return the items of a batch: the first dimension of its first tensor that has one, else 1."""
    return next((len(tensor) for tensor in tensors_of(batch) if tensor.ndim), 1)


def num_tokens(batch: Batch) -> int | None:
    """Return the tokens of a batch; None: none of its parts has any.

    The first of these that the batch has:

    - Parts named `input_ids`: all elements.
    - Parts named `labels` of two dimensions or more: elements that are not -100; on `meta` all.
    - A single tensor `(batch, length + 1)` of inputs and labels: all but the first of each row.
    - The first tensor of whole numbers `(batch, length)`: all elements.
    """
    if ids := [tensor for tensor in _named("input_ids", batch) if _is_whole(tensor)]:
        return sum(tensor.numel() for tensor in ids)
    if labels := [tensor for tensor in _named("labels", batch) if _is_whole(tensor) and tensor.ndim > 1]:
        return sum(tensor.numel() if tensor.is_meta else int((tensor != -100).sum()) for tensor in labels)
    if isinstance(batch, Tensor):
        return batch[:, 1:].numel() if _is_whole(batch) and batch.ndim == 2 else None
    rows = (t.numel() for t in tensors_of(batch) if _is_whole(t) and t.ndim == 2 and _dtype(t) not in _NOT_TOKENS)
    return next(rows, None)


def _named(name: str, batch: Batch) -> Iterator[Tensor]:
    """Yield the tensors under a name, at any depth."""
    for key, part in parts_of(batch):
        if key == name:
            yield from tensors_of(part)
        else:
            yield from _named(name, part)


def _is_whole(tensor: Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex())


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
