"""The memory profile of a trial that does not run.

Runs the training code itself under fake tensors: `training.build` makes the model, `training.loop` runs the step.
"""

from __future__ import annotations

import logging
import warnings
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from traceback import walk_tb

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fsdp_lab.config import ConfigError, TrialConfig, UserError
from fsdp_lab.config.axes.offload import OffloadConfig, OffloadTarget
from fsdp_lab.config.rules import check_trial
from fsdp_lab.config.target import user_line
from fsdp_lab.forecast.capacity import Forecast, weigh
from fsdp_lab.forecast.depth import Stack
from fsdp_lab.forecast.equal_blocks import keep_first, step_of_equal_blocks
from fsdp_lab.forecast.fake import ACCELERATOR, HOST, ValuesOnRequest, fake_tensors, fake_world
from fsdp_lab.forecast.float8 import apply_fake_float8
from fsdp_lab.forecast.keep import ratio_group, unlike
from fsdp_lab.forecast.kernels import buffer_bytes, cuda_kernels
from fsdp_lab.forecast.speed.costs import in_tf32
from fsdp_lab.forecast.speed.device import OTHER, Device
from fsdp_lab.forecast.speed.predict import Speed, predict
from fsdp_lab.forecast.step import Step
from fsdp_lab.forecast.torch_private import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    flat_streams,
    kernels_planned,
)
from fsdp_lab.forecast.trace import StepTrace
from fsdp_lab.memory.profile import Profile
from fsdp_lab.memory.recorder import record_step
from fsdp_lab.memory.timeline import write_timeline
from fsdp_lab.memory.torch_private import collectives_announced, replace_tensors, without_modes
from fsdp_lab.training.build import build
from fsdp_lab.training.data import microbatch_size
from fsdp_lab.training.distributed import ParallelDims
from fsdp_lab.training.loop import train_step
from fsdp_lab.training.memory_profiler import TRACKED_STEPS, main_settings
from fsdp_lab.training.parallel import build_parallel
from fsdp_lab.training.parallel.base import Parallel, local
from fsdp_lab.training.parallel.sharded import held_parameters
from fsdp_lab.training.parallel.tensor import parameter_holders, tie_again
from fsdp_lab.workloads.base import Batch, Workload, tensors_of
from fsdp_lab.workloads.build import build_workload
from fsdp_lab.workloads.construct import without_values

# Pageable memory is copied through pinned buffers first. The share is assumed: no measurement on a current GPU was
# found.
PAGEABLE = 2.0
# Part of an error that only a forecast raises -> its explanation.
_NOT_FOLLOWED = {
    "FlexAttention": "flex_attention has no forecast: on a CPU, where forecasts are made, it has no backward pass",
    "SparseTensorImpl": "sparse gradients have no forecast: their size depends on the values of a batch",
}
_LAST: dict[str, Step] = {}  # by `Request.step`


class NotFollowedError(UserError):
    """Training does something that a forecast cannot follow, such as a decision on a tensor's value."""


def forecast(
    config: TrialConfig,
    num_workers: int,
    cuda: bool,
    capacity_bytes: int | None = None,
    page: Path | None = None,
    sheet: Device | None = None,
    same: str = "",
) -> Forecast:
    """Forecast the memory and speed of one worker. The range of its speed is for a device that it does not fill.

    Args:
        capacity_bytes: of one device; None: not known.
        page: where to write the timeline of the step; None: nowhere.
        sheet: the device whose speed to forecast; None: only the memory.
        same: identifies the step; the last step of this process is reused if it has the same identifier; "": never.

    Raises:
        UserError: see `forecast_profile`.
    """
    step = _LAST.get(same) or forecast_step(config, num_workers, cuda, sheet=sheet, traced=sheet is not None)
    _LAST.clear()
    _LAST.update({same: step} if same else {})
    result = weigh(step.profile, step.num_trained, config, num_workers, cuda, capacity_bytes)
    result = replace(result, num_params=step.num_params, layout=step.layout)
    if sheet is not None:
        result = replace(result, data_sheet=sheet.name)
        try:
            result = replace(result, speed=price(step, config, num_workers, sheet))
        except ConfigError as error:  # the memory forecast is still valid
            result = replace(result, no_speed=str(error))
    if page is not None:
        with suppress(OSError):  # a full disk loses the page, not the forecast
            device, settings = "GPUs" if cuda else "CPUs", main_settings(config, step.workload.model.description)
            what = {"for": device, "workers": str(num_workers), **settings}
            write_timeline(step.profile, page, f"Optimizer step {TRACKED_STEPS}, forecast", what)
    return result


