"""Ranks compare what each has made, before anything pairs their tensors by position: data, modules, first values.

Digests are compared first, and details only where digests differ. The digest of a large tensor is of a sample: the
first and the last 4,096 values, and about as many between them. Parameters on `meta` have no values to compare. Floats
that differ by rounding are alike, because other CPUs compute other last digits.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import zip_longest

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fsdp_lab.config.errors import ConfigError, UserError
from fsdp_lab.config.training import TrainingConfig
from fsdp_lab.training.blocks import BATCH_NORM
from fsdp_lab.training.data import TrainOrder
from fsdp_lab.training.distributed import ParallelDims, gather
from fsdp_lab.workloads.base import Data, Dataset, describe, original_name, tensors_of, unwrapped
from fsdp_lab.workloads.construct import seeded

_SAMPLED = 4096  # values at each end of a tensor, and between
_READ = 4  # items of each split
_SHOWN = 3  # names in a note
_ORDER = (
    "A set has another order in each process: let the constructor iterate over `sorted(...)` of it. Nor may it depend "
    "on the rank, the clock or a generator without a seed."
)
_VALUES = (
    "Draw them from the generators of PyTorch, NumPy (`np.random`) or Python (`random`), which are seeded alike, not "
    "from one without a seed (`np.random.default_rng()`, `random.SystemRandom()`), the clock or the rank; and write "
    "what `torch.empty` made."
)
_DATA = (
    "fsdp_lab divides the samples among ranks itself, so every rank must read the same data: sort what the data set "
    "iterates (a set, the files of a folder), and give its generators a seed."
)
_HASH_SEED = (
    " These ranks have different hash seeds, with which sets of words differ: set PYTHONHASHSEED=0 in the environment "
    "of torchrun, or of `ray start` on every node."
)
_Entry = tuple[str, str | None]


@dataclass(frozen=True)
class _Facet:
    """What ranks must have in common, entry by entry.

    Attributes:
        what: what an entry is, such as `parameter`.
        remedy: for a difference.
        entries: name and content of each; the content is None if this rank has no values to compare.
        tensors: the tensors of the entries, in the same order; None: the entries are words.
    """

    what: str
    remedy: str
    entries: list[_Entry]
    tensors: list[Tensor] | None = None


def check_model(model: nn.Module, buffers_are_sent: bool = False) -> None:
    """Compare the parameters, buffers and modules that the constructor made on each rank; every rank calls it.

    Args:
        model: before it is sharded, wrapped or loaded. Parameters may be on `meta`, on some ranks or all.
        buffers_are_sent: whether all ranks get the buffers of rank 0, so that their first values may differ.

    Raises:
        UserError: two ranks differ. The error has the first such name, both ranks and a remedy. It is the same on all
            ranks.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    buffers = dict(model.named_buffers(remove_duplicate=False))
    modules = model.named_modules(remove_duplicate=False)
    _check(
        _Facet("parameter", _ORDER, _shapes(parameters)),
        _Facet("buffer", _ORDER, _shapes(buffers)),
        _Facet("module", _ORDER, [(name or "of the model", _kind(module)) for name, module in modules]),
        _values("parameter", parameters),
        _values("buffer", {} if buffers_are_sent else buffers),
    )


def check_data(data: Data, training: TrainingConfig) -> None:
    """Compare both splits, the order of the first batch, and some items of each; every rank calls it.

    Of items that differ when they are read again, as augmented ones do, only shapes and types are compared.

    Raises:
        UserError: as `check_model`.
    """
    order = torch.arange(_READ)
    with suppress(ConfigError):  # a split of less than a batch is refused later, when all ranks agree on its length
        order = next(iter(TrainOrder(len(data.train), training, ParallelDims())))
    facts = [
        ("split train", f"{len(data.train)} items"),
        ("split val", f"{len(data.val)} items"),
        ("vocabulary", f"{data.vocab_size} tokens"),
        ("order of the first batch", f"digest {zlib.crc32(order.numpy().tobytes()):08x}"),
        _items("train", data.train, order[:_READ]),
        _items("val", data.val, torch.arange(min(_READ, len(data.val)))),
        ("digest", data.digest),
    ]
    _check(_Facet("the data's", _DATA, facts))


def buffer_notes(model: nn.Module, dp_degree: int) -> list[str]:
    """Return a note on buffers that differ between ranks, because each wrote them from its own rows.

    Batch norm has another note, from the start. Every rank calls this after some steps.
    """
    if dp_degree == 1:
        return []
    model = unwrapped(model)
    noted = [name for name, module in model.named_modules() if isinstance(module, BATCH_NORM)]
    buffers = {original_name(n): b for n, b in model.named_buffers() if n.rpartition(".")[0] not in noted}
    names = [name for _, name, _ in _differences(_values("buffer", buffers))]
    if not names:
        return []
    return [
        f"Ranks differ in the buffers {', '.join(names[:_SHOWN])}{' and others' * (len(names) > _SHOWN)}: each writes "
        "them from its own part of the batch. Losses depend on the number of workers. val/loss, and the best epoch by "
        "it, is of each rank's own; the exported model has those of rank 0. Average them over the ranks "
        "(torch.distributed.all_reduce) where they are written."
    ]


def _check(*facets: _Facet) -> None:
    """Raise the first difference, on every rank."""
    for facet, _, text in _differences(*facets):
        seeds = set(gather(hash(__name__)))
        raise UserError(f"ranks are not alike: {text}. {facet.remedy}{_HASH_SEED * (len(seeds) > 1)}")


