"""Any map-style data set, and a model's own example batch, as the data of a workload."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.data import default_collate

from fsdp_lab.config.errors import ConfigError, UserError
from fsdp_lab.config.target import import_callable, in_words, instantiate
from fsdp_lab.config.workload import DataConfig, ModelConfig
from fsdp_lab.workloads.base import Batch, Data, Dataset, DataSpec, describe, map_tensors, tensors_of
from fsdp_lab.workloads.construct import seeded, without_values

_ENDS = 4  # items at each end of a split, of which its digest is made
_MEASURED = 32  # items of a batch that shows the shape of a larger one, if items are alike
_TOGETHER = 1.5  # a dimension that grows so much for twice the items is the sum over items, not the longest
_READ = 1024  # the most items that are read for a batch's shape if items differ


class Marked(NamedTuple):
    """A batch of a validation split.

    Attributes:
        batch: without padding.
        num_items: the number of items, a scalar tensor; 0 for a batch that replaces a batch of padding.
    """

    batch: Batch
    num_items: Tensor


class Collated:
    """Whole batches of a map-style data set by the indices of their items, without padding.

    Args:
        collate: makes a batch of a list of items.
        count: use only the first so many items; None: all.
        name: of the data set, for messages.
    """

    def __init__(
        self, items: Any, collate: Callable[[list[Any]], Batch], count: int | None, name: str = "the data"
    ) -> None:
        self.items, self.collate, self.name = items, collate, name
        self.count = min(len(items), count or len(items))

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, indices: Tensor) -> Batch:
        """Return the batch of these items.

        Raises:
            UserError: an item cannot be read, or the items make no batch with a tensor in it.
            OSError: the disk failed; another attempt may succeed.
        """
        items = self._read(indices.tolist())
        remedy = ". Items of different sizes need a data.collate_fn."
        with _translated(self.name, "the items do not form a batch", remedy):
            batch = self.collate(items)
        if not tensors_of(batch):
            raise UserError(
                f"the data's batch is a {type(batch).__name__} without a tensor in it; let data.collate_fn return a "
                "tensor, or tuples, lists, dictionaries or dataclasses of tensors, or an object with to(device)."
            )
        return batch

    def _read(self, indices: list[int]) -> list[Any]:
        """Return these items: at once by the data set's own `__getitems__`, as PyTorch's loader does, or one by one."""
        if callable(read_all := getattr(self.items, "__getitems__", None)):
            several = ", ".join(map(str, indices[:5])) + (", ..." if indices[5:] else "")
            with _translated(self.name, f"one of the items {several} cannot be read"):
                return read_all(indices)  # type: ignore[no-any-return]
        items = []
        for i in indices:
            with _translated(self.name, f"item {i} cannot be read"):
                items.append(self.items[i])
        return items

    def spread(self, size: int) -> Batch:
        """Return a batch of so many items from the first to the last, repeated if there are too few.

        Items may be sorted by their length, so the first ones would not be typical. Errors as for any batch.
        """
        places = torch.arange(size)
        return self[places % len(self) if size > len(self) else places * (len(self) - 1) // max(size - 1, 1)]


@contextmanager
def _translated(name: str, what: str, remedy: str = "") -> Iterator[None]:
    """Translate an error of the user's code into a UserError. Lack of memory and of disks is passed on."""
    try:
        yield
    except (UserError, OSError, MemoryError):
        raise
    except Exception as error:
        if "allocate memory" in str(error):
            raise
        raise UserError(f"{name}: {what}: {in_words(error)}{remedy}") from error


class Repeated:
    """Whole batches that are always the same: the model's own example.

    Args:
        example: makes a batch of a given size.
        count: the number of items to pretend.
    """

    def __init__(self, example: Callable[[int], Batch], count: int) -> None:
        self.example, self.count = example, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, indices: Tensor) -> Batch:
        return self.example(len(indices))


