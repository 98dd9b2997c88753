"""What `make published` is made of: the models of published runs, their rows, fits, and steps cut out of programs."""

from __future__ import annotations

import csv
import math
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.published.__main__ import RESULTS
from benchmarks.published.fit import START, fit
from benchmarks.published.rows import STEPS, Row, read_steps
from benchmarks.published.steps import Step, Traced
from fsdp_lab.forecast.capacity import Forecast
from fsdp_lab.forecast.speed.device import Efficiency, load_device
from fsdp_lab.forecast.speed.program import Kind, Operator, Stream
from fsdp_lab.report.render import environment

A100 = load_device(Path(__file__).parents[1] / "conf" / "device" / "a100_80gb.yaml")
KNOWN = Efficiency(matmul=0.7, attention=0.5, memory=0.8, link=0.45, network=START.network)


def program(blocks: int, tokens: int, microbatches: int = 1, ranks: int = 8) -> list[Operator]:
    """Forwards and backwards: a product, attention, a sum and a gather that is waited for, of each block."""
    group = tuple(range(ranks))

    def block(number: int, phase: str) -> list[Operator]:
        common = {"phase": phase, "module": "", "dtype": "bfloat16"}
        return [
            Operator("gather", Kind.gather, Stream.gather, num_bytes=2e8, group=group,
                     writes=(number,), **common),
            Operator("mm", Kind.matmul, Stream.compute, flops=tokens * 3e8, reads=(number,), writes=(99,), **common),
            Operator("attention", Kind.attention, Stream.compute, flops=tokens**2 * 2e3, writes=(99,), **common),
            Operator("add", Kind.memory, Stream.compute, num_bytes=tokens * 1e6 * (1 + tokens % 3),
                     writes=(99,), **common),
        ]  # fmt: skip

    adam = Operator("adam", Kind.memory, Stream.compute, "optimizer", "", num_bytes=1e8)
    one = [o for phase in ("forward", "backward") for number in range(blocks) for o in block(number, phase)]
    return [o for _ in range(microbatches) for o in (*one, adam)]


def test_a_fit_finds_the_efficiencies_that_made_the_steps():
    """Steps of seven sizes, timed by known efficiencies, from others that are far away."""
    rows = []
    for tokens in (300, 1000, 2000, 5000, 12000, 30000, 60000):
        one = Row(f"size {tokens}", "here", f"size {tokens}", A100, "a100_80gb", 8, (), 6, 3, 1.0)
        steps = {depth: Step.of(program(depth, tokens, 2, 8)) for depth in (2, 3)}
        fits = Forecast(True, 8, {"device": {"total": 2**30}}, capacity_bytes=80 * 2**30)
        step = Traced(one, steps, fits, ())
        rows.append(replace(step, row=replace(one, measured_s=step.seconds(replace(A100, efficiency=KNOWN)))))
    fitted = fit(rows, replace(START, attention=0.95, memory=0.2, link=0.9))
    for name, value in vars(KNOWN).items():
        assert getattr(fitted, name) == pytest.approx(value, rel=0.05), name


HEAD = (
    "id,source,model,dim,layers,heads,kv_heads,ffn,vocab,tied,gpu,gpus,gbit_per_node,impl,dp_replicate,tp,cp,pp,seq,"
    "local_batch,accum,ac,compile,precision,tok_s_gpu,tok_s_gpu_high,step_s,static_mib,active_gib,reserved_gib,fits,note"
)
LLAMA = "llama2_7b,4096,32,32,32,11008,32000,false"
ROWS = [
    f"g00,torchtitan PR 165,{LLAMA},h100_96gb,8,,fsdp2,1,1,1,1,2048,8,1,full,true,bf16_mixed,6100,6300,,,,31.0,true,",
    f"g01,YaFSDP,{LLAMA},a100_80gb,64,,fsdp1,4,1,1,1,2048,1,1,every_n,false,bf16,,,0.9,,,9.9,true,",
    f"g02,fms,{LLAMA},a100_80gb,64,400,fsdp1,1,8,1,1,2048,1,1,none,false,bf16,,,0.9,,,,true,",
    f"g04,torchtitan benchmarks/,{LLAMA},h100_96gb,8,,fsdp2,1,1,1,1,2048,8,1,full,true,bf16_mixed,6100,,,,,31.0,true,",
    f"g03,nanotron,{LLAMA},a100_80gb,64,,zero1,1,1,1,1,2048,1,1,none,false,bf16,,,0.9,,,,true,",
]


def test_rows_are_overrides_with_what_is_stated(tmp_path: Path):
    (tmp_path / STEPS).write_text("\n".join([HEAD, *ROWS]))
    (one, two, three), left_out = read_steps(tmp_path / STEPS)
    assert one.early and not one.expandable, "its script set nothing yet"
    assert three.expandable and not three.early
    assert {"model._target_=benchmarks.published.decoders.Torchtitan", "task.loss_chunks=2"} <= set(three.words)
    assert one.measured_s == pytest.approx(2048 * 8 / 6200), "the middle of both rates"
    assert (one.reserved_gib, one.marks) == (31.0, ("compiled",))
    assert {"model._target_=benchmarks.published.decoders.EarlyTorchtitan", "compile=true"} <= set(one.words)
    assert one.device.reached.cudnn_attention is None and one.device.reached.attention == 0.35
    assert (two.measured_s, two.reserved_gib, two.marks) == (0.9, None, ("fsdp1", "hybrid")), "memory of FSDP2 only"
    assert {"sharding.dp_replicate=4", "activation_checkpointing=every_n", "training.global_batch_size=64"} <= set(
        two.words
    )
    assert two.several_nodes and not two.device.network_known
    assert sorted(left_out) == ["g02", "g03"] and "ZeRO-1" in left_out["g03"]


def test_what_forecasts_say_of_published_steps_is_what_the_rows_say():
    with (RESULTS / "rows.csv").open() as file:
        rows = [one for one in csv.DictReader(file) if one["gbit"] != "?"]
    nodes = [one for one in rows if int(one["gpus"]) > 8]
    kinds = {
        "compile=true": [one for one in rows if "compiled" in one["marks"]],
        "float8": [one for one in rows if "float8" in one["marks"]],
        "several nodes": nodes,
        "hybrid sharding over several nodes": [one for one in nodes if "hybrid" in one["marks"]],
    }
    found = {
        kind: (len(some), math.ceil(max(abs(float(one["error"].rstrip("%"))) for one in some)))
        for kind, some in kinds.items()
    }
    assert found == environment(False).get_template("forecast_words.j2").module.compared
