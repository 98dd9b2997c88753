"""What a rank of a calibration times outside of models."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from fsdp_lab.calibrate import rank
from fsdp_lab.training.distributed import DistributedContext


def test_attention_is_timed_in_each_dtype_forwards_and_backwards(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(rank, "_ATTENTION", ((17, 32, False), (64, 32, True)))
    rows = rank.time_attention(DistributedContext(0, 0, 1, torch.device("cpu")), repeats=2)
    assert Counter((name, dtype) for name, _, dtype, *_ in rows) == {
        (f"aten._scaled_dot_product_flash_attention_for_cpu{which}", dtype): 2
        for which in ("", "_backward")
        for dtype in ("float32", "bfloat16", "float16")
    }
    short, long = rows[0], rows[2]
    assert short[3] == 2 * 2 * 16 * 17 * 17 * 32, "two products of 16 heads"
    assert (short[5], long[5]) == (16, 32), "tiles of at most 32 queries"
    assert all(kind == "attention" and seconds > 0 for _, kind, *_, seconds in rows)
