"""A sharded run learns what one unsharded process learns, step by step, and holds what was forecast, to the byte.

The rows are in `tests/parity_rows.py`, what trains them in `tests/parity.py`.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Sequence
from enum import Enum
from functools import cache
from statistics import fmean
from typing import Any

import pytest
import torch

from fsdp_lab.config import TrialConfig, conf_dir
from fsdp_lab.config.metrics import CHANGE_NORM
from fsdp_lab.config.options import option_values
from fsdp_lab.config.serialize import flatten
from tests.parity import (
    FIRST_STEPS_TOLERANCE,
    FP32_TOLERANCE,
    OF_TRANSFORMERS,
    Result,
    Row,
    first_steps,
    forecast_differences,
    train_rows,
    unsharded,
)
from tests.parity_rows import AXES, HALF, ROWS
from tests.ranks import config, selected
from tests.training.reference import apart

pytestmark = pytest.mark.timeout(3600)  # its first test trains all rows
Trained = Callable[[Row], Sequence[Result]]


def _marked(row: Row, *more: Row) -> Any:
    """A row, or several, as a parameter, in the tier of the last."""
    tier = (row, *more)[-1].tier
    marks = [] if tier == "test" else [getattr(pytest.mark, tier)]
    if row.workload in OF_TRANSFORMERS:
        missing = importlib.util.find_spec("transformers") is None
        marks.append(pytest.mark.skipif(missing, reason="transformers is not installed"))
    return pytest.param((row, *more) if more else row, marks=marks, id=str(row))


@pytest.fixture(scope="module")
def trained(request: pytest.FixtureRequest) -> Trained:
    """What each rank has of a row. The rows of the tests that were selected are trained, as many ranks in one group."""
    rows = {*selected(request, "row"), *(row for several in selected(request, "rows") for row in several)}

    @cache
    def group(ranks: int) -> dict[Row, Sequence[Result]]:
        return train_rows([row for row in ROWS if row in rows and row.ranks == ranks], ranks)

    return lambda row: group(row.ranks)[row]


@pytest.mark.parametrize("row", [_marked(row) for row in ROWS])
def test_a_sharded_run_learns_what_one_process_learns(trained: Trained, row: Row) -> None:
    (result, *others), plain, training = trained(row), unsharded(row), config(*row.words).training
    assert all(other.losses == result.losses for other in others), "ranks report different losses"
    assert len(plain.losses) > 1 and min(plain.losses[1:]) < plain.losses[0], "it learns"
    difference = apart(result.losses, plain.losses)
    assert difference <= row.tolerance, f"a step's loss is off by {difference:.2e}\n{result.losses}\n{plain.losses}"
    metrics = result.metrics
    assert abs(metrics["val/loss"] - plain.val_loss) <= row.tolerance
    last = slice(-round(len(plain.losses) / training.epochs), None)  # the steps of the last epoch
    assert metrics["train/loss"] == pytest.approx(fmean(result.losses[last]), abs=1e-6)
    in_tokens = not {"task=language", "task=seq2seq"}.isdisjoint(row.words)
    if in_tokens:
        assert metrics["val/perplexity"] == pytest.approx(math.exp(metrics["val/loss"]))
    if row.workload.startswith("language"):
        assert metrics["val/bits_per_byte"] == pytest.approx(metrics["val/loss"] / math.log(2)), "a token is a byte"
    assert ("train/grad_norm" in metrics) == (training.max_grad_norm is not None or in_tokens)
    if row.tolerance <= FP32_TOLERANCE and "train/grad_norm" in metrics:
        assert metrics["train/grad_norm"] == pytest.approx(fmean(plain.norms[last]), rel=1e-4), "before clipping"
    if row.tolerance <= FP32_TOLERANCE and plain.val_accuracy is not None:
        assert metrics["val/accuracy"] == pytest.approx(plain.val_accuracy)


@pytest.mark.parametrize("row", [_marked(row) for row in ROWS if row.tolerance == FP32_TOLERANCE])
def test_its_first_steps_are_those_of_the_plain_loop(trained: Trained, row: Row) -> None:
    got, plain = trained(row)[0].first, dict(first_steps(row))
    if row.workload == "user" and "sharding.api=fsdp1" in row.words:
        assert got[CHANGE_NORM] > plain.pop(CHANGE_NORM), "FSDP1 decays weights without a gradient, too"
    assert {key: got[key] for key in plain} == pytest.approx(plain, rel=FIRST_STEPS_TOLERANCE, abs=1e-7)


@pytest.mark.parametrize("row", [_marked(row) for row in ROWS if row.has_forecast])
def test_it_holds_what_was_forecast_to_the_byte(trained: Trained, row: Row) -> None:
    assert forecast_differences(row.words, row.ranks, trained(row)[: row.forecast_ranks]) == []


WITH_WEIGHTS = [r for r in ROWS if r.workload in ("user", "user, with state") and r.tolerance == FP32_TOLERANCE]


@pytest.mark.parametrize("row", map(_marked, WITH_WEIGHTS))
def test_its_weights_are_the_scripts(trained: Trained, row: Row) -> None:
    """Also those that are tied, frozen, or have no gradient."""
    got, expected = trained(row)[0].weights, unsharded(row).weights
    assert got is not None and got.keys() == expected.keys()
    for name, weight in expected.items():
        if "sharding.api=fsdp1" in row.words and name.startswith("unused."):
            continue  # FSDP1 gives a unit one gradient, of which theirs is 0: weight decay changes them
        torch.testing.assert_close(got[name], weight, rtol=0, atol=2e-5, msg=name)
    assert torch.equal(got["embedding.weight"], got["head.weight"]) == (row.workload == "user")


def _half(sharding: str) -> Any:
    return _marked(*(row for row in ROWS if row.workload == "wide mlp" and row.cell in HALF[sharding]))


@pytest.mark.parametrize("rows", [_half("per_block"), _half("per_layer")])
def test_each_precision_does_its_own_arithmetic(trained: Trained, rows: Sequence[Row]) -> None:
    """The reduction's dtype is used, not only the computation's: no two of the settings agree."""
    losses = [*(trained(row)[0].losses for row in rows), unsharded(rows[0]).losses]
    assert all(apart(a, b) > 1e-6 for i, a in enumerate(losses) for b in losses[:i])


# Keys and options that no row of `make test` has, and what tests them.
ELSEWHERE = {
    "precision=float8": "tests/training/test_precision.py, layer by layer: losses need a GPU",
    "precision.init_scale": "tests/training/test_optimizer.py",
    "precision.growth_interval": "tests/training/test_optimizer.py",
    "task.metrics": "tests/workloads/test_user.py",
    "task.unit": "tests/workloads/test_user.py",
    "check.": "tests/training/test_plain.py",
    "init=meta": "tests/training/test_constructor.py: modules draw other numbers than a plain script",
    "optimizer.scale_lr": "tests/training/test_optimizer.py",
    **dict.fromkeys(("optimizer.groups", "optimizer.decay", "optimizer.embedding_lr"), "tests/training/test_groups.py"),
    "task.after_step": "tests/training/test_after_step.py",
    "task.step": "tests/training/test_step.py",
    "task.optimizers": "tests/training/test_step.py",
    "training.epoch_steps": "tests/training/test_loader.py",
    "lr_schedule.": "tests/training/test_optimizer.py",
    "training.timing_warmup_steps": "tests/training/test_loop.py",
    "repeat": "changes nothing",
    "compile": "rows of make ci: the compiler takes half a minute",
    "checkpoint.": "tests/training/test_checkpoint.py",
    "memory_profile=timeline": "tests/forecast/test_memory.py",
    "profile_trace": "tests/training/test_traces.py",
    "model.": "tests/test_presets.py",
    "data.": "tests/test_presets.py",
}
GROUPS = ("sharding", "precision", "offload", "reshard_after_forward", "optimizer", "task")


def _options(group: str) -> set[str]:
    return {file.stem for file in (conf_dir() / group).glob("*.yaml")}


def _members(key: str) -> set[str]:
    """The names of a key's values, if it takes one of a few."""
    value: Any = TrialConfig()
    for name in key.split("."):
        value = getattr(value, name, None)  # of an argument of a callable: None
    return {member.name for member in type(value)} if isinstance(value, Enum) else set()


def test_every_value_of_every_setting_has_a_row_in_make_test() -> None:
    """A new key or option needs a row that types it, or a line above; of a few values every one but the default."""
    words = {word for row in ROWS if row.tier == "test" for word in row.words}
    typed = words | {f"{word.partition('=')[0]}=" for word in words}
    options = [(group, option) for group in GROUPS for option in _options(group)]
    of_options = {f"{group}.{key}" for group, option in options for key in option_values(group, option)}
    wanted = {f"{group}={option}" for group, option in options}
    for key, default in flatten(TrialConfig()).items():
        if key not in of_options:
            names = {name for name in _members(key) if name != default}
            wanted |= {f"{key}={name}" for name in names} or {f"{key}="}
    missing = wanted - typed
    assert [each for each in missing if not each.startswith(tuple(ELSEWHERE))] == []
    assert [prefix for prefix in ELSEWHERE if not any(each.startswith(prefix) for each in missing)] == []


def test_every_value_is_in_the_pairs_of_make_ci() -> None:
    few = {key: _options(key) - {"float8", "tf32", "cpu_unpinned"} or _members(key) - {"meta"} for key in AXES}
    assert {key: set(AXES[key]) for key in few if few[key]} == {key: names for key, names in few.items() if names}