class WithoutPadding:
    """The batches of a validation split without padding, for a user's loss, which does not know padding.

    To keep step with the others, a rank may get a batch of padding only. The first item, marked, replaces it.
    """

    def __init__(self, dataset: Dataset) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, indices: Tensor) -> Marked:
        real = indices[indices >= 0]
        return Marked(self.dataset[real if len(real) else torch.zeros(1, dtype=torch.int64)], torch.tensor(len(real)))


def build_data(config: DataConfig, model: ModelConfig, build_model: Callable[[], nn.Module]) -> DataSpec:
    """Return the data of a map-style data set, or of `data=example`. Reads nothing yet.

    Args:
        model: its sizes are arguments of the data set.
        build_model: the model's constructor, which makes the batches of `data=example`.
    """
    if (function := config.function()) is None:
        return _example_data(config, build_model, own_example(config, model))
    arguments, target = config.arguments_for(model), str(config.target)
    collate = import_callable(config.collate_fn, "data.collate_fn") if config.collate_fn else default_collate

    @cache
    def split(name: str) -> Collated:
        items = make_split(function, target, name, arguments)
        count = config.num_train if name == "train" else config.num_val
        return Collated(items, collate, count, f"data._target_={target}, split={name}")

    def prepare() -> None:
        split("train"), split("val")

    def load() -> Data:
        prepare()
        train, val = split("train"), split("val")
        text, vocab_size = (getattr(val.items, name, None) for name in ("bytes_per_token", "vocab_size"))
        return Data(train, WithoutPadding(val), digest_of([train, val]), text, vocab_size)

    def spread(size: int) -> Batch:
        return split("train").spread(size)

    knows_collate = not config.collate_fn or _package_of(collate) == _package_of(function)
    without_reading = getattr(function, "example_batch", None) if knows_collate else None
    example = partial(without_reading, **instantiate(arguments, "data")) if without_reading else None
    return DataSpec(prepare, load, own_example(config, model) or example or example_of(partial(like, spread)))


def _package_of(callable: Any) -> str:
    return str(getattr(callable, "__module__", "")).partition(".")[0]


def digest_of(splits: Sequence[Collated]) -> str:
    """Return 16 digits: of each data set's own attribute `digest`, or else of its length and its first and last items.

    Of items that differ when they are read again, as augmented ones do, only shapes and types count. Errors as for any
    batch.
    """
    sha = hashlib.sha256()
    for split in splits:
        count, own = len(split.items), getattr(split.items, "digest", None)
        if isinstance(own, str | int):
            sha.update(f"{count} {own}".encode())
            continue
        ends = torch.tensor(sorted({*range(min(_ENDS, count)), *range(max(0, count - _ENDS), count)}))
        with torch.random.fork_rng(devices=[]):
            once, again = split[ends], split[ends]
        sha.update(f"{count} {describe(once)}".encode())
        tensors, others = ([part for tensor in tensors_of(batch) for part in _dense(tensor)] for batch in (once, again))
        if len(tensors) == len(others) and all(map(torch.equal, tensors, others)):
            for tensor in tensors:
                sha.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return sha.hexdigest()[:16]


def _dense(tensor: Tensor) -> list[Tensor]:
    """Return the dense tensors of which a sparse, nested or dense one consists."""
    match tensor.layout:
        case torch.sparse_coo:
            tensor = tensor.coalesce()
            return [tensor.indices(), tensor.values()]
        case torch.sparse_csr | torch.sparse_bsr:
            return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
        case torch.sparse_csc | torch.sparse_bsc:
            return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
        case torch.jagged:
            nested: Any = tensor
            return [nested.values(), nested.offsets()]
    return [tensor.resolve_conj()]


def make_split(function: Any, target: str, name: str, arguments: dict[str, Any]) -> Any:
    """Return a split that is the same on every rank and in every trial, even if its items are drawn at random.

    Args:
        name: `train` or `val`.
        arguments: of the callable, without the split.

    Raises:
        UserError: the callable fails, or returns no map-style data set with items.
    """
    try:
        with seeded(0):
            items = function(split=name, **instantiate(arguments, "data"))
    except UserError:  # our own data sets say it in one message
        raise
    except Exception as error:
        raise UserError(f"data._target_={target} with split={name} fails: {in_words(error)}") from error
    readers = {getattr(type(items), name, None) for name in ("__getitem__", "__getitems__")}
    if not hasattr(items, "__len__") or readers <= {None, torch.utils.data.Dataset.__getitem__}:  # which only raises
        raise UserError(
            f"data._target_={target} returns a {type(items).__name__} for split={name}; return a map-style data set, "
            "with __len__ and __getitem__; give an iterable one by data.loader, as batches."
        )
    if len(items) == 0:
        raise UserError(f"data._target_={target} returns no items for split={name}; each split needs at least one.")
    return items


