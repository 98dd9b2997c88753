"""What a sweep finds of its own model: settings that must have the same losses, with planted ones."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest

from fsdp_lab.config import SweepConfig
from fsdp_lab.config.status import TrialStatus
from fsdp_lab.record.trial import TrialRecord
from fsdp_lab.report.answer import Answer, answer, plain_text
from fsdp_lab.report.page import to_html
from fsdp_lab.report.self_check import check_itself
from tests.report.sweeps import sweep, trial

# By epoch: the loss of training and validation. DDP is right; the others are of a model that branches by rank.
RIGHT, WRONG = ((1.4, 1.1), (0.9, 0.8205)), ((1.3, 1.0), (0.8, 0.7895))
Losses = Sequence[tuple[float, float]]


def one(number: int, words: str, losses: Losses = RIGHT, speed: float = 1000.0, **figures: float) -> TrialRecord:
    """A finished trial of a setting, such as `sharding=ddp precision=fp32`."""
    made = trial(number, ("", "", "finished", 100, speed, losses[-1][1] if losses else 0), **figures)
    epochs = [
        {"epoch": float(n + 1), "step": 10.0 * (n + 1), "train/loss": train, "val/loss": val}
        for n, (train, val) in enumerate(losses)
    ]
    setting = dict(word.split("=") for word in words.split())
    return dataclasses.replace(made, setting=setting, epochs=epochs, overrides=words.split())


def early(first: float, second: float) -> dict[str, float]:
    return {"train/first_loss": first, "train/early_loss": second}


def of(*trials: TrialRecord, **changed: Any) -> Answer:
    axes = list(dict.fromkeys(key for each in trials for key in each.setting))
    return answer(sweep(list(trials), axes=axes, **changed))


def codes(made: Answer) -> list[str]:
    return [str(note.code) for note in made.recommendation.notes if note.code in ("differs", "agree", "amplified")]


def test_a_model_that_differs_when_it_is_sharded_is_a_finding_and_only_what_agrees_with_ddp_is_recommended():
    """By its loss limit, DDP would not qualify: the wrong settings are 4 % lower, and faster."""
    almost = [(train * (1 + 2e-7), val * (1 - 2e-7)) for train, val in RIGHT]
    trials = [
        one(0, "sharding=per_block", WRONG, 3000.0), one(1, "sharding=ddp"),
        one(2, "sharding=root", almost, 1100.0), one(3, "sharding=per_layer", WRONG, 2000.0),
    ]  # fmt: skip
    made = of(*trials)
    assert made.setting is not None and made.setting.values == {"sharding": "root"}
    finding = (
        "This model does not compute the same when it is sharded: from epoch 1 on, val/loss is 1.100 with "
        "`sharding=ddp` and 1.000 with `sharding=per_block`; and another one with `sharding=per_layer`. Only what "
        "agrees with `sharding=ddp` can be recommended: `sharding=root`."
    )
    assert made.notes[0] == finding == made.as_data["finding"]
    assert finding.replace("`", "") in plain_text(made)
    assert "does not compute the same" in to_html(sweep(trials, axes=["sharding"]))
    assert made.why_not == dict.fromkeys(
        ["sharding=per_block", "sharding=per_layer"],
        "computes other losses than `sharding=ddp`: val/loss 1.000 instead of 1.100 from epoch 1",
    )
    assert [s.name for s in made.recommendation.front] == ["sharding=root"]
    by_loss = of(*trials, objectives=[("val/loss", "min")])
    assert by_loss.setting is not None and by_loss.setting.name not in made.why_not


def test_without_another_setting_that_agrees_ddp_is_recommended():
    made = of(one(0, "sharding=ddp"), one(1, "sharding=per_block", WRONG, 3000.0))
    assert made.setting is not None and made.setting.values == {"sharding": "ddp"}
    assert made.notes[0].endswith("Only what agrees with `sharding=ddp` can be recommended: nothing else does.")
    without = of(one(0, "sharding=per_layer", WRONG, 3000.0), one(1, "sharding=root"))
    assert without.setting is not None and without.setting.values == {"sharding": "root"}, "the fewest units"


def test_the_first_three_steps_decide_where_they_are_known():
    """Adam with a large rate: 1e-7 in the third step, and 40 % at the end. No setting's loss counts against another."""
    apart = ((1.5, 1.3), (1.3, 1.2))
    trials = [
        one(0, "sharding=ddp", RIGHT, **early(2.3, 2.2)),
        one(1, "sharding=root", apart, 3000.0, **early(2.3, 2.2 * (1 + 2e-7))),
    ]
    made = of(*trials)
    assert codes(made) == ["amplified"] and made.why_not == {}
    assert made.setting is not None and made.setting.values == {"sharding": "root"}
    assert "from 0.8205 to 1.2: this training amplifies rounding" in made.notes[0]
    nearly = [(train * (1 + 3e-5), val * (1 + 3e-5)) for train, val in RIGHT]
    made = of(trials[0], one(1, "sharding=root", nearly, 3000.0, **early(2.3, 2.2 * (1 + 5e-5))))
    assert codes(made) == ["differs"] and made.setting is not None and made.setting.values == {"sharding": "ddp"}
    assert "train/early_loss is 2.2000 with `sharding=ddp` and 2.2001 with `sharding=root`" in made.notes[0]


