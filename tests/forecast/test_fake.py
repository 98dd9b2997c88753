"""Fake tensors and a GPU's kernels and allocator without a GPU: sizes of real ones, and requests worked out by hand."""

from __future__ import annotations

import csv
import gc
import re
import weakref
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch._dynamo.utils import counters
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention as attend

from fsdp_lab.forecast import allocator as rules
from fsdp_lab.forecast.allocator import CachingAllocator, allocator_peaks
from fsdp_lab.forecast.capacity import weigh
from fsdp_lab.forecast.dispatch import AS_THEY_ARE, FLOAT32, FLOAT32_RESULTS, LOWER, PROMOTED
from fsdp_lab.forecast.fake import ACCELERATOR, HOST, fake_tensors, fake_world
from fsdp_lab.forecast.forecast import forecast_profile
from fsdp_lab.forecast.kernels import buffer_bytes, cuda_kernels
from fsdp_lab.forecast.torch_private import is_autocast_on_cuda, kernels_planned
from fsdp_lab.machine.hardware import ALLOCATOR_VARIABLES
from fsdp_lab.memory.profile import Event, Profile
from tests.forecast.planted import kept, num_bytes
from tests.operators import Operators
from tests.ranks import config


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_fake_reduction_frees_its_tensor_at_once(dtype: torch.dtype) -> None:
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


# vit_tiny with 1 block: 2 heads, hidden 64, 4 x 4 patches and the class token
HEADS, HIDDEN, SEQUENCE, BATCH = 2, 64, 17, 16
BATCH_ON_DEVICE = BATCH * (28 * 28 * 4 + 8)  # images and labels: on a CPU they are where they were
SEED = 2 * 8  # and the offset


@pytest.mark.parametrize(
    ("precision", "more"),
    [
        ("fp32", BATCH * SEQUENCE * HIDDEN * 4 + BATCH * HEADS * (32 - SEQUENCE) * 4 + SEED),
        ("bf16_mixed", 2 * 2 * BATCH * SEQUENCE * 2 + SEED),
    ],
)
def test_a_gpu_keeps_more_activations_than_a_cpu(precision: str, more: int):
    """In float32 memory-efficient attention writes (batch, sequence, heads, size); the model flattens it sequence
    first, which copies, and the projection keeps the copy. Its row sums are padded to 32.

    In half precision flash attention and cuDNN's write in the layout of the query, as the CPU's kernel does. Each of
    the block's two norms keeps two statistics a token in float32, which a CPU keeps in bfloat16."""
    words = ["model=vit_tiny", "model.num_layers=1", f"training.global_batch_size={2 * BATCH}"]
    setting = config(*words, f"precision={precision}")
    on_cpu, on_gpu = (forecast_profile(setting, 2, cuda).peaks["device"] for cuda in (False, True))
    assert on_gpu["activation"] - on_cpu["activation"] - BATCH_ON_DEVICE == more


def test_the_buffer_of_attention_is_the_one_that_a_gpu_asked_for():
    """An H200, with PyTorch 2.11 and cuDNN 9.19: the largest allocation of the backward pass that it frees at once."""
    backward, wrong = torch.ops.aten._scaled_dot_product_flash_attention_backward.default, {}
    with (Path(__file__).parent / "attention_buffers.csv").open() as file:
        rows = list(csv.DictReader(file))
    for row in rows:
        batch, heads, of_keys, sequence, size = (int(value) for value in list(row.values())[:5])
        query, key = (
            torch.empty(batch, number, sequence, size, dtype=getattr(torch, row["dtype"]), device="meta")
            for number in (heads, of_keys)
        )
        if (ours := buffer_bytes(None, backward, (query, query, key, key))) != int(row["bytes"]):
            wrong[tuple(row.values())] = ours
    assert len(rows) > 60 and not wrong


@pytest.mark.parametrize(
    ("rows", "columns", "expected"),
    [(6304, 768, 38928384 + 24), (6304, 2304, 116785152 + 72), (6304, 4096, 138412032 + 128), (16, 4096, 0)],
)
def test_the_buffer_of_a_sum_is_the_one_that_a_gpu_asked_for(rows: int, columns: int, expected: int):
    """In which a sum of the rows of a gradient in half precision is put together, and a counter for 128 columns."""
    with FakeTensorMode():
        gradient = torch.empty(rows, columns, dtype=torch.bfloat16, device=ACCELERATOR)
        assert buffer_bytes(None, torch.ops.aten.sum.dim_IntList, (gradient, [0], True)) == expected


