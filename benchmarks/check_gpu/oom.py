"""Out of memory is an outcome of a trial, and leaves the process fit for the next one."""

from __future__ import annotations

import gc
import tempfile
from pathlib import Path

from benchmarks.check_gpu.lines import Bench, Line, Measured
from benchmarks.check_gpu.run import Run
from benchmarks.check_gpu.settings import Setting, trial

_GPU_BYTES = 512 * 2**20  # what the trial may have of a GPU: ViT-B's parameters and their gradients do not fit
_SIZES: Setting = {
    "training.global_batch_size": 8,
    "data.num_train": 24,
    "data.num_val": 8,
    "memory_profile": "peaks",
}
# Its one weight has 1024 * 2**40 numbers, more than any address: the allocator refuses and touches nothing.
_NO_CPU: Setting = {
    "model": "mlp", "model.hidden_dim": 2**40,
}  # fmt: skip


def lines(bench: Bench) -> list[Line]:
    return [Line("oom", "too large, then small", 1, "outcome oom; then the small trial finishes")]


def measure(line: Line, bench: Bench) -> Measured:
    """On CUDA the allocator gets a small part of the device; on a CPU the trial wants more than there can be."""
    import torch

    if bench.cuda:
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(_GPU_BYTES / total)
    try:
        large, why = outcome({**_SIZES, **({"model": "vit_b_16"} if bench.cuda else _NO_CPU)})
        gc.collect()
        if bench.cuda:
            torch.cuda.empty_cache()
        small, why_small = outcome({**_SIZES, "model": "vit_tiny"})
    finally:
        if bench.cuda:
            torch.cuda.set_per_process_memory_fraction(1.0)
    left = torch.cuda.memory_allocated() if bench.cuda else 0
    text = f"outcome {large}, then {small}{': ' + why_small if why_small else ''}"
    text += f", {left / 2**20:.0f} MiB left allocated" if bench.cuda else ""
    return Measured((large, small) == ("oom", "finished"), text, {"message": why, "left_bytes": left})


def outcome(setting: Setting) -> tuple[str, str]:
    """What the platform makes of the trial: `(status, message)`."""
    from fsdp_lab.engine.rank import train_rank
    from fsdp_lab.record.failures import RankFailure
    from fsdp_lab.report.reason_texts import reason_text

    with tempfile.TemporaryDirectory() as name:
        folder, run = Path(name), Run()
        try:
            train_rank(trial(setting), folder, 0, run)
        except RankFailure as failure:
            return failure.reason.status, reason_text(failure.reason)
        return ("finished", "") if run.epochs else ("no outcome", "")
