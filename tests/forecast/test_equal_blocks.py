"""Equal blocks that are followed once: the step is that of the whole model, to the byte and the operator."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

import pytest

from fsdp_lab.config import TrialConfig
from fsdp_lab.forecast import equal_blocks, run
from fsdp_lab.forecast import forecast as forecasts
from fsdp_lab.forecast.capacity import weigh
from fsdp_lab.forecast.forecast import forecast_step
from fsdp_lab.forecast.request import Request
from fsdp_lab.forecast.speed.device import load_device
from fsdp_lab.forecast.speed.predict import predict
from fsdp_lab.forecast.step import Step
from tests.conftest import ROOT
from tests.ranks import config

H100 = load_device(ROOT / "conf" / "device" / "h100_sxm.yaml")
LM = ("model=lm_tiny", "task=language", "data=synthetic_tokens", "data.seq_len=32", "model.num_layers=20")
OWN = ("task=classification", "data._target_=tests.forecast.deep.Rows")


def steps(trial: TrialConfig, ranks: int, cuda: bool) -> tuple[Step, Step, list[int]]:
    """Return a step as it is followed, that of the whole model, and of how many blocks each was; 0: of all."""
    followed, follow = list[int](), forecasts._follow

    def noted(*args: Any) -> Step:
        followed.append(args[-1])
        return follow(*args)

    with mock.patch.object(forecasts, "_follow", noted):
        step = forecast_step(trial, ranks, cuda, sheet=H100 if cuda else None, traced=True)
    with mock.patch.object(equal_blocks, "_equal_blocks", return_value=None):
        whole = forecast_step(trial, ranks, cuda, sheet=H100 if cuda else None, traced=True)
    return step, whole, followed


def assert_equal(step: Step, whole: Step, trial: TrialConfig, ranks: int, cuda: bool) -> None:
    figures = [weigh(one.profile, one.num_trained, trial, ranks, cuda, None) for one in (step, whole)]
    assert figures[0] == figures[1], "peaks by category, active and reserved bytes"
    assert (step.num_params, step.num_trained, step.layout) == (whole.num_params, whole.num_trained, whole.layout)
    assert step.units == whole.units
    assert (step.profile.begun, len(step.profile.events)) == (whole.profile.begun, len(whole.profile.events))
    programs = [[replace(op, reads=(), writes=()) for op in one.program] for one in (step, whole)]
    assert programs[0] == programs[1]
    assert predict(step.program, H100).step_s == pytest.approx(predict(whole.program, H100).step_s, rel=1e-14)


@pytest.mark.parametrize(
    ("words", "ranks", "cuda"),
    [
        (("sharding=per_block", "precision=bf16_mixed"), 8, True),
        pytest.param(("sharding=per_block", "precision=fp32"), 2, False, marks=pytest.mark.ci),
        (("sharding=root", "precision=bf16_mixed", "optimizer=adamw"), 8, True),
        pytest.param(
            ("sharding=per_block", "activation_checkpointing=full", "reshard_after_forward=never"),
            8,
            True,
            marks=pytest.mark.ci,
        ),
        pytest.param(
            ("sharding=per_block", "activation_checkpointing=selective", "training.grad_accum_steps=2"),
            2,
            True,
            marks=pytest.mark.ci,
        ),
        pytest.param(("sharding=per_block", "sharding.dp_replicate=2", "offload=cpu"), 4, True, marks=pytest.mark.ci),
        pytest.param(("sharding=per_block", "sharding.tp=2"), 4, True, marks=pytest.mark.ci),
        pytest.param(("sharding=per_layer", "optimizer=sgd"), 2, False, marks=pytest.mark.full),
        (("sharding=per_block", "precision=bf16_mixed", "activation_offload=cpu"), 8, True),
        pytest.param(
            ("sharding=per_block", "activation_offload=cpu", "activation_checkpointing=full"),
            2,
            False,
            marks=pytest.mark.full,
        ),
        pytest.param(
            ("sharding=per_block", "sharding.tp=2", "activation_offload=cpu"), 4, True, marks=pytest.mark.full
        ),
    ],
)
def test_twenty_blocks_are_made_of_six(words: tuple[str, ...], ranks: int, cuda: bool):
    trial = config(*LM, *words)
    step, whole, followed = steps(trial, ranks, cuda)
    assert followed == [5, 6]
    assert_equal(step, whole, trial, ranks, cuda)


@pytest.mark.ci
def test_units_of_two_blocks_and_one_that_is_left():
    trial = config(*LM[:-1], "model.num_layers=37", "sharding=per_block", "sharding.blocks_per_unit=2")
    step, whole, followed = steps(trial, 2, cuda=True)
    assert followed == [11, 13]
    assert_equal(step, whole, trial, 2, cuda=True)


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ("Equal", [5, 6]),
        ("Nested", [5, 6]),
        ("OneWider", [0]),
        pytest.param("OneScaled", [0], marks=pytest.mark.full),
        pytest.param("Tied", [0], marks=pytest.mark.full),
        ("Tapped", [0]),
        pytest.param("Jumping", [0], marks=pytest.mark.ci),
        pytest.param("Keeping", [0], marks=pytest.mark.full),
        pytest.param("Twice", [0], marks=pytest.mark.full),
        pytest.param("ByLength", [0], marks=pytest.mark.ci),
        ("Hooked", [0]),
        ("OfTheDevice", [5, 6, 0]),
        ("PartlyFrozen", [0]),
        pytest.param("PartlyRecomputed", [0], marks=pytest.mark.full),
        pytest.param("PartlyCast", [0], marks=pytest.mark.ci),
        pytest.param("PartlyTraining", [0], marks=pytest.mark.full),
        pytest.param("PartlyPacked", [0], marks=pytest.mark.ci),
        pytest.param("Alternating", [0], id="Alternating: too few for a period of two", marks=pytest.mark.full),
        pytest.param("TwoStacks", [5, 6], marks=pytest.mark.full),
    ],
)
def test_blocks_that_differ_are_all_followed(model: str, expected: list[int]):
    trial = config(
        *OWN, f"model._target_=tests.forecast.deep.{model}", "sharding=per_block",
        "precision=bf16_mixed",
    )  # fmt: skip
    step, whole, followed = steps(trial, 2, cuda=True)
    assert followed == expected
    assert_equal(step, whole, trial, 2, cuda=True)


@pytest.mark.ci
def test_a_period_of_two_blocks():
    trial = config(
        *OWN, "model._target_=tests.forecast.deep.Alternating", "model.depth=40",
        "sharding=per_block",
    )  # fmt: skip
    step, whole, followed = steps(trial, 2, cuda=True)
    assert followed == [10, 12]
    assert_equal(step, whole, trial, 2, cuda=True)


def test_devices_with_the_same_kernels_share_a_step():
    """An H100 and an H200 do, an A100 has other cores; each has the forecast that it has alone."""
    trial = config(*LM[:-1], "model.num_layers=2", "sharding=per_block")
    names = ("h100_sxm", "h200", "a100_80gb")
    requests = [
        Request(trial, 8, True, None, sheet=load_device(ROOT / "conf" / "device" / f"{name}.yaml")) for name in names
    ]
    assert requests[0].step == requests[1].step != requests[2].step
    with mock.patch.object(forecasts, "_follow", wraps=forecasts._follow) as follow:
        answers = run._answer_all(requests[:2])
        assert follow.call_count == 1
    forecasts._LAST.clear()
    assert answers == [run._answer(request) for request in reversed(requests[:2])][::-1]
    assert answers[0].speed != answers[1].speed
