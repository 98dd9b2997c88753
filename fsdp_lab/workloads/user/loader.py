"""The user's own loader as the data of a workload. What it returns is checked; its first batch shows the shapes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

from fsdp_lab.config.errors import UserError
from fsdp_lab.config.target import in_words, instantiate
from fsdp_lab.config.workload import DataConfig, ModelConfig
from fsdp_lab.workloads.base import Batch, Data, DataSpec, tensors_of
from fsdp_lab.workloads.construct import seeded
from fsdp_lab.workloads.user.data import example_of, own_example

_ONCE = ("builtins", "itertools")  # modules of iterators that can be read only once


def build_loader_data(config: DataConfig, model: ModelConfig) -> DataSpec:
    """Return the data of `data.loader`. Reads nothing yet.

    Args:
        model: its sizes are arguments of the loader.
    """
    make = partial(_make, config, config.arguments_for(model))

    @cache
    def load() -> Data:
        return data_of(config, make("train", batch_size=1, rank=0, world_size=1, seed=0))

    def first(size: int) -> Batch:
        loader = make("train", batch_size=size, rank=0, world_size=1, seed=0)
        with explained(config, "the first batch of split=train"):
            batch = next(iter(loader), None)  # the iterator is not kept, so its processes end
        check_batch(config, batch)
        return batch

    return DataSpec(lambda: None, load, own_example(config, model) or example_of(first), make)


def data_of(config: DataConfig, train: Any, val: Any = None) -> Data:
    """Return what is known of loaders. The digest is the training loader's own `digest`, or else how it was made."""
    own = getattr(train, "digest", None)
    text = str(own) if isinstance(own, str | int) else json.dumps([config.loader, config.arguments], default=str)
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    return Data((), (), digest, getattr(val, "bytes_per_token", None), getattr(train, "vocab_size", None))  # type: ignore[arg-type]


def _make(config: DataConfig, arguments: dict[str, Any], split: str, **given: int) -> Any:
    """Return the user's loader of a split, which can be iterated again.

    Raises:
        UserError: the function fails, or returns another object.
    """
    try:
        with seeded(0):  # the same parts on every rank, in every trial
            made = config.function()(split=split, **given, **instantiate(arguments, "data"))
    except Exception as error:
        raise UserError(f"{config.typed} with split={split} fails: {in_words(error)}") from error
    kind = f"{config.typed} returns a {type(made).__name__} for split={split}"
    if isinstance(made, Iterator) and type(made).__module__ in _ONCE:
        raise UserError(
            f"{kind}, which can be iterated once; return an object whose __iter__ begins again, such as a list or a "
            "torch.utils.data.IterableDataset."
        )
    if not hasattr(made, "__iter__"):
        raise UserError(
            f"{kind}, which cannot be iterated; return the batches of this rank, as in "
            "torch.utils.data.DataLoader(items, batch_size=batch_size), or name a map-style data set by data._target_."
        )
    return made


def check_batch(config: DataConfig, batch: Batch) -> None:
    """Raise a UserError if a batch has no tensor, or there is none."""
    if not tensors_of(batch):
        raise UserError(
            f"{config.typed} gives a {type(batch).__name__} without a tensor in it; let it give batches: a tensor, or "
            "tuples, lists, dictionaries or dataclasses of tensors, or an object with to(device)."
        )


@contextmanager
def explained(config: DataConfig, what: str) -> Iterator[None]:
    """Translate an error of the user's loader into a UserError. Lack of memory and of disks is passed on."""
    try:
        yield
    except (UserError, OSError, MemoryError):
        raise
    except Exception as error:
        if "allocate memory" in str(error):
            raise
        raise UserError(f"{config.typed}: {what} cannot be read: {in_words(error)}") from error


def length_of(loader: Any) -> int | None:
    """Return the number of batches by a loader's `__len__`; None: it does not know."""
    try:
        return len(loader)
    except (TypeError, NotImplementedError, AttributeError):  # as a DataLoader of an iterable data set raises
        return None


def begin_epoch(loader: Any, epoch: int) -> None:
    """Call `set_epoch` of the loader, its samplers and its data set, if they have it."""
    parts = (loader, *(getattr(loader, name, None) for name in ("sampler", "batch_sampler", "dataset")))
    for part in parts:
        if callable(method := getattr(part, "set_epoch", None)):
            method(epoch)
