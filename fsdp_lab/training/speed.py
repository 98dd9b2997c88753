"""Step times, samples per second and model FLOPs utilisation."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import fmean, variance
from typing import TYPE_CHECKING, Any

import torch

from fsdp_lab.config.trial import TrialConfig
from fsdp_lab.training.checkpoint import Metrics
from fsdp_lab.training.distributed import DistributedContext, largest

if TYPE_CHECKING:
    from fsdp_lab.machine.cpu_contention import Window
    from fsdp_lab.training.parallel.base import Parallel


# Dense matrix peaks in FLOP/s by the device's whole name. Those of `conf/device` are copied here, because a GPU machine
# may have no YAML reader; a test compares the two. The others are from NVIDIA's data sheets. Variants of a chip have
# other peaks, so a device that is not here has no MFU. float32 is without TF32, which has its own.
def _peaks(half: float, tf32: float | None, single: float) -> dict[str, float]:
    return {"bfloat16": half, "float16": half, **({"tfloat32": tf32} if tf32 else {}), "float32": single}


PEAK_FLOPS = {
    "NVIDIA A100-SXM4-40GB": _peaks(312e12, 156e12, 19.5e12),
    "NVIDIA A100-SXM4-80GB": _peaks(312e12, 156e12, 19.5e12),
    "NVIDIA H100": _peaks(989e12, 494.5e12, 67e12),
    "NVIDIA H100 80GB HBM3": _peaks(989e12, 494.5e12, 67e12),
    "NVIDIA H100 PCIe": _peaks(756e12, 378e12, 51e12),
    "NVIDIA H200": _peaks(989e12, 494.5e12, 67e12),
    "NVIDIA B200": _peaks(2.25e15, 1.125e15, 75e12),
    "NVIDIA L40S": _peaks(362e12, 183e12, 91.6e12),
    "AMD Instinct MI300X": _peaks(1.3074e15, 653.7e12, 163.4e12),
    "NVIDIA A100-PCIE-40GB": _peaks(312e12, 156e12, 19.5e12),
    "NVIDIA A100 80GB PCIe": _peaks(312e12, 156e12, 19.5e12),
    "NVIDIA A10G": _peaks(70e12, 35e12, 35e12),
    "NVIDIA GH200 480GB": _peaks(989e12, 494.5e12, 67e12),
    "NVIDIA H100 NVL": _peaks(835.5e12, 417.5e12, 60e12),
    "NVIDIA L4": _peaks(121e12, 60e12, 30.3e12),
    "NVIDIA GeForce RTX 3090": _peaks(71e12, 35.6e12, 35.6e12),
    "NVIDIA GeForce RTX 4090": _peaks(165.2e12, 82.6e12, 82.6e12),
    "NVIDIA RTX 6000 Ada Generation": _peaks(364.2e12, 182.1e12, 91.1e12),
    "Tesla V100-SXM2-32GB": {"float16": 125e12, "float32": 15.7e12},
    "AMD Instinct MI250": _peaks(181.05e12, None, 45.25e12),  # one of its two dies
}


class StepTimer:
    """The seconds of each optimizer step, including loading, without a sync point inside the epoch.

    On CUDA, events are recorded, and read at the end of the epoch. On a CPU the clock is read.

    Args:
        warmup_steps: steps at the start of the run that are not timed.

    Attributes:
        waited_s: seconds that this process waited for batches within the steps that `take` returned last.
        waiting_s: the same, of the step that has begun.
        taken: the seconds of the steps that `take` returned last.
        items: of this rank in the step that has begun, if they are counted; `tokens` the same.
        counted: items and tokens of the steps that `take` returned last.
    """

    def __init__(self, warmup_steps: int, ranks: DistributedContext) -> None:
        self.left_out = warmup_steps
        self.cuda = ranks.device.type == "cuda"
        self.waited_s = 0.0
        self._chains: list[list[Any]] = []  # of clock readings, or of events
        self._waits: list[float] = []  # of each timed step
        self.waiting_s = 0.0
        self.taken: list[float] = []
        self.items = self.tokens = 0
        self.counted = (0, 0)
        self._counts: list[tuple[int, int]] = []

    def start(self) -> None:
        """Start a chain of steps; time between two chains is not counted."""
        self._chains.append([self._mark()])
        self.waiting_s = 0.0

    def warm_up(self) -> None:
        """Count the step that ends as one of the warm-up, and start a chain."""
        self.left_out = max(0, self.left_out - 1)
        self.start()

    def step_done(self) -> None:
        self._chains[-1].append(self._mark())
        self._waits.append(self.waiting_s)
        self._counts.append((self.items, self.tokens))
        self.waiting_s = 0.0

    @contextmanager
    def waiting(self) -> Iterator[None]:
        begun = time.perf_counter()
        yield
        self.waiting_s += time.perf_counter() - begun

    def _mark(self) -> Any:
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def take(self) -> list[float]:
        """Return the step times since the last call, in seconds, without the run's warm-up steps."""
        steps = [step for chain in self._chains for step in itertools.pairwise(chain)]
        if self.cuda:
            torch.cuda.synchronize()
            times = [begin.elapsed_time(end) / 1000 for begin, end in steps]
        else:
            times = [end - begin for begin, end in steps]
        warmup = min(self.left_out, len(times))
        self.left_out -= warmup
        self.waited_s = sum(self._waits[warmup:])
        counts = self._counts[warmup:]
        self.counted = sum(items for items, _ in counts), sum(tokens for _, tokens in counts)
        self._chains, self._waits, self._counts, self.taken = [], [], [], times[warmup:]
        return self.taken


