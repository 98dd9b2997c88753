"""Figures of a trial's first steps, over all ranks, to compare with those of the plain loop (`plain.py`)."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from fsdp_lab.config.metrics import CHANGE_NORM, CHECK_STEPS, CHECK_VAL_LOSS, EVAL_LOSS, FIRST_GRAD_NORM
from fsdp_lab.training.checkpoint import Metrics, TrainState
from fsdp_lab.training.data import Loaders
from fsdp_lab.training.distributed import largest
from fsdp_lab.training.memory_profiler import start_clean
from fsdp_lab.training.own_loader import OwnLoaders
from fsdp_lab.training.parallel.base import local
from fsdp_lab.training.plain_state import put_back, state_of
from fsdp_lab.training.step_checks import StepChecks
from fsdp_lab.workloads.base import Batch
from fsdp_lab.workloads.construct import seeded
from fsdp_lab.workloads.user.data import Marked

_KEPT_BYTES = 2**30  # of first weights on a rank, which are copied to the host
_OWN = (EVAL_LOSS, FIRST_GRAD_NORM, CHANGE_NORM, CHECK_VAL_LOSS)

MeanLoss = Callable[[Iterable[Batch]], float | None]


class FirstSteps:
    """Figures of the first three steps of a trial, or of its first epoch if that is shorter.

    Passes for these figures leave the model, its buffers and the random generators as they were.

    Args:
        mean_loss: evaluates batches of this rank, and returns the mean loss over all ranks; None: no label counts. The
            state is in eval mode then.
        resumed: the trial does not start with its constructor's weights.

    Attributes:
        last: the number of these steps; negative: no figures are taken.
    """

    def __init__(
        self,
        state: TrainState,
        loaders: Loaders | OwnLoaders,
        checks: StepChecks,
        mean_loss: MeanLoss,
        resumed: bool,
    ) -> None:
        config, self._parallel, self._checks, self._mean_loss = state.parallel.config, state.parallel, checks, mean_loss
        self._loaders, self._state, self._model = loaders, state, state.model
        steps = min(CHECK_STEPS, loaders.steps_per_epoch or CHECK_STEPS, config.training.max_steps or CHECK_STEPS)
        self.last = steps if config.check.enabled and not resumed and state.step == 0 else -1
        self._first_weights: list[Tensor] | None = None
        cut = next((m for m in state.history if resumed and m["epoch"] == 1 and m["step"] >= steps), {})
        self._figures: Metrics = {key: cut[key] for key in _OWN if key in cut}  # before max_steps cut the epoch short
        self.grad_norm: Tensor | None = None
        self._done = False

    def is_first(self, step: int) -> bool:
        """Return whether figures start with the next step, after so many steps."""
        return self.last > 0 and step == 0

    def is_cut(self, step: int) -> bool:
        """Return whether an epoch ended after so many steps, too early for all figures: a loader may have no length."""
        return 0 < step < self.last and not self._done

    def begin(self, microbatches: list[Batch]) -> None:
        """Compute the loss in eval mode before the first step, and keep this rank's weights."""
        parts = [local(parameter) for parameter in self._model.parameters()]
        if largest(sum(tensor.nbytes for tensor in parts)) <= _KEPT_BYTES:
            self._first_weights = [tensor.detach().to("cpu", copy=True) for tensor in parts]
        items_of = self._loaders.items_of
        if self._parallel.config.task.metrics is None:  # metrics are made for items of the validation split
            self._evaluate(EVAL_LOSS, [Marked(batch, torch.tensor(items_of(batch))) for batch in microbatches])
        start_clean(self._parallel.device)

    def finish(self) -> None:
        """After the last step, compare the weights with the first ones, and validate."""
        if self._first_weights is not None:
            self._note(CHANGE_NORM, self._change(self._first_weights))
            self._first_weights = None
        self._evaluate(CHECK_VAL_LOSS, self._loaders.first_val)
        self._done = True

    def figures(self) -> Metrics:
        """Return the figures so far; a sync point."""
        if self.grad_norm is not None:
            self._note(FIRST_GRAD_NORM, float(self.grad_norm))
        return self._figures

    def _note(self, key: str, value: float | None) -> None:
        if value is not None and math.isfinite(value):  # the first gradients of fp16 may overflow
            self._figures[key] = value

    def _change(self, first: list[Tensor]) -> float:
        squares = 0.0
        for parameter, before in zip(self._model.parameters(), first, strict=True):
            change = (local(parameter).detach().cpu() - before).abs().double()
            squares += float(change.square().sum()) / self._copies(parameter)
        total = torch.tensor(squares, dtype=torch.float64, device=self._parallel.device)
        dist.all_reduce(total)
        return math.sqrt(float(total))

    def _copies(self, parameter: Tensor) -> float:
        """Return the number of ranks that hold the same part of a parameter."""
        parts = self._parallel.flat_parts
        if isinstance(parameter, DTensor):
            sizes = zip(parameter.device_mesh.shape, parameter.placements, strict=True)
            parts = math.prod(size for size, placement in sizes if not placement.is_replicate())
        return dist.get_world_size() / parts

    def _evaluate(self, key: str, batches: Iterable[Batch]) -> None:
        """Note the mean loss of batches; leave the model and the random generators as they are."""
        before = state_of(self._model)
        seed = zlib.crc32(f"{self._parallel.config.training.seed}/0/{self._parallel.dims.dp_rank}".encode())
        with seeded(seed), self._checks.comparing():
            self._note(key, self._mean_loss(self._announced(batches)))
        put_back(self._model, before)
        self._parallel.reshard()  # the root has kept its parameters for a backward pass
        self._state.train()

    def _announced(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        for batch in batches:
            yield batch
            self._checks.evaluated()  # a rank that uses fewer modules must not reach the next collective
