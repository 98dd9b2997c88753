"""Profiles the memory of a trial's first steps, and reports the peaks of all ranks."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from fsdp_lab.config.training import MemoryProfile as Detail
from fsdp_lab.config.trial import TrialConfig
from fsdp_lab.memory.allocator_profile import AllocatorRecorder
from fsdp_lab.memory.gloo import SynchronousGlooMode
from fsdp_lab.memory.profile import CATEGORIES, Profile
from fsdp_lab.memory.recorder import StepRecorder, record_step
from fsdp_lab.memory.torch_private import (
    AccumulatesInPlace,
    compiled_code_runs,
    free_cublas_workspaces,
    start_allocator_history,
    stop_allocator_history,
    write_allocator_history,
)
from fsdp_lab.storage.files import write_json
from fsdp_lab.training.distributed import DistributedContext, gather
from fsdp_lab.training.parallel.base import Parallel

# Of this process. The first step has no optimizer state yet. Its profile is for a trial that runs out of memory at
# once; the second step's replaces it.
TRACKED_STEPS = 2
_MOST_NAMED_RANKS = 8  # ranks with their own metrics; with more, charts and tables are unreadable
_TOTALS = ("peak_bytes", "active_bytes", "reserved_bytes", "host_peak_bytes")
SNAPSHOT_ENTRIES = 100_000  # of the CUDA allocator's history: unbounded, a dump takes minutes


@contextmanager
def record_compiled_step(
    parallel: Parallel, optimizers: Iterable[torch.optim.Optimizer], batch: Sequence[Tensor]
) -> Iterator[AllocatorRecorder]:
    """Follow the step inside, with compiled blocks, by what the allocators report; see `record_step`."""
    with record_step(parallel, optimizers, batch) as before:
        pass
    recorder = AllocatorRecorder(before.profile, parallel.device)
    with compiled_code_runs(), SynchronousGlooMode(), AccumulatesInPlace() as accumulates:
        accumulates.learn(parallel.device)
        with recorder.following(parallel.model):
            yield recorder


class MemoryProfiler:
    """Profiles the first steps of a run. `figures` has the bytes per rank and of the fullest rank.

    On CUDA the peaks are the allocator's, if possible over steps that are not followed; the tracker explains them.
    Evaluations and checkpoints count in `reserved_bytes` only: the allocator keeps what they took.

    - `peak_bytes` are the bytes that tensors requested, which a forecast predicts.
    - `active_bytes` are the allocator's blocks for these tensors.
    - `reserved_bytes` are what the process took from the device: these run out.
    - `workspace_bytes` are cuBLAS's workspaces, which are also part of the last two.

    Figures are written as soon as they are known: `memory_peaks_rank<r>.json`, and with `timeline` a page and, on CUDA,
    a snapshot.

    Args:
        model: in a few words, for the page.
    """

    def __init__(self, config: TrialConfig, model: str, ranks: DistributedContext, folder: Path) -> None:
        self.config, self.model, self.ranks, self.folder = config, model, ranks, folder
        self.detail = config.memory_profile
        self._tracked = 0
        self._profile: Profile | None = None
        self._figures: dict[str, float] | None = None
        self._cuda = ranks.device.type == "cuda"
        self._measured: dict[str, float] = {}  # by the allocator; read again only after a step
        self._of_steps: dict[str, float] = {}  # the largest of steps that were not followed
        self._steps_since = 0
        self.failed_at = ""  # where an operator of a followed step failed, in words
        if self.detail is not Detail.off:
            start_clean(ranks.device)

    def tracks(self) -> bool:
        """Return whether the next step is to be followed tensor by tensor."""
        return self.detail is not Detail.off and self._tracked < TRACKED_STEPS

    @contextmanager
    def track(
        self, parallel: Parallel, optimizers: Iterable[torch.optim.Optimizer], batch: Sequence[Tensor]
    ) -> Iterator[None]:
        """Follow one step on this rank, and write its profile however the step ends."""
        self._tracked += 1
        self._figures = None  # figures from before this step lack the optimizer's state
        history = self._cuda and self.detail is Detail.timeline
        if history:
            start_allocator_history(SNAPSHOT_ENTRIES)
        recorder: StepRecorder | AllocatorRecorder | None = None
        follow = record_compiled_step if self.config.compile else record_step
        try:
            with follow(parallel, optimizers, batch) as recorder:
                try:
                    yield
                except Exception:
                    self.failed_at = recorder.failed_at if isinstance(recorder, StepRecorder) else ""
                    raise
        finally:
            if recorder is not None:
                self._profile = recorder.finish()
            try:
                self._write(self._profile)
                if history:
                    write_allocator_history(self._file("snapshot", "pickle"))
            except (OSError, RuntimeError) as error:  # a full disk ends a trial where it loses results, not here
                print(f"the memory profile could not be written: {error}", flush=True)
            finally:
                if history:
                    stop_allocator_history()
        if self._cuda and not self.tracks():
            # Following a step may hold more than training does, and so may compiling.
            self._measured = allocator_figures(self.ranks.device)
            start_clean(self.ranks.device)

    def epoch_begins(self) -> None:
        """Drop the peaks of an evaluation and a checkpoint, once `figures` has those of the steps before."""
        if self._cuda and self._measured and not self._steps_since:
            torch.cuda.reset_peak_memory_stats(self.ranks.device)

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Exclude what is done inside, between two steps, from the peaks of steps."""
        if not self._cuda or self._profile is None:
            yield
            return
        if self._steps_since:
            self._read()
        yield
        torch.cuda.reset_peak_memory_stats(self.ranks.device)

    def step_done(self) -> None:
        """Count a step that was not followed."""
        self._steps_since += 1

    def _write(self, profile: Profile | None) -> None:
        if profile is None:
            return
        self._write_peaks(profile)
        if self.detail is Detail.timeline:
            from fsdp_lab.memory.timeline import write_timeline

            facts = {"rank": f"{self.ranks.rank} of {self.ranks.world_size}", **main_settings(self.config, self.model)}
            title = f"Optimizer step {self._tracked}, measured"
            write_timeline(profile, self._file("timeline", "html"), title, facts)

    def _write_peaks(self, profile: Profile, **more: Any) -> None:
        content = {"step": self._tracked, "rank": self.ranks.rank, "peaks": profile.peaks, **more}
        write_json(self._file("peaks", "json"), content, parents=False)

    def _file(self, what: str, suffix: str) -> Path:
        return self.folder / f"memory_{what}_rank{self.ranks.rank}.{suffix}"

    def figures(self) -> dict[str, float]:
        """Return the metrics `memory/*`, in bytes; empty before a step was followed.

        Every rank calls it; the peaks are all-gathered.
        """
        if self._profile is None:
            return {}
        if self._figures is None or self._cuda:  # on CUDA a later step may reach higher
            mine = peak_figures(self._profile.peaks)
            if self._cuda:
                mine |= self._allocator_figures(explained=mine["peak_bytes"] - mine["other_bytes"])
                with suppress(OSError):  # as in `track`
                    self._write_peaks(self._profile, allocator=self._measured)
            self._figures = metrics_of_ranks(gather(mine))
        return self._figures

    def _allocator_figures(self, explained: float) -> dict[str, float]:
        if self._steps_since or not self._measured:
            self._read()
        return {**self._measured, "other_bytes": self._measured["peak_bytes"] - explained}

    def _read(self) -> None:
        now = allocator_figures(self.ranks.device)
        self._of_steps = {key: max(value, self._of_steps.get(key, 0.0)) for key, value in now.items()}
        self._measured, self._steps_since = self._of_steps, 0