@dataclass(frozen=True)
class Timed:
    """The timed steps of a run so far, over its epochs and starts.

    Attributes:
        variance: of `seconds`, as far as the steps of each epoch show it, by batch means.
        others_cpu: the share of the machine's cores that other processes used meanwhile.
        waited: the seconds of it in which a process waited for batches.
        samples: that were counted, of the user's own loader.
        tokens: the same.
    """

    steps: int = 0
    seconds: float = 0.0
    variance: float = 0.0
    others_cpu: float = 0.0
    waited: float = 0.0
    samples: float = 0.0
    tokens: float = 0.0

    @classmethod
    def before(cls, history: Sequence[Metrics]) -> Timed:
        """Return the steps that the epochs of an earlier start have timed."""
        for metrics in reversed(history):
            if (seconds := metrics.get("perf/timed_s")) is not None:
                error = metrics.get("perf/speed_error", 0.0) * seconds
                others, waited = (metrics.get(f"perf/{key}", 0.0) for key in ("others_cpu", "data_wait_share"))
                counted = (metrics.get(f"perf/{key}_per_s", 0.0) * seconds for key in ("samples", "tokens"))
                return cls(int(metrics["perf/timed_steps"]), seconds, error**2, others, waited * seconds, *counted)
        return cls()

    def plus(
        self, times: Sequence[float], others_cpu: float, waited: float = 0.0, samples: float = 0.0, tokens: float = 0.0
    ) -> Timed:
        """Return these steps and those of one more epoch.

        Args:
            times: of its steps, in seconds.
            waited: for batches within them.
            samples: that were counted in them.
            tokens: the same.
        """
        if not times:
            return self
        seconds = self.seconds + sum(times)
        share = (self.others_cpu * self.seconds + others_cpu * sum(times)) / seconds
        noise = self.variance + variance_of_sum(times)
        counted = self.samples + samples, self.tokens + tokens
        return Timed(self.steps + len(times), seconds, noise, share, self.waited + waited, *counted)


def variance_of_sum(times: Sequence[float]) -> float:
    """Return the variance of the sum of consecutive, correlated step times; 0 for a single one.

    By non-overlapping batch means: of n steps, a batch has the square root of n. Source: Flegal and Jones, "Batch
    means and spectral variance estimators in Markov chain Monte Carlo", Annals of Statistics 38, 2010. Two or three
    steps count as independent. Changes between runs, or slower than a batch, are not included.
    """
    if len(times) < 2:
        return 0.0
    size = math.isqrt(len(times))
    means = [fmean(times[i : i + size]) for i in range(0, len(times) - size + 1, size)]
    return len(times) * size * variance(means)


def watch_cores() -> Window | None:
    """Start to watch the CPU use of other processes on this node; None if psutil is not installed."""
    try:
        from fsdp_lab.machine.cpu_contention import Window, launchers
    except ImportError:
        return None
    return Window(*launchers())