def test_a_loss_that_starts_at_zero_and_an_optimizer_that_rounds_by_shards_are_no_finding():
    """A difference of means starts at the rounding of its parts; 8-bit states are quantised in blocks of a shard."""
    zero = [one(0, "sharding=ddp", **early(3e-9, -0.02)), one(1, "sharding=root", **early(-2e-9, -0.02 * (1 + 1e-6)))]
    assert codes(of(*zero)) == ["agree"]
    ours, theirs = SweepConfig(), SweepConfig()
    theirs.optimizer.target = "torchao.optim.AdamW8bit"
    for config, expected in ((ours, ["differs"]), (theirs, ["agree"])):
        rounds = [one(0, "sharding=ddp", **early(2.3, 2.2)), one(1, "sharding=root", **early(2.3, 2.203))]
        assert codes(of(*(dataclasses.replace(row, config=config) for row in rounds))) == expected
    wrong = [one(0, "sharding=ddp", **early(2.3, 2.2)), one(1, "sharding=root", **early(2.31, 2.2))]
    assert codes(of(*(dataclasses.replace(row, config=theirs) for row in wrong))) == ["differs"], "before any step"


def test_validation_of_an_epoch_whose_training_agrees_is_compared():
    """Batch norm's statistics, taken twice by checkpointing; its rounding alone is within 1e-3."""
    words = "sharding=ddp activation_checkpointing="
    for val, expected in ((1.1008, ["agree"]), (1.4, ["differs"])):
        twice = ((1.4, val), (0.9, 0.8205))
        made = of(one(0, words + "none", **early(2.3, 2.2)), one(1, words + "full", twice, **early(2.3, 2.2)))
        assert codes(made) == expected
    assert (
        "when it is recomputed: from epoch 1 on, val/loss is 1.100 with `activation_checkpointing=none`"
        in made.notes[0]
    )


NARROW = SweepConfig()
NARROW.precision.reduce_dtype = type(NARROW.precision.reduce_dtype).bfloat16
DDP = one(0, "sharding=ddp")
OTHER = one(1, "sharding=root", WRONG)
STEPS = [{**epoch, "step": epoch["step"] - 3} for epoch in OTHER.epochs]


