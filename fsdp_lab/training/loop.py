"""One optimizer step, one epoch, one validation."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import islice
from statistics import fmean
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.utils.data import DataLoader

from fsdp_lab.config.errors import UserError
from fsdp_lab.config.metrics import EARLY_LOSS, FIRST_LOSS, LABELS, LOSS_EPS, WARM_LOSS
from fsdp_lab.config.target import in_words
from fsdp_lab.config.trial import TrialConfig
from fsdp_lab.memory.allocator_profile import not_reported
from fsdp_lab.memory.torch_private import active_fake_mode, without_modes
from fsdp_lab.training.checkpoint import Metrics, TrainState
from fsdp_lab.training.distributed import ParallelDims, gather
from fsdp_lab.training.divergence import DivergedError, LossCheck
from fsdp_lab.training.memory_profiler import MemoryProfiler
from fsdp_lab.training.own_loader import OwnLoaders
from fsdp_lab.training.own_step import OwnStep, of_users, optimizer_explained, reads_refused
from fsdp_lab.training.parallel.base import whole
from fsdp_lab.training.profiler_trace import ProfilerTrace
from fsdp_lab.training.slow_rank import SlowRank
from fsdp_lab.training.speed import StepTimer
from fsdp_lab.training.step_checks import FIRST_STEPS, MEAN, SUM_AND_COUNT, StepChecks
from fsdp_lab.training.step_loss import StepLoss
from fsdp_lab.workloads.base import Batch, Task, tensors_of, to_device, unwrapped
from fsdp_lab.workloads.construct import seed_all

if TYPE_CHECKING:
    from fsdp_lab.training.first_steps import FirstSteps
_WARM_STEPS = 20  # of a warm-up; later ones amplify rounding too much to compare a loss


def train_step(
    state: TrainState,
    task: Task,
    microbatches: list[Batch],
    passed: Callable[..., None] = lambda *event: None,
    norm_too: bool = False,
    watched: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> tuple[Tensor, Tensor | None]:
    """Take one step over the microbatches of this rank: the optimizer's, or the user's own.

    Args:
        state: changed in place.
        microbatches: of this rank, on any device.
        passed: called with `forward` and the loss after each forward pass, and with `backward` after each backward
            pass. Once for each loss it is called with the form of the loss, before ranks exchange what depends on it.
            Then it is called with `gradients`, before these are used.
        norm_too: compute the norm of the gradients, unless some are sparse.
        watched: the context in which an optimizer takes its step.

    Returns:
        this rank's part of the loss, or of the sum of all losses that were minimised; its mean over the ranks is the
        loss of the global batch. And the norm of all gradients before clipping; None unless `norm_too` or `has_norms`.
        Both are detached and on the device, so there is no sync point.
    """
    state.lr = state.rate
    descent = _Descent(state, microbatches, passed, norm_too, watched)
    take_step = getattr(task, "take_step", None)
    if take_step is None:
        descent("model", task)
    else:
        state.figures = take_step(state.model, state.step + 1, descent)
        descent.end()
    if not descent.skipped:
        _step_schedule(state)
        state.taken += 1
        if state.after_step is not None:
            _after_step(state, state.after_step)
    state.step += 1
    state.epoch_step += 1
    norms = descent.norms
    norm = torch.linalg.vector_norm(torch.stack(norms)) if norms[1:] else norms[0] if norms else None
    assert descent.total is not None
    return descent.total, norm


class _Descent:
    """Minimises losses over the microbatches of a step, each by one optimizer; see `train_step`.

    Attributes:
        total: this rank's part of the losses so far.
        norms: of the gradients of each.
        skipped: loss scaling has skipped one.
    """

    def __init__(
        self, state: TrainState, microbatches: list[Batch], passed: Callable[..., None], norm_too: bool,
        watched: Callable[[], AbstractContextManager[None]],
    ) -> None:  # fmt: skip
        self._state, self._microbatches, self._passed = state, microbatches, passed
        self._norm_too, self._watched = norm_too, watched
        self.total: Tensor | None = None
        self.norms: list[Tensor] = []
        self.skipped = False

    def __call__(self, name: str, task: Task) -> Tensor:
        """Let the optimizer of that name take a step, and return this rank's part of the loss, detached.

        Raises:
            UserError: there is no such optimizer.
        """
        state, model = self._state, self._state.model
        if (optimizer := state.optimizers.get(name)) is None:
            raise UserError(
                f"task.step={state.parallel.config.task.step}: run.minimize({name!r}, ...) names no optimizer; use "
                f"{' or '.join(map(repr, state.optimizers))}."
            )
        self._compare(f"minimises {name!r}")
        with state.parallel.divided_loss():
            loss = _accumulate(state, task, self._microbatches, self._passed)
        if state.parallel.config.task.step is not None:
            state.parallel.reshard()  # a part without a backward pass of its own stays gathered
        if len(state.optimizers) > 1:
            own = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
            for parameter in model.parameters():
                if id(parameter) not in own:
                    parameter.grad = None
        self._check_trains(name, optimizer)
        self._passed("gradients")
        is_dense = all(p.grad is None or p.grad.layout is torch.strided for p in model.parameters())
        has_norm = has_norms(task, state.parallel.config) or (self._norm_too and is_dense)
        norm = update(state, optimizer, has_norm=has_norm, watched=self._watched)
        self.norms += [] if norm is None else [norm]
        scale = state.scaler.get_scale()  # a sync point: one a step
        self.skipped |= scale < state.loss_scale  # a smaller scale means that the step was skipped
        state.loss_scale = scale
        self.total = loss if self.total is None else self.total + loss
        return loss

    def end(self) -> None:
        """Check that all ranks have ended the step."""
        self._compare("ends the step")

    def _compare(self, does: str) -> None:
        for rank, other in enumerate(self._of_ranks(does)):
            if other != does:
                raise UserError(
                    f"task.step={self._state.parallel.config.task.step}: in step {self._state.step + 1} a rank {does}, "
                    f"and rank {rank} {other}; every rank must minimise the same losses in the same order: exchange "
                    "what decides (torch.distributed.all_reduce)."
                )

    def _check_trains(self, name: str, optimizer: torch.optim.Optimizer) -> None:
        has = any(p.grad is not None for group in optimizer.param_groups for p in group["params"])
        if not any(self._of_ranks(has) or [True]):
            raise UserError(
                f"task.step={self._state.parallel.config.task.step}: the loss of run.minimize({name!r}, ...) gives no "
                "parameter of that optimizer a gradient; let it depend on one, or name another optimizer."
            )

    def _of_ranks(self, value: Any) -> list[Any]:
        """Return the value of each rank, in the first steps of a user's step; else nothing."""
        state = self._state
        if state.parallel.config.task.step is None or state.step >= FIRST_STEPS or active_fake_mode() is not None:
            return []
        with without_modes(), not_reported():
            return gather(value)


