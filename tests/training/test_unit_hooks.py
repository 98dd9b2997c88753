"""What a unit returns, keeps and changes that FSDP2 would lose is refused by name. What it learns: `test_parity.py`."""

from __future__ import annotations

import re
from collections import UserDict
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fsdp_lab.config import ModelError
from fsdp_lab.forecast.forecast import forecast_profile
from fsdp_lab.training import unit_hooks
from fsdp_lab.training.unit_hooks import call_by_methods, tensors_inside
from tests.ranks import config, run_ranks, train_all
from tests.training.reference import apart
from tests.workloads.user import unusual

HERE = unusual.__name__
ALWAYS = "sharding=per_block reshard_after_forward=always"
REFUSED = {
    f"methods {ALWAYS}": r"sharding=per_block: a weight of a unit is used outside of it "
    r"\(.*unusual\.py:\d+: return .*\).*model\.forward_methods=\[",
    f"methods {ALWAYS} activation_checkpointing=full": r"outside of it .*unusual\.py:\d+: .*forward_methods",
    f"calls_inside {ALWAYS}": r"a weight of a unit is used outside of it .*unusual\.py:\d+: .*inner",
    f"weight_used_outside {ALWAYS}": r"a weight of a unit is used outside .*self\.blocks\[1\]\.inner\.weight",
    "only_weights sharding=per_layer": r"a weight of a unit is used outside .*self\.layer\.weight.*such as root",
    f"keeps model.of_weight=true {ALWAYS}": r"blocks\.0 keeps in kept a view of its parameter inner\.weight.*clone",
    f"collects {ALWAYS}": r"blocks\.0 changes a list that it gets, of which FSDP2 hands it a copy.*sharding=root",
    f"returns_weight task.loss={HERE}.loss_of_weight {ALWAYS}": r"ReturnsWeight returns a view of .* first\.weight",
    f"methods {ALWAYS} model.forward_methods=[encod]": r"model\.forward_methods=\[encod\]: no module",
}

# What tensors without values do not show.
IN_TRAINING = {
    f"returns model.what=function {ALWAYS}": r"reshard_after_forward=always: a tensor of a unit "
    r"is used after its parameters were freed.*reshard_after_forward=never",
    f"float32_buffer {ALWAYS} precision=bf16_mixed": r"param_dtype=bfloat16: .* in blocks\.0\.inner\.inner \(Linear\).*"
    r"buffer\.to\(x\.dtype\)",
}


def words_of(case: str) -> list[str]:
    model, *words = case.split()
    return [f"model._target_={HERE}.{model}", f"data._target_={HERE}.Rows", f"task.loss={HERE}.loss", *words]


@pytest.mark.parametrize("case", REFUSED)
def test_what_fsdp2_would_lose_is_refused_by_name(case: str) -> None:
    with pytest.raises(ModelError) as error:
        forecast_profile(config(*words_of(case)), 2, cuda=False)
    assert re.search(REFUSED[case], str(error.value)), error.value


def errors(cases: list[list[str]]) -> list[str]:
    """On one rank: how each case ends."""
    ends = []
    for words in cases:
        try:
            train_all([words])
            ends.append("")
        except ModelError as error:
            ends.append(str(error))
    return ends


def test_what_is_found_in_the_first_step_is_named_too() -> None:
    for case, end in zip(IN_TRAINING, run_ranks(1, errors, [words_of(case) for case in IN_TRAINING])[0], strict=True):
        assert re.search(IN_TRAINING[case], end), f"{case}: {end}"


def test_a_weight_that_the_root_keeps_may_be_returned() -> None:
    cases = [
        words_of(f"returns_weight task.loss={HERE}.loss_of_weight {sharding}")
        for sharding in ("sharding=ddp", "sharding=root", "sharding=per_block")
    ]
    ddp, *sharded = (losses for losses, _ in run_ranks(2, train_all, cases)[0])
    assert all(apart(losses, ddp) <= 1e-5 for losses in sharded)


class KeepsLater(nn.Linear):
    """Keeps its output from a pass on, and counts how often its modules are gone through."""

    searched, passes, kept = 0, 0, None

    def __init__(self, since: int) -> None:
        super().__init__(2, 2)
        self.since = since

    def modules(self) -> Iterator[nn.Module]:
        self.searched += 1
        return super().modules()

    def forward(self, x: Tensor) -> Tensor:
        self.passes += 1
        out = super().forward(x)
        self.kept = out if self.passes >= self.since else None
        return out.clone()


@pytest.mark.parametrize("since", [1, 2, 9])
def test_what_a_unit_keeps_is_looked_for_in_two_passes(monkeypatch: pytest.MonkeyPatch, since: int) -> None:
    hooked: list[Tensor] = []
    monkeypatch.setattr(unit_hooks, "gather_before_gradient_of", lambda tensor, module: hooked.append(tensor))
    unit = KeepsLater(since)
    unit_hooks.UnitHooks(unit, "unit", config())
    for number in range(1, 5):
        hooked.clear()
        unit(torch.ones(1, 2))
        assert unit.searched == min(number, 2)
        assert any(tensor is unit.kept for tensor in hooked) == (number >= since)


def test_tensors_are_found_in_any_object_once() -> None:
    tensor, loop = torch.ones(1), unusual.Result(torch.ones(2))
    loop.again = loop  # type: ignore[attr-defined]
    nested: Any = {"a": [unusual.Result(UserDict(x=tensor)), (unusual.Named(tensor), {})], "b": loop}
    found = list(tensors_inside([nested, "text", None, nn.Linear(1, 1), lambda: tensor]))
    assert [each.shape[0] for each in found] == [1, 2] and found[0] is tensor


class Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.hooks = 0
        self.register_forward_hook(self.count)

    def count(self, *_: object) -> None:
        self.hooks += 1

    def encode(self, x: Tensor, by: int) -> Tensor:
        return x * by

    def forward(self, x: Tensor) -> Tensor:
        return self.encode(x, by=3)


def test_a_method_runs_the_hooks_once_and_not_inside_of_forward() -> None:
    module = Counts()
    call_by_methods(module, ["encode", "decode"])
    assert module.encode(torch.ones(1), by=2).item() == 2 and module.hooks == 1
    assert module(torch.ones(1)).item() == 3 and module.hooks == 2
    assert not hasattr(module, "decode")
