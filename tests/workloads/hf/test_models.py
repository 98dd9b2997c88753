"""Models of transformers learn sharded what a plain script of transformers' own learns, from the same bits, and hold
what was forecast to the byte."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from fsdp_lab.forecast.forecast import forecast_profile
from tests.forecast.test_equality import differences
from tests.ranks import config, run_ranks, train_all
from tests.training.reference import apart
from tests.workloads.hf.cases import LEARN, WORDS, script

SHARDINGS = ("sharding=ddp", "sharding=root", "sharding=per_block")
MORE = (
    "sharding=per_block init=meta",
    "sharding=per_block activation_checkpointing=full training.grad_accum_steps=2",
    "sharding=per_layer reshard_after_forward=always",
)


@cache
def plain(name: str) -> tuple[list[float], float]:
    torch.set_num_threads(1)
    return script(name).train(*WORDS[name], *LEARN)


def check_losses(names: list[str], cells: tuple[str, ...]) -> None:
    """Train every cell of every model on two ranks, and compare each step with the plain script's."""
    cases = [[*WORDS[name], *LEARN, *cell.split()] for name in names for cell in cells]
    results: Any = iter(run_ranks(2, train_all, cases)[0])
    for name in names:
        losses, val_loss = plain(name)
        assert len(losses) == 4 and min(losses[1:]) < losses[0]
        for cell in cells:
            got, reported = next(results)
            assert apart(got, losses) <= 1e-5, (name, cell, got, losses)
            assert abs(reported[-1]["val/loss"] - val_loss) <= 1e-5, (name, cell)


def test_sharded_they_learn_what_a_plain_script_of_transformers_learns() -> None:
    check_losses(list(WORDS), SHARDINGS)


@pytest.mark.ci
def test_with_other_settings_too() -> None:
    check_losses(list(WORDS), MORE)


def test_they_hold_what_was_forecast_to_the_byte() -> None:
    """Rows are cut by a window in one of Qwen's layers, and padded for T5: their masks are tensors, and so is that of
    rows without padding."""
    cases = [[*WORDS[name], *cell.split()] for name in WORDS for cell in SHARDINGS]
    assert differences([*cases, [*WORDS["t5"], "data.least=12", "sharding=root"]], ranks=1) == []


@pytest.mark.parametrize("precision", ["fp32", "bf16_mixed"])
def test_a_forecast_for_gpus_needs_no_value(precision: str) -> None:
    for words in WORDS.values():
        trial = config(*words, "sharding=per_block", f"precision={precision}")
        assert forecast_profile(trial, 8, cuda=True).peaks["device"]["total"] > 0


@pytest.mark.ci
def test_with_other_settings_they_hold_it_too() -> None:
    cells = [*MORE, "sharding=ddp precision=bf16_mixed", "sharding=per_block precision=bf16 training.max_grad_norm=1"]
    assert differences([[*WORDS[name], *cell.split()] for name in WORDS for cell in cells]) == []