def start_clean(device: torch.device) -> None:
    """Free what an earlier trial of this process left on a GPU, and reset its peaks."""
    if device.type != "cuda":
        return
    gc.collect()  # a model and its optimizer are in cycles
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)


def allocator_figures(device: torch.device) -> dict[str, float]:
    """Return the largest figures of a GPU's allocator since the last reset, in bytes.

    `peak_bytes` were requested, `active_bytes` are the blocks for them, `reserved_bytes` were taken from the GPU.
    `workspace_bytes` are cuBLAS's, excluded from the first.
    """
    stats = torch.cuda.memory_stats(device)
    figures = {f"{name}_bytes": float(stats[f"{name}_bytes.all.peak"]) for name in ("active", "reserved")}
    workspaces = float(free_cublas_workspaces(device))
    return {"peak_bytes": stats["requested_bytes.all.peak"] - workspaces, "workspace_bytes": workspaces, **figures}


def main_settings(config: TrialConfig, model: str) -> dict[str, str]:
    """Return the settings that a reader of the page needs, in words; `model`: in a few words."""
    training = config.training
    return {
        "model": model,
        "sharding": config.sharding.granularity.name,
        "computes in": config.precision.param_dtype.name,
        "reduces in": config.precision.reduce_dtype.name,
        "offload": config.offload.target.name,
        "reshard_after_forward": config.reshard_after_forward.policy.name,
        "activation_checkpointing": config.activation_checkpointing.name,
        "activation_offload": config.activation_offload.name,
        "optimizer": config.optimizer.kind,
        "global batch": f"{training.global_batch_size} in {training.grad_accum_steps} part(s)",
    }


def peak_figures(peaks: dict[str, dict[str, int]]) -> dict[str, float]:
    """Return `<category>_bytes` and `peak_bytes` of the device, and those of the host with the prefix `host_`."""
    out: dict[str, float] = {}
    for place, prefix in (("device", ""), ("host", "host_")):
        sums = peaks.get(place)
        if sums is not None:
            out[f"{prefix}peak_bytes"] = float(sums["total"])
            out.update({f"{prefix}{name}_bytes": float(sums[name]) for name in CATEGORIES if name in sums})
    return out


def metrics_of_ranks(everyone: Sequence[dict[str, float]]) -> dict[str, float]:
    """Return `memory/<key>`, the maximum of the ranks, and `memory/rank<r>/<key>` for the totals of each rank.

    Above eight ranks, `memory/rank_smallest/<key>` and `memory/rank_median/<key>` replace the last. The breakdown by
    category is that of the rank with the highest peak.
    """
    highest = max(everyone, key=lambda figures: figures["peak_bytes"])
    out = {f"memory/{key}": value for key, value in highest.items()}
    for key in _TOTALS:
        values = [figures[key] for figures in everyone if key in figures]
        if not values:
            continue
        out[f"memory/{key}"] = max(values)
        if len(everyone) > _MOST_NAMED_RANKS:
            out[f"memory/rank_smallest/{key}"], out[f"memory/rank_median/{key}"] = min(values), median(values)
        else:
            out |= {f"memory/rank{rank}/{key}": figures[key] for rank, figures in enumerate(everyone) if key in figures}
    return out
