"""What is timed on one device: operators of transformers in the sizes of a step, on random data in rotating buffers.

On a CPU the sizes are smaller, and operators that only a GPU has are left out.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from fsdp_lab.forecast.speed.program import FUSED, Kind, Operator, Stream
from fsdp_lab.forecast.torch_private import float8_product
from fsdp_lab.machine.hardware import num_cpus
from fsdp_lab.probe.timer import Case

_TURNS = 4  # buffers of a case
# (rows, columns, inner size): projections and feed-forward layers of ViT-B, ViT-L and Llama 1B, 3B and 8B
_PRODUCTS = {
    "cuda": ((12608, 3072, 768), (12608, 1024, 4096), (8192, 8192, 2048), (8192, 3072, 8192), (8192, 4096, 4096)),
    "cpu": ((512, 576, 192), (512, 768, 192), (512, 192, 768), (256, 704, 256), (256, 256, 704)),
}
# (samples, heads, tokens, size of a head), and whether it is causal: of ViT and of Llama
_ATTENTION = {
    "cuda": (((32, 12, 197, 64), False), ((4, 32, 2048, 64), True), ((2, 32, 4096, 128), True)),
    "cpu": (((8, 3, 65, 64), False), ((2, 4, 128, 64), True)),
}
_ROWS = {"cuda": (8192, 4096), "cpu": (512, 384)}  # of element-wise operators
_COPIED = {"cuda": 2**28, "cpu": 2**21}  # bytes
_FLASH, _EFFICIENT = (f"aten._scaled_dot_product_{kernel}_attention" for kernel in ("flash", "efficient"))


def operator(name: str, kind: Kind, stream: Stream = Stream.compute, **facts: Any) -> Operator:
    return Operator(name, kind, stream, "forward", "", **facts)


def product_cases(device: torch.device) -> dict[str, list[Case]]:
    """Return matrix products by the dtype that a forecast prices; a dtype that this device lacks raises when timed."""
    dtypes = {"bfloat16": torch.bfloat16, "float32": torch.float32}
    if device.type == "cuda":
        dtypes |= {"float16": torch.float16}
        if torch.cuda.get_device_capability(device) >= (8, 0):
            dtypes |= {"tfloat32": torch.float32}
        if torch.cuda.get_device_capability(device) >= (8, 9):
            dtypes |= {"float8_e4m3fn": torch.float8_e4m3fn}
    return {name: [_product(name, *shape, dtype, device) for shape in _PRODUCTS[device.type]]
            for name, dtype in dtypes.items()}  # fmt: skip


def _product(name: str, rows: int, columns: int, inner: int, dtype: torch.dtype, device: torch.device) -> Case:
    shape, flops = (1, rows, columns, inner), 2.0 * rows * columns * inner
    num_bytes = dtype.itemsize * (rows * inner + inner * columns) + 2 * rows * columns

    def make() -> Callable[[int], object]:
        a, b = (_random((size, inner), device, dtype) for size in (rows, columns))
        if name.startswith("float8"):
            scales = (torch.ones(rows, 1, device=device), torch.ones(1, columns, device=device))
            return lambda n: float8_product(a[n % _TURNS], b[n % _TURNS].t(), *scales, torch.bfloat16)
        if name != "tfloat32":
            return lambda n: a[n % _TURNS] @ b[n % _TURNS].t()

        def in_tf32(n: int) -> None:
            before = torch.get_float32_matmul_precision()
            torch.set_float32_matmul_precision("high")
            torch.mm(a[n % _TURNS], b[n % _TURNS].t())
            torch.set_float32_matmul_precision(before)

        return in_tf32

    return Case([operator("aten.mm", Kind.matmul, num_bytes=num_bytes, flops=flops, dtype=name, shape=shape)], make)


def attention_cases(device: torch.device) -> dict[str, list[Case]]:
    """Return attention cases by figure: the kernel that PyTorch prefers, and FlashAttention if that is cuDNN's."""
    if device.type == "cpu" or not prefers_cudnn(device):
        kernels: dict[str, tuple[str, SDPBackend | None]] = {"reached.attention": (_FLASH, None)}
    else:  # a forecast never prices the second name as cuDNN's
        flash = (_EFFICIENT, SDPBackend.FLASH_ATTENTION)
        kernels = {"reached.cudnn_attention": (_FLASH, None), "reached.attention": flash}
    return {figure: [_attention(name, *shape, device, kernel) for shape in _ATTENTION[device.type]]
            for figure, (name, kernel) in kernels.items()}  # fmt: skip


