"""Fake tensors and a GPU's kernels and allocator without a GPU: sizes of real ones, and requests worked out by hand."""

from __future__ import annotations

import csv
import gc
import itertools
import random
import re
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import scaled_dot_product_attention as attend

from fsdp_lab.forecast import allocator as rules
from fsdp_lab.forecast.allocator import STREAMS_BEFORE_129721, CachingAllocator, allocator_peaks
from fsdp_lab.forecast.fake import ACCELERATOR, HOST, fake_tensors, fake_world
from fsdp_lab.forecast.forecast import forecast_profile
from fsdp_lab.forecast.kernels import buffer_bytes, cuda_kernels
from fsdp_lab.training.profile import Event, Profile
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


def test_the_buffer_of_attention_is_the_one_that_a_gpu_asked_for():
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


def test_the_buffer_of_a_sum_is_the_one_that_a_gpu_asked_for():
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
def test_a_gpus_rms_norm_keeps_its_input_and_a_number_a_row(dtype: torch.dtype, weight_dtype: torch.dtype):
    """But for one of two types, which is computed step by step."""
    with FakeTensorMode(), cuda_kernels():
        norm = torch.nn.RMSNorm(64, device=ACCELERATOR, dtype=weight_dtype)
        rows = torch.empty(3, 10, 64, device=ACCELERATOR, dtype=dtype, requires_grad=True)
        tensors = [(tuple(t.shape), t.dtype) for t in kept(lambda: norm(rows).sum().backward())]
        assert norm.weight.grad is not None and rows.grad is not None and rows.grad.shape == rows.shape
    fused = [((3, 10, 64), dtype), ((64,), dtype), ((3, 10, 1), torch.float32)]
    assert tensors == fused if dtype == weight_dtype else len(tensors) > len(fused)


def test_attention_that_a_model_imports_by_its_name_is_a_gpus() -> None:
    """Inside of a forecast; outside all is PyTorch's own."""
    theirs, norm = attend, F.rms_norm
    with cuda_kernels():
        assert attend is not theirs and attend is F.scaled_dot_product_attention and F.rms_norm is not norm
    assert attend is theirs is F.scaled_dot_product_attention and F.rms_norm is norm


MIB = 2**20


def test_the_sizes_are_those_of_this_pytorch():
    header = Path(torch.__file__).parent / "include/c10/core/AllocatorConfig.h"
    if not header.exists():
        pytest.skip("this PyTorch names its allocator's constants in no header")
    named = dict(re.findall(r"constexpr size_t (k\w+) = (\d+);", header.read_text()))
    ours = {
        "kMinBlockSize": rules.MIN_BLOCK,
        "kSmallSize": rules.SMALL_SIZE,
        "kSmallBuffer": rules.SMALL_SEGMENT,
        "kMinLargeAlloc": rules.MIN_OWN_SEGMENT,
        "kRoundLarge": rules.ROUND_LARGE,
    }
    assert {name: int(named[name]) for name in ours} == ours
    shared = re.search(r"large_segment_size_\{(\d+)\}", header.read_text())  # older versions have it in no header
    assert shared is None or int(shared[1]) == rules.LARGE_SEGMENT


@pytest.mark.parametrize(
    ("requested", "active", "reserved"),
    [
        (1, 512, 2 * MIB),
        (513, 1024, 2 * MIB),
        (MIB, MIB, 2 * MIB),  # the largest small one
        (MIB + 1, MIB + 512, 20 * MIB),
        (10 * MIB, 10 * MIB, 10 * MIB),  # the smallest with a segment of its own
        (10 * MIB + 1, 10 * MIB + 512, 12 * MIB),  # almost 2 MiB are left: cut off
        (11 * MIB, 12 * MIB, 12 * MIB),  # just 1 MiB is left: it stays with the block
    ],
)
def test_one_request(requested: int, active: int, reserved: int):
    allocator = CachingAllocator()
    allocator.allocate("a", requested)
    assert (allocator.requested, allocator.active, allocator.reserved) == (requested, active, reserved)
    allocator.free("a")
    assert (allocator.requested, allocator.active, allocator.reserved) == (0, 0, reserved), "freed, and kept"
    allocator.allocate("b", requested)
    assert allocator.reserved == reserved, "taken again"


@pytest.mark.parametrize(
    ("steps", "reserved"),
    [
        # another stream does not get a freed block
        ("+a16@gather -a +b16", 32),
        # the smallest that is large enough: 18 out of the 20, of which 2 are cut off, 40 of the 40, and 3 of neither
        ("+x40 +y20 -x -y +a18 +b40", 60),
        ("+x40 +y20 -x -y +a18 +b40 +c3", 80),
        # free neighbours become one block: 18 of the 20 MiB of one segment, of which the last freed has two
        ("+a6 +b6 +c6 -a -c -b +d20", 20),
    ],
)
def test_which_block_is_taken(steps: str, reserved: int):
    """Steps: `+a16@gather` asks for 16 MiB on a stream, `-a` frees them; then so many MiB are reserved."""
    assert after(CachingAllocator(), steps).reserved == reserved * MIB


