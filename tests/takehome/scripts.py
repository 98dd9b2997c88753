"""Trials, and the scripts that are written of them, run one after the other on the same ranks."""

from __future__ import annotations

import io
import os
import tempfile
from contextlib import ExitStack, redirect_stdout
from pathlib import Path
from typing import Any
from unittest import mock

from tests.ranks import Memo, config

# Weight decay inside Adam's gradient, and a large step: four small ones would hardly move the ViT.
VIT = ("optimizer=adam", "optimizer.lr=0.01", "optimizer.weight_decay=0.1")
SHARDINGS: dict[str, tuple[str, ...]] = {
    "ddp": ("sharding=ddp",),
    "root": ("sharding=root",),
    "per_block": ("sharding=per_block",),
    "per_layer": ("sharding=per_layer",),
    "size_based": ("sharding=size_based", "sharding.min_num_params=10000"),
}
PRECISIONS = ("bf16", "bf16_mixed", "fp16", "fp16_mixed", "grad_bf16")


def train_and_run(cases: list[list[str]]) -> list[dict[str, Any]]:
    """Train each case and run its script; the text, what the script printed, and the losses of both."""
    import torch.distributed as dist

    from fsdp_lab.takehome import read_setup, to_pytorch
    from fsdp_lab.training import train

    results = []
    for overrides in cases:
        trial, memo, losses = config(*overrides), Memo(), list[float]()
        with tempfile.TemporaryDirectory() as own:
            train(trial, Path(own), memo, losses.extend)
        setup = read_setup("Trial 0", trial, memo.known)
        assert setup is not None
        script, names, printed = to_pytorch(setup), {"__name__": "__main__"}, io.StringIO()
        with ExitStack() as patches:
            # the ranks have joined already, and stay together for the next script
            for name in ("init_process_group", "destroy_process_group"):
                patches.enter_context(mock.patch.object(dist, name))
            leave = patches.enter_context(mock.patch.object(os, "_exit"))
            patches.enter_context(redirect_stdout(printed))
            exec(compile(script, "use_pytorch.py", "exec"), names)
        results.append(
            {
                "script": script,
                "printed": printed.getvalue(),
                "left": leave.call_args_list == [mock.call(0)],
                "last": names["losses"].tolist(),  # type: ignore[attr-defined]
                "trial": losses,
                "skipped": sum(reported.get("train/skipped_steps", 0) for reported in memo.reported),
                "epochs": [reported["train/loss"] for reported in memo.reported],
                "setup": setup,
            }
        )
    return results
