"""What `make published` is made of: the models of published runs, their rows, fits, and steps cut out of programs."""

from __future__ import annotations

import csv
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.nn.functional as F

from benchmarks.published.__main__ import RESULTS
from benchmarks.published.decoders import Mpt, Torchtitan
from benchmarks.published.fit import START, fit, without_each
from benchmarks.published.rows import STEPS, Row, read_steps
from benchmarks.published.steps import Step, Traced
from benchmarks.published.summary import Result, summary
from fsdp_lab.forecast.capacity import Forecast
from fsdp_lab.forecast.speed.device import Efficiency, load_device
from fsdp_lab.forecast.speed.program import Kind, Operator, Stream
from fsdp_lab.report.render import environment
from fsdp_lab.workloads.language.llama import Llama

A100 = load_device(Path(__file__).parents[2] / "conf" / "device" / "a100_80gb.yaml")
KNOWN = Efficiency(matmul=0.7, attention=0.5, memory=0.8, link=0.45, network=START.network)


def test_the_fused_loss_is_the_plain_one_and_metrics_come_after_the_backward_pass():
    torch.manual_seed(0)
    model = Mpt(vocab_size=11, dim=16, num_layers=1, num_heads=2, max_seq_len=8)
    tokens, labels = torch.randint(0, 11, (2, 2, 8))
    result, count = model(tokens, labels, 2)
    seen: list[bool] = []

    def noted(*_: object, **__: object) -> None:
        seen.append(model.tokens.weight.grad is not None)

    with mock.patch.object(F, "cross_entropy", noted):
        result.backward()
    assert seen == [True, True], "both metrics, when the last gradient is there"
    assert model.outputs is not None and model.outputs.shape == (16, 11)
    gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    plain = F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten(), reduction="sum")
    plain.backward()
    assert count == 16
    torch.testing.assert_close(result, plain)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, msg=name)


def test_torchtitan_computes_what_our_llama_does():
    """Its rotations pair neighbours in a head: with the rows of both projections in its order the logits are equal."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 11, "dim": 32, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "ffn_dim": 48}
    ours, model = Llama(**sizes, max_seq_len=8), Torchtitan(**sizes, max_seq_len=8)
    weights = ours.state_dict()
    order = torch.arange(8).view(2, 4).t().flatten()  # 0, 4, 1, 5, ... of each head of eight
    for name, weight in weights.items():
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            weights[name] = weight.view(-1, 8, 32)[:, order].flatten(0, 1)
    model.load_state_dict(weights)
    tokens, labels = torch.randint(0, 11, (2, 2, 8))
    torch.testing.assert_close(model(tokens), ours(tokens))
    total, count = model(tokens, labels, 2)
    mean = F.cross_entropy(ours(tokens).flatten(0, 1), labels.flatten())
    torch.testing.assert_close(total / count, mean)


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


def row(name: str = "m001", workers: int = 8, **facts: object) -> Row:
    return replace(Row(name, "here", name, A100, "a100_80gb", workers, (), 6, 3, 1.0), **facts)


GIB = 2**30


def forecast(needed_gib: float) -> Forecast:
    whole = round(needed_gib * GIB)
    peaks = {"device": {"total": whole}}
    return Forecast(True, 8, peaks, capacity_bytes=80 * GIB, active_bytes=whole, reserved_bytes=whole)


def traced(one: Row, tokens: int = 2000, gib: float = 1, unlike: tuple[str, ...] = ()) -> Traced:
    steps = {depth: Step.of(program(depth, tokens, 2, one.workers)) for depth in (2, 3)}
    return Traced(one, steps, forecast(gib), unlike)


def rows() -> list[Traced]:
    collected = []
    for number, tokens in enumerate((300, 1000, 2000, 5000, 12000, 30000, 60000)):
        one = traced(row(f"size {number}"), tokens)
        measured = one.seconds(replace(A100, efficiency=KNOWN))
        collected.append(replace(one, row=replace(one.row, measured_s=measured)))
    return collected


@pytest.mark.parametrize("far", [START, replace(START, attention=0.95, link=0.2), replace(START, memory=0.2, link=0.9)])
def test_a_fit_finds_the_efficiencies_that_made_the_steps(far: Efficiency):
    fitted = fit(rows(), far)
    for name, value in vars(KNOWN).items():
        assert getattr(fitted, name) == pytest.approx(value, rel=0.05), name


def test_a_row_is_forecast_by_numbers_that_were_not_fitted_to_it():
    """One that took twice as long leaves the numbers that forecast it alone, and moves those of the others."""
    *others, slow = rows()
    slow = replace(slow, row=replace(slow.row, measured_s=2 * slow.row.measured_s))
    plain, *_, own = without_each([*others, slow])
    assert own == fit(others)
    assert plain.matmul > 1.05 * own.matmul


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


def read(folder: Path, lines: Sequence[str]) -> tuple[list[Row], dict[str, str]]:
    (folder / STEPS).write_text("\n".join([HEAD, *lines]))
    return read_steps(folder / STEPS)


def test_rows_are_overrides_with_what_is_stated(tmp_path: Path):
    (one, two, three), left_out = read(tmp_path, ROWS)
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


def test_a_summary_names_what_misses_its_target():
    def result(name: str, step_s: float, marks: tuple[str, ...] = (), fits: str = "yes", **facts: object) -> Result:
        return Result(row(name, marks=marks, **facts), step_s, 0.95 * step_s, 1.05 * step_s, 10.0, 0.5, fits)

    good = [
        result("m001", 1.01, fitted=True),
        result("g01", 0.99, reserved_gib=10.0),
        result("g02", 1.0, ("compiled",)),
    ]
    apart = result("g03", 1.04, workers=16)
    assert summary([*good, apart])[1]
    for bad, words in (
        (result("g04", 1.2), "outside: g04"),
        (result("g04", 1.2, workers=16), "network not stated: inside their range | all | 1 of 2; outside: g04 | no"),
        (result("g04", 1.0, reserved_gib=20.0), "worst -50.0% (g04) | no"),
        (result("g04", 1.0, fits="no"), "forecast not to fit | none | g04 | no"),
    ):
        text, met = summary([*good, apart, bad])
        assert not met and words in text


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