@pytest.mark.parametrize(
    ("dtype", "heads", "masked", "kernel"),
    [
        (torch.float16, 2, False, "_flash_attention"),  # fewer heads of keys: grouped queries
        (torch.bfloat16, 4, True, "_efficient_attention"),
        (torch.float32, 2, False, "softmax"),  # the plain path: efficient attention takes no grouped queries
    ],
)
def test_the_kernel_is_the_one_that_a_gpu_would_choose(dtype: torch.dtype, heads: int, masked: bool, kernel: str):
    with FakeTensorMode(), cuda_kernels(), Operators() as called:
        query, key = (torch.empty(3, n, 10, 16, dtype=dtype, device=ACCELERATOR) for n in (4, heads))
        bias = torch.empty(3, 4, 10, 10, dtype=dtype, device=ACCELERATOR) if masked else None
        F.scaled_dot_product_attention(query, key, key, bias, enable_gqa=heads != 4)
    assert any(name.endswith(kernel) for name in called.names)


def test_a_gpus_rms_norm_keeps_its_input_and_a_number_a_row():
    with FakeTensorMode(), cuda_kernels():
        norm = torch.nn.RMSNorm(64, device=ACCELERATOR, dtype=torch.bfloat16)
        rows = torch.empty(3, 10, 64, device=ACCELERATOR, dtype=torch.bfloat16, requires_grad=True)
        tensors = [(tuple(t.shape), t.dtype) for t in kept(lambda: norm(rows).sum().backward())]
    assert tensors == [((3, 10, 64), torch.bfloat16), ((64,), torch.bfloat16), ((3, 10, 1), torch.float32)]


def test_attention_that_a_model_imports_by_its_name_is_a_gpus() -> None:
    """Inside of a forecast; outside all is PyTorch's own."""
    theirs, norm = attend, F.rms_norm
    with cuda_kernels():
        assert attend is not theirs and attend is F.scaled_dot_product_attention and F.rms_norm is not norm
    assert attend is theirs is F.scaled_dot_product_attention and F.rms_norm is norm


# Which others call: convolutions of a CPU are cast before, and attention is ours.
HIDDEN = ("_convolution", "convolution", "_scaled_dot_product_flash_attention")


def test_autocast_computes_in_the_types_of_a_gpu():
    """The list is that of the header which PyTorch's CUDA kernels are built from, without what a CPU's autocast has."""
    header = (Path(torch.__file__).parent / "include/ATen/autocast_mode.h").read_text()
    lists = {"FP32": FLOAT32, "FP32_SET_OPT_DTYPE": FLOAT32_RESULTS, "PROMOTE": PROMOTED, "LOWER_PRECISION_FP": LOWER}
    for macro, ours in lists.items():
        body = header.partition(f"#define AT_FORALL_{macro}(_)")[2].partition("\n\n")[0]
        theirs = [".".join(filter(None, found)) for found in re.findall(r"_\((\w+)(?:, (\w+))?\)", body)]
        has = torch._C._dispatch_has_kernel_for_dispatch_key
        theirs = [name for name in theirs if "imname" not in name and "cell" not in name and name not in HIDDEN]
        missing = {name for name in theirs if not has(f"aten::{name}", "AutocastCPU")}
        assert missing == {name for name in ours if is_autocast_on_cuda(name)}
    assert all(has(f"aten::{n}", "AutocastCPU") and not has(f"aten::{n}", "AutocastCUDA") for n in AS_THEY_ARE)
    with FakeTensorMode(), torch.autocast("cpu", torch.bfloat16):
        for on_gpu, dtype in ((True, torch.float32), (False, torch.bfloat16)):
            with cuda_kernels() if on_gpu else nullcontext():
                half = torch.empty(4, 8, dtype=torch.bfloat16, device=ACCELERATOR)
                results = F.softmax(half, -1), F.layer_norm(half, (8,)), F.softplus(half), half.sum(), half.rsqrt()
                asked = F.softmax(half, -1, dtype=torch.float32), half.log_softmax(-1, torch.float64)
            assert {result.dtype for result in results} == {dtype}
            assert [result.dtype for result in asked] == [torch.float32, torch.float64], "as models of transformers do"
        with cuda_kernels():
            whole, places = (
                torch.empty(4, 8, device=ACCELERATOR),
                torch.zeros(4, 8, dtype=torch.int64, device=ACCELERATOR),
            )
            made = [whole.scatter_add(0, places, half), torch.tensordot(half, whole.T, 1), F.rms_norm(half, (8,))]
            assert {result.dtype for result in made} == {torch.float32}
            assert torch.mv(whole, whole[0]).dtype is F.pad(half[None], (1, 1), "reflect").dtype is torch.bfloat16


