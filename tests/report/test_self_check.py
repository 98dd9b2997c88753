"""What a sweep finds of its own model: settings that must have the same losses. What it says: test_golden.py."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from fsdp_lab.config import SweepConfig
from fsdp_lab.record.trial import TrialRecord
from fsdp_lab.report.answer import Answer, answer
from fsdp_lab.report.self_check import check_itself
from tests.report.sweeps import RIGHT, WRONG, amplified, differing, early, one, sweep


def of(*trials: TrialRecord, **changed: Any) -> Answer:
    axes = list(dict.fromkeys(key for each in trials for key in each.setting))
    return answer(sweep(list(trials), axes=axes, **changed))


def found(*trials: TrialRecord) -> list[str]:
    notes = of(*trials).recommendation.notes
    return [str(note.code) for note in notes if note.code in ("differs", "agree", "amplified")]


def chosen(*trials: TrialRecord, **changed: Any) -> dict[str, str]:
    made = of(*trials, **changed)
    assert made.setting is not None
    return made.setting.values


def test_a_model_that_differs_when_sharded_is_a_finding():
    """By its loss limit, DDP would not qualify: the wrong settings are 4 % lower, and faster."""
    made = of(*differing())
    assert chosen(*differing()) == {"sharding": "root"}
    assert found(*differing()) == ["differs"] and made.as_data["finding"] == made.notes[0]
    why_not = {name: why.code for name, why in made.recommendation.why_not.items()}
    assert why_not == {"sharding=per_block": "differs", "sharding=per_layer": "differs"}
    assert [setting.name for setting in made.recommendation.front] == ["sharding=root"]
    assert chosen(*differing(), objectives=[("val/loss", "min")])["sharding"] in ("ddp", "root")
    assert chosen(one(0, "sharding=per_layer", WRONG, 3000.0), one(1, "sharding=root")) == {"sharding": "root"}


def test_the_first_three_steps_decide_where_they_are_known():
    """Adam with a large rate: 1e-7 in the third step, and 40 % at the end. No setting's loss counts against another."""
    assert found(*amplified()) == ["amplified"] and of(*amplified()).why_not == {}
    assert chosen(*amplified()) == {"sharding": "root"}
    nearly = [(train * (1 + 3e-5), val * (1 + 3e-5)) for train, val in RIGHT]
    apart = (amplified()[0], one(1, "sharding=root", nearly, 3000.0, **early(2.3, 2.2 * (1 + 5e-5))))
    assert found(*apart) == ["differs"] and chosen(*apart) == {"sharding": "ddp"}


def test_rounding_at_zero_or_by_shards_is_no_finding():
    """A difference of means starts at the rounding of its parts; 8-bit states are quantised in blocks of a shard."""
    ddp, zero = one(0, "sharding=ddp", **early(2.3, 2.2)), one(0, "sharding=ddp", **early(3e-9, -0.02))
    assert found(zero, one(1, "sharding=root", **early(-2e-9, -0.02 * (1 + 1e-6)))) == ["agree"]
    later, before = one(1, "sharding=root", **early(2.3, 2.203)), one(1, "sharding=root", **early(2.31, 2.2))
    assert found(ddp, later) == ["differs"]
    own = SweepConfig()
    own.optimizer.target = "torchao.optim.AdamW8bit"
    assert found(replace(ddp, config=own), replace(later, config=own)) == ["agree"]
    assert found(replace(ddp, config=own), replace(before, config=own)) == ["differs"]


@pytest.mark.parametrize(("val", "expected"), [(1.1008, "agree"), (1.4, "differs")])
def test_validation_is_compared_where_its_epochs_training_agrees(val: float, expected: str):
    """Batch norm's statistics, taken twice by checkpointing; its rounding alone is within 1e-3."""
    plain = one(0, "sharding=ddp activation_checkpointing=none", **early(2.3, 2.2))
    twice = one(1, "sharding=ddp activation_checkpointing=full", ((1.4, val), (0.9, 0.8205)), **early(2.3, 2.2))
    assert found(plain, twice) == [expected]


