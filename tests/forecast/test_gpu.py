"""On a GPU: the allocator's peak against the forecast. Nothing here runs without one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fsdp_lab.forecast.forecast import forecast_profile
from tests.ranks import Memo, config, run_ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
TRIAL = ("model=vit_b_16", "data=synthetic", "training.global_batch_size=16", "training.max_steps=4", "init=meta")


def measure(words: list[str], folder: str) -> dict[str, float]:
    """On one rank with a GPU: the metrics of a few steps."""
    import torch.distributed as dist

    from fsdp_lab.training import train

    dist.destroy_process_group()  # tests.ranks made one for CPUs
    memo = Memo()
    train(config(*TRIAL, "memory_profile=timeline", *words), Path(folder), memo)
    return memo.reported[-1]


@pytest.mark.parametrize(
    "words",
    [
        ["sharding=per_block", "precision=bf16_mixed"],
        ["sharding=per_block", "precision=bf16_mixed", "offload=cpu"],
        ["sharding=root", "precision=fp16", "activation_checkpointing=full"],
        ["sharding=ddp", "precision=fp32"],
    ],
    ids=" ".join,
)
def test_the_allocators_peak_is_within_ten_percent_of_the_forecast(words: list[str], tmp_path: Path):
    (metrics,) = run_ranks(1, measure, words, str(tmp_path))
    peaks = forecast_profile(config(*TRIAL, *words), 1, cuda=True).peaks
    assert peaks["device"]["total"] == pytest.approx(metrics["memory/peak_bytes"], rel=0.10)
    held = [metrics[f"memory/{key}_bytes"] for key in ("peak", "active", "reserved")]
    assert held == sorted(held)
    if "offload=cpu" in words:
        assert metrics["memory/host_param_bytes"] == peaks["host"]["param"]
        assert metrics["memory/param_bytes"] == 0
    assert (tmp_path / "memory_snapshot_rank0.pickle").stat().st_size > 0
    assert (tmp_path / "memory_timeline_rank0.html").stat().st_size > 0
