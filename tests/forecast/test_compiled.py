"""What compiled blocks keep and call under fake tensors; tests/training/test_parity.py compares whole steps."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.hub import tqdm

from fsdp_lab.config.conf import device_file
from fsdp_lab.forecast.forecast import forecast_step
from fsdp_lab.forecast.speed.device import load_device
from fsdp_lab.forecast.speed.predict import predict
from fsdp_lab.forecast.speed.program import Kind, Operator
from fsdp_lab.forecast.torch_private import kernels_planned
from tests.ranks import config

CPU = torch.device("cpu")
SIZE = 64 * 8 * 4  # of each tensor below, in bytes


def test_a_fused_chain_is_one_kernel_that_keeps_its_input_and_writes_its_output():
    """y = sin(sin(2 x)): eager execution keeps what each sine gets; the compiler keeps x and computes these again."""
    kernels: list[tuple[list[int], list[int]]] = []

    def seen(name: str, reads: Sequence[Tensor], writes: Sequence[Tensor]) -> None:
        kernels.append(([t.nbytes for t in reads], [t.nbytes for t in writes]))

    def chain(x: Tensor) -> Tensor:
        return torch.sin(torch.sin(2 * x))

    def kept(function: Any, x: Tensor) -> int:
        sizes: dict[int, int] = {}
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t: sizes.update({t.untyped_storage()._cdata: t.nbytes}) or t, lambda t: t
        ):
            function(x).sum().backward()
        return sum(sizes.values())

    with kernels_planned(CPU, seen), FakeTensorMode():
        x = torch.empty(64, 8, requires_grad=True)
        assert kept(chain, x) == 2 * SIZE
        assert kept(torch.compile(chain), x) == SIZE
        assert x.grad is not None and x.grad.shape == x.shape
    assert type(tqdm.get_lock()) is type(threading.RLock()), "no semaphore that a killed process leaves behind"
    forward, backward = kernels
    assert forward == ([SIZE], [SIZE])
    assert backward == ([SIZE, SIZE], [SIZE]), "it reads x and the gradient of y"


@pytest.mark.ci
@pytest.mark.parametrize("checkpointing", ["none", "full", "selective"])
def test_a_compiled_step_computes_the_same_and_moves_less(checkpointing: str):
    words = ["task=language", "model=lm_tiny", "precision=bf16_mixed", f"activation_checkpointing={checkpointing}"]
    eager, compiled = (
        forecast_step(config(*words, f"compile={value}"), 4, cuda=True, traced=True) for value in ("false", "true")
    )
    assert compiled.profile.peaks["device"]["total"] < eager.profile.peaks["device"]["total"]

    def total(program: list[Operator], kind: Kind, attribute: str) -> float:
        return sum(getattr(o, attribute) for o in program if o.kind is kind)

    for kind in (Kind.matmul, Kind.attention):
        assert total(eager.program, kind, "flops") == total(compiled.program, kind, "flops")
    for kind in (Kind.gather, Kind.scatter):
        assert total(eager.program, kind, "num_bytes") == total(compiled.program, kind, "num_bytes")
    assert total(compiled.program, Kind.memory, "num_bytes") < 0.8 * total(eager.program, Kind.memory, "num_bytes")
    fused = [o for o in compiled.program if o.name == "fused"]
    assert fused and all(o.module.startswith("blocks.") for o in fused)
    device = load_device(device_file("h100_sxm"))  # type: ignore[arg-type]
    assert predict(compiled.program, device).step_s < predict(eager.program, device).step_s


def test_float8_layers_keep_bfloat16_and_cast_for_each_product():
    """Of a block: seven layers with three products each; the head stays in bfloat16."""
    sizes = ["model.dim=64", "model.num_layers=1", "model.num_heads=4", "model.num_kv_heads=2", "model.ffn_dim=176"]
    words = ["task=language", *sizes, "model.max_seq_len=64", "data.seq_len=64", "training.global_batch_size=8"]
    narrow, wide = (
        forecast_step(config(*words, f"precision={p}"), 2, cuda=True, traced=True) for p in ("float8", "bf16_mixed")
    )
    products = [o for o in narrow.program if o.name == "aten._scaled_mm"]
    assert len(products) == 7 * 3 and {o.dtype for o in products} == {"float8_e4m3fn"}
    in_blocks = [o for o in wide.program if o.kind is Kind.matmul and o.module.startswith("blocks.")]
    assert sum(o.flops for o in products) == sum(o.flops for o in in_blocks)
    assert sorted(o.shape or () for o in products) == sorted(o.shape or () for o in in_blocks)
    sent, expected = ([o.num_bytes for o in s.program if o.kind is Kind.gather] for s in (narrow, wide))
    assert sent == expected, "gathers send bfloat16"
    assert narrow.profile.peaks["device"]["total"] >= wide.profile.peaks["device"]["total"]