def _attention(
    name: str, shape: tuple[int, ...], causal: bool, device: torch.device, kernel: SDPBackend | None
) -> Case:
    samples, heads, tokens, size = shape
    flops = 4.0 * samples * heads * tokens * tokens * size / (2 if causal else 1)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32

    def make() -> Callable[[int], object]:
        inputs = [[t.requires_grad_() for t in three.unbind()] for three in _random((3, *shape), device, dtype)]
        gradient = _random(shape, device, dtype)[0]

        def run(n: int) -> None:
            query, key, value = inputs[n % _TURNS]
            with nullcontext() if kernel is None else sdpa_kernel(kernel):
                out = F.scaled_dot_product_attention(query, key, value, is_causal=causal)
            torch.autograd.grad(out, inputs[n % _TURNS], gradient)

        return run

    named = str(dtype).removeprefix("torch.")
    program = [operator(called, Kind.attention, flops=times * flops, dtype=named)
               for called, times in ((name, 1.0), (f"{name}_backward", 2.5))]  # fmt: skip
    return Case(program, make)


def memory_cases(device: torch.device) -> tuple[Case, Case, Case]:
    """Return copies, a chain of element-wise operators and reductions (forward and backward), and a compiled chain."""
    shape, dtype = _ROWS[device.type], torch.bfloat16 if device.type == "cuda" else torch.float32
    whole, copied = math.prod(shape) * dtype.itemsize, _COPIED[device.type]

    def copies() -> Callable[[int], object]:
        buffers = _random((2, copied // 4), device, torch.float32)
        return lambda n: buffers[n % _TURNS][0].copy_(buffers[n % _TURNS][1])

    def eager() -> Callable[[int], object]:
        inputs = [[x.requires_grad_() for x in pair.unbind()] for pair in _random((2, *shape), device, dtype)]
        norm, gradient = torch.nn.LayerNorm(shape[1], device=device, dtype=dtype), _random(shape, device, dtype)[0]

        def run(n: int) -> None:
            x, y = inputs[n % _TURNS]
            out = F.softmax(norm(F.gelu(x + y)), -1)
            torch.autograd.grad(out, (x, y), gradient)
            out.detach().sum(0)

        return run

    def compiled() -> Callable[[int], object]:
        inputs = _random((2, *shape), device, dtype)
        chain = torch.compile(lambda x, y: F.gelu((x + y) * y) + x)
        return lambda n: chain(*inputs[n % _TURNS].unbind())

    passes = {"aten.gelu": 3 + 2 + 2 + 2 + 1 + 3 * 3, FUSED: 3}  # a sum, gelu, norm, softmax; one of rows; backwards
    chain, fused = (operator(name, Kind.memory, num_bytes=count * whole) for name, count in passes.items())
    moved = operator("aten.copy_", Kind.memory, num_bytes=2 * copied)
    return Case([moved], copies), Case([chain], eager), Case([fused], compiled)


def transfer_cases(device: torch.device) -> dict[str, Case]:
    """Return copies to the device from pinned and from pageable memory, and an operator of the host, by figure."""
    size = 2**26

    def copies(pinned: bool) -> Callable[[int], object]:
        there = [torch.zeros(size, dtype=torch.uint8, pin_memory=pinned) for _ in range(2)]
        here = torch.empty(size, dtype=torch.uint8, device=device)
        return lambda n: here.copy_(there[n % 2], non_blocking=pinned)

    def adds() -> Callable[[int], object]:
        a, b, c = torch.zeros(3, size // 4).unbind()
        share = max(1, num_cpus() // max(1, torch.cuda.device_count()))  # its share of the cores, with one rank per GPU

        def run(_: int) -> None:
            before = torch.get_num_threads()
            torch.set_num_threads(share)
            torch.add(a, b, out=c)
            torch.set_num_threads(before)

        return run

    moved, paged = (operator(name, Kind.transfer, Stream.copy_in, num_bytes=size) for name in ("pinned", "pageable"))
    on_host = operator("aten.add", Kind.memory, Stream.host, num_bytes=3 * size)
    return {
        "host_bandwidth": Case([moved], partial(copies, True)),
        "pageable_bandwidth": Case([paged], partial(copies, False)), "host_memory_bandwidth": Case([on_host], adds),
    }  # fmt: skip


def prefers_cudnn(device: torch.device) -> bool:
    """Return whether PyTorch prefers cuDNN's attention on this GPU, according to the autograd node that it records."""
    query = torch.zeros(1, 1, 128, 64, device=device, dtype=torch.bfloat16, requires_grad=True)
    recorded = F.scaled_dot_product_attention(query, query, query).grad_fn
    return recorded is not None and "cudnn" in recorded.name().lower()


def _random(shape: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> list[Tensor]:
    return [torch.randn(shape, device=device).to(dtype) for _ in range(_TURNS)]