class RunSpeed:
    """The speed of a run after each of its epochs.

    Args:
        flops_per_sample: None: not known.
        tokens_per_sample: None: samples are counted, or each has another number.
        before: what an earlier start has timed.
    """

    def __init__(
        self,
        parallel: Parallel,
        ranks: DistributedContext,
        flops_per_sample: float | None,
        tokens_per_sample: int | None,
        before: Timed,
    ) -> None:
        self._parallel, self._ranks, self._timed = parallel, ranks, before
        self._flops: float | None = flops_per_sample
        self._tokens: float | None = tokens_per_sample
        self._cores: Window | None = None

    def epoch_begins(self) -> None:
        self._cores = watch_cores() if self._ranks.local_rank == 0 else None

    def figures(self, timer: StepTimer, tokens_per_step: float | None) -> Metrics:
        """Return `perf/*` of an epoch that has ended. Every rank calls this.

        Args:
            tokens_per_step: the mean of the epoch's steps, if tokens were counted.
        """
        config, dims, times = self._parallel.config, self._parallel.dims, timer.take()
        sums = torch.tensor([timer.waited_s, *timer.counted], dtype=torch.float64, device=self._ranks.device)
        waited, items, counted = dims.sum(sums).tolist()
        others = largest(self._cores.share() if self._cores else 0.0)
        tokens, flops = self._tokens, self._flops
        if tokens_per_step is not None:
            counted = counted or tokens_per_step * len(times)
            tokens = tokens or tokens_per_step / config.training.global_batch_size
        self._timed = self._timed.plus(times, others, waited / dims.dp_degree, items, counted)
        if config.data.loader is not None and (samples := self._timed.samples):
            tokens = self._timed.tokens / samples or None
            flops = config.model.flops_per_unit and config.model.flops_per_unit * (tokens or 1)
        return speed_metrics(times, config, self._ranks, flops, tokens, self._timed)


def speed_metrics(
    times: list[float],
    config: TrialConfig,
    ranks: DistributedContext,
    flops_per_sample: float | None,
    tokens_per_sample: float | None = None,
    run: Timed | None = None,
) -> Metrics:
    """Return `perf/*` after one epoch; empty if every step of it was warm-up.

    All ranks step together, so this rank's times are the job's. Speeds, and the share of waiting in them, are over all
    timed steps of the run so far; percentiles are over this epoch's.

    Args:
        times: of the epoch's steps, in seconds.
        flops_per_sample: None: not known.
        tokens_per_sample: the mean of the epoch, if samples differ; None: samples are counted, or it is not known.
        run: the run including this epoch; None: this epoch is all.
    """
    if not times:
        return {}
    run = run or Timed().plus(times, 0.0)
    ordered = sorted(times)
    is_counted = config.data.loader is not None
    samples = run.samples if is_counted else run.steps * config.training.global_batch_size
    samples_per_s = samples / run.seconds
    metrics = {
        "perf/samples_per_s": samples_per_s,
        "perf/timed_steps": float(run.steps),
        "perf/timed_s": run.seconds,
        "perf/others_cpu": run.others_cpu,
        "perf/data_wait_share": run.waited / run.seconds,
        "perf/step_time_p50_s": percentile(ordered, 0.50),
        "perf/step_time_p95_s": percentile(ordered, 0.95),
    }
    if run.variance:
        metrics["perf/speed_error"] = math.sqrt(run.variance) / run.seconds
    if tokens_per_sample is not None:
        tokens_per_s = samples_per_s * tokens_per_sample
        metrics["perf/tokens_per_s"] = tokens_per_s
        metrics["perf/tokens_per_s_per_device"] = tokens_per_s / ranks.world_size
        if flops_per_sample is not None:
            metrics["perf/tflops_per_device"] = samples_per_s * flops_per_sample / ranks.world_size / 1e12
    peak = device_peak_flops(config, ranks)
    if peak is not None and flops_per_sample is not None:
        metrics["perf/mfu"] = samples_per_s * flops_per_sample / (peak * ranks.world_size)
    return metrics


def percentile(ordered: list[float], q: float) -> float:
    """Return the smallest value that at least a share `q` does not exceed (nearest rank)."""
    return ordered[max(0, -(-int(q * 1000) * len(ordered) // 1000) - 1)]


def device_peak_flops(config: TrialConfig, ranks: DistributedContext) -> float | None:
    """Return the device's peak FLOP/s in the type of matrix products; None if it is not known."""
    if ranks.device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(ranks.device)
    return PEAK_FLOPS.get(name, {}).get(config.precision.multiplied_in)
