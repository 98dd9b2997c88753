"""One trial, from a config to an exported model: read it from top to bottom.

`build.py` makes the model and its optimizer, `loop.py` takes the steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from fsdp_lab.config.axes import Where, notes
from fsdp_lab.config.axes.precision import PrecisionConfig
from fsdp_lab.config.axes.tensor_parallel import check_nodes
from fsdp_lab.config.metrics import LABELS
from fsdp_lab.config.ranks import Ranks
from fsdp_lab.config.rules import check_trial
from fsdp_lab.config.training import Init
from fsdp_lab.config.trial import TrialConfig
from fsdp_lab.machine.hardware import allocator_settings
from fsdp_lab.training.alike import buffer_notes, check_model
from fsdp_lab.training.blocks import batch_norm_notes, loss_depends_on_dp_degree
from fsdp_lab.training.build import build
from fsdp_lab.training.checkpoint import Checkpoints, Metrics, TrainState
from fsdp_lab.training.distributed import (
    DistributedContext,
    gather,
    largest,
    own_node,
    setup_distributed,
)
from fsdp_lab.training.export import export_model
from fsdp_lab.training.first_steps import FirstSteps
from fsdp_lab.training.layout import unit_notes
from fsdp_lab.training.loop import Watch, evaluate, mean_metrics, token_metrics, train_epoch
from fsdp_lab.training.memory_profiler import MemoryProfiler, start_clean
from fsdp_lab.training.own_loader import OwnLoaders, make_loaders
from fsdp_lab.training.parallel import build_parallel
from fsdp_lab.training.profiler_trace import ProfilerTrace
from fsdp_lab.training.slow_rank import SlowRank
from fsdp_lab.training.speed import RunSpeed, StepTimer, Timed, device_peak_flops
from fsdp_lab.training.step_checks import StepChecks
from fsdp_lab.training.weights import build_model, fill
from fsdp_lab.workloads.base import Batch, Data
from fsdp_lab.workloads.build import build_workload
from fsdp_lab.workloads.construct import copy_on_meta


class Reporter(Protocol):
    """Where a trial's results go. Every rank calls each method with the same values."""

    def facts(self, facts: dict[str, Any]) -> None:
        """Report what is known before the first step: device, data digest, number of parameters, notes.

        Called again, with all facts, if the first epoch has shown more.
        """

    def phase(self, name: str) -> None:
        """Report the start of other work that may get stuck, such as `building the model`."""

    def step(self, step: int) -> None:
        """Report the start of an optimizer step, counted from 1."""

    def epoch(self, metrics: Metrics) -> None:
        """Report the metrics of a finished epoch, including `epoch` and `step`.

        After a resume the earlier epochs are reported again, so nothing is lost between a checkpoint and its report.
        """


def train(
    config: TrialConfig,
    folder: Path,
    reporter: Reporter,
    on_step_losses: Callable[[list[float]], None] = lambda losses: None,
    storage: str | None = None,
) -> None:
    """Train one trial; every rank calls this.

    Args:
        folder: the trial's own folder, seen by all ranks, for `checkpoints/` and `model.pt`. A run that was stopped
            resumes from the last checkpoint in it.
        on_step_losses: called with the loss of every step of an epoch, over the global batch.
        storage: the trial's address in object storage. Checkpoints are written there, and the folder is each rank's
            own. None: everything goes to the folder.

    Raises:
        UserError: a problem that the user can fix.
        DivergedError: the loss is not finite.
    """
    folder.mkdir(parents=True, exist_ok=True)
    ranks = setup_distributed(config.offload)
    check_trial(config, ranks.world_size)
    start_clean(ranks.device)
    with float32_products(config.precision, ranks.device):
        _train(config, folder, reporter, on_step_losses, storage, ranks)