def _step_schedule(state: TrainState) -> None:
    try:
        for schedule in state.lr_schedules:
            schedule.step()
    except Exception as error:
        if state.schedule_is_ours:
            raise
        target = state.parallel.config.lr_schedule.target
        raise UserError(
            f"lr_schedule._target_={target} fails after step {state.step + 1}: {in_words(error)}"
        ) from error


def _after_step(state: TrainState, call: Callable[[dict[str, nn.Module], int], object]) -> None:
    """Call a function of the user's, unless the step is a forecast's: it may write files."""
    if active_fake_mode() is not None:
        return
    path, looks = state.parallel.config.task.after_step, state.step < FIRST_STEPS
    parts = state.parallel.roots(state.model)
    state.parallel.reshard()  # so that what it changes is gathered again
    try:
        with torch.no_grad(), reads_refused(f"task.after_step={path}") if looks else nullcontext():
            call({name or "model": unwrapped(part) for name, part in parts.items()}, state.step + 1)
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"task.after_step={path} fails: {in_words(error)}") from error


def has_norms(task: Task, config: TrialConfig) -> bool:
    """Return whether every step computes the norm of the gradients: for clipping, and where tokens are counted."""
    return config.training.max_grad_norm is not None or task.unit == "tokens"


def update(
    state: TrainState,
    optimizer: torch.optim.Optimizer,
    has_norm: bool,
    watched: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> Tensor | None:
    """Let an optimizer use and free the gradients, unless one overflows on any rank; return their norm if asked."""
    grad_norm, config = None, state.parallel.config
    if has_norm or isinstance(state.scaler, ShardedGradScaler):  # it asks the other ranks for overflows only here
        state.scaler.unscale_(optimizer)
    if has_norm:
        grad_norm = state.parallel.clip(config.training.max_grad_norm)
    with optimizer_explained(config), watched():
        state.scaler.step(optimizer)
    state.scaler.update()
    optimizer.zero_grad()
    return grad_norm


def _accumulate(
    state: TrainState,
    task: Task,
    microbatches: list[Batch],
    passed: Callable[..., None],
) -> Tensor:
    """Compute the gradients of all microbatches, and return this rank's part of the loss; see `train_step`."""
    parallel = state.parallel
    step_loss = StepLoss(task, microbatches, parallel.device, parallel.dims)
    for i, batch in enumerate(microbatches):
        batch = to_device(batch, parallel.device)
        is_last = i == len(microbatches) - 1
        with parallel.microbatch(is_last):
            with parallel.forward():
                outputs = task.forward(state.model, batch)
            loss = task.loss(outputs, batch)
        del outputs  # the graph keeps what the backward pass needs of the logits
        passed("forward", loss)
        if i == 0:
            passed(SUM_AND_COUNT if isinstance(loss, tuple) else MEAN)
        loss = step_loss.part(loss, i)
        with parallel.backward(is_last):
            state.scaler.scale(loss).backward()
        passed("backward")
    total = step_loss.finish(state.model)
    state.loss_dtype, state.num_labels = step_loss.dtype, step_loss.num_labels
    return total


@dataclass(frozen=True)
class Watch:
    """Times the steps of a trial, profiles some, and reports the start of each.

    Attributes:
        memory: profiles the first steps.
        trace: records the steps after these.
        slow: finds a rank that the others wait for.
        checks: finds what sharding silently breaks.
        first: the figures of the first steps.
        on_step: called with the step's number, counted from 1.
    """

    timer: StepTimer
    memory: MemoryProfiler
    trace: ProfilerTrace
    slow: SlowRank
    checks: StepChecks
    first: FirstSteps
    on_step: Callable[[int], None]

    @contextmanager
    def step(self, state: TrainState, microbatches: list[Batch]) -> Iterator[None]:
        """Watch the optimizer step inside. An exception gets the step as a note, and the module if it is known."""
        self.on_step(state.step + 1)
        try:
            if self.first.is_first(state.step):
                self.first.begin(microbatches)
            with self.checks.step(state.step + 1) as is_first, self._instruments(state, microbatches, is_first):
                yield
        except Exception as error:
            error.add_note(f"step {state.step + 1}")
            if self.memory.failed_at:
                error.add_note(self.memory.failed_at)
            raise

    @contextmanager
    def _instruments(self, state: TrainState, microbatches: list[Batch], is_first: bool) -> Iterator[None]:
        if self.memory.tracks():
            with self.memory.track(state.parallel, state.optimizers.values(), tensors_of(microbatches)):
                yield
            self.timer.start()  # the tracked step is slow, so it is not timed
        elif self.trace.records():
            with self.trace.step():
                yield
            self.timer.start()  # as above
            self.memory.step_done()
        elif not is_first and self.slow.measures(self.timer.left_out):  # the first ones compare ranks
            with self.slow.step(self.timer.waiting_s):
                yield
            self.timer.warm_up()
            self.memory.step_done()
        else:
            yield
            if is_first:
                self.timer.warm_up()
            else:
                self.timer.step_done()
            self.memory.step_done()
        if state.step == self.first.last:
            self.end_first_steps()
            self.timer.start()

    def end_first_steps(self) -> None:
        """Take the figures of the first steps."""
        with self.memory.apart():
            self.first.finish()


def train_epoch(
    state: TrainState, task: Task, loader: DataLoader[Batch] | OwnLoaders, watch: Watch
) -> tuple[Metrics, list[float]]:
    """Train through one epoch, or up to `training.max_steps`.

    Args:
        state: changed in place.

    Returns:
        metrics over the global batch, and the loss of every step averaged over all ranks.

    Raises:
        DivergedError: a step's loss is not finite; see `LossCheck`. Raised within ten steps.
        UserError: see `StepChecks.step`.
    """
    state.train()
    config, dims, device = state.parallel.config, state.parallel.dims, state.parallel.device
    taken_before, steps_before = state.taken, state.step
    losses, norms, labels, figures = [], [], [], dict[str, list[Tensor]]()
    check = LossCheck(state.step, device, config.precision.loss_scaling, watch.checks)
    own, is_own = OwnStep(state.optimizers, state.parallel), bool(of_users(config))
    watch.timer.start()
    _seed(config, state.step, dims)
    for microbatches in _by_step(loader, config.training.grad_accum_steps, watch.timer):
        _seed(config, state.step, dims)
        is_first = watch.first.is_first(state.step)
        with watch.step(state, microbatches):
            loss, norm = train_step(
                state, task, microbatches, watch.checks.passed, is_first,
                own.watched if state.step < FIRST_STEPS and is_own else nullcontext,
            )  # fmt: skip
            if is_first:
                watch.first.grad_norm = norm
        losses.append(loss)
        check.add(loss)
        norms += [norm] if norm is not None and has_norms(task, config) else []
        labels += [] if state.num_labels is None else [state.num_labels]
        for name, value in state.figures.items():
            figures.setdefault(f"figures/{name}", []).append(value.to(device, torch.float32))
        if config.training.max_steps is not None and state.step >= config.training.max_steps:
            break
    check.finish()
    step_losses, *values = [
        (dims.sum(torch.stack(values)) / dims.dp_degree).tolist() for values in (losses, *figures.values())
    ]
    taken = state.taken - taken_before
    state.so_far |= {
        name: [*state.so_far.get(name, []), *values]
        for name, values in {
            "losses": step_losses,
            "norms": torch.stack(norms).tolist() if norms else [],
            "labels": torch.stack(labels).tolist() if labels else [],
            "skipped": [float(state.step - steps_before - taken)],
            **dict(zip(figures, values, strict=True)),
        }.items()
    }
    epoch_losses, counts = state.so_far["losses"], state.so_far["labels"]
    finite = [loss for loss in epoch_losses if math.isfinite(loss)]  # loss scaling skips the steps of others
    metrics = {"train/loss": fmean(finite), "train/lr": float(state.lr)}
    for name in figures:
        metrics[f"train/{name.partition('/')[2]}"] = fmean(state.so_far[name])
    if state.epoch == 0:
        compared = {FIRST_LOSS: epoch_losses[0]}
        if early := epoch_losses[1:3]:
            compared[EARLY_LOSS] = fmean(early)
        warm = min(config.lr_schedule.warmup_steps + 1, _WARM_STEPS - 1)
        if config.lr_schedule.warmup_steps and warm < len(epoch_losses):
            compared[WARM_LOSS] = epoch_losses[warm]
        metrics.update({key: loss for key, loss in compared.items() if math.isfinite(loss)})
        if watch.first.is_cut(state.step):
            watch.end_first_steps()
        metrics.update(watch.first.figures())
    if (eps := torch.finfo(state.loss_dtype).eps) > torch.finfo(torch.float32).eps:
        metrics[LOSS_EPS] = eps
    if norms_so_far := [norm for norm in state.so_far["norms"] if math.isfinite(norm)]:
        metrics["train/grad_norm"] = fmean(norms_so_far)  # fp16 skips the steps that overflow
    if counts:
        metrics[LABELS] = fmean(counts)
    if config.precision.loss_scaling:
        metrics["train/loss_scale"] = state.scaler.get_scale()
        metrics["train/skipped_steps"] = sum(state.so_far["skipped"])
    return metrics, step_losses


def evaluate(state: TrainState, task: Task, loader: Iterable[Batch]) -> Metrics:
    """Return the task's metrics over the whole validation split; see `mean_metrics`.

    Raises:
        DivergedError: the loss is not finite.
        UserError: no label counts.
    """
    means = mean_metrics(state, task, loader)
    if "loss" not in means:
        raise UserError("the validation split has no label that counts, so there is no val/loss; give it such samples.")
    if not math.isfinite(means["loss"]):
        raise DivergedError(f"the validation loss after step {state.step} is {means['loss']}")
    return {f"val/{name}": mean for name, mean in means.items()}


@torch.no_grad()
def mean_metrics(state: TrainState, task: Task, loader: Iterable[Batch]) -> dict[str, float]:
    """Return the task's metrics over the batches of all ranks, each sample counted once; empty metrics are left out.

    Args:
        state: its model and its optimizer are set to eval mode.
    """
    parallel = state.parallel
    state.eval()
    totals: dict[str, Tensor] = {}  # by metric: sum and count
    for batch in loader:
        batch = to_device(batch, parallel.device)
        with parallel.divided_loss():
            with parallel.forward():
                outputs = task.forward(parallel.model, batch)
            figures = task.metrics(outputs, batch)
        for name, (total, count) in figures.items():
            own = totals.setdefault(name, torch.zeros(2, dtype=torch.float64, device=parallel.device))
            own[0] += whole(total)
            own[1] += count
        del outputs
    # a user's metrics may depend on the batch, so that ranks have others, or in another order
    names = sorted({name for names in gather([*totals]) for name in names})
    sums = torch.stack([totals.get(name, torch.zeros_like(totals["loss"])) for name in names])
    reduced = parallel.dims.sum(sums).tolist()
    return {name: total / count for name, (total, count) in zip(names, reduced, strict=True) if count}


def _seed(config: TrialConfig, step: int, dims: ParallelDims) -> None:
    """Seed all generators by seed, step and part of the batch.

    A resumed run then draws the same dropout as an uninterrupted one. Only ranks that share samples draw the same.
    """
    seed_all(zlib.crc32(f"{config.training.seed}/{step}/{dims.dp_rank}".encode()))


def token_metrics(val_loss: float, bytes_per_token: float | None) -> Metrics:
    """Return metrics derived from the mean loss of tokens: perplexity, and bits per byte for text.

    Args:
        val_loss: in nats.
        bytes_per_token: None: the data are no text.
    """
    metrics = {"val/perplexity": math.exp(min(val_loss, 700.0))}  # beyond it there is no float
    if bytes_per_token is not None:
        metrics["val/bits_per_byte"] = val_loss / math.log(2) / bytes_per_token
    return metrics


def _by_step(loader: DataLoader[Batch] | OwnLoaders, grad_accum_steps: int, timer: StepTimer) -> Iterable[list[Batch]]:
    if isinstance(loader, OwnLoaders):
        yield from loader.by_step(timer)
        return
    batches = iter(loader)
    while True:
        with timer.waiting():
            step = list(islice(batches, grad_accum_steps))
        if not step:
            return
        yield step