def price(step: Step, config: TrialConfig, num_workers: int, sheet: Device) -> Speed:
    """Return the speed of a step, with the model's MFU.

    Raises:
        ConfigError: the device lacks a figure, or the step has operators without a known FLOP count.
    """
    if step.uncounted:
        on_gpu = {"aten.mkldnn_rnn_layer": "torch.nn.LSTM on a GPU"}
        named = ", ".join(sorted(on_gpu.get(name, name) for name in step.uncounted))
        raise ConfigError(
            f"PyTorch has no formula for the FLOPs of {named}, so the speed is not known; register one where you "
            "define it, by torch.utils.flop_counter.register_flop_formula (0 where it only moves data)."
        )
    differs = unlike(config, sheet)
    kinds = [OTHER] if differs else kinds_of(config, num_workers, sheet)
    program = in_tf32(step.program, sheet, config.precision.tf32)
    separate = config.sharding.separate_reduce_scatter_group
    speed = predict(program, sheet, separate, kinds)
    if config.offload.target is OffloadTarget.cpu_unpinned:
        known = sheet.pageable_bandwidth
        rates = [known] if known else [sheet.host_bandwidth / by for by in (PAGEABLE, PAGEABLE**2)]
        paged = [predict(program, replace(sheet, host_bandwidth=rate), separate, kinds) for rate in rates]
        speed = replace(paged[0], low_s=paged[0].low_s if known else speed.low_s, high_s=paged[-1].high_s)
    samples = config.training.global_batch_size
    flops = step.workload.train_flops_per_sample()
    peak = sheet.peak_flops.get(config.precision.multiplied_in) if flops else None
    return replace(
        speed,
        group=ratio_group(config, num_workers, sheet),
        unlike=differs,
        samples=samples,
        tokens=step.workload.shaped_tokens(),
        mfu=flops * samples / num_workers / speed.step_s / peak if flops and peak else None,
    )


def kinds_of(config: TrialConfig, num_workers: int, sheet: Device) -> list[str]:
    """Return the kinds of a step by which `Errors` has errors."""
    kind = "float8" if config.precision.float8 else "compiled" if config.compile else "eager"
    return [kind, *(["several_nodes"] if num_workers > sheet.node_size else [])]


def forecast_profile(config: TrialConfig, num_workers: int, cuda: bool, rank: int = 0) -> Profile:
    """Return the memory of one rank of `num_workers` through its second optimizer step; see `forecast_step`."""
    return forecast_step(config, num_workers, cuda, rank).profile