@contextmanager
def float32_products(precision: PrecisionConfig, device: torch.device) -> Iterator[None]:
    """Multiply float32 matrices in TF32 inside, if the trial asks for it. The process's setting is restored."""
    if not precision.tf32 or device.type != "cuda":
        yield
        return
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def _train(
    config: TrialConfig,
    folder: Path,
    reporter: Reporter,
    on_step_losses: Callable[[list[float]], None],
    storage: str | None,
    ranks: DistributedContext,
) -> None:
    nodes = gather(own_node())
    check_nodes(config.sharding.tp, nodes)
    parallel = build_parallel(config, ranks)
    dims = parallel.dims
    reporter.phase("loading the data")
    workload = build_workload(config.model, config.data, config.task)
    loaders = make_loaders(workload, config, dims, ranks)
    data, steps_per_epoch = loaders.data, loaders.steps_per_epoch

    reporter.phase("building the model")
    first = build_model(workload.model, config)
    check_model(first.model, buffers_are_sent=first.init is Init.rank0)
    on_meta = _copied(first.model)
    find_unused, unused_notes = parallel.leaves_some_unused(workload, on_meta)
    in_tokens, tokens = workload.task.unit == "tokens", workload.tokens_per_sample(data.train)
    is_wanted = tokens is not None if in_tokens else device_peak_flops(config, ranks) is not None
    is_wanted &= config.data.loader is None  # else batches have other shapes
    flops = workload.train_flops_per_sample(on_meta) if is_wanted else None
    del on_meta

    def fill_model(model: nn.Module) -> None:
        reporter.phase("loading the weights" if first.load else f"initialising the weights (init={config.init.name})")
        fill(model, first, parallel)

    state = build(
        workload,
        first.model,
        parallel,
        fill=fill_model,
        steps_per_epoch=steps_per_epoch or 1,
        total_steps=config.training.total_steps(steps_per_epoch),
        find_unused=largest(float(find_unused)) > 0,  # of any rank: they may use different modules
    )
    reporter.phase("loading a checkpoint")
    checkpoints = Checkpoints(f"{storage or folder}/checkpoints", config, ranks)
    state.loader = loaders if isinstance(loaders, OwnLoaders) else None
    resumed_from = checkpoints.load(state)
    earlier_notes = [*first.notes, *checkpoints.notes, *loaders.resume(), *unused_notes]
    facts = _facts(config, ranks, state, data, steps_per_epoch, resumed_from, nodes, earlier_notes)
    reporter.facts(facts)
    for metrics in state.history:
        reporter.epoch(metrics)

    def mean_loss(batches: Iterable[Batch]) -> float | None:
        return mean_metrics(state, workload.task, batches).get("loss")

    checks = StepChecks(parallel)
    watch = Watch(
        StepTimer(config.training.timing_warmup_steps, ranks),
        MemoryProfiler(config, workload.model.description, ranks, folder),
        ProfilerTrace(config, ranks, folder),
        SlowRank(ranks, nodes, config.compile),
        checks,
        FirstSteps(state, loaders, checks, mean_loss, resumed_from is not None),
        reporter.step,
    )
    before = Timed.before(state.history) if checkpoints.times_count else Timed()
    speed = RunSpeed(parallel, ranks, flops, tokens, before)
    first_epoch = state.epoch
    while not config.training.is_through(state.epoch, state.step):
        loaders.go_to(state.epoch, state.epoch_step)
        speed.epoch_begins()
        watch.memory.epoch_begins()
        metrics, losses = train_epoch(state, workload.task, loaders.train, watch)
        on_step_losses(losses)
        metrics.update(speed.figures(watch.timer, metrics.get(LABELS) if in_tokens else None))
        metrics.update(watch.slow.figures(watch.timer))
        known = facts
        if state.epoch == first_epoch and (late := buffer_notes(state.model, dims.dp_degree)):
            known = {**known, "dp_degree_of_losses": dims.dp_degree, "notes": [*known["notes"], *late]}
        if (slow := watch.slow.slow) and "slow_rank" not in known:
            known = {**known, "slow_rank": slow, "notes": [*known["notes"], slow["text"]]}
        if known is not facts:
            facts = known
            reporter.facts(facts)
        metrics.update(watch.memory.figures())
        watch.checks.evaluation()
        metrics.update(evaluate(state, workload.task, loaders.val))
        watch.checks.check()
        if in_tokens:
            metrics.update(token_metrics(metrics["val/loss"], data.bytes_per_token))
        metrics.update(epoch=state.epoch + 1, step=state.step)
        if loaders.is_over(state.epoch_step):  # else max_steps cut it short, and a resume trains the rest
            state.epoch, state.epoch_step, state.so_far = state.epoch + 1, 0, {}
        reporter.epoch(_keep(metrics, state, config, checkpoints))

    watch.trace.finish()
    if config.export:
        reporter.phase("exporting the model")
        step = checkpoints.load_best_weights(state) if config.checkpoint.export_best else state.step
        export_model(state.model, config, ranks, folder, step, workload.model.save)


def _copied(model: nn.Module) -> nn.Module | None:
    """Return a copy without values; None: it cannot be copied, so the constructor is called again."""
    with suppress(Exception):  # whatever an object raises that is copied
        return copy_on_meta(model).to("meta")
    return None


def _keep(metrics: Metrics, state: TrainState, config: TrialConfig, checkpoints: Checkpoints) -> Metrics:
    """Save a checkpoint if one is due, and return the metrics with its cost."""
    through = config.training.is_through(state.epoch, state.step)
    is_best = metrics["val/loss"] < min((before["val/loss"] for before in state.history), default=math.inf)
    to_export = config.checkpoint.export_best and is_best  # in any epoch
    if not (through or to_export) and state.epoch % config.checkpoint.every_epochs:
        state.remember(metrics)
        return metrics
    metrics = checkpoints.save(state, metrics)
    if through:
        metrics.update(checkpoints.finish())
    return metrics


def _facts(
    config: TrialConfig,
    ranks: DistributedContext,
    state: TrainState,
    data: Data,
    steps_per_epoch: int | None,
    resumed_from: str | None,
    nodes: list[str],
    earlier_notes: list[str],
) -> dict[str, Any]:
    on_cpu = ranks.device.type == "cpu"
    dp_degree = Ranks.of(config.sharding, ranks.world_size).dp
    depends = loss_depends_on_dp_degree(state.model, config.optimizer.scale_lr)
    where = Where(not on_cpu, not on_cpu and torch.cuda.is_tf32_supported(), True, state.groups_compared, nodes)
    return {
        "device": ranks.device_name,
        "world_size": ranks.world_size,
        "dp_degree_of_losses": dp_degree if depends else None,
        "num_params": state.num_params,
        "torch": str(torch.__version__),
        "tf32": config.precision.tf32 and bool(where.has_tf32),
        "allocator_settings": "" if on_cpu else allocator_settings(),
        "layout": asdict(state.layout),
        "data_digest": data.digest,
        "data_num_train": len(data.train) or None,
        "data_num_val": len(data.val) or None,
        "steps_per_epoch": steps_per_epoch,
        "resumed_from": resumed_from,
        "data": config.data.name,
        "calls": config.calls(),
        "num_steps": config.training.num_steps(steps_per_epoch),
        "notes": [
            *earlier_notes,
            *notes(config, where),
            *batch_norm_notes(state.model, dp_degree),
            *unit_notes(state.layout, config),
        ],
    }