def _differences(*facets: _Facet) -> Iterator[tuple[_Facet, str, str]]:
    """Yield each difference between ranks: its facet, the name of an entry, and both in words.

    The same on every rank. A rank is compared with the first one that has the entry.
    """
    of_ranks = gather([_digest_of_entries(facet.entries) for facet in facets])
    for facet, *digests in zip(facets, *of_ranks, strict=True):
        if len({*digests} - {None}) < 2:
            continue
        for place, entries in enumerate(zip_longest(*gather(facet.entries))):
            has = [(rank, entry) for rank, entry in enumerate(entries) if entry is None or entry[1] is not None]
            if len({entry for _, entry in has}) > 1:
                one, entry = has[0]
                others = [rank for rank, theirs in has if theirs != entry]
                if facet.tensors is not None and all(each for _, each in has):
                    others = _beyond_rounding(facet.tensors[place], others)
                for other in others[:1]:
                    name, _ = entry or entries[other]
                    yield facet, name, _in_words(facet, (one, other), (entry, entries[other]))


def _in_words(facet: _Facet, ranks: tuple[int, int], entries: tuple[_Entry | None, _Entry | None]) -> str:
    """Return what two ranks have; None: one has no such entry, and no later one."""
    (one, other), what = ranks, facet.what
    if facet.tensors is not None and entries[0]:
        return f"{what} {entries[0][0]} has other values on rank {one} than on rank {other}"
    mine, theirs = (f"{what} {entry[0]} ({entry[1]})" if entry else f"no other {what}" for entry in entries)
    return f"rank {one} has {mine} where rank {other} has {theirs}"


def _digest_of_entries(entries: list[_Entry]) -> int | None:
    """Return a digest; None if this rank has only names."""
    if entries and all(content is None for _, content in entries):
        return None
    return zlib.crc32(repr(entries).encode())


def _beyond_rounding(tensor: Tensor, others: list[int]) -> list[int]:
    """Return the other ranks with values that are not close to the first rank's; every rank calls it."""
    samples = gather(None if tensor.is_meta else _sample(tensor))
    first = next(sample for sample in samples if sample is not None)
    return [rank for rank in others if not _is_close(first, samples[rank])]


def _is_close(one: Tensor | str | None, other: Tensor | str | None) -> bool:
    """Whether floats agree in the first half of their digits, and anything else wholly."""
    if not isinstance(one, Tensor) or not isinstance(other, Tensor) or one.shape != other.shape:
        return False
    if one.dtype != other.dtype or not one.is_floating_point():
        return torch.equal(one, other)
    eps, one, other = torch.finfo(one.dtype).eps, one.double(), other.double()
    largest = one[one.isfinite()].abs().max().item() if one.isfinite().any() else 0.0
    return torch.allclose(one, other, rtol=0.0, atol=largest * eps**0.5, equal_nan=True)


def _values(what: str, tensors: Mapping[str, Tensor]) -> _Facet:
    entries = [(name, None if tensor.is_meta else digest(tensor)) for name, tensor in tensors.items()]
    return _Facet(what, _VALUES, entries, [*tensors.values()])


def digest(tensor: Tensor) -> str:
    """Return a digest of some of a tensor's values."""
    sample = _sample(tensor)
    return f"{zlib.crc32(sample.encode() if isinstance(sample, str) else _bytes(sample)):08x}"


def _bytes(sample: Tensor) -> bytes:
    return sample.view(torch.uint8).numpy().tobytes()


def _sample(tensor: Tensor) -> Tensor | str:
    """Return values of a tensor on the host, `(n,)`; of a sparse or quantized one PyTorch's summary in words."""
    with torch.no_grad():
        try:
            tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()
            values = (torch.view_as_real(tensor) if tensor.is_complex() else tensor).reshape(-1)
            if (count := len(values)) > 3 * _SAMPLED:
                values = torch.cat([values[:_SAMPLED], values[:: count // _SAMPLED], values[-_SAMPLED:]])
            values = values.cpu().contiguous()
            _bytes(values)
        except (RuntimeError, TypeError, NotImplementedError):
            return repr(tensor.cpu())
    return values


def _shapes(tensors: Mapping[str, Tensor]) -> list[_Entry]:
    """Return a description of each tensor: shape, type, whether it is trained, and what it is tied to."""
    first: dict[int, str] = {}
    entries: list[_Entry] = []
    for name, tensor in tensors.items():
        tied = first.setdefault(id(tensor), name)
        trained = "" if not isinstance(tensor, nn.Parameter) else ", trained" if tensor.requires_grad else ", frozen"
        entries.append((name, f"{describe(tensor)}{trained}{f', the same as {tied}' * (tied != name)}"))
    return entries


def _kind(module: nn.Module) -> str:
    """Return the class of a module, and for PyTorch's own modules the arguments that PyTorch shows."""
    kind = type(module)
    return f"{kind.__qualname__}({module.extra_repr() if kind.__module__.startswith('torch.nn.') else ''})"


def _items(split: str, dataset: Dataset, indices: Tensor) -> _Entry:
    """Return the content of some items; None if they cannot be read: a step reports that error."""
    name = f"items {', '.join(map(str, indices.tolist()))} of {split}"
    try:
        with seeded(0):
            once = dataset[indices]
        with seeded(0):
            again = dataset[indices]
        digests = [[digest(tensor) for tensor in tensors_of(batch)] for batch in (once, again)]
    except Exception:  # noqa: BLE001 (whatever a data set raises)
        return name, None
    return name, f"{describe(once)}{' digest ' + ' '.join(digests[0]) if digests[0] == digests[1] else ''}"
