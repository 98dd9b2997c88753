"""Fake tensors: as large as the real ones that they stand for, and on a GPU with what its kernels keep, by hand."""

from __future__ import annotations

import csv
import gc
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import scaled_dot_product_attention as attend

from fsdp_lab.forecast.fake import ACCELERATOR, HOST, fake_tensors, fake_world
from fsdp_lab.forecast.forecast import forecast_profile
from fsdp_lab.forecast.kernels import buffer_bytes, cuda_kernels
from tests.operators import Operators
from tests.ranks import config

LOSSES = ("mse_loss", "smooth_l1_loss", "soft_margin_loss", "l1_loss", "huber_loss", "kl_div", "poisson_nll_loss",
          "binary_cross_entropy", "binary_cross_entropy_with_logits", "cross_entropy")  # fmt: skip


def num_bytes(name: str, reduction: str) -> int:
    inputs, targets = torch.rand(8, 5, requires_grad=True), torch.rand(8, 5)
    loss = getattr(F, name)(inputs, targets, reduction=reduction)
    loss.sum().backward()
    return loss.untyped_storage().nbytes()


@pytest.mark.filterwarnings("ignore:reduction. 'mean' divides")
@pytest.mark.parametrize("name", LOSSES)
def test_a_fake_loss_has_the_storage_of_a_real_one(name: str) -> None:
    """Some means keep the memory of all elements: 160 bytes here, not 4."""
    reductions = ("mean", "sum", "none")
    real = [num_bytes(name, reduction) for reduction in reductions]
    with fake_tensors():
        assert [num_bytes(name, reduction) for reduction in reductions] == real


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_fake_reduction_frees_its_tensor_without_a_garbage_collection(dtype: torch.dtype) -> None:
    """Else a forecast's peak depends on when Python collects: 4 bytes more than a trial's, now and then."""
    gc.disable()
    try:
        with fake_world(2, HOST), fake_tensors():
            reduced = torch.zeros(3, dtype=dtype)
            storage = weakref.ref(reduced.untyped_storage())
            work = dist.all_reduce(reduced, async_op=True)
            assert work is not None
            work.wait()
            assert work.get_future().value()[0].shape == (3,)
            del work, reduced
            assert storage() is None
    finally:
        gc.enable()


def kept(run: Callable[[], object]) -> list[torch.Tensor]:
    """What autograd keeps for the backward pass of what runs."""
    tensors: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        tensors.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        run()
    return tensors


def test_a_fake_lstm_keeps_what_a_real_one_keeps() -> None:
    """oneDNN's workspace among it, for which PyTorch's own fake layer has nothing."""

    def size() -> int:
        tensors = kept(lambda: nn.LSTM(16, 32, num_layers=2)(torch.rand(7, 3, 16)))
        storages = {id(storage): storage.nbytes() for storage in (tensor.untyped_storage() for tensor in tensors)}
        return sum(storages.values())

    real = size()
    with fake_tensors():
        assert size() == real


# vit_tiny with 1 block: 2 heads, hidden 64, 4 x 4 patches and the class token
HEADS, HIDDEN, SEQUENCE, BATCH = 2, 64, 17, 16
BATCH_ON_DEVICE = BATCH * (28 * 28 * 4 + 8)  # images and labels: on a CPU they are where they were
SEED = 2 * 8  # and the offset


@pytest.mark.parametrize(
    ("words", "more"),
    [
        ([], BATCH * SEQUENCE * HIDDEN * 4 + BATCH * HEADS * (32 - SEQUENCE) * 4 + SEED),
        (["precision=bf16_mixed"], 2 * 2 * BATCH * SEQUENCE * 2 + SEED),
    ],
)
def test_a_gpu_keeps_more_activations_than_a_cpu(words: list[str], more: int):
    """In float32 memory-efficient attention writes (batch, sequence, heads, size); the model flattens it sequence
    first, which copies, and the projection keeps the copy. Its row sums are padded to 32.

    In half precision flash attention and cuDNN's write in the layout of the query, as the CPU's kernel does. Each of
    the block's two norms keeps two statistics a token in float32, which a CPU keeps in bfloat16."""
    words = ["model=vit_tiny", "model.num_layers=1", f"training.global_batch_size={2 * BATCH}", *words]
    on_cpu, on_gpu = (forecast_profile(config(*words), 2, cuda).peaks["device"] for cuda in (False, True))
    assert on_gpu["activation"] - on_cpu["activation"] - BATCH_ON_DEVICE == more


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


# rows and columns of a gradient in half precision -> the buffers in which a sum of the rows is put together
SUMS = {
    (6304, 768): 38928384 + 24, (6304, 1024): 51904512 + 32, (6304, 2304): 116785152 + 72, (6304, 3072): 138412032 + 96,
    (6304, 4096): 138412032 + 128, (16, 4096): 0,
}  # fmt: skip


def test_the_buffer_of_a_sum_of_rows_is_the_one_that_a_gpu_asked_for():
    with FakeTensorMode():
        for shape, expected in SUMS.items():
            gradient = torch.empty(shape, dtype=torch.bfloat16, device=ACCELERATOR)
            assert buffer_bytes(None, torch.ops.aten.sum.dim_IntList, (gradient, [0], True)) == expected, shape


FLASH, EFFICIENT = "_flash_attention", "_efficient_attention"
PLAIN = "softmax"  # a part of the plain path


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
    with FakeTensorMode(), cuda_kernels(), Operators() as called:
        query = torch.empty(3, 4, 10, size, dtype=dtype, device=ACCELERATOR, requires_grad=True)
        key = torch.empty(3, heads, 10, size, dtype=dtype, device=ACCELERATOR)
        bias = None if mask is None else torch.empty(3, 4, 10, 10, dtype=mask, device=ACCELERATOR)
        out = F.scaled_dot_product_attention(query, key, key, bias, enable_gqa=heads != 4)
        out.sum().backward()
    assert out.shape == (3, 4, 10, size) and query.grad is not None
    assert [k for k in (FLASH, EFFICIENT, PLAIN) if any(name.endswith(k) for name in called.names)] == [kernel]
    assert not any("for_cpu" in name for name in called.names)


@pytest.mark.filterwarnings("ignore:Mismatch dtype")
@pytest.mark.parametrize(
    ("dtype", "weight_dtype"),
    [(torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16), (torch.bfloat16, torch.float32)],
)
def test_a_gpus_rms_norm_keeps_its_input_its_weight_and_a_number_a_row(dtype: torch.dtype, weight_dtype: torch.dtype):
    """But for one of two types, which is computed step by step."""
    with FakeTensorMode(), cuda_kernels():
        norm = torch.nn.RMSNorm(64, device=ACCELERATOR, dtype=weight_dtype)
        rows = torch.empty(3, 10, 64, device=ACCELERATOR, dtype=dtype, requires_grad=True)
        tensors = [(tuple(t.shape), t.dtype) for t in kept(lambda: norm(rows).sum().backward())]
        assert norm.weight.grad is not None and rows.grad is not None and rows.grad.shape == rows.shape
    fused = [((3, 10, 64), dtype), ((64,), dtype), ((3, 10, 1), torch.float32)]
    assert tensors == fused if dtype == weight_dtype else len(tensors) > len(fused)


def test_attention_that_a_model_imports_by_its_name_is_a_gpus_too() -> None:
    """Inside of a forecast; outside all is PyTorch's own."""
    theirs, norm = attend, F.rms_norm
    with cuda_kernels():
        assert attend is not theirs and attend is F.scaled_dot_product_attention and F.rms_norm is not norm
    assert attend is theirs is F.scaled_dot_product_attention and F.rms_norm is norm
