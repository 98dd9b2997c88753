"""The optimizer that was asked for, schedules worked out by hand, and loss scaling that counts what it skips."""

from __future__ import annotations

import math
import re
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import default_collate

from fsdp_lab.config import UserError, to_dict
from fsdp_lab.config.rules import check_trial
from fsdp_lab.training.optimizer import build_lr_schedule, build_optimizer
from tests.ranks import config, outcomes, parallel_of, run_ranks, train_all
from tests.workloads.user import optim

HALF_SQRT2 = math.sqrt(2) / 2


@pytest.mark.parametrize(
    ("words", "by_step"),
    [
        ("constant lr_schedule.warmup_steps=4", {0: 0.25, 1: 0.5, 2: 0.75, 3: 1.0, 4: 1.0}),
        ("step lr_schedule.gamma=0.5", {0: 1.0, 4: 1.0, 5: 0.5, 9: 0.5, 10: 0.25, 15: 0.125}),
        ("step lr_schedule.gamma=0.1 lr_schedule.step_epochs=2", {0: 1.0, 9: 1.0, 10: 0.1, 20: 0.01}),
        (
            "cosine lr_schedule.warmup_steps=0",
            {0: 1.0, 5: 0.5 + 0.5 * HALF_SQRT2, 10: 0.5, 15: 0.5 - 0.5 * HALF_SQRT2, 20: 0.0, 25: 0.0},
        ),
        (
            "cosine lr_schedule.warmup_steps=4 lr_schedule.min_lr_ratio=0.2",
            {0: 0.25, 3: 1.0, 4: 1.0, 12: 0.6, 20: 0.2, 21: 0.2},
        ),
    ],
)
def test_learning_rates_by_hand(words: str, by_step: dict[int, float]) -> None:
    """Parts of the first one; five steps an epoch, twenty steps in all."""
    trial = config(*f"optimizer.lr=0.8 lr_schedule={words}".split())
    optimizer = build_optimizer(parallel_of(trial, nn.Linear(2, 2)))
    schedule = build_lr_schedule(optimizer, trial.lr_schedule, 5, 20)
    rates = []
    for _ in range(26):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    assert {step: rates[step] / 0.8 for step in by_step} == pytest.approx(by_step, abs=1e-12)


def test_the_implementation_that_is_chosen() -> None:
    """Loss scaling and DTensors of SGD have no fused kernel; see `OptimizerConfig.chosen_implementation`."""
    cases = {"adam": ["fused"], "adamw optimizer.implementation=for_loop": [], "sgd": ["foreach"],
             "adam precision=fp16": ["foreach"]}  # fmt: skip
    for words, chosen in cases.items():
        group = build_optimizer(parallel_of(config(*f"optimizer={words}".split()), nn.Linear(2, 2))).param_groups[0]
        assert [name for name in ("fused", "foreach") if group[name]] == chosen, words


def build_own(*words: str) -> torch.optim.Optimizer:
    trial = config(*words)
    check_trial(trial, 2)
    return build_optimizer(parallel_of(trial, nn.Linear(2, 2), dp_shard=4))


def test_an_own_class_gets_the_parameters_and_its_arguments() -> None:
    words = ["optimizer.lr=0.02", "optimizer._target_=torch.optim.RAdam", "optimizer.betas=[0.8,0.9]"]
    words += ["optimizer.weight_decay=0.3", "optimizer.scale_lr=true"]
    optimizer = build_own(*words)
    group = optimizer.param_groups[0]
    assert type(optimizer) is torch.optim.RAdam and len(group["params"]) == 2
    assert (group["lr"], group["betas"], group["weight_decay"], group["eps"]) == (0.08, [0.8, 0.9], 0.3, 1e-8)
    assert to_dict(config(*words))["optimizer"] == {
        "_target_": "torch.optim.RAdam", "name": "custom", "lr": 0.02, "scale_lr": True, "groups": None,
        "betas": [0.8, 0.9], "weight_decay": 0.3,
    }  # fmt: skip
    # PyTorch's own choice on a GPU, which forecasts on a CPU must know: foreach for plain tensors alone
    for sharding, foreach in (("ddp", True), ("root", False)):
        built = build_own("optimizer._target_=torch.optim.Adagrad", f"sharding={sharding}")
        assert built.param_groups[0]["foreach"] is foreach


