"""What attention keeps on a GPU, in a forecast: against sizes worked out by hand."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

from fsdp_lab.forecast.attention import cuda_attention
from fsdp_lab.forecast.fake import ACCELERATOR
from fsdp_lab.forecast.forecast import forecast_profile
from tests.ranks import config

# vit_tiny: 4 blocks, 2 heads, hidden 64, 4 x 4 patches and the class token
BLOCKS, HEADS, HIDDEN, SEQUENCE, BATCH = 4, 2, 64, 17, 16
BATCH_ON_DEVICE = BATCH * (28 * 28 * 4 + 8)  # images and labels: on a CPU they are where they were
WORDS = ("model=vit_tiny", f"training.global_batch_size={2 * BATCH}")


def more_on_a_gpu(*words: str) -> int:
    """Bytes of activations at the peak that a forecast for a GPU has beyond one for a CPU."""
    on_cpu, on_gpu = (forecast_profile(config(*WORDS, *words), 2, cuda).peaks["device"] for cuda in (False, True))
    return on_gpu["activation"] - on_cpu["activation"] - BATCH_ON_DEVICE


def test_in_float32_a_gpu_keeps_the_output_of_attention_and_a_copy_in_each_block():
    """Memory-efficient attention writes (batch, sequence, heads, size); the model flattens it sequence first, which
    copies, and the projection keeps the copy. Its row sums are padded to 32, and seed and offset take 8 bytes each."""
    copies = BLOCKS * BATCH * SEQUENCE * HIDDEN * 4
    padding = BLOCKS * BATCH * HEADS * (32 - SEQUENCE) * 4
    assert more_on_a_gpu() == copies + padding + BLOCKS * 16


def test_in_half_precision_a_gpu_keeps_no_copy():
    """Flash attention writes in the layout of the query, as the CPU's kernel does. It keeps seed (two numbers) and
    offset besides."""
    assert more_on_a_gpu("precision=bf16_mixed") == BLOCKS * 24


@pytest.mark.parametrize(
    ("dtype", "heads", "mask", "kernel"),
    [
        (torch.bfloat16, 4, False, "flash"),
        (torch.float16, 2, False, "flash"),  # fewer heads of keys: grouped queries
        (torch.bfloat16, 4, True, "efficient"),
        (torch.float32, 4, False, "efficient"),
        (torch.float32, 2, False, "cpu"),  # efficient attention takes no grouped queries
    ],
)
def test_the_kernel_is_the_one_that_a_gpu_would_choose(dtype: torch.dtype, heads: int, mask: bool, kernel: str):
    called = []

    class Spy(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            called.append(str(func))
            return func(*args, **(kwargs or {}))

    with FakeTensorMode(), cuda_attention(), Spy():
        query = torch.empty(3, 4, 10, 16, dtype=dtype, device=ACCELERATOR, requires_grad=True)
        key = torch.empty(3, heads, 10, 16, dtype=dtype, device=ACCELERATOR)
        bias = torch.empty(3, 4, 10, 10, dtype=dtype, device=ACCELERATOR) if mask else None
        out = F.scaled_dot_product_attention(query, key, key, bias, enable_gqa=heads != 4)
        out.sum().backward()
    assert out.shape == (3, 4, 10, 16)
    chosen = {
        "flash": any("_flash_attention.default" in name for name in called),
        "efficient": any("_efficient_attention.default" in name for name in called),
    }
    assert chosen == {"flash": kernel == "flash", "efficient": kernel == "efficient"}


def test_outside_a_forecast_attention_is_pytorchs_own():
    before = F.scaled_dot_product_attention
    with cuda_attention():
        assert F.scaled_dot_product_attention is not before
    assert F.scaled_dot_product_attention is before