def after(allocator: CachingAllocator, steps: str) -> CachingAllocator:
    for step in steps.split():
        if step[0] == "-":
            allocator.free(step[1])
        else:
            size, _, stream = step[2:].partition("@")
            allocator.allocate(step[1], int(size) * MIB, stream)
    return allocator


def test_at_any_time_blocks_are_whole_and_apart():
    """Ten thousand requests at random: each segment stays covered by its blocks, once, and the sums agree."""
    rng = random.Random(0)
    allocator, held = CachingAllocator(), {}
    for number in range(10_000):
        if held and rng.random() < 0.5:
            key = rng.choice(list(held))
            allocator.free(key)
            del held[key]
        else:
            held[number] = rng.choice([rng.randint(1, 4000), rng.randint(1, 30 * MIB)])
            allocator.allocate(number, held[number], rng.choice(["", "gather"]))
    used = [block for block, _ in allocator._blocks.values()]
    free = [block for blocks in allocator._free.values() for _, _, block in blocks]
    assert allocator.requested == sum(held.values())
    assert allocator.active == sum(block.size for block in used)
    assert allocator.reserved == sum(block.size for block in [*used, *free])
    spans = sorted((block.address, block.address + block.size) for block in [*used, *free])
    assert all(end == begin for (_, end), (begin, _) in itertools.pairwise(spans))
    assert not any(block.after is not None and block.after.free for block in free), "free neighbours are one"


Step = list[tuple[int, str, int]]  # storage, category, MiB from now on
ACTIVATION: Step = [(1, "activation", 16), (1, "activation", 0)]
GATHERED: Step = [(0, "all_gather", 16), (0, "all_gather", 0), *ACTIVATION]
SCATTERED: Step = [(0, "reduce_scatter", 16), (0, "reduce_scatter", 0), *ACTIVATION]
REDUCED: Step = [(0, "temp", 16), (0, "grad", 16), (0, "grad", 0), *ACTIVATION]


@pytest.mark.parametrize(
    ("step", "begun", "sharded", "more", "reserved"),
    [
        # The optimizer's state comes after the first step. That leaves 30 MiB free where its activations were. The
        # state takes 20 of them, and the second step's activations do not fit into the 10 that are left.
        ([(0, "param", 10), (1, "optimizer", 20), (2, "activation", 30), (2, "activation", 0)], 2, True, {}, 70),
        ([(2, "activation", 30), (2, "activation", 0)], 0, True, {"workspaces": [32 * MIB]}, 62),
        # what is known for something else later stays where it is
        ([(0, "temp", 16), (0, "activation", 16), (0, "activation", 0)], 0, True, {}, 16),
        # what is gathered lies in a pool of its own where the model is sharded
        (GATHERED, 0, True, {}, 32),
        (GATHERED, 0, False, {}, 16),
        # what is scattered lay in one before pytorch#129721: the compute stream could not have it
        (SCATTERED, 0, True, {}, 16),
        (SCATTERED, 0, True, {"streams": STREAMS_BEFORE_129721}, 32),
        # a single worker gathers nothing and reduces on a stream of its own
        (REDUCED, 0, True, {}, 32),
    ],
)
def test_what_a_step_reserves_in_pools_of_its_streams(
    step: Step, begun: int, sharded: bool, more: dict[str, Any], reserved: int
):
    events = [Event(storage, "device", category, mib * MIB, "", "forward") for storage, category, mib in step]
    assert allocator_peaks(Profile(events, begun), sharded, **more).reserved == reserved * MIB


def test_an_expandable_segment_grows_by_what_its_free_end_lacks():
    """Worked out by hand: a stream has one segment, of pages of 20 MiB, so its freed blocks serve larger requests."""
    allocator = CachingAllocator(expandable=True)
    for steps, reserved in (
        ("+a30 -a +b50", 60),  # 40 MiB, then one more page; in plain segments 80
        ("+c10", 60),  # the end of the segment
        ("-b -c +d60", 60),  # both are one block again
        ("+e10@other", 80),
    ):
        assert after(allocator, steps).reserved == reserved * MIB, steps
    assert allocator.active == 70 * MIB
    assert after(CachingAllocator(), "+a30 -a +b50").reserved == 80 * MIB


def test_the_end_of_an_expandable_segment_is_taken_last():
    """52 of 60 MiB: 5 come from the hole of 30, not from the 8 at the end, which 8 more fill. Then 17 of the hole are
    left, and 25 need another page."""
    allocator = after(CachingAllocator(expandable=True), "+a30 +b10 +c12 -a +d5 +e8 +f25")
    assert allocator.reserved == 80 * MIB