OWN = "tests.workloads.user.optim"
NO_OPTIMIZER = {
    "torch.optim.RAdam optimizer.beta1=0.8": r"\.beta1=0\.8: torch\.optim\.RAdam has no parameter beta1\. .*lr",
    "torch.optim.RAdam optimizer.lr=fast": r"optimizer\.lr=fast is text; use a number",
    "torch.nn.ReLU": r"torch\.nn\.ReLU has no parameter params; fsdp_lab calls it with params=",
    f"{OWN}.Picky": r"Picky with optimizer\.lr=0\.001 fails: ValueError: .* \(tests/.*/optim\.py:\d+\)",
    "torch.optim.LBFGS": r"_target_=torch\.optim\.LBFGS: step\(\) of LBFGS needs a closure .*optimizer=adamw",
    f"{OWN}.Asks": r"Asks: step\(\) of Asks needs a closure",
    f"{OWN}.no_optimizer": r"returns a Identity; it must return a torch\.optim\.Optimizer",
}


@pytest.mark.parametrize("target", NO_OPTIMIZER)
def test_what_is_no_optimizer_is_refused(target: str) -> None:
    with pytest.raises(UserError, match=NO_OPTIMIZER[target]):
        build_own(*f"optimizer._target_={target}".split())


class Rows:
    def __init__(self, split: str) -> None:
        self.x = torch.randn(64, 8, generator=torch.Generator().manual_seed(len(split)))

    def __len__(self) -> int:
        return 64

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        return self.x[i], self.x[i].sum().tanh()


class Net(nn.Sequential):
    def __init__(self, bias: bool = True) -> None:
        layers = [nn.Linear(8, width, bias) for width in (8, 8, 1)]
        super().__init__(layers[0], nn.Tanh(), layers[1], nn.Tanh(), layers[2])


def squares(model: nn.Module, batch: Any) -> Tensor:
    return F.mse_loss(model(batch[0])[:, 0], batch[1])


@cache
def plain(kind: Any, lr: float) -> tuple[list[float], list[float]]:
    """The loss of every step of a plain loop, and that of each validation."""
    torch.manual_seed(0)
    model, rows, losses, validations = Net(), Rows("train"), [], []
    optimizer = kind(model.parameters(), lr=lr)
    for epoch in range(2):
        getattr(optimizer, "train", lambda: None)()
        for part in torch.randperm(64, generator=torch.Generator().manual_seed(epoch)).split(16):
            loss = squares(model, default_collate([rows[i] for i in part.tolist()]))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        getattr(optimizer, "eval", lambda: None)()
        validations.append(squares(model, default_collate([*Rows("val")])).item())
    return losses, validations


def own(target: str, lr: float, *more: str) -> list[str]:
    return [f"model._target_={__name__}.Net", f"data._target_={__name__}.Rows", f"task.loss={__name__}.squares",
            f"optimizer._target_={target}", f"optimizer.lr={lr}", "training.epochs=2",
            "data.num_train=64", "data.num_val=64", "training.global_batch_size=16", *more]  # fmt: skip


DDP, LAYER, NEVER = "sharding=ddp", "sharding=per_layer", "sharding=per_layer reshard_after_forward=never"
ROOT, FSDP1 = "sharding=root", "sharding=root sharding.api=fsdp1"


def test_an_optimizer_with_modes_is_in_train_mode_for_steps_and_else_in_eval_mode() -> None:
    shardings = (DDP, ROOT, NEVER, FSDP1, "sharding=per_layer sharding.api=fsdp1")
    expected, validations = plain(optim.ScheduleFree, 0.5)
    cases = [own(f"{OWN}.ScheduleFree", 0.5, *each.split()) for each in shardings]
    for sharding, (losses, reported) in zip(shardings, run_ranks(2, train_all, cases)[0], strict=True):
        assert losses == pytest.approx(expected, rel=1e-5), sharding
        assert [epoch["val/loss"] for epoch in reported] == pytest.approx(validations, rel=1e-5), sharding


