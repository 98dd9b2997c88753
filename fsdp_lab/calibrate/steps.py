"""The measured steps next to their forecasts, and this machine as a device."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from importlib.metadata import version
from typing import Any

from fsdp_lab.calibrate.fit import Fitted, Sample, Steps, known_error
from fsdp_lab.calibrate.rank import SMALL, lower_quartile
from fsdp_lab.calibrate.reference import Reference
from fsdp_lab.config import UserError
from fsdp_lab.forecast.pool import NoAnswerError, Pool
from fsdp_lab.hardware import cpu_name, host_memory, num_cpus
from fsdp_lab.speed.device import Basis, Device, DeviceKind, Efficiency, KnownError, Reached
from fsdp_lab.speed.measured import HostCosts, Measured, sent_bytes
from fsdp_lab.speed.program import Kind, Operator, Stream

_LIMIT_S = 300.0  # for one forecast
_A_PROCESS = 4  # forecasts, as it first imports PyTorch
_GIB = 2**30
_SHORT = 1e-6  # seconds, of latencies that the measured collectives have in them
_ANY_NUMBER = 4096  # of workers: what a machine of CPUs takes


def as_steps(
    measurements: dict[str, list[Any]], settings: Sequence[Reference], workers: int
) -> tuple[list[Steps], list[Sample]]:
    """Return the measured steps with their forecast programs, and the operators that were measured alone.

    Args:
        measurements: the content of `rank0.json`, as `run_rank` writes it.
        settings: that were measured.
        workers: number of ranks.

    Raises:
        UserError: a setting cannot be forecast.
    """
    programs = trace_all([reference.words for reference in settings], workers)
    steps = [
        Steps(
            reference.family, " ".join(reference.model), [Sample(*row) for row in one["operators"]], program,
            lower_quartile(one["steps"]),
        )
        for reference, one, program in zip(settings, measurements["references"], programs, strict=True)
    ]  # fmt: skip
    group = tuple(range(workers))
    alone = [Sample(*row) for row in measurements["attention"]]
    for kind, dtype, num_bytes, seconds in measurements["collectives"]:
        sent = sent_bytes(Operator(kind, Kind(kind), Stream.gather, "", "", num_bytes=num_bytes, group=group))
        alone.append(Sample(kind, kind, dtype, 0.0, sent, 0.0, seconds))
    return steps, alone


def trace_all(settings: Sequence[Sequence[str]], workers: int) -> list[list[Operator]]:
    """Return the program of a step of each setting.

    Args:
        settings: overrides of each.
        workers: number of ranks.

    Raises:
        UserError: one cannot be forecast.
    """
    processes = min(num_cpus(), -(-len(settings) // _A_PROCESS))
    with Pool(_trace, processes, _LIMIT_S) as pool:
        futures: list[Future[list[Operator] | str]] = [pool.submit((words, workers)) for words in settings]
        try:
            traces = [future.result() for future in futures]
        except NoAnswerError as error:
            raise UserError(f"a forecast of the calibration failed: its process {error}") from error
    if problems := [one for one in traces if isinstance(one, str)]:
        raise UserError(problems[0])
    return [one for one in traces if not isinstance(one, str)]


def _trace(question: tuple[Sequence[str], int]) -> list[Operator] | str:
    """Return the program, or the reason why there is none."""
    os.environ["CUDA_VISIBLE_DEVICES"], os.environ["OMP_NUM_THREADS"] = "", "1"
    from fsdp_lab.forecast.forecast import forecast_step
    from fsdp_lab.training.__main__ import read_config

    words, workers = question
    try:
        return forecast_step(read_config(None, [*SMALL, *words]), workers, cuda=False, traced=True).program
    except UserError as error:
        return str(error)


def device_here(workers: int, steps: Sequence[Steps], alone: Sequence[Sample], others: float = 0.0) -> Device:
    """Return this machine with the best rates that were measured.

    Args:
        workers: number of ranks.
        steps: the references.
        alone: operators that ran outside a model.
        others: the share of its cores that other processes used.
    """
    samples = [sample for one in steps for sample in one.samples]
    peaks: dict[str, float] = {}
    for sample in samples:
        if sample.kind == Kind.matmul and sample.seconds > 0:
            peaks[sample.dtype] = max(peaks.get(sample.dtype, 0.0), sample.flops / sample.seconds)
    name = cpu_name()
    measured = Measured(
        name, version("torch"), workers, num_cpus(), round(others, 3), {}, HostCosts(0.0, 0.0, 0.0, 0.0)
    )
    unknown = KnownError(0.5, 0.9)
    memory = _best(sample for sample in samples if sample.kind == Kind.memory)
    link = _best(sample for sample in alone if sample.kind == Kind.gather)
    return Device(
        name=name,
        kind=DeviceKind.cpu,
        basis=Basis.calibration,
        memory_gib=round(host_memory() / workers / _GIB, 2),
        peak_flops=peaks,
        memory_bandwidth=memory,
        num_cores=1,
        link_bandwidth=link,
        node_size=_ANY_NUMBER,
        network_bandwidth=link,
        host_bandwidth=memory,
        host_memory_bandwidth=memory,
        launch_s=_SHORT,
        latency_s=_SHORT,
        link_latency_s=_SHORT,
        network_latency_s=_SHORT,
        reached=Reached(),
        efficiency=Efficiency(1.0, 1.0, 1.0, 1.0, 1.0),
        error=unknown,
        error_elsewhere=unknown,
        source=f"python -m fsdp_lab.calibrate on {platform.node()}",
        measured=measured,
    )


def _best(samples: Any) -> float:
    return max((one.num_bytes / one.seconds for one in samples if one.seconds > 0 and one.num_bytes > 1e5), default=1e9)


def with_fit(device: Device, fitted: Fitted) -> Device:
    """Return the device with the measurements and errors of a fit."""
    error = known_error(fitted.errors)
    return replace(device, measured=fitted.measured, error=error, error_elsewhere=error, relative=fitted.relative)