def own_example(config: DataConfig, model: ModelConfig) -> Callable[[int], Batch] | None:
    """Return what makes batches by `data.example_batch`; None without it."""
    if config.example_batch is None:
        return None
    function = import_callable(config.example_batch, "data.example_batch")

    def example(size: int) -> Batch:
        try:
            return function(size, **instantiate(config.arguments_for(model), "data"))
        except Exception as error:
            raise UserError(f"data.example_batch={config.example_batch} fails: {in_words(error)}") from error

    return example_of(example)


def example_of(read: Callable[[int], Batch]) -> Callable[[int], Batch]:
    """Return a function that makes batches of the shapes and types that another reads, from uninitialised memory.

    Items are read with the first batch of each size, in the caller's thread, because a connection to a database may be
    bound to it. Tensors must not be fake at that call.
    """

    @cache
    def shapes(size: int) -> Batch:
        with seeded(0), torch.device("cpu"):  # not with the caller's seed and device
            return map_tensors(lambda tensor: tensor.to("meta"), read(size))

    return lambda size: map_tensors(lambda tensor: torch.empty(tensor.shape, dtype=tensor.dtype), shapes(size))


def like(read: Callable[[int], Batch], size: int) -> Batch:
    """Return a batch with the shapes and types of one of that size, from few items if these are alike.

    Items of different lengths are read, up to 1,024 of them. A dimension is then the longest of these and of
    33 others, or the sum of all.

    Args:
        read: returns a batch of so many items.
    """
    less, more = read(_MEASURED), read(_MEASURED + 1)
    if all(_grows_in_step(*dims) for dims in zip(_dims(less), _dims(more), strict=True)):
        dims = iter([a if a == b else a // _MEASURED * size for a, b in zip(_dims(less), _dims(more), strict=True)])
        return _shaped(less, dims)
    batch, times = read(min(size, _READ)), max(size / _READ, 1.0)
    known = zip(_dims(batch), _dims(read(_MEASURED // 2)), _dims(more), strict=True)
    dims = iter([math.ceil(dim * times) if many >= _TOGETHER * few else max(dim, many) for dim, few, many in known])
    return _shaped(batch, dims)


def _dims(batch: Batch) -> list[int]:
    return [dim for tensor in tensors_of(batch) for dim in tensor.shape]


def _shaped(batch: Batch, dims: Iterator[int]) -> Batch:
    return map_tensors(
        lambda tensor: torch.empty(list(islice(dims, tensor.dim())), dtype=tensor.dtype, device="meta"), batch
    )


def _grows_in_step(a: int, b: int) -> bool:
    return a == b or (a % _MEASURED == 0 and b == a // _MEASURED * (_MEASURED + 1))


def _example_data(
    config: DataConfig, build_model: Callable[[], nn.Module], own: Callable[[int], Batch] | None
) -> DataSpec:
    @cache
    def example(size: int) -> Batch:
        model: Any = without_values(build_model)
        if not callable(getattr(model, "example_batch", None)):
            raise ConfigError(
                f"data=example: the model is a {type(model).__name__}, which has no method example_batch(size) that "
                "returns a batch; add it, or name a data set with data._target_."
            )
        with torch.random.fork_rng(devices=[]), torch.device("cpu"):
            torch.manual_seed(0)  # the same on every rank
            return model.example_batch(size)

    read = partial(like, example)
    train, val = (Repeated(example, count or 1024) for count in (config.num_train, config.num_val))
    return DataSpec(lambda: None, lambda: Data(train, WithoutPadding(val), "example"), own or example_of(read))