OF_PARTS = r"each rank of sharding\.api=fsdp1 has a flat part.*Use sharding\.api=fsdp2"
READS = r"reads a number of a sharded tensor"
# An optimizer and a sharding: the message that refuses it; "" where it trains as a plain loop.
STEPS = {
    f"Normalized {LAYER}": "", f"Normalized {FSDP1}": rf"reduces a tensor to one number \(.*norm\), and {OF_PARTS}",
    f"ByNumber {DDP}": "",
    f"ByNumber {LAYER}": rf"the step of .*ByNumber {READS} \(tests/.*/optim\.py:\d+\).*full_tensor",
    f"ByWholeNumber {LAYER}": "", f"ByNumber {FSDP1}": OF_PARTS,
    f"Compiled {DDP}": "", f"Compiled {LAYER}": "", f"Exchanges {LAYER}": "", f"Exchanges {FSDP1}": "",
    f"KeepsOwn {LAYER}": r"KeepsOwn has set param_groups\[0\]\[lr\] to [\d.]+ on rank 0 and [\d.]+ on rank 1",
    f"ReadsFirst {DDP}": "", f"ReadsFirst {LAYER}": rf"the constructor of .*ReadsFirst {READS}",
    f"ReadsFirst {FSDP1}": r"has set param_groups\[\d\]\[lr\] to",
    f"torch.optim.Adafactor {LAYER}": rf"the step of optimizer\._target_=torch\.optim\.Adafactor {READS}",
    f"torch.optim.Muon {LAYER} model.bias=false": r"PyTorch cannot take the step of .*torch\.optim\.Muon",
}  # fmt: skip


def test_a_step_by_a_number_of_a_ranks_own_part_is_refused() -> None:
    targets = [(name if "." in name else f"{OWN}.{name}", words) for name, *words in map(str.split, STEPS)]
    cases = [own(target, 0.05, *words) for target, words in targets]
    for found in run_ranks(2, outcomes, cases):
        for (case, expected), (target, _), got in zip(STEPS.items(), targets, found, strict=True):
            if expected:
                assert isinstance(got, str) and re.search(expected, got), (case, got)
            else:
                kind = getattr(optim, target.rpartition(".")[2])
                assert got == pytest.approx(plain(kind, 0.05)[0], rel=1e-5), case


MLP = ["model=mlp", "optimizer=sgd", "sharding=per_block"]
FP16 = [*MLP, "lr_schedule.warmup_steps=4", "optimizer.lr=0.1", "precision=fp16"]
OVERFLOW = [*FP16, "precision.init_scale=1e30"]


def test_overflow_skips_steps_and_lowers_the_scale() -> None:
    cases = [
        [*MLP, "optimizer.lr=1e-30"], OVERFLOW, [*OVERFLOW, "precision.reduce_dtype=float32", "sharding=ddp"],
        [*OVERFLOW, "training.max_grad_norm=1.0"], [*FP16, "precision.init_scale=1024"],
        [*FP16, "precision.init_scale=64", "precision.growth_interval=2"],
    ]  # fmt: skip
    (still, at_first), *overflow, (learned, good), (_, growing) = run_ranks(2, train_all, cases)[0]
    for losses, (reported,) in overflow:
        assert reported["train/skipped_steps"] == 4
        assert reported["train/loss_scale"] == pytest.approx(1e30 / 2**4, rel=1e-6)
        assert reported["train/lr"] == pytest.approx(0.1 / 4)  # a skipped step does not move the schedule
        assert losses == pytest.approx(still, abs=2e-3)  # no step was taken: the weights are the first ones
        assert reported["val/loss"] == pytest.approx(at_first[0]["val/loss"], abs=2e-3)
    assert [good[0][f"train/{name}"] for name in ("skipped_steps", "loss_scale", "lr")] == [0, 1024, 0.1]
    assert learned[-1] < learned[0] - 0.1
    assert growing[0]["train/loss_scale"] == 64 * 2 * 2  # doubled after steps 2 and 4
    assert "train/loss_scale" not in at_first[0], "without scaling"


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
