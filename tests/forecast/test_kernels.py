"""What a GPU's kernels keep, in a forecast: against sizes worked out by hand."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import scaled_dot_product_attention as attend
from torch.utils._python_dispatch import TorchDispatchMode

from fsdp_lab.forecast.fake import ACCELERATOR
from fsdp_lab.forecast.forecast import forecast_profile
from fsdp_lab.forecast.kernels import buffer_bytes, cuda_kernels
from tests.ranks import config

# vit_tiny with 1 block: 2 heads, hidden 64, 4 x 4 patches and the class token
BLOCKS, HEADS, HIDDEN, SEQUENCE, BATCH = 1, 2, 64, 17, 16
BATCH_ON_DEVICE = BATCH * (28 * 28 * 4 + 8)  # images and labels: on a CPU they are where they were
WORDS = ("model=vit_tiny", f"model.num_layers={BLOCKS}", f"training.global_batch_size={2 * BATCH}")


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
    """Flash attention and cuDNN's write in the layout of the query, as the CPU's kernel does. They keep seed and offset
    besides. Each of the block's two norms keeps two statistics a token in float32, which a CPU keeps in bfloat16."""
    statistics = BLOCKS * 2 * 2 * BATCH * SEQUENCE * 2
    assert more_on_a_gpu("precision=bf16_mixed") == BLOCKS * 16 + statistics


# rows and columns of a gradient in half precision -> the buffers in which a sum of the rows is put together
SUMS = {
    (6304, 768): 38928384 + 24, (6304, 1024): 51904512 + 32, (6304, 2304): 116785152 + 72, (6304, 3072): 138412032 + 96,
    (6304, 4096): 138412032 + 128, (16, 4096): 0,
}  # fmt: skip


def test_the_buffer_of_attentions_backward_pass_is_the_one_that_a_gpu_asked_for():
    """An H200, with PyTorch 2.11 and cuDNN 9.19: the largest allocation of the backward pass that it frees at once."""
    backward, wrong = torch.ops.aten._scaled_dot_product_flash_attention_backward.default, {}
    with (Path(__file__).parent / "attention_buffers.csv").open() as file:
        rows = list(csv.DictReader(file))
    for row in rows:
        batch, heads, of_keys, sequence, size = (int(value) for value in list(row.values())[:5])
        dtype = getattr(torch, row["dtype"])
        query = torch.empty(batch, heads, sequence, size, dtype=dtype, device="meta")
        key = torch.empty(batch, of_keys, sequence, size, dtype=dtype, device="meta")
        if (ours := buffer_bytes(None, backward, (query, query, key, key))) != int(row["bytes"]):
            wrong[tuple(row.values())] = ours
    assert len(rows) > 60 and not wrong


@pytest.mark.parametrize("shape", SUMS, ids=str)
def test_the_buffer_of_a_sum_of_rows_is_the_one_that_a_gpu_asked_for(shape: tuple[int, int]):
    with FakeTensorMode():
        gradient = torch.empty(shape, dtype=torch.bfloat16, device=ACCELERATOR)
        assert buffer_bytes(None, torch.ops.aten.sum.dim_IntList, (gradient, [0], True)) == SUMS[shape]


class _Called(TorchDispatchMode):
    """The operators that were called, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


FLASH, EFFICIENT = "_flash_attention.default", "_efficient_attention.default"
PLAIN = "softmax.default"  # a part of the plain path


@pytest.mark.parametrize(
    ("dtype", "heads", "size", "mask", "kernel"),
    [
        (torch.bfloat16, 4, 16, None, FLASH),
        (torch.float16, 2, 16, None, FLASH),  # fewer heads of keys: grouped queries
        (torch.bfloat16, 4, 20, None, FLASH),  # padded to 24
        (torch.bfloat16, 4, 16, torch.bfloat16, EFFICIENT),
        (torch.bfloat16, 4, 16, torch.bool, EFFICIENT),
        (torch.float32, 4, 16, None, EFFICIENT),
        (torch.float32, 4, 18, None, PLAIN),  # a head size that is no multiple of 4
        (torch.float32, 2, 16, None, PLAIN),  # efficient attention takes no grouped queries
    ],
)
def test_the_kernel_is_the_one_that_a_gpu_would_choose(
    dtype: torch.dtype, heads: int, size: int, mask: torch.dtype | None, kernel: str
):
    with FakeTensorMode(), cuda_kernels(), _Called() as called:
        query = torch.empty(3, 4, 10, size, dtype=dtype, device=ACCELERATOR, requires_grad=True)
        key = torch.empty(3, heads, 10, size, dtype=dtype, device=ACCELERATOR)
        bias = None if mask is None else torch.empty(3, 4, 10, 10, dtype=mask, device=ACCELERATOR)
        out = F.scaled_dot_product_attention(query, key, key, bias, enable_gqa=heads != 4)
        out.sum().backward()
    assert out.shape == (3, 4, 10, size) and query.grad is not None
    assert [k for k in (FLASH, EFFICIENT, PLAIN) if any(name.endswith(k) for name in called.names)] == [kernel]
    assert not any("for_cpu" in name for name in called.names)


def kept_by_rms_norm(dtype: torch.dtype, weight_dtype: torch.dtype) -> list[tuple[tuple[int, ...], torch.dtype]]:
    kept = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.append((tuple(tensor.shape), tensor.dtype))
        return tensor

    with FakeTensorMode(), cuda_kernels(), torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        norm = torch.nn.RMSNorm(64, device=ACCELERATOR, dtype=weight_dtype)
        rows = torch.empty(3, 10, 64, device=ACCELERATOR, dtype=dtype, requires_grad=True)
        out = norm(rows)
        assert out.shape == rows.shape and out.device == ACCELERATOR
        out.sum().backward()
        assert norm.weight.grad is not None and norm.weight.grad.shape == (64,)
        assert rows.grad is not None and rows.grad.shape == rows.shape
    return kept


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gpus_rms_norm_keeps_its_input_its_weight_and_a_number_a_row(dtype: torch.dtype):
    assert kept_by_rms_norm(dtype, dtype) == [((3, 10, 64), dtype), ((64,), dtype), ((3, 10, 1), torch.float32)]


def test_an_rms_norm_of_two_types_is_no_fused_one():
    """PyTorch warns of it, and computes step by step."""
    assert len(kept_by_rms_norm(torch.bfloat16, torch.float32)) > 3


def test_attention_that_a_model_imports_by_its_name_is_a_gpus_too() -> None:
    theirs = attend
    with cuda_kernels():
        assert attend is not theirs and attend is F.scaled_dot_product_attention
    assert attend is theirs is F.scaled_dot_product_attention


def test_outside_a_forecast_attention_is_pytorchs_own():
    before = F.scaled_dot_product_attention, F.rms_norm
    with cuda_kernels():
        assert F.scaled_dot_product_attention is not before[0] and F.rms_norm is not before[1]
    assert (F.scaled_dot_product_attention, F.rms_norm) == before
