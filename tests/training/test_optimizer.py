"""The optimizer that was asked for, schedules worked out by hand, and loss scaling that counts what it skips."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from fsdp_lab.config import UserError, to_dict
from fsdp_lab.config.rules import check_trial
from fsdp_lab.training.optimizer import build_lr_schedule, build_optimizer, lr_factor
from tests.ranks import config, run_ranks, train_all

HOST = torch.device("cpu")
HALF_SQRT2 = math.sqrt(2) / 2


@pytest.mark.parametrize(
    ("overrides", "by_step"),
    [
        (["lr_schedule=constant", "lr_schedule.warmup_steps=4"], {0: 0.25, 1: 0.5, 2: 0.75, 3: 1.0, 4: 1.0}),
        (["lr_schedule=step", "lr_schedule.gamma=0.5"], {0: 1.0, 4: 1.0, 5: 0.5, 9: 0.5, 10: 0.25, 15: 0.125}),
        (
            ["lr_schedule=step", "lr_schedule.gamma=0.1", "lr_schedule.step_epochs=2"],
            {0: 1.0, 9: 1.0, 10: 0.1, 20: 0.01},
        ),
        (
            ["lr_schedule=cosine", "lr_schedule.warmup_steps=0"],
            {0: 1.0, 5: 0.5 + 0.5 * HALF_SQRT2, 10: 0.5, 15: 0.5 - 0.5 * HALF_SQRT2, 20: 0.0, 25: 0.0},
        ),
        (
            ["lr_schedule=cosine", "lr_schedule.warmup_steps=4", "lr_schedule.min_lr_ratio=0.2"],
            {0: 0.25, 3: 1.0, 4: 1.0, 12: 0.6, 20: 0.2, 21: 0.2},
        ),
    ],
)
def test_factors_of_the_learning_rate_by_hand(overrides: list[str], by_step: dict[int, float]) -> None:
    """Five steps an epoch, twenty steps in all."""
    schedule = config(*overrides).lr_schedule
    for step, expected in by_step.items():
        assert lr_factor(schedule, step, 5, 20) == pytest.approx(expected, abs=1e-12), step


def test_schedule_drives_the_optimizer() -> None:
    trial = config("lr_schedule=step", "lr_schedule.gamma=0.5", "optimizer.lr=0.8", "optimizer=sgd", "optimizer.lr=0.8")
    optimizer = build_optimizer(nn.Linear(2, 2), trial, 1)
    schedule = build_lr_schedule(optimizer, trial.lr_schedule, 2, 6)
    rates = []
    for _ in range(6):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    assert rates == [0.8, 0.8, 0.4, 0.4, 0.2, 0.2]


@pytest.mark.parametrize(
    ("overrides", "kind", "fused", "foreach"),
    [
        (["optimizer=adam"], torch.optim.Adam, True, False),
        (["optimizer=adamw", "optimizer.implementation=for_loop"], torch.optim.AdamW, False, False),
        (["optimizer=sgd"], torch.optim.SGD, False, True),
        (["optimizer=adam", "precision=fp16"], torch.optim.Adam, False, True),
        (["optimizer=adam", "optimizer.implementation=foreach"], torch.optim.Adam, False, True),
    ],
)
def test_the_implementation_that_is_chosen(overrides: list[str], kind: type, fused: bool, foreach: bool) -> None:
    optimizer = build_optimizer(nn.Linear(2, 2), config(*overrides), 1)
    group = optimizer.param_groups[0]
    assert type(optimizer) is kind
    assert (bool(group["fused"]), bool(group["foreach"])) == (fused, foreach)


OWN = "tests.workloads.user.optim"


def build_own(*words: str) -> torch.optim.Optimizer:
    trial = config(*words)
    check_trial(trial, 2)
    return build_optimizer(nn.Linear(2, 2), trial, 4)


def test_an_own_class_gets_the_parameters_and_its_arguments() -> None:
    words = ["optimizer.lr=0.02", "optimizer._target_=torch.optim.RAdam", "optimizer.betas=[0.8,0.9]"]
    words += ["optimizer.weight_decay=0.3", "optimizer.scale_lr=true"]
    optimizer = build_own(*words)
    group = optimizer.param_groups[0]
    assert type(optimizer) is torch.optim.RAdam and len(group["params"]) == 2
    assert (group["lr"], group["betas"], group["weight_decay"], group["eps"]) == (0.08, [0.8, 0.9], 0.3, 1e-8)
    assert to_dict(config(*words))["optimizer"] == {
        "_target_": "torch.optim.RAdam", "name": "custom", "lr": 0.02, "scale_lr": True, "betas": [0.8, 0.9],
        "weight_decay": 0.3,
    }  # fmt: skip
    # PyTorch's own choice on a GPU, which forecasts on a CPU must know: foreach for plain tensors alone
    for words, foreach in ((["sharding=ddp"], True), (["sharding=root"], False)):
        assert build_own("optimizer._target_=torch.optim.Adagrad", *words).param_groups[0]["foreach"] is foreach


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["_target_=torch.optim.RAdam", "beta1=0.8"],
            r"\.beta1=0\.8: torch\.optim\.RAdam has no parameter beta1\. .*lr",
        ),
        (["_target_=torch.optim.RAdam", "lr=fast"], r"optimizer\.lr=fast is a str; use a number"),
        (["_target_=torch.nn.ReLU"], r"torch\.nn\.ReLU has no parameter params; fsdp_lab calls it with params="),
        (
            [f"_target_={OWN}.Picky"],
            r"Picky with optimizer\.lr=0\.001 fails: ValueError: .* \(tests/.*/optim\.py:\d+\)",
        ),
        ([f"_target_={OWN}.no_optimizer"], r"returns a Identity; it must return a torch\.optim\.Optimizer"),
    ],
)
def test_what_is_no_optimizer_is_refused(words: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        build_own(*(f"optimizer.{word}" for word in words))


MLP = ["model=mlp", "optimizer=sgd", "sharding=per_block"]
WARM = ["lr_schedule.warmup_steps=4", "optimizer.lr=0.1"]
SCALED = {
    "all overflow": [*MLP, *WARM, "precision=fp16", "precision.init_scale=1e30"],
    "all overflow, ddp": [*MLP, *WARM, "precision=fp16_mixed", "precision.init_scale=1e30", "sharding=ddp"],
    "all overflow, clipped": [*MLP, *WARM, "precision=fp16", "precision.init_scale=1e30", "training.max_grad_norm=1.0"],
    "none": [*MLP, *WARM, "precision=fp16", "precision.init_scale=1024"],
    "growing": [*MLP, *WARM, "precision=fp16", "precision.init_scale=64", "precision.growth_interval=2"],
    "standing still": [*MLP, "optimizer.lr=1e-30"],
    "off": [*MLP, "precision=bf16"],
}


@pytest.fixture(scope="module")
def scaled() -> dict[str, tuple[list[float], dict[str, float]]]:
    results = run_ranks(2, train_all, list(SCALED.values()))[0]
    return {name: (losses, reported[-1]) for name, (losses, reported) in zip(SCALED, results, strict=True)}


@pytest.mark.parametrize("name", [name for name in SCALED if name.startswith("all")])
def test_overflow_skips_steps_and_lowers_the_scale(
    scaled: dict[str, tuple[list[float], dict[str, float]]], name: str
) -> None:
    losses, reported = scaled[name]
    assert reported["train/skipped_steps"] == 4
    assert reported["train/loss_scale"] == pytest.approx(1e30 / 2**4, rel=1e-6)
    assert reported["train/lr"] == pytest.approx(0.1 / 4)  # a skipped step does not move the schedule
    still = scaled["standing still"][0]
    assert losses == pytest.approx(still, abs=2e-3)  # no step was taken: the weights are the first ones
    assert reported["val/loss"] == pytest.approx(scaled["standing still"][1]["val/loss"], abs=2e-3)


def test_without_overflow_nothing_is_skipped(scaled: dict[str, tuple[list[float], dict[str, float]]]) -> None:
    losses, reported = scaled["none"]
    assert (reported["train/skipped_steps"], reported["train/loss_scale"], reported["train/lr"]) == (0, 1024, 0.1)
    assert losses[-1] < losses[0] - 0.1
    assert scaled["growing"][1]["train/loss_scale"] == 64 * 2 * 2  # doubled after steps 2 and 4
    assert "train/loss_scale" not in scaled["off"][1]


def scaler_calls() -> list[str]:
    """Return which methods of the loss scaler two steps call, in order."""
    calls: list[str] = []

    def noted(name: str, method: Any) -> Any:
        return lambda *args: calls.append(name) or method(*args)

    for name in ("scale", "step", "update", "get_scale"):
        setattr(torch.amp.GradScaler, name, noted(name, getattr(torch.amp.GradScaler, name)))
    train_all([[*MLP, "precision=fp16", "training.max_steps=2"]])
    return calls


def test_a_step_reads_the_loss_scale_once_after_its_update() -> None:
    """Each reading waits for the device. The first and the last belong to the trial, not to a step."""
    calls = run_ranks(2, scaler_calls)[0]
    of_steps = ["scale", "step", "update", "get_scale"] * 2
    assert calls[calls.index("get_scale") :] == ["get_scale", *of_steps, "get_scale"]