def test_attention_by_hand_keeps_its_probabilities_in_both_types_on_a_gpu():
    """Under autocast: of n scores 4 n bytes for the gradient of softmax, 2 n for the product; a CPU keeps 2 n in all.

    In float16 CUDA's softmax reads halves and writes float32, so no copy of the scores is made before it."""

    def attention() -> None:
        scores = torch.empty(2, 4, 16, 16, dtype=dtype, device=ACCELERATOR, requires_grad=True)
        value = torch.empty(2, 4, 16, 8, dtype=dtype, device=ACCELERATOR, requires_grad=True)
        with torch.autocast("cpu", dtype):
            F.softmax(scores, -1) @ value

    scores, value = 2 * 4 * 16 * 16, 2 * 4 * 16 * 8
    for dtype in (torch.bfloat16, torch.float16):
        with FakeTensorMode():
            assert num_bytes(kept(attention)) == 2 * scores + 2 * value
            with cuda_kernels(), Operators() as called:
                assert num_bytes(kept(attention)) == (4 + 2) * scores + 2 * value
        copies = sum(name.endswith("_to_copy") for name in called.names)
        assert copies == (2 if dtype is torch.bfloat16 else 1), "of the probabilities, and of the scores"


def test_dropout_is_one_kernel_with_a_mask_of_bytes():
    with FakeTensorMode(), cuda_kernels(), Operators() as called:
        hidden = torch.empty(3, 10, dtype=torch.bfloat16, device=ACCELERATOR, requires_grad=True)
        tensors = kept(lambda: F.dropout(hidden, 0.1))
        assert num_bytes(tensors) == 30 and F.dropout(hidden, 0.1, training=False) is hidden
    assert [name for name in called.names if "dropout" in name or "bernoulli" in name] == ["aten::native_dropout"]


def test_a_kernel_that_a_model_excludes_is_not_taken():
    with FakeTensorMode(), cuda_kernels():
        query = torch.empty(3, 4, 10, 16, dtype=torch.bfloat16, device=ACCELERATOR)
        for backends, kernel in (
            ([SDPBackend.MATH], "softmax"),
            ([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH], "_efficient_attention"),
            ([SDPBackend.CUDNN_ATTENTION], "_flash_attention"),  # which keeps the same tensors
        ):
            with sdpa_kernel(backends), Operators() as called:
                F.scaled_dot_product_attention(query, query, query)
            assert any(name.endswith(kernel) for name in called.names), kernel


def test_a_compiled_block_is_one_graph():
    """With attention, and autocast of its own, as on a CPU."""

    class Block(torch.nn.Module):
        def forward(self, query: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cuda", enabled=False):
                return attend(query, query, query) * 2

    counters.clear()
    with kernels_planned(ACCELERATOR, lambda *_: None), fake_tensors(), cuda_kernels():
        query = torch.empty(2, 4, 16, 8, dtype=torch.bfloat16, device=ACCELERATOR)
        assert torch.compile(Block())(query).shape == query.shape
    assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]


def test_a_model_that_names_its_gpu_is_followed():
    with fake_tensors(), cuda_kernels():
        made = torch.arange(4, device="cuda"), torch.ones(2).to("cuda:0"), torch.ones(2).cuda()
        assert {one.device for one in made} == {ACCELERATOR}
        assert made[0].cuda() is made[0] is made[0].to("cuda"), "it is there"
        assert made[0].is_cuda and not torch.ones(2).is_cuda
        with torch.autocast("cuda"):
            assert F.linear(made[1][None], made[2][None]).dtype is torch.float16, "the default on a GPU"
    assert not torch.ones(2).is_cuda


MIB = 2**20


def test_the_sizes_are_those_of_this_pytorch():
    header = Path(torch.__file__).parent / "include/c10/core/AllocatorConfig.h"
    if not header.exists():
        pytest.skip("this PyTorch names its allocator's constants in no header")
    named = dict(re.findall(r"constexpr size_t (k\w+) = (\d+);", header.read_text()))
    names = ("kMinBlockSize", "kSmallSize", "kSmallBuffer", "kMinLargeAlloc", "kRoundLarge")
    ours = [rules.MIN_BLOCK, rules.SMALL_SIZE, rules.SMALL_SEGMENT, rules.MIN_OWN_SEGMENT, rules.ROUND_LARGE]
    assert [int(named[name]) for name in names] == ours
    shared = re.search(r"large_segment_size_\{(\d+)\}", header.read_text())  # older versions have it in no header
    assert shared is None or int(shared[1]) == rules.LARGE_SEGMENT


