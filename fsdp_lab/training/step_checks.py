"""What goes wrong in silence when a model is sharded, found in the first steps, every ten, and before results are kept.

FSDP2 matches the collectives of ranks by their order alone. Ranks that use different modules exchange wrong weights,
or end with an error of gloo or NCCL.
"""

from __future__ import annotations

import zlib
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from fsdp_lab.config.errors import UserError
from fsdp_lab.config.trial import TrialConfig
from fsdp_lab.training.distributed import gather
from fsdp_lab.training.module_names import plain_name
from fsdp_lab.training.torch_private import (
    collectives_announced,
    not_reported,
    unsharded_parameters,
    version_of,
    without_modes,
)

FIRST_STEPS = 2  # in which ranks compare before each collective; they are not timed
EVERY = 10  # later steps between two looks
_PIECE = 1 << 18  # numbers of a weight that are looked at together: more take memory
_REMEDY = (
    "With FSDP2 all ranks must use the same modules in the same order, or they exchange the wrong weights: let every "
    "rank use them (add 0 times the output of one that a rank does not need), or use sharding=ddp, which looks for "
    "parameters without a gradient."
)
_DOES = {
    "gather": "gathers the weights of {unit}",
    "reduce": "reduces {size} gradients of {unit}",
    "forward": "has ended its forward pass",
    "backward": "has ended its backward pass",
    "gradients": "has other gradients",
}
_EVENTS = tuple(_DOES)


