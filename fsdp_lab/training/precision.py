"""Types by their names, and the products of float32 matrices."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from fsdp_lab.config.parallel import Dtype, PrecisionConfig

TORCH_DTYPE = {Dtype.float32: torch.float32, Dtype.bfloat16: torch.bfloat16, Dtype.float16: torch.float16}


@contextmanager
def float32_products(precision: PrecisionConfig, device: torch.device) -> Iterator[None]:
    """Multiply float32 matrices in TF32 inside, if the trial does: a setting of the process, which is restored."""
    if not precision.tf32 or device.type != "cuda":
        yield
        return
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
