"""Forecasts beside measurements on a CPU: what differs between settings, every change of a step, and whole grids.

The settings of `make test` and `make ci` are rows of `tests/training/test_parity.py`, which trains them anyway.
"""

from __future__ import annotations

import itertools
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from fsdp_lab.forecast.forecast import forecast_profile
from tests.forecast.cases import MODELS, every_four_axes, overrides
from tests.parity import SHARDINGS, WORKLOADS, Peaks, differences
from tests.ranks import Memo, config, run_ranks

MLP = WORKLOADS["mlp"].words


@pytest.mark.full
def test_a_model_of_real_size_is_forecast_to_the_byte() -> None:
    words = ["sharding=per_block", "precision=bf16_mixed", "training.grad_accum_steps=2", "training.max_grad_norm=1"]
    assert differences([["model=vit_b_16", "training.global_batch_size=4", *words]]) == []


@pytest.mark.full
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("model", "step"), [("mlp", 1), ("vit_tiny", 1), ("vit_b_16", 25)])
def test_every_combination_of_the_four_axes_is_forecast_to_the_byte(model: str, step: int) -> None:
    """As experiments/forecast_accuracy reports."""
    batch = 4 if model == "vit_b_16" else 32
    cases = [[*MODELS[model], f"training.global_batch_size={batch}", *overrides(c)] for c in every_four_axes()[::step]]
    result = differences(cases)
    print(f"{model}: {len(cases)} configurations on two ranks, {len(result)} differences")
    assert result == []


def device_peaks(*words: str) -> dict[str, int]:
    peaks: Peaks = forecast_profile(config(*MLP, *words), 2, cuda=False).peaks
    return peaks["device"]


def test_gradients_that_are_reduced_for_each_microbatch_take_less() -> None:
    """Else a rank holds the whole model's gradients between two microbatches."""
    accumulate = ("sharding=per_block", "training.grad_accum_steps=3", "training.global_batch_size=24")
    each, last = (device_peaks(*accumulate, f"training.sync_each_microbatch={each}") for each in ("true", "false"))
    assert each["unsharded_grad"] < last["unsharded_grad"] and each["total"] < last["total"]


Change = tuple[str, str, int, str, str]
INVOLVED = ("precision=bf16_mixed", "training.grad_accum_steps=2", "training.max_grad_norm=1")


def timelines(cases: list[list[str]]) -> list[list[Change]]:
    """On one rank: what the page of the second step of each case is made of."""
    from fsdp_lab.training import timeline
    from fsdp_lab.training.train import train

    kept: list[list[Change]] = []
    write = timeline.write_timeline

    def remember(profile: Any, path: Path, title: str, facts: Any) -> None:
        kept.append(changes(profile))
        write(profile, path, title, facts)

    timeline.write_timeline = remember
    collected = []
    for words in cases:
        with tempfile.TemporaryDirectory() as folder:
            train(config("memory_profile=timeline", "training.max_steps=2", *words), Path(folder), Memo())
        collected.append(kept[-1])
    return collected


def changes(profile: Any) -> list[Change]:
    """Each event, with the bytes that it adds."""
    held, found = Counter[int](), []
    for event in profile.events:
        found.append((event.place, event.category, event.num_bytes - held[event.storage], event.phase, event.module))
        held[event.storage] = event.num_bytes
    return found


def in_any_order_of_frees(changes: list[Change]) -> list[Change]:
    """With each run of frees sorted: autocast frees its copies in the order of their addresses."""
    runs = itertools.groupby(changes, key=lambda change: change[2] < 0)
    return [change for are_frees, run in runs for change in (sorted(run) if are_frees else run)]


@pytest.mark.parametrize(
    "cases",
    [
        pytest.param([[*MLP, *SHARDINGS["per_block"], *INVOLVED]], id="per_block"),
        pytest.param([[*MLP, *words, *INVOLVED] for words in SHARDINGS.values()], id="involved", marks=pytest.mark.ci),
        pytest.param([[*MLP, *words] for words in SHARDINGS.values()], id="plain", marks=pytest.mark.ci),
        pytest.param([["sharding=per_block", *INVOLVED], ["sharding=ddp"]], id="vit_tiny", marks=pytest.mark.ci),
    ],
)
def test_every_single_change_of_a_step_is_forecast_in_its_order(cases: list[list[str]]) -> None:
    """Of the page itself, on both ranks: nothing is added to it after the step."""
    for rank, measured in enumerate(run_ranks(2, timelines, cases)):
        for words, seen in zip(cases, measured, strict=True):
            observed = changes(forecast_profile(config(*words), 2, cuda=False, rank=rank))
            assert len(seen) > 50
            if "sharding=ddp" in words and words[-1] == INVOLVED[-1]:
                seen, observed = in_any_order_of_frees(seen), in_any_order_of_frees(observed)
            assert observed == seen, f"rank {rank} {' '.join(words)}"
