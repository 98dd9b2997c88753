"""Find what sharding silently breaks: in the first steps, in every tenth, and before results are kept.

FSDP matches the collectives of ranks by their order alone. Ranks that use different modules exchange wrong weights,
or end with an error of gloo or NCCL.
"""

from __future__ import annotations

import zlib
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp_lab.config.errors import UserError
from fsdp_lab.memory.allocator_profile import not_reported
from fsdp_lab.memory.torch_private import (
    collectives_announced,
    flat_units,
    unsharded_parameters,
    version_of,
    without_modes,
)
from fsdp_lab.training.distributed import gather
from fsdp_lab.training.parallel.base import Parallel
from fsdp_lab.training.replicas import check_replicas
from fsdp_lab.workloads.base import Loss, describe, original_name, unwrapped

FIRST_STEPS = 2  # ranks compare before each of their collectives; these steps are not timed
EVERY = 10  # later steps between two checks
MEAN, SUM_AND_COUNT = "a mean", "(sum, count)"  # the forms of a loss
_REMEDY = (
    "With FSDP all ranks must use the same modules in the same order, or they exchange the wrong weights: let every "
    "rank use them (add 0 times the output of one that a rank does not need), or use sharding=root with "
    "sharding.find_unused_parameters=true, or sharding=ddp, which looks for parameters without a gradient."
)


