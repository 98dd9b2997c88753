"""A sharded run learns what one unsharded process learns, step by step, and holds what was forecast, to the byte.

The rows are in `tests/parity_rows.py`, what trains them in `tests/parity.py`.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from enum import Enum
from functools import cache
from typing import Any

import pytest
import torch

from fsdp_lab.config import TrialConfig, conf_dir
from fsdp_lab.config.convert import flatten
from fsdp_lab.config.options import option_values
from tests.parity import (
    FP32_TOLERANCE,
    NEED_TRANSFORMERS,
    Result,
    Row,
    forecast_differences,
    train_rows,
    unsharded,
)
from tests.parity_rows import AXES, HALF, ROWS
from tests.ranks import config
from tests.training.reference import apart


def _marked(rows: Sequence[Row], id: str = "") -> Any:
    """Rows as a parameter, in the latest of their tiers."""
    tier = max((row.tier for row in rows), key=("test", "ci", "full").index)
    marks = [] if tier == "test" else [getattr(pytest.mark, tier)]
    if any(row.workload in NEED_TRANSFORMERS for row in rows):
        missing = importlib.util.find_spec("transformers") is None
        marks.append(pytest.mark.skipif(missing, reason="transformers is not installed"))
    return pytest.param(rows[0] if not id else rows, marks=marks, id=id or str(rows[0]))


def row_of(cell: str, workload: str = "mlp") -> Row:
    (row,) = (row for row in ROWS if (row.workload, row.cell, row.ranks) == (workload, cell, 2))
    return row


pytestmark = pytest.mark.timeout(3600)  # its first test trains all rows


@pytest.fixture(scope="module")
def trained(request: pytest.FixtureRequest) -> Callable[[Row], Result]:
    """Train the rows of the tests that were selected, those of as many ranks in one process group."""
    items = (item for item in request.session.items if item.path == request.path and hasattr(item, "callspec"))
    chosen = (item.callspec.params for item in items)
    selected = {row: None for params in chosen for row in params.get("rows", (params.get("row"),)) if row}

    @cache
    def group(ranks: int) -> dict[Row, Result]:
        return train_rows([row for row in selected if row.ranks == ranks], ranks)

    return lambda row: group(row.ranks)[row]


@pytest.mark.parametrize("row", [_marked([row]) for row in ROWS])
def test_a_sharded_run_learns_what_one_process_learns(trained: Callable[[Row], Result], row: Row) -> None:
    result, plain = trained(row), unsharded(row)
    assert len(plain.losses) > 1 and min(plain.losses[1:]) < plain.losses[0], "it learns"
    difference = apart(result.losses, plain.losses)
    assert difference <= row.tolerance, f"a step's loss is off by {difference:.2e}\n{result.losses}\n{plain.losses}"
    assert abs(result.metrics["val/loss"] - plain.val_loss) <= row.tolerance
    steps = round(len(plain.losses) / config(*row.words).training.epochs)
    assert result.metrics["train/loss"] == pytest.approx(sum(result.losses[-steps:]) / steps, abs=1e-6)
    if row.workload == "seq2seq":
        assert result.metrics["val/perplexity"] == pytest.approx(torch.tensor(plain.val_loss).exp().item(), rel=1e-4)
        assert "perf/tokens_per_s" not in result.metrics, "rows differ in their tokens"
    if plain.val_accuracy is not None and row.tolerance <= FP32_TOLERANCE:
        assert result.metrics["val/accuracy"] == pytest.approx(plain.val_accuracy)


@pytest.mark.parametrize("row", [_marked([row]) for row in ROWS if row.has_forecast])
def test_it_holds_what_was_forecast_to_the_byte(trained: Callable[[Row], Result], row: Row) -> None:
    peaks = trained(row).peaks[: row.forecast_ranks]
    assert forecast_differences(row.words, row.ranks, peaks) == []


@pytest.mark.parametrize(
    "row",
    [
        _marked([row])
        for row in ROWS
        if row.workload in ("user", "user, with state") and row.tolerance == FP32_TOLERANCE
    ],
)
def test_its_weights_are_the_scripts(trained: Callable[[Row], Result], row: Row) -> None:
    """Also those that are tied, frozen, or have no gradient."""
    got, expected = trained(row).weights, unsharded(row).weights
    assert got is not None and got.keys() == expected.keys()
    for name, weight in expected.items():
        torch.testing.assert_close(got[name], weight, rtol=0, atol=2e-5, msg=name)
    assert torch.equal(got["embedding.weight"], got["head.weight"]) == (row.workload == "user")


@pytest.mark.parametrize(
    "rows", [_marked([row_of(cell, "wide mlp") for cell in HALF[s]], s) for s in ("per_block", "per_layer")]
)
def test_each_precision_does_its_own_arithmetic(trained: Callable[[Row], Result], rows: list[Row]) -> None:
    """The reduction's dtype is used, not only the computation's: no two of the settings agree."""
    losses = [*(trained(row).losses for row in rows), unsharded(rows[0]).losses]
    assert all(apart(a, b) > 1e-6 for i, a in enumerate(losses) for b in losses[:i])


# Keys that no row has, or none of `make test`, and what tests them.
ELSEWHERE = {
    "precision=float8": "tests/training/test_precision.py, on a GPU",
    "precision.float8": "tests/training/test_precision.py, on a GPU",
    "precision.init_scale": "tests/training/test_optimizer.py",
    "precision.growth_interval": "tests/training/test_optimizer.py",
    "task.metrics": "tests/workloads/test_user.py",
    "task.unit": "tests/workloads/test_user.py",
    "optimizer.scale_lr": "tests/training/test_optimizer.py",
    "lr_schedule.": "tests/training/test_optimizer.py",
    "training.timing_warmup_steps": "tests/training/test_speed.py",
    "repeat": "changes nothing",
    "compile": "rows of make ci: the compiler takes half a minute",
    "checkpoint.": "tests/training/test_checkpoint.py",
    "memory_profile=timeline": "tests/forecast/test_memory.py",
    "profile_trace": "tests/training/test_profiler_trace.py",
    "model.": "tests/test_presets.py",
    "data.": "tests/test_presets.py",
}
GROUPS = ("sharding", "precision", "offload", "reshard_after_forward", "optimizer", "task")


def test_every_value_of_every_setting_has_a_row_in_make_test() -> None:
    """A new key or option needs a row, or a line above."""
    rows = [flatten(config(*row.words)) for row in ROWS if row.tier == "test"]
    missing = [
        f"{group}={file.stem}"
        for group in GROUPS
        for file in (conf_dir() / group).glob("*.yaml")
        if not any(_named(group, file.stem).items() <= row.items() for row in rows)
    ]
    for key, default in flatten(TrialConfig()).items():
        values = {str(row[key]) if isinstance(row[key], list) else row[key] for row in rows if key in row}
        wanted = _members(key)
        missing += [f"{key}={value}" for value in wanted - values]
        missing += [f"{key}, other than {default}"] if not wanted and not values - {default} else []
    assert [each for each in missing if not each.startswith(tuple(ELSEWHERE))] == []
    assert [prefix for prefix in ELSEWHERE if not any(each.startswith(prefix) for each in missing)] == []


def _named(group: str, option: str) -> dict[str, Any]:
    """The values by which an option is told from the others of its group."""
    values = option_values(group, option)
    known = ("granularity", "policy", "target", "name", "param_dtype", "reduce_dtype", "loss_scaling", "float8", "tf32")
    return {f"{group}.{key}": value for key, value in values.items() if key in known}


def _members(key: str) -> set[str]:
    """The names of a key's values, if it takes one of a few."""
    value: Any = TrialConfig()
    for name in key.split("."):
        value = getattr(value, name, None)  # of an argument of a callable: None
    return {member.name for member in type(value)} if isinstance(value, Enum) else set()


def test_every_value_is_in_the_pairs_of_make_ci() -> None:
    for key, values in AXES.items():
        folder = conf_dir() / key
        if folder.is_dir():
            options = {file.stem for file in folder.glob("*.yaml")}
            assert set(values) == options - {"float8", "tf32", "cpu_unpinned"}, key
        elif members := _members(key):
            assert set(values) == members, key
