"""What is forecast is what is measured on a CPU: to the byte, in every category, on every rank.

The measured side trains for real on two gloo ranks. `tests.forecast.cases` has every pair of values of the
axes. `make test-all` also runs every combination of the four main axes: experiments/forecast_accuracy.
"""

from __future__ import annotations

import itertools
import json
import tempfile
from pathlib import Path

import pytest

from fsdp_lab.forecast.forecast import forecast_profile
from tests.forecast.cases import MODELS, every_four_axes, overrides, pairwise
from tests.ranks import Memo, config, run_ranks

MEASURED = ("memory_profile=peaks", "training.max_steps=2")
Peaks = dict[str, dict[str, int]]


def measure(cases: list[list[str]]) -> list[Peaks]:
    """On one rank: train each case for two steps, and read what is left on disk of the second."""
    from fsdp_lab.training import train

    collected = []
    for words in cases:
        with tempfile.TemporaryDirectory() as folder:
            train(config(*MEASURED, *words), Path(folder), Memo())
            (file,) = Path(folder).glob("memory_peaks_rank*.json")
            content = json.loads(file.read_text())
            assert content["step"] == 2
            collected.append(content["peaks"])
    return collected


def differences(cases: list[list[str]], world_size: int = 2, ranks: int | None = None) -> list[str]:
    """Where a category of a rank was measured otherwise than forecast; of the first `ranks`, or of all."""
    collected = []
    for rank, measured in enumerate(run_ranks(world_size, measure, cases)[:ranks]):
        for words, peaks in zip(cases, measured, strict=True):
            forecast = forecast_profile(config(*words), world_size, cuda=False, rank=rank).peaks
            if forecast != peaks:
                collected.append(f"rank {rank} {' '.join(words)}: measured {peaks}, forecast {forecast}")
    return collected


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("model", "ranks", "step"), [("mlp", 2, 1), ("vit_tiny", 1, 6)])
def test_every_pair_of_settings_is_forecast_to_the_byte(model: str, ranks: int, step: int):
    """Of the larger model every sixth of these configurations, for the sake of the suite's time."""
    cases = [[*MODELS[model], *overrides(case)] for case in pairwise()[::step]]
    assert differences(cases, ranks=ranks) == []


REAL_SIZE = (["sharding=per_block", "precision=bf16_mixed", "training.grad_accum_steps=2", "training.max_grad_norm=1"],)


@pytest.mark.full
@pytest.mark.timeout(600)
def test_a_model_of_real_size_is_forecast_to_the_byte():
    assert differences([["model=vit_b_16", "training.global_batch_size=4", *words] for words in REAL_SIZE]) == []


@pytest.mark.full
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("model", "step"), [("mlp", 1), ("vit_tiny", 1), ("vit_b_16", 25)])
def test_every_combination_of_the_four_axes_is_forecast_to_the_byte(model: str, step: int):
    batch = 4 if model == "vit_b_16" else 32
    cases = [[*MODELS[model], f"training.global_batch_size={batch}", *overrides(c)] for c in every_four_axes()[::step]]
    result = differences(cases)
    print(f"{model}: {len(cases)} configurations on two ranks, {len(result)} differences")
    assert result == []


SHALLOW = "model.num_layers=3"  # the middle one has neighbours on both sides


def test_hybrid_sharding_over_four_ranks_is_forecast_to_the_byte():
    mesh = ["sharding.dp_replicate=2", "sharding=per_block", SHALLOW]
    cases = [mesh, [*mesh, "training.grad_accum_steps=2", "precision=bf16_mixed"]]
    cases.append(["sharding=per_block", "reshard_after_forward=to_size", "reshard_after_forward.size=2", SHALLOW])
    assert differences(cases, world_size=4) == []


def test_gradients_that_are_reduced_for_each_microbatch_are_forecast_to_the_byte():
    """And they take less: without it a rank holds the whole model's gradients between two microbatches."""
    accumulate = ["sharding=per_block", "training.grad_accum_steps=3", "training.global_batch_size=24", SHALLOW]
    cases = [[*accumulate, f"training.sync_each_microbatch={each}", f"precision={p}"]
             for each, p in (("true", "fp32"), ("true", "bf16_mixed"), ("false", "fp32"))]  # fmt: skip
    assert differences(cases, ranks=1) == []
    each, _, last = (forecast_profile(config(*words), 2, cuda=False).peaks["device"] for words in cases)
    assert each["unsharded_grad"] < last["unsharded_grad"] and each["total"] < last["total"]


@pytest.fixture(scope="module")
def measured() -> Peaks:
    (peaks,) = run_ranks(2, measure, [["sharding=per_block", "reshard_after_forward=always"]])[0]
    return peaks


@pytest.mark.parametrize(
    "wrong",
    [
        "activation_checkpointing=full", "training.grad_accum_steps=2", "precision=bf16", "sharding=root",
        "optimizer=sgd", "training.global_batch_size=64", "reshard_after_forward=never",
    ],
)  # fmt: skip
def test_another_configuration_is_not_equal(measured: Peaks, wrong: str):
    """The comparison can fail: what is measured differs from the forecast of any other setting."""
    other = ["sharding=per_block", "reshard_after_forward=always", wrong]
    assert forecast_profile(config(*other), 2, cuda=False).peaks != measured


Change = tuple[str, str, int, str, str]
SHARDINGS = ("ddp", "root", "per_block", "per_layer", "size_based")
PLAIN = ["precision=fp32"]
INVOLVED = ["precision=bf16_mixed", "training.grad_accum_steps=2", "training.max_grad_norm=1"]


def timelines(cases: list[list[str]]) -> list[list[Change]]:
    """On one rank: what the page of the second step of each case is made of."""
    from fsdp_lab.training import timeline, train

    kept: list[list[Change]] = []
    write = timeline.write_timeline

    def remember(profile, path, title, facts):
        kept.append(changes(profile))
        write(profile, path, title, facts)

    timeline.write_timeline = remember
    collected = []
    for words in cases:
        with tempfile.TemporaryDirectory() as folder:
            train(config("memory_profile=timeline", "training.max_steps=2", *words), Path(folder), Memo())
        collected.append(kept[-1])
    return collected


def changes(profile) -> list[Change]:
    deltas = zip(profile.events, profile.deltas(), strict=True)
    return [(event.place, event.category, delta, event.phase, event.module) for event, delta in deltas]


def in_any_order_of_frees(changes: list[Change]) -> list[Change]:
    """With each run of frees sorted: autocast frees its copies in the order of their addresses."""
    runs = itertools.groupby(changes, key=lambda change: change[2] < 0)
    return [change for are_frees, run in runs for change in (sorted(run) if are_frees else run)]


def test_every_single_change_of_a_step_is_forecast_in_its_order():
    """Of the page itself, for every sharding, on both ranks: nothing is added to it after the step."""
    mlp = [["model=mlp", *overrides({"sharding": s}), *words] for s in SHARDINGS for words in (PLAIN, INVOLVED)]
    cases = [*mlp, ["sharding=per_block", *INVOLVED], ["sharding=ddp"]]
    for rank, measured in enumerate(run_ranks(2, timelines, cases)):
        for words, seen in zip(cases, measured, strict=True):
            observed = changes(forecast_profile(config(*words), 2, cuda=False, rank=rank))
            if "sharding=ddp" in words and words[-1] == INVOLVED[-1]:
                seen, observed = in_any_order_of_frees(seen), in_any_order_of_frees(observed)
            assert observed == seen, f"rank {rank} {' '.join(words)}"
    assert len(seen) > 500
