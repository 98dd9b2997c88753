"""Chains of memory-bound operators of compiled modules, by hand and in a real step."""

from __future__ import annotations

import pytest

from fsdp_lab.config.conf import device_file
from fsdp_lab.forecast.forecast import forecast_step
from fsdp_lab.speed.device import load_device
from fsdp_lab.speed.fuse import fuse
from fsdp_lab.speed.predict import predict
from fsdp_lab.speed.program import Kind, Operator, Stream
from tests.ranks import config

pytestmark = pytest.mark.ci


def operator(name: str, reads: dict[int, int], writes: dict[int, int], module: str = "blocks.0") -> Operator:
    kind = Kind.matmul if name == "mm" else Kind.memory
    sizes = (*reads.values(), *writes.values())
    return Operator(
        name, kind, Stream.compute, "forward", module, num_bytes=float(sum(sizes)), reads=tuple(reads),
        writes=tuple(writes), sizes=sizes,
    )  # fmt: skip


def test_a_chain_reads_what_it_has_not_written_and_writes_what_is_read_later():
    """y = relu(a + b); z = mm(y): of 100 bytes each, the sum is in registers, and only y is written."""
    program = [
        operator("add", {1: 100, 2: 100}, {3: 100}),
        operator("relu", {3: 100}, {4: 100}),
        operator("mm", {4: 100}, {5: 100}),
        operator("add", {5: 100}, {6: 100}),
        operator("mul", {6: 100, 4: 100}, {7: 100}),
        operator("sum", {7: 100}, {8: 4}, module=""),
    ]
    fused = fuse(program, lambda module: module == "blocks.0")
    assert [(o.name, o.num_bytes) for o in fused] == [("fused", 300), ("mm", 200), ("fused", 300), ("sum", 104)]
    assert fused[0].reads == (1, 2) and set(fused[0].writes) == {3, 4}
    assert fuse(program, lambda module: False) == program


@pytest.mark.parametrize("checkpointing", ["none", "full", "selective"])
def test_a_compiled_step_computes_the_same_and_moves_less(checkpointing: str):
    words = ["task=language", "model=lm_tiny", "precision=bf16_mixed", f"activation_checkpointing={checkpointing}"]
    eager, compiled = (
        forecast_step(config(*words, f"compile={value}"), 4, cuda=True, traced=True) for value in ("false", "true")
    )
    assert eager.profile.peaks == compiled.profile.peaks

    def total(program: list[Operator], kind: Kind, attribute: str) -> float:
        return sum(getattr(o, attribute) for o in program if o.kind is kind)

    for kind in (Kind.matmul, Kind.attention):
        assert total(eager.program, kind, "flops") == total(compiled.program, kind, "flops")
    for kind in (Kind.gather, Kind.scatter):
        assert total(eager.program, kind, "num_bytes") == total(compiled.program, kind, "num_bytes")
    assert total(compiled.program, Kind.memory, "num_bytes") < 0.8 * total(eager.program, Kind.memory, "num_bytes")
    fused = [o for o in compiled.program if o.name == "fused"]
    assert fused and all(o.module.startswith("blocks.") for o in fused)
    outside = [o for o in eager.program if not o.module.startswith("blocks.")]
    assert [o.name for o in outside] == [o.name for o in compiled.program if not o.module.startswith("blocks.")]
    device = load_device(device_file("h100_sxm"))  # type: ignore[arg-type]
    assert predict(compiled.program, device)[0].step_s < predict(eager.program, device)[0].step_s