@pytest.mark.parametrize(
    "trials",
    {
        "seeds": (one(0, "sharding=ddp training.seed=0"), one(1, "sharding=root training.seed=1", WRONG)),
        "learning rates": (one(0, "sharding=ddp optimizer.lr=1"), one(1, "sharding=root optimizer.lr=2", WRONG)),
        "models": (one(0, "sharding=ddp model=a"), one(1, "sharding=root model=b", WRONG)),
        "workers": (dataclasses.replace(DDP, facts={"world_size": 2}),
                    dataclasses.replace(OTHER, facts={"world_size": 4})),
        "numbers of workers": (one(0, "sharding=ddp cluster.num_workers=2"),
                               one(1, "sharding=root cluster.num_workers=4", WRONG)),
        "data": (dataclasses.replace(DDP, facts={"data_digest": "a"}),
                 dataclasses.replace(OTHER, facts={"data_digest": "b"})),
        "precision": (one(0, "sharding=ddp precision=bf16"), one(1, "sharding=root precision=bf16", WRONG)),
        "a typed precision": (one(0, "sharding=ddp"), dataclasses.replace(OTHER, overrides=["precision=fp16_mixed"])),
        "a key of precision": (one(0, "sharding=ddp"),
                               dataclasses.replace(OTHER, overrides=["+precision.param_dtype=bfloat16"])),
        "a configured precision": (DDP, dataclasses.replace(OTHER, config=NARROW)),
        "a narrow loss": (DDP, one(1, "sharding=root", WRONG, **{"train/loss_eps": 2.0**-7})),
        "steps": (DDP, dataclasses.replace(OTHER, epochs=STEPS)),
        "an epoch": (DDP, dataclasses.replace(OTHER, epochs=[], status=TrialStatus.stopped)),
        "a diverged one": (DDP, dataclasses.replace(OTHER, epochs=[], status=TrialStatus.diverged)),
        "an epoch that only one has": (DDP, dataclasses.replace(OTHER, epochs=[{**OTHER.epochs[0], "epoch": 5.0}])),
        "a model that draws its own random numbers": (
            one(0, "sharding=ddp repeat=0"), one(1, "sharding=ddp repeat=1", ((1.2, 0.9),)),
            one(2, "sharding=root repeat=0", WRONG), one(3, "sharding=root repeat=1"),
        ),
        "repeats of one setting": (one(0, "sharding=root repeat=0"), one(1, "sharding=root repeat=1", WRONG)),
    }.items(),
    ids=lambda case: case[0],
)  # fmt: skip
def test_what_may_have_other_losses_is_no_finding(trials: tuple[str, Sequence[TrialRecord]]):
    made = trials[1]
    axes = list(dict.fromkeys(key for each in made for key in each.setting))
    assert check_itself(made, axes).different == {}


def test_what_differs_in_float32_differs_in_other_precisions_too():
    words = [f"sharding={s} precision={p}" for s in ("ddp", "per_block") for p in ("fp32", "bf16")]
    made = of(*(one(n, w, WRONG if "per_block" in w else RIGHT, 1000.0 + 100 * n) for n, w in enumerate(words)))
    assert list(made.why_not) == ["sharding=per_block precision=fp32", "sharding=per_block precision=bf16"]
    assert made.setting is not None and made.setting.values == {"sharding": "ddp", "precision": "bf16"}
    assert "another one with `sharding=per_block precision=bf16`" in made.notes[0]


def test_what_only_moves_or_gathers_must_not_change_a_loss():
    words = ["sharding=root offload=none", "sharding=root offload=cpu", "sharding=per_block offload=cpu"]
    words = [f"{each} reshard_after_forward={policy}" for each in words for policy in ("always", "never")]
    assert check_itself(
        [one(n, w) for n, w in enumerate(words)], ["sharding", "offload", "reshard_after_forward"]
    ).agreeing == [[0, 1, 2, 3, 4, 5]]
    assert of(*map(one, range(6), words)).notes[0].startswith("6 settings have the same losses, as they must")
    made = of(*(one(n, w, WRONG if n == 5 else RIGHT) for n, w in enumerate(words)))
    assert list(made.why_not) == ["sharding=per_block offload=cpu reshard_after_forward=never"]
