"""The script of a setting does what the trial did."""

from __future__ import annotations

import os
from contextlib import ExitStack
from typing import Any
from unittest import mock

from benchmarks.check_gpu.lines import Bench, Line, Measured
from benchmarks.check_gpu.parity import CPU_FP32, CUDA_FP32, HALF, LEARNING
from benchmarks.check_gpu.run import run_trial
from benchmarks.check_gpu.settings import Setting, trial, words

_SIZES: Setting = {"training.global_batch_size": 32, "data.num_train": 128, "data.num_val": 32}
SCRIPTS: tuple[Setting, ...] = (
    {"sharding": "per_block", "precision": "bf16_mixed", "reshard_after_forward": "always"},
    {"sharding": "per_layer", "precision": "fp16", "offload": "cpu"},
    {"sharding": "ddp", "precision": "bf16"},
)


def lines(bench: Bench) -> list[Line]:
    return [
        Line("takehome", f"use_pytorch.py {words(case)}", bench.workers, _expected(case, bench), case)
        for case in SCRIPTS
    ]


def measure(line: Line, bench: Bench) -> Measured:
    from fsdp_lab.takehome import read_setup, to_pytorch

    setting = {**LEARNING, **_SIZES, **line.case}
    run = run_trial(setting)
    setup = read_setup("Trial 0", trial(setting), run.known)
    assert setup is not None
    losses = run_script(to_pytorch(setup))
    apart = max(abs(a - b) for a, b in zip(run.losses, losses, strict=True))
    return Measured(apart <= _tolerance(line.case, bench), f"apart by {apart:.1e}", {"losses": losses})


def run_script(script: str) -> list[float]:
    """Run a script on these ranks, and return the losses of its last epoch.

    The ranks have joined already, and continue after it.
    """
    import torch.distributed as dist

    names: dict[str, Any] = {"__name__": "__main__"}
    with ExitStack() as patches:
        for module, name in (dist, "init_process_group"), (dist, "destroy_process_group"), (os, "_exit"):
            patches.enter_context(mock.patch.object(module, name))
        exec(compile(script, "use_pytorch.py", "exec"), names)
    return names["losses"].tolist()  # type: ignore[no-any-return]


def _expected(case: Setting, bench: Bench) -> str:
    return f"losses of the trial within {_tolerance(case, bench):g}"


def _tolerance(case: Setting, bench: Bench) -> float:
    if not bench.cuda:
        return CPU_FP32  # the same kernels in the same order
    return CUDA_FP32 if case.get("precision", "fp32") == "fp32" else HALF