@pytest.mark.parametrize(
    ("requested", "active", "reserved"),
    [
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


@pytest.mark.parametrize(
    ("steps", "expandable", "reserved"),
    [
        # another stream does not get a freed block
        ("+a16@gather -a +b16", False, 32),
        # the smallest that is large enough: 18 out of the 20, of which 2 are cut off, 40 of the 40, and 3 of neither
        ("+x40 +y20 -x -y +a18 +b40", False, 60),
        ("+x40 +y20 -x -y +a18 +b40 +c3", False, 80),
        # free neighbours become one block: 18 of the 20 MiB of one segment, of which the last freed has two
        ("+a6 +b6 +c6 -a -c -b +d20", False, 20),
        # a stream's expandable segment grows by pages of 20 MiB: 40, of which 50 lack one page
        ("+a30 -a +b50", False, 80),
        ("+a30 -a +b50", True, 60),
        ("+a30 -a +b50 +c10 -b -c +d60", True, 60),  # its end is taken, then both are one block again
        ("+a30 +b10@other", True, 60),
        # of 60 MiB the end is taken last: 5 come from the hole of 30, not from the 8 at the end, which 8 more fill;
        # then 17 of the hole are left, and 25 need another page
        ("+a30 +b10 +c12 -a +d5 +e8 +f25", True, 80),
    ],
)
def test_which_block_is_taken(steps: str, expandable: bool, reserved: int):
    """Steps: `+a16@gather` asks for 16 MiB on a stream, `-a` frees them; then so many MiB are reserved."""
    allocator = CachingAllocator(expandable)
    for step in steps.split():
        if step[0] == "-":
            allocator.free(step[1])
        else:
            size, _, stream = step[2:].partition("@")
            allocator.allocate(step[1], int(size) * MIB, stream)
    assert allocator.reserved == reserved * MIB


@pytest.mark.parametrize(
    ("variables", "expandable"),
    [
        ({}, False),
        ({"PYTORCH_ALLOC_CONF": "max_split_size_mb:64, expandable_segments:True"}, True),
        # PyTorch reads the older name first, and then not the other
        ({"PYTORCH_ALLOC_CONF": "expandable_segments:True", "PYTORCH_CUDA_ALLOC_CONF": "backend:native"}, False),
    ],
)
def test_segments_grow_where_the_environment_says_so(
    variables: dict[str, str], expandable: bool, monkeypatch: pytest.MonkeyPatch
):
    """30 MiB, freed, then 50: two segments, or pages of 20 MiB of one."""
    for name in ALLOCATOR_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    steps = [(1, 30), (1, 0), (2, 50), (2, 0)]
    events = [Event(storage, "device", "activation", mib * MIB, "", "forward") for storage, mib in steps]
    profile = Profile(events, 0, {"device": {"total": 50 * MIB}})
    assert allocator_peaks(profile, True).reserved == (60 if expandable else 80) * MIB
    assert weigh(profile, 0, config("sharding=per_block"), 2, True, None).expandable == expandable


Step = list[tuple[int, str, int]]  # storage, category, MiB from now on
ACTIVATION: Step = [(1, "activation", 16), (1, "activation", 0)]
GATHERED: Step = [(0, "all_gather", 16), (0, "all_gather", 0), *ACTIVATION]
REDUCED: Step = [(0, "temp", 16), (0, "grad", 16), (0, "grad", 0), *ACTIVATION]
UNITS: Step = [(unit, "unsharded_param", mib) for unit in range(4) for mib in (16, 0)]


@pytest.mark.parametrize(
    ("step", "begun", "sharded", "more", "reserved"),
    [
        # The optimizer's state comes after the first step. That leaves 30 MiB free where its activations were. The
        # state takes 20 of them, and the second step's activations do not fit into the 10 that are left.
        ([(0, "param", 10), (1, "optimizer", 20), (2, "activation", 30), (2, "activation", 0)], 2, True, {}, 70),
        ([(2, "activation", 30), (2, "activation", 0)], 0, True, {"workspaces": [32 * MIB]}, 62),
        # what is gathered lies in a pool of its own where the model is sharded
        (GATHERED, 0, True, {}, 32),
        (GATHERED, 0, False, {}, 16),
        # a single worker gathers nothing and reduces on a stream of its own
        (REDUCED, 0, True, {}, 32),
        # FSDP1's units are computed with when the next ones are gathered: each third takes the place of the first
        (UNITS, 0, True, {"flat": True}, 32),
        (UNITS, 0, True, {}, 16),
    ],
)
def test_what_a_step_reserves_in_pools_of_its_streams(
    step: Step, begun: int, sharded: bool, more: dict[str, Any], reserved: int
):
    events = [Event(storage, "device", category, mib * MIB, "", "forward") for storage, category, mib in step]
    assert allocator_peaks(Profile(events, begun), sharded, **more).reserved == reserved * MIB