def forecast_step(
    config: TrialConfig, num_workers: int, cuda: bool, rank: int = 0, sheet: Device | None = None, traced: bool = False
) -> Step:
    """Follow one rank of `num_workers` through its second optimizer step.

    Args:
        cuda: for GPUs: device and host apart, and the attention of a GPU. Otherwise for CPUs.
        sheet: of the GPU; None: an H100.
        traced: also record the program, which is empty otherwise.

    Raises:
        ConfigError: the configuration cannot run.
        NotFollowedError: see there.
    """
    check_trial(config, num_workers)
    if cuda and config.sharding.kind == "fsdp1" and config.offload.target is not OffloadTarget.none:
        raise NotFollowedError(
            "sharding.api=fsdp1 with offload=cpu has no forecast for a GPU: FSDP1 moves parameters between devices in "
            "place, which tensors without memory cannot; measure this trial with memory_profile=peaks."
        )
    if cuda and not config.sharding.limit_all_gathers:
        raise NotFollowedError(
            "sharding.limit_all_gathers=false has no forecast for a GPU: how many units have their parameters at once "
            "depends on how far the host runs ahead; measure this trial with memory_profile=peaks, or forecast "
            "sharding.limit_all_gathers=true."
        )
    workload = build_workload(config.model, config.data, config.task)
    # DDP and FSDP1 put parts of several blocks into one buffer; compiling a block takes as long as following fifteen
    equal = config.sharding.kind in ("fsdp2", "tensor") and not config.compile
    equal &= (config.optimizer.target or "torch.optim.").startswith("torch.optim.")  # others may count parameters
    equal &= config.task.step is None  # its parts have their own blocks

    def follow(stack: Stack | None, blocks: int) -> Step:
        return _follow_rank(config, num_workers, cuda, rank, sheet, traced, stack, blocks)

    return step_of_equal_blocks(workload, config, follow) if equal else follow(None, 0)


def _follow_rank(
    config: TrialConfig, num_workers: int, cuda: bool, rank: int, sheet: Device | None, traced: bool,
    stack: Stack | None, blocks: int,
) -> Step:  # fmt: skip
    """Follow a rank, with all blocks of the model, or only so many of a stack."""
    device = ACCELERATOR if cuda else HOST
    for name in ("torch._subclasses.fake_tensor", "torch._higher_order_ops.wrap", "torch.utils.cpp_extension"):
        logging.getLogger(name).setLevel(logging.CRITICAL)  # they log what is also raised, or that there is no GPU
    with fake_world(num_workers, device, rank) as ranks, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about speed and strides, which do not matter here
        workload = build_workload(config.model, config.data, config.task)
        parallel = build_parallel(as_forecast(config), ranks)
        try:
            return _follow(workload, parallel, sheet, traced, stack, blocks)
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            part = "the forward pass of the model"
            if any(isinstance(f.f_locals.get("self"), torch.optim.Optimizer) for f, _ in walk_tb(error.__traceback__)):
                part = f"the step of optimizer={config.optimizer.kind}"
            raise NotFollowedError(
                f"a forecast runs on tensors without values, but {error.func} needs one in {part}"
                f"{_at(error)}; measure this trial with memory_profile=peaks, or remove the "
                "decision that depends on a value (.item(), if tensor:, nonzero)."
            ) from error
        except RuntimeError as error:
            if "found at least two devices" in str(error):
                raise NotFollowedError(
                    f"a tensor on the CPU meets one on the GPU{_at(error)}, which ends training there; move it, as in "
                    "mask.to(x.device), or make it there."
                ) from error
            why = next((why for part, why in _NOT_FOLLOWED.items() if part in str(error)), None)
            if why is None:
                raise
            raise NotFollowedError(f"{why}; measure this trial with memory_profile=peaks.") from error


def _at(error: BaseException) -> str:
    line = user_line(error)
    return f", at {line}" if line else ""