class StepChecks:
    """Checks on every rank that all ranks use the same parts of the model, and that what changes is kept.

    Args:
        model: sharded, or wrapped by DDP.
        device: of collectives.

    Attributes:
        mark: a number of 24 bits that differs once ranks have done different things.
    """

    def __init__(self, model: nn.Module, config: TrialConfig, device: torch.device) -> None:
        self._model, self._device = model, device
        self._sharding = f"sharding={config.sharding.granularity.name}"
        self._parameters = list(model.named_parameters())
        self._frozen = [(name, parameter) for name, parameter in self._parameters if not parameter.requires_grad]
        self._gathered: list[tuple[str, nn.Parameter, nn.Parameter]] = []
        self._trained = {id(parameter) for _, parameter in self._parameters if parameter.requires_grad}
        self._is_sharded = isinstance(model, FSDPModule) and not config.precision.float8
        self._compares = isinstance(model, FSDPModule) and dist.get_world_size() > 1
        self._watches_data = self._is_sharded and not config.compile
        self._meetings = 0  # how many events from now on are compared as they come
        self._step = self._seen = 0
        self._evaluated = False
        self._used: Counter[tuple[str, str, int]] = Counter()
        self._gradients = deque[str](maxlen=2 * EVERY)  # of a step: which parameters have one; seen by then
        self.mark = 0
        if self._compares:
            self._units = collectives_announced(model, self._comes)

    @contextmanager
    def step(self, number: int) -> Iterator[bool]:
        """Check one step; yield whether it is one of the first, which take longer.

        Args:
            number: of the step, counted from 1 over all starts of a trial.

        Raises:
            UserError: ranks use different modules, or a parameter was written or unfrozen in a forward pass.
        """
        self._step, self._seen = number, self._seen + 1
        is_first = self._seen <= FIRST_STEPS  # with DDP, too, so that all settings are timed over the same steps
        if is_first and self._is_sharded and self._compares:
            self._meetings = 1 << 62
        handles = self._watch_data() if is_first and self._watches_data else []
        try:
            yield is_first
        finally:
            self._meetings = 0
            for handle in handles:
                handle.remove()
        if is_first or self._seen % EVERY == 0:
            self.check_parameters()

    def passed(self, event: str) -> None:
        """Note that a forward or backward pass has ended; after the last of a step: what has `gradients`."""
        if event == "forward" and self._is_sharded and self._seen <= FIRST_STEPS:
            self._gathered = unsharded_parameters(self._model)
        copies = [(name, copy) for name, shard, copy in self._gathered if id(shard) not in self._trained]
        for name, parameter in (*self._frozen, *copies):  # a copy is frozen again when its unit is gathered again
            self._check_trained(name, parameter)
        if not self._compares:
            return
        number = 0
        if event == "gradients":
            self._gradients.append("".join("01"[parameter.grad is not None] for _, parameter in self._parameters))
            number = zlib.crc32(self._gradients[-1].encode())
        self._comes(event, "", number)

    def evaluation(self) -> None:
        """Compare the beginning of the first evaluation as it comes."""
        if self._compares and not self._evaluated:
            self._meetings = 2 * len(self._units)
        self._evaluated = True

    def check(self) -> None:
        """Check what has been done so far; before a checkpoint or a model is written.

        Raises:
            UserError: see `step`.
        """
        if self._compares and len(set(gather(str(self.mark)))) > 1:
            self.explain()
        self.check_parameters()

    def explain(self) -> NoReturn:
        """Raise what ranks have done differently; every rank calls it."""
        mine = "\n".join(f"{what}\t{unit}\t{size}\t{n}" for (what, unit, size), n in sorted(self._used.items()))
        ranks = [Counter(self._lines(text)) for text in gather(mine)]
        for rank, other in enumerate(ranks):
            for what, unit, size in sorted((ranks[0] - other).keys() | (other - ranks[0]).keys()):
                if what in ("gather", "reduce"):
                    done = _DOES[what].format(unit=unit, size=size)
                    counts = [ranks[r][what, unit, size] for r in (0, rank)]
                    self._refuse(f"rank 0 {done} {counts[0]} times and rank {rank} {counts[1]} times")
        self._refuse_gradients("ranks use modules in another order")

    @staticmethod
    def _lines(text: str) -> dict[tuple[str, str, int], int]:
        rows = (line.split("\t") for line in text.splitlines())
        return {(what, unit, int(size)): int(n) for what, unit, size, n in rows}

    def _comes(self, what: str, unit: str, size: int) -> None:
        """Note what this rank does next, and compare it with the others if it is time."""
        self._used[what, unit, size] += 1
        self.mark = zlib.crc32(f"{self.mark} {what} {unit} {size}".encode()) & 0xFFFFFF
        if not self._meetings:
            return
        self._meetings -= 1
        number = self._units.index(unit) if unit else -1
        with without_modes(), not_reported():
            mine = torch.tensor([_EVENTS.index(what), number, size], device=self._device)
            everyone = mine.new_empty(dist.get_world_size() * 3)
            dist.all_gather_into_tensor(everyone, mine)
            ranks = everyone.view(-1, 3).tolist()
        for rank, other in enumerate(ranks):
            if other != ranks[0]:
                if {ranks[0][0], other[0]} == {_EVENTS.index("gradients")}:
                    self._refuse_gradients("ranks have other gradients")
                first, second = (
                    _DOES[_EVENTS[event]].format(unit=self._units[unit], size=size)
                    for event, unit, size in (ranks[0], other)
                )
                self._refuse(f"rank 0 {first}, and rank {rank} {second}")

    def _refuse_gradients(self, what: str) -> NoReturn:
        ranks = [text.split("\n") for text in gather("\n".join(self._gradients))]
        for rank, other in enumerate(ranks):
            for mine, theirs in zip(ranks[0], other, strict=True):
                for (name, _), on_first, on_other in zip(self._parameters, mine, theirs, strict=False):
                    if on_first != on_other:
                        has, lacks = (0, rank) if on_first == "1" else (rank, 0)
                        self._refuse(f"{plain_name(name)} has a gradient on rank {has} and none on rank {lacks}")
        self._refuse(what)

    def _refuse(self, what: str) -> NoReturn:
        raise UserError(f"{self._sharding}: up to step {self._step} {what}. {_REMEDY}")

    def check_parameters(self) -> None:
        """Check that no parameter was unfrozen or made since the start, or written while it was gathered.

        Raises:
            UserError: with its name, and a remedy.
        """
        names = {name for name, _ in self._parameters}
        for name, parameter in self._model.named_parameters():
            if name not in names or not (self._is_sharded or id(parameter) in self._trained):
                self._check_trained(name, parameter)
        for name, _, copy in self._gathered:
            if version_of(copy):
                self._refuse_write(name)

    def _check_trained(self, name: str, parameter: Tensor) -> None:
        if parameter.requires_grad or parameter.grad is not None:
            raise UserError(
                f"{plain_name(name)} requires a gradient by step {self._step}, but was frozen or not there at the "
                "start, when the optimizer was made, so it is never trained. Let it require one from the constructor "
                "on, and multiply its part by 0 until it is to be trained; or train in two trials, the second with "
                "checkpoint.resume_from=<the first>."
            )

    def _refuse_write(self, name: str) -> NoReturn:
        raise UserError(
            f"{self._sharding}: {plain_name(name)} was written in a forward pass, by step {self._step}. FSDP2 gathers "
            "a copy of it for each pass and frees that again, so the write is lost. Write it outside of forward, as in "
            "a hook of the optimizer's step, keep it in a buffer (register_buffer), or use sharding=ddp."
        )

    def _watch_data(self) -> list[torch.utils.hooks.RemovableHandle]:
        """Compare the values of gathered parameters around each unit's forward pass: `.data` counts no writes."""
        before: dict[nn.Module, dict[str, tuple[int, int]]] = {}

        def entered(module: nn.Module, args: object) -> None:
            before[module] = _values(module)

        def left(module: nn.Module, args: object, output: object) -> None:
            values = _values(module)
            for name, old in before.pop(module, {}).items():
                if name in values and values[name] != old:
                    self._refuse_write(f"{names[module]}.{name}".lstrip("."))

        names = {module: name for name, module in self._model.named_modules()}
        units = [module for module in self._model.modules() if isinstance(module, FSDPModule)]
        handles = [nn.Module.register_forward_pre_hook(module, entered) for module in units]
        return [*handles, *(module.register_forward_hook(left, prepend=True) for module in units)]


def _values(module: nn.Module) -> dict[str, tuple[int, int]]:
    """Return where each gathered parameter is, and a number of its bits."""
    with without_modes(), not_reported(), torch.no_grad():
        gathered = [(name, p) for name, p in module.named_parameters() if type(p.data) is Tensor and p.numel()]
        return {name: (p.data_ptr(), _digest(p)) for name, p in gathered}


def _digest(tensor: Tensor) -> int:
    """Return a number that depends on a tensor's bits and on their places: `torch.hash_tensor` knows no places."""
    bits = tensor.flatten().view({1: torch.int8, 2: torch.int16}.get(tensor.element_size(), torch.int32))
    places = torch.arange(1, min(len(bits), _PIECE) + 1, device=bits.device)
    digest = places.new_zeros(())
    for piece in bits.split(_PIECE):
        digest = 31 * digest + (piece * places[: len(piece)]).sum()  # of 64 bits, without those beyond
    return int(digest)