class StepChecks:
    """Checks on every rank that all ranks use the same parts of the model, and that what changes is kept.

    Attributes:
        mark: a number of 24 bits that differs once ranks have done different things.
    """

    def __init__(self, parallel: Parallel) -> None:
        config, model = parallel.config, parallel.model
        self._parallel, self._model = parallel, unwrapped(model)
        self._sharding = parallel.sharding
        self._loss = f"task.loss={config.task.loss}: " if config.task.loss else ""
        self._flat = [handle.flat_param for _, handle in flat_units(model)]
        self._parameters = self._named_parameters()
        self._frozen = [(name, parameter) for name, parameter in self._parameters if not parameter.requires_grad]
        self._gathered: list[tuple[str, nn.Parameter, nn.Parameter]] = []
        self._trained = {id(parameter) for _, parameter in self._parameters if parameter.requires_grad}
        self._is_sharded = parallel.is_sharded and not config.precision.float8
        self._compares = parallel.is_sharded and dist.get_world_size() > 1
        self._meetings = 0  # so many of the next events are compared as they come
        self._step = self._seen = 0
        self._evaluated = False
        self._collectives = Counter[str]()
        self._lacking = deque[list[str]](maxlen=2 * EVERY)  # for each of the last steps: parameters without a gradient
        self.mark = 0
        if self._compares:
            self._units = collectives_announced(model, self._collective)

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
        with self.comparing() if is_first else nullcontext():
            yield is_first
        if is_first:
            self._check_replicas()
        if is_first or self._seen % EVERY == 0:
            self.check_parameters()

    def passed(self, event: str, loss: Loss | None = None) -> None:
        """Note the end of a forward or backward pass; after the last of a step, which parameters have gradients.

        Args:
            event: `forward`, `backward` or `gradients`; or the form of the loss, which must be the same on all ranks.
            loss: of a forward pass.
        """
        if event in (MEAN, SUM_AND_COUNT):
            self._check_form(event)
            return
        if event == "forward" and self._is_sharded and self._seen <= FIRST_STEPS:
            self._gathered = unsharded_parameters(self._model)
        if loss is not None and self._seen <= FIRST_STEPS:
            self._check_leaves(loss)
        copies = [(name, copy) for name, shard, copy in self._gathered if id(shard) not in self._trained]
        for name, parameter in (*self._frozen, *copies):  # a copy is frozen again when its unit is gathered again
            self._check_trained(name, parameter)
        if self._compares and event == "gradients":
            whole = self._parallel.flat_parts == 1  # else a rank may have no element of a parameter
            self._lacking.append([name for name, parameter in self._parameters if whole and parameter.grad is None])
            self._comes("has other gradients", str(self._lacking[-1]))
            if self._seen <= FIRST_STEPS:
                self._parallel.check_gradients(self._parameters)
        elif self._compares:
            self._comes(f"has ended its {event} pass")

    def _check_leaves(self, loss: Loss) -> None:
        """Check that the model holds the parameters that a loss trains. An input may require a gradient, too."""
        copies = (copy for _, _, copy in unsharded_parameters(self._model))
        held = {id(tensor) for tensor in (*self._model.parameters(), *self._model.buffers(), *copies, *self._flat)}
        for leaf in _leaves_of(loss):
            if isinstance(leaf, nn.Parameter) and id(leaf) not in held:
                raise UserError(
                    f"{self._loss}the loss of step {self._step} has a parameter ({describe(leaf)}) that the model does "
                    "not hold, so no optimizer trains it. Move it into the model: register it in the constructor as "
                    "an nn.Parameter, and use it in forward. To keep its value, freeze it by requires_grad_(False)."
                )

    def _check_form(self, form: str) -> None:
        """Check in the first step that losses have one form: ranks exchange the counts of a sum, and none of a mean."""
        if self._seen > 1:
            return  # the task raises an error if the form changes later
        with without_modes(), not_reported():
            forms = gather(form)
        for rank, other in enumerate(forms):
            if other != forms[0]:
                raise UserError(
                    f"the loss is {forms[0]} on rank 0 and {other} on rank {rank} in step {self._step}; let task.loss "
                    "return (sum, count) for every batch, with a count of 0 where no label counts."
                )

    def _named_parameters(self) -> list[tuple[str, nn.Parameter]]:
        return [(original_name(name), parameter) for name, parameter in self._model.named_parameters()]

    def evaluated(self) -> None:
        """Note that a forward pass without gradients has ended."""
        if self._compares:
            self._comes("has ended its forward pass")

    def evaluation(self) -> None:
        """Compare the start of the first evaluation as it comes."""
        if self._compares and not self._evaluated:
            self._meetings = 2 * self._units
        self._evaluated = True

    @contextmanager
    def comparing(self) -> Iterator[None]:
        """Compare what ranks do inside as it comes.

        Raises:
            UserError: ranks use different modules.
        """
        if self._is_sharded and self._compares:
            self._meetings = 1 << 62
        try:
            yield
        finally:
            self._meetings = 0

    def check(self) -> None:
        """Check what has been done so far; before a checkpoint or a model is written.

        Raises:
            UserError: see `step`.
        """
        if self._compares and len(set(gather(self.mark))) > 1:
            self.explain()
        self._check_replicas()
        self.check_parameters()

    def _check_replicas(self) -> None:
        parallel, where = self._parallel, f"{self._sharding}: by step {self._step}"
        check_replicas(self._parameters, parallel.dims.dp_replicate, parallel.device, where)

    def explain(self) -> NoReturn:
        """Raise what ranks have done differently; every rank calls it."""
        ranks = gather((self._collectives, list(self._lacking)))
        first, lacking = ranks[0]
        for rank, (collectives, _) in enumerate(ranks):
            for does in sorted((first - collectives).keys() | (collectives - first).keys()):
                self._refuse(f"rank 0 {does} {first[does]} times and rank {rank} {collectives[does]} times")
        for rank, (_, others) in enumerate(ranks):
            for mine, theirs in zip(lacking, others, strict=True):
                for name in (*mine, *theirs):
                    if (name in mine) != (name in theirs):
                        has, lacks = (rank, 0) if name in mine else (0, rank)
                        self._refuse(f"{name} has a gradient on rank {has} and none on rank {lacks}")
        self._refuse("ranks use modules in another order")

    def _collective(self, does: str, unit: str) -> None:
        does = f"{does} of {unit or 'the root'}"
        self._collectives[does] += 1
        self._comes(does)

    def _comes(self, does: str, details: str = "") -> None:
        """Note what this rank does next, and if it is time, compare it with the others."""
        self.mark = zlib.crc32(f"{self.mark} {does} {details}".encode()) & 0xFFFFFF
        if not self._meetings:
            return
        self._meetings -= 1
        with without_modes(), not_reported():
            mine = torch.tensor([self.mark], device=self._parallel.device)
            marks = mine.new_empty(dist.get_world_size())
            dist.all_gather_into_tensor(marks, mine)
            if len(set(marks.tolist())) == 1:
                return
            ranks = gather(does)
            for rank, other in enumerate(ranks):
                if other != ranks[0]:
                    self._refuse(f"rank 0 {ranks[0]}, and rank {rank} {other}")
            self.explain()

    def _refuse(self, what: str) -> NoReturn:
        raise UserError(f"{self._sharding}: up to step {self._step} {what}. {_REMEDY}")

    def check_parameters(self) -> None:
        """Check that no parameter was unfrozen or made since the start, or written while it was gathered.

        Raises:
            UserError: with its name, and a remedy.
        """
        names = {name for name, _ in self._parameters}
        for name, parameter in self._named_parameters():
            if name not in names or not (self._is_sharded or id(parameter) in self._trained):
                self._check_trained(name, parameter)
        for name, _, copy in self._gathered:
            if version_of(copy):
                raise UserError(
                    f"{self._sharding}: {name} was written in a forward pass, by step {self._step}. FSDP2 gathers a "
                    "copy of it for each pass and frees that again, so the write is lost. Write it outside of forward, "
                    "as in a hook of the optimizer's step, or keep it in a buffer (register_buffer). sharding=ddp "
                    "keeps a write that is the same on all ranks, and refuses one of a rank's own samples, "
                    "as nn.Embedding(max_norm=...) does: divide what the embedding returns by its norm instead."
                )

    def _check_trained(self, name: str, parameter: Tensor) -> None:
        if parameter.requires_grad or parameter.grad is not None:
            raise UserError(
                f"{name} requires a gradient by step {self._step}, but was frozen or missing at the "
                "start, when the optimizer was made, so it is never trained. Let it require one from the constructor "
                "on, and multiply its part by 0 until it is to be trained."
            )


def _leaves_of(loss: Loss) -> Iterator[Tensor]:
    """Yield the tensors for which a backward pass computes gradients."""
    tensors = loss if isinstance(loss, tuple) else (loss,)
    yield from (tensor for tensor in tensors if tensor.requires_grad and tensor.is_leaf)
    left = [tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None]
    seen = set(left)
    while left:
        node = left.pop()
        if type(node).__name__ == "AccumulateGrad":
            yield node.variable  # type: ignore[attr-defined]
        for before, _ in node.next_functions:
            if before is not None and before not in seen:
                seen.add(before)
                left.append(before)
