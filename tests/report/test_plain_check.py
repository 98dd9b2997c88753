"""What trials compute against the plain loop of the user's own code. What is said of it: test_golden.py."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from fsdp_lab.config import SweepConfig
from fsdp_lab.config.training import Init
from fsdp_lab.record.plain_loops import PlainLoop
from fsdp_lab.record.trial import TrialRecord
from fsdp_lab.report.answer import Answer, answer
from fsdp_lab.report.plain_check import PlainCheck, check_against_plain
from tests.report.sweeps import compared, plain_loop, sweep


def of(*trials: TrialRecord, loops: tuple[PlainLoop, ...] | None = None) -> Answer:
    axes = list(dict.fromkeys(key for each in trials for key in each.setting))
    return answer(sweep(list(trials), axes=axes, plain_loops=[plain_loop()] if loops is None else loops))


def found(answer: Answer) -> list[str]:
    return [str(note.code) for note in answer.recommendation.notes if note.code not in ("one_run", "side_by_side")]


def test_a_setting_that_trains_another_model_is_not_recommended():
    """Two settings share a mistake, which agree with each other; the third is right, and slower."""
    made = of(
        compared(0, "sharding=ddp", speed=3000.0, first=1.298), compared(1, "sharding=root", first=1.298),
        compared(2, "sharding=per_block"),
    )  # fmt: skip
    assert made.setting is not None and made.setting.values == {"sharding": "per_block"}
    assert {name: why.code for name, why in made.recommendation.why_not.items()} == {
        "sharding=ddp": "another_model", "sharding=root": "another_model",
    }  # fmt: skip
    assert found(made) == ["another_model", "as_plain"] and "sharding=ddp" in made.as_data["finding"]
    assert [setting.name for setting in made.recommendation.front] == ["sharding=per_block"]
    none = of(compared(0, "sharding=ddp", first=1.298), compared(1, "sharding=root", first=1.298))
    assert none.setting is None and none.sentence.startswith("`sharding=ddp`: the first step's loss is 1.298")
    assert none.as_data["finding"] == none.sentence and found(none) == []


@pytest.mark.parametrize(
    ("figures", "expected"),
    [
        ({"evaluated": 1.34, "first": 1.298}, "check/eval_loss"),  # the earliest names the cause
        ({"first": 1.339 * (1 + 9e-6)}, None), ({"first": 1.339 * (1 + 2e-5)}, "train/first_loss"),
        ({"norm": 0.5 * (1 + 9e-5)}, None), ({"norm": 0.5 * (1 + 2e-4)}, "check/grad_norm"),
        ({"early": 1.2 * (1 + 2e-5), "change": 0.2}, "train/early_loss"),
        ({"change": 0.1 * 1.01}, None), ({"change": 0.1 * 1.05}, "check/change_norm"),  # Adam's steps of noise
        ({"val": 1.1 * (1 + 2e-4)}, "check/val_loss"),
    ],
)  # fmt: skip
def test_the_first_figure_beyond_rounding_is_named(figures: dict[str, float], expected: str | None):
    check = check_against_plain([compared(0, "", **figures)], [plain_loop()])
    assert [one.metric for one in check.different.values()] == ([expected] if expected else [])
    assert bool(check.agreeing) is (expected is None) and check.nothing_agrees is (expected is not None)


def test_what_rounding_alone_moves_in_the_plain_loop_is_no_difference():
    """A training that amplifies it from the first update on."""
    trial, loop = compared(0, "", early=1.2 * (1 + 3e-3)), plain_loop()
    assert check_against_plain([trial], [loop]).different.keys() == {0}
    assert check_against_plain([trial], [replace(loop, noise={"train/early_loss": 1e-3})]).different == {}


def with_config(trial: TrialRecord, **values: Any) -> TrialRecord:
    config = SweepConfig()
    for key, value in values.items():
        group, _, name = key.partition("_")
        setattr(*((getattr(config, group), name) if name else (config, group)), value)
    return replace(trial, config=config)


def narrow(number: int, precision: str, device: str = "cpu", **figures: float) -> TrialRecord:
    """A trial in another precision."""
    trial = with_config(compared(number, f"precision={precision}", **figures))
    assert trial.config is not None
    dtype = type(trial.config.precision.param_dtype)
    trial.config.precision.tf32 = precision == "tf32"
    trial.config.precision.param_dtype = {"bf16": dtype.bfloat16}.get(precision, dtype.float32)
    return replace(trial, facts={**trial.facts, "device": device})


def test_other_values_of_losses_and_other_weights_are_not_compared():
    wrong = compared(0, "", first=1.298)
    for other in (
        with_config(wrong, optimizer_lr=0.01), with_config(wrong, training_seed=3), with_config(wrong, init=Init.meta),
        with_config(wrong, checkpoint_resume_from="a"), replace(wrong, facts={**wrong.facts, "world_size": 4}),
        replace(wrong, config=None),
    ):  # fmt: skip
        assert check_against_plain([compared(1, ""), replace(other, number=0)], [plain_loop(1)]).different == {}
    same = with_config(wrong, training_timing=1)  # of no meaning
    assert check_against_plain([same], [plain_loop()]).different.keys() == {0}
    assert check_against_plain([wrong], [replace(plain_loop(), figures={}, missing="late")]) == PlainCheck(
        missing=["late"]
    )


def test_low_precision_is_compared_within_its_rounding():
    """Near 1.339, bfloat16 numbers are 0.0078 apart: four of them are 0.04 in a loss."""
    for precision, device, first, expected in (
        ("bf16", "cpu", 1.30, False), ("bf16", "cpu", 1.28, True), ("tf32", "NVIDIA H100", 1.336, False),
        ("tf32", "NVIDIA H100", 1.32, True), ("tf32", "cpu", 1.336, True),
    ):  # fmt: skip
        check = check_against_plain([narrow(0, precision, device, first=first)], [plain_loop()])
        assert (0 in check.different) is expected, (precision, first)
    later = check_against_plain([narrow(0, "bf16", early=1.5, change=0.2, val=1.3)], [plain_loop()])
    assert later.different == {}, "what follows the first update depends on steps that fp16 skips"
    other = replace(compared(0, "", first=1.336), facts={"device": "NVIDIA H100", "world_size": 2})
    assert check_against_plain([other], [plain_loop()]).different == {}, "the loop ran on a CPU"
    assert check_against_plain([other], [replace(plain_loop(), device="NVIDIA H100")]).different.keys() == {0}


def test_what_is_wrong_in_one_layout_is_wrong_in_it_with_other_values():
    """A rate that has no plain loop, and a precision whose rounding hides it; a layout that is right passes."""
    trials = [
        compared(0, "sharding=ddp precision=fp32", first=1.339 * (1 + 1e-3)),
        with_config(compared(1, "sharding=ddp precision=fp32 optimizer.lr=0.01"), optimizer_lr=0.01),
        narrow(2, "bf16", first=1.339 * (1 + 1e-3)),
        replace(with_config(compared(3, "sharding=root", early=1.3), optimizer_lr=0.01), number=3),
    ]
    check = check_against_plain(trials, [plain_loop()])
    assert {number: one.witness for number, one in check.different.items()} == {0: 0, 1: 0, 2: 0, 3: 0}
    assert trials[3].config is not None
    trials[3].config.sharding.granularity = type(trials[3].config.sharding.granularity).root
    assert check_against_plain(trials, [plain_loop()]).different.keys() == {0, 1, 2}


def test_a_forward_pass_that_draws_has_one_loss_to_compare():
    loop = replace(plain_loop(), draws=True)
    same = of(compared(0, "sharding=ddp", first=1.0), compared(1, "sharding=root", first=1.0), loops=(loop,))
    assert found(same) == ["as_plain", "agree"] and "before the first step" in same.notes[0]
    assert of(compared(0, "sharding=ddp", evaluated=1.3), loops=(loop,)).setting is None


def test_what_is_not_compared_says_why():
    missing = replace(plain_loop(), figures={}, missing="needs 61.0 of 8.0 GiB")
    made = of(compared(0, "sharding=ddp"), compared(1, "sharding=root"), loops=(missing,))
    assert made.notes[0] == "Not compared with a plain loop: needs 61.0 of 8.0 GiB." and found(made)[1:] == ["agree"]
