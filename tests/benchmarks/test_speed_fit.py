"""What the study of published speeds is made of: the loss of its model, its fits, and steps cut out of programs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from benchmarks import published_speed
from benchmarks.mpt import Mpt
from benchmarks.published_speed import Program, Traces, fingerprint
from benchmarks.speed_fit import START, Row, Step, constant, fit, refit, roofline
from fsdp_lab.config import TrialConfig
from fsdp_lab.forecast.forecast import Step as TracedStep
from fsdp_lab.speed.device import Efficiency, load_device
from fsdp_lab.speed.program import Kind, Operator, Stream

A100 = load_device(Path(__file__).parents[2] / "conf" / "device" / "a100_80gb.yaml")
KNOWN = Efficiency(matmul=0.7, attention=0.5, memory=0.8, link=0.45, network=START.network)


def test_the_fused_loss_is_the_plain_one():
    torch.manual_seed(0)
    model = Mpt(vocab_size=11, dim=16, num_layers=1, num_heads=2, max_seq_len=8)
    tokens, labels = torch.randint(0, 11, (2, 2, 8))
    result, count = model(tokens, labels, 2)
    result.backward()
    gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    plain = F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten(), reduction="sum")
    plain.backward()
    assert count == 16
    torch.testing.assert_close(result, plain)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, msg=name)


def program(blocks: int, tokens: int, microbatches: int = 1) -> list[Operator]:
    """Forwards and backwards: a product, attention, a sum and a gather that is waited for, of each block."""
    group = tuple(range(8))

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


def rows() -> list[Row]:
    collected = []
    for number, tokens in enumerate((300, 1000, 2000, 5000, 12000, 30000, 60000)):
        facts = {
            "num_gpus": "8", "num_layers": "6", "grad_accum_steps": "3", "num_params": "1e9", "hidden_dim": "512",
            "seq_len": "128", "activation_checkpointing": "none", "global_batch_size": str(tokens),
            "model": str(number),
        }  # fmt: skip
        steps = {depth: Step.of(program(depth, tokens, 2)) for depth in (2, 3)}
        row = Row(facts, A100, steps, 1.0)
        collected.append(replace(row, measured=row.seconds(KNOWN)))
    return collected


def test_a_fit_finds_the_efficiencies_that_made_the_steps():
    made = rows()
    fitted = fit(made)
    for name, value in vars(KNOWN).items():
        assert getattr(fitted, name) == pytest.approx(value, rel=0.05), name
    again = refit(made, fitted)(range(1, len(made)))
    assert again.matmul == pytest.approx(KNOWN.matmul, rel=0.05)


def test_a_step_of_two_microbatches_has_the_second_alone():
    step = Step.of(program(2, 100, 2))
    assert len(step.whole) == 34
    assert step.again is not None
    assert [o.phase for o in step.again] == ["forward"] * 8 + ["backward"] * 8
    assert Step.of(program(2, 100)).again is None


def test_depth_and_accumulation_are_extrapolated_to_the_whole_step():
    few = rows()[2]
    step = Step.of(program(6, 2000, 3))
    one = replace(few, facts={**few.facts, "grad_accum_steps": "1"}, steps={6: Step(step.whole, None), 7: step})
    assert few.seconds(KNOWN) == pytest.approx(one.seconds(KNOWN), rel=0.02)


def test_the_baselines_know_no_more_than_their_numbers():
    made = rows()
    doubled = [replace(row, measured=2 * row.measured) for row in made]
    assert constant(doubled, made) == pytest.approx([2 * result for result in constant(made, made)])
    assert roofline(doubled, made) == pytest.approx([2 * result for result in roofline(made, made)])


def test_a_fingerprint_is_of_the_code_that_traces(tmp_path: Path):
    counts = ("fsdp_lab/forecast/trace.py", "fsdp_lab/training/loop.py", "fsdp_lab/workloads/language/task.py",
              "fsdp_lab/speed/program.py", "conf/precision/bf16_mixed.yaml")  # fmt: skip
    others = ("fsdp_lab/speed/costs.py", "conf/device/h100_sxm.yaml", "README.md")
    for file in (*counts, *others):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text("one")
    before = fingerprint(tmp_path)
    assert fingerprint(tmp_path) == before
    for file in (*counts, *others):
        (tmp_path / file).write_text("another")
        assert (fingerprint(tmp_path) != before) is (file in counts), file
        (tmp_path / file).write_text("one")


def test_traces_are_kept_until_the_code_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    traced: list[int] = []
    real = published_speed.forecast_step

    def counted(config: TrialConfig, ranks: int, **how: bool) -> TracedStep:
        traced.append(ranks)
        return real(config, ranks, **how)

    monkeypatch.setattr(published_speed, "forecast_step", counted)

    def of(code: str) -> Program:
        return Traces(tmp_path / "kept" / "programs.pkl", code).of(["model=mlp"], 2)

    first = of("a")
    assert first == of("a") and traced == [2] and not capsys.readouterr().out
    assert of("b") == first and traced == [2, 2]
    assert "1 trace of other code left out" in capsys.readouterr().out