def _follow(
    workload: Workload, parallel: Parallel, sheet: Device | None, traced: bool, stack: Stack | None, blocks: int
) -> Step:
    config, dims, device = parallel.config, parallel.dims, parallel.device
    cuda = device == ACCELERATOR
    trace = StepTrace(HOST if cuda else None)
    buffers = partial(buffer_bytes, sheet) if cuda else None
    with torch.device("meta"):
        fake_microbatches(workload, config, dims)  # read their files before tensors are fake
    with ExitStack() as fake:

        def make_fake(model: nn.Module) -> None:
            """Make every new tensor a fake one, from here to the end of the step."""
            if config.compile:
                fake.enter_context(kernels_planned(device, trace.kernel, trace.in_compiled))
            values = fake.enter_context(fake_tensors())
            if cuda:
                fake.enter_context(cuda_kernels(sheet, trace.kernel))
            _replace(model, parallel.home, device)
            _mark_forward(model, values)

        model = without_values(workload.model.build, config.training.seed)
        if stack is not None:
            keep_first(model, stack, blocks)
        held = () if parallel.is_sharded else held_parameters(model)  # otherwise refused below
        for name, holder in held:
            raise NotFollowedError(
                f"a forecast cannot follow {holder}, which holds the parameter {name}; look it up where it is used, as "
                "in self.head.weight, or measure this trial."
            )
        unused, _ = parallel.leaves_some_unused(workload)
        state = build(workload, model, parallel, fill=make_fake, find_unused=unused, to_float8=apply_fake_float8)
        parallel.reduce_in_python()
        if traced:
            collectives_announced(state.model, trace.comes)
        for _ in range(TRACKED_STEPS - 1):
            train_step(state, workload.task, fake_microbatches(workload, config, dims))
        trace.flat_streams = flat_streams(state.model)
        microbatches = fake_microbatches(workload, config, dims)
        inside = (lambda recorder: trace.following(recorder.place)) if traced else (lambda recorder: nullcontext())
        batch = tensors_of(microbatches)
        with record_step(parallel, state.optimizers.values(), batch, buffers, inside) as recorder:
            trace.program.clear()
            _held = train_step(state, workload.task, microbatches)  # after the batch, as in training
        own, trained = (
            sum(local(p).numel() for p in state.model.parameters() if p.requires_grad or not only_trained)
            for only_trained in (False, True)
        )
        layout = replace(state.layout, counts=state.num_labels is not None)
        sizes = (state.num_params, own), trained
        return Step(recorder.finish(), trace.program, workload, *sizes, layout, trace.uncounted, parallel.units)


def as_forecast(config: TrialConfig) -> TrialConfig:
    """Return the configuration without pinned memory: a fake tensor cannot be pinned.

    `pinned_rounding` adds the cost.
    """
    if config.offload.target is not OffloadTarget.cpu:
        return config
    return replace(config, offload=OffloadConfig(OffloadTarget.cpu_unpinned))


def _replace(model: nn.Module, home: torch.device, device: torch.device) -> None:
    """Replace a model's parameters by empty ones on `home`, its buffers by empty ones on `device`; keep ties."""
    holders, made = parameter_holders(model), set[int]()

    def fresh(old: Tensor) -> Tensor:
        """Return a tensor itself if it is a replacement: a tied DTensor comes twice, then with new storage."""
        if id(old) in made and not old.is_meta:
            return old
        if old.is_meta:
            made.add(id(old))
        return fresh_tensor(old, home if old.is_meta else device)

    replace_tensors(model, fresh, in_place=False)
    tie_again(holders)


def fresh_tensor(old: Tensor, device: torch.device) -> Tensor:
    """Return an empty tensor like another one.

    It is created anew: a fake tensor made from another one keeps a reference to it, and could not replace it.
    """
    if not isinstance(old, DTensor):
        return torch.empty(old.shape, dtype=old.dtype, device=device)
    with without_modes():  # `to_local` makes a view, and `old` is no fake tensor
        shape = old.to_local().shape
    local = torch.empty(shape, dtype=old.dtype, device=device)
    return DTensor.from_local(
        local, old.device_mesh, old.placements, run_check=False, shape=old.shape, stride=old.stride()
    )


def fake_microbatches(workload: Workload, config: TrialConfig, dims: ParallelDims) -> list[Batch]:
    """Return the batches that the loader gives one rank for one optimizer step."""
    size = microbatch_size(config.training, dims)
    return [workload.data.example_batch(size) for _ in range(config.training.grad_accum_steps)]


def _mark_forward(model: nn.Module, values: ValuesOnRequest) -> None:
    model.register_forward_pre_hook(lambda *_: setattr(values, "in_model", True))
    model.register_forward_hook(lambda *_: setattr(values, "in_model", False), always_call=True)