@pytest.mark.parametrize(
    ("figures", "expected"),
    [
        ({"check/grad_norm": 0.5 * (1 + 3e-4)}, "differs"), ({"check/grad_norm": 0.5 * (1 + 3e-5)}, "amplified"),
        ({"train/warm_loss": 1.8}, "differs"), ({"train/warm_loss": 1.5 * (1 + 3e-3)}, "amplified"),
    ],
)  # fmt: skip
def test_wrong_gradients_do_not_pass_under_a_warm_up(figures: dict[str, float], expected: str):
    """Their first three steps change next to nothing: losses are 2e-6 apart, which is no rounding of an epoch."""
    same = {"check/grad_norm": 0.5, "train/warm_loss": 1.5}
    ddp = one(0, "sharding=ddp", ((1.5, 1.1),), **early(2.3, 2.3), **same)
    other = one(1, "sharding=root", ((1.8, 1.3),), **early(2.3, 2.3 * (1 + 2e-6)), **(same | figures))
    assert found(ddp, other) == [expected]


@pytest.mark.parametrize(("facts", "differs"), [({"tf32": True}, False), ({"tf32": False}, True), ({}, False)])
def test_tf32_rounds_more_on_a_gpu_that_has_it(facts: dict[str, Any], differs: bool):
    """Set by a preset, so that no word names it. A record of an earlier version does not say what its GPU has."""
    config = SweepConfig()
    config.precision.tf32 = True
    nearly = [(train * 1.001, val * 1.001) for train, val in RIGHT]
    pair = [one(0, "sharding=ddp", **early(2.3, 2.2)), one(1, "sharding=root", nearly, **early(2.301, 2.201))]
    check = check_itself(
        [replace(trial, config=config, facts={"device": "NVIDIA H100", **facts}) for trial in pair], ["sharding"]
    )
    assert bool(check.different) is differs


NARROW = SweepConfig()
NARROW.precision.reduce_dtype = type(NARROW.precision.reduce_dtype).bfloat16
LARGE = SweepConfig()
LARGE.training.global_batch_size *= 2
DDP = one(0, "sharding=ddp")
OTHER = one(1, "sharding=root", WRONG)
CASES: dict[str, Sequence[TrialRecord]] = {
    "seeds": (one(0, "sharding=ddp training.seed=0"), one(1, "sharding=root training.seed=1", WRONG)),
    "workers": (replace(DDP, facts={"world_size": 2}), replace(OTHER, facts={"world_size": 4})),
    "parts of a batch, for dropout": (
        replace(DDP, facts={"dp_degree_of_losses": 4}), replace(OTHER, facts={"dp_degree_of_losses": 2}),
    ),
    "batches": (replace(DDP, config=LARGE), replace(OTHER, config=SweepConfig())),
    "data": (replace(DDP, facts={"data_digest": "a"}), replace(OTHER, facts={"data_digest": "b"})),
    "precision": (one(0, "sharding=ddp precision=bf16"), one(1, "sharding=root precision=bf16", WRONG)),
    "a typed precision": (DDP, replace(OTHER, overrides=["precision=fp16_mixed"])),
    "a configured precision": (DDP, replace(OTHER, config=NARROW)),
    "a narrow loss": (DDP, one(1, "sharding=root", WRONG, **{"train/loss_eps": 2.0**-7})),
    "steps": (DDP, replace(OTHER, epochs=[{**epoch, "step": epoch["step"] - 3} for epoch in OTHER.epochs])),
    "no epoch": (DDP, replace(OTHER, epochs=[])),
    "a model that draws its own random numbers": (
        one(0, "sharding=ddp repeat=0"), one(1, "sharding=ddp repeat=1", ((1.2, 0.9),)),
        one(2, "sharding=root repeat=0", WRONG), one(3, "sharding=root repeat=1"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_what_may_have_other_losses_is_no_finding(case: str):
    axes = list(dict.fromkeys(key for trial in CASES[case] for key in trial.setting))
    assert check_itself(CASES[case], axes).different == {}


def test_what_differs_in_float32_differs_in_other_precisions_too():
    words = [f"sharding={s} precision={p}" for s in ("ddp", "per_block") for p in ("fp32", "bf16")]
    trials = [one(n, w, WRONG if "per_block" in w else RIGHT, 1000.0 + 100 * n) for n, w in enumerate(words)]
    assert list(of(*trials).why_not) == ["sharding=per_block precision=fp32", "sharding=per_block precision=bf16"]
    assert chosen(*trials) == {"sharding": "ddp", "precision": "bf16"}


def test_what_only_moves_or_gathers_must_not_change_a_loss():
    words = ("sharding=root offload=none", "sharding=root offload=cpu", "sharding=per_block offload=none")
    trials = [one(n, each) for n, each in enumerate(words)]
    assert check_itself(trials, [*trials[0].setting]).agreeing == [[0, 1, 2]]
    gathered = "sharding=root offload=none reshard_after_forward=never"
    assert list(of(*trials, one(3, gathered, WRONG)).why_not) == [gathered]
