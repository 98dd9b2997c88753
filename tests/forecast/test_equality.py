"""What is forecast is what is measured on a CPU: to the byte, in every category, on every rank.

The measured side trains for real on two gloo ranks. `tests.forecast.cases` has every pair of values of the
eight axes. FSDP_LAB_EVERY=1 also runs every combination of the four main axes: experiments/forecast_accuracy.
"""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path

import pytest

from fsdp_lab.forecast.forecast import forecast_profile
from tests.forecast.cases import every_four_axes, overrides, pairwise
from tests.ranks import Memo, config, run_ranks

MEASURED = ("memory_profile=peaks", "training.max_steps=2")
Peaks = dict[str, dict[str, int]]


def measure(cases: list[list[str]]) -> list[Peaks]:
    """On one rank: train each case for two steps, and read what is left on disk of the second."""
    from fsdp_lab.training import train

    found = []
    for words in cases:
        with tempfile.TemporaryDirectory() as folder:
            train(config(*MEASURED, *words), Path(folder), Memo())
            (file,) = Path(folder).glob("memory_peaks_rank*.json")
            content = json.loads(file.read_text())
            assert content["step"] == 2
            found.append(content["peaks"])
    return found


def differences(cases: list[list[str]], world_size: int = 2, ranks: int | None = None) -> list[str]:
    """Where a category of a rank was measured otherwise than forecast; of the first `ranks`, or of all."""
    found = []
    for rank, measured in enumerate(run_ranks(world_size, measure, cases)[:ranks]):
        for words, peaks in zip(cases, measured, strict=True):
            forecast = forecast_profile(config(*words), world_size, cuda=False, rank=rank).peaks
            if forecast != peaks:
                found.append(f"rank {rank} {' '.join(words)}: measured {peaks}, forecast {forecast}")
    return found


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("model", "ranks", "step"), [("mlp", 2, 1), ("vit_tiny", 1, 6)])
def test_every_pair_of_settings_is_forecast_to_the_byte(model: str, ranks: int, step: int):
    """Of the larger model every sixth of these configurations, for the sake of the suite's time."""
    cases = [[f"model={model}", *overrides(case)] for case in pairwise()[::step]]
    assert differences(cases, ranks=ranks) == []


REAL_SIZE = (["sharding=per_block", "precision=bf16_mixed", "training.grad_accum_steps=2", "training.max_grad_norm=1"],)


@pytest.mark.slow
@pytest.mark.skipif(not os.environ.get("FSDP_LAB_EVERY"), reason="half a minute: set FSDP_LAB_EVERY=1")
@pytest.mark.timeout(600)
def test_a_model_of_real_size_is_forecast_to_the_byte():
    assert differences([["model=vit_b_16", "training.global_batch_size=4", *words] for words in REAL_SIZE]) == []


@pytest.mark.skipif(not os.environ.get("FSDP_LAB_EVERY"), reason="half an hour: set FSDP_LAB_EVERY=1")
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("model", "step"), [("mlp", 1), ("vit_tiny", 1), ("vit_b_16", 25)])
def test_every_combination_of_the_four_axes_is_forecast_to_the_byte(model: str, step: int):
    batch = 4 if model == "vit_b_16" else 32
    cases = [
        [f"model={model}", f"training.global_batch_size={batch}", *overrides(c)] for c in every_four_axes()[::step]
    ]
    found = differences(cases)
    print(f"{model}: {len(cases)} configurations on two ranks, {len(found)} differences")
    assert found == []


def test_hybrid_sharding_over_four_ranks_is_forecast_to_the_byte():
    mesh = ["sharding.dp_replicate=2", "sharding=per_block"]
    cases = [mesh, [*mesh, "training.grad_accum_steps=2", "precision=bf16_mixed"]]
    cases.append(["sharding=per_block", "reshard_after_forward=to_size", "reshard_after_forward.size=2"])
    assert differences(cases, world_size=4) == []


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


def _events(words: list[str]) -> list[tuple[str, str, int, str]]:
    from fsdp_lab.training import train
    from fsdp_lab.training.memory import MemoryProfile

    kept = []
    write = MemoryProfile._write

    def remember(self, profile):
        kept.append(profile)
        write(self, profile)

    MemoryProfile._write = remember
    with tempfile.TemporaryDirectory() as folder:
        train(config(*MEASURED, *words), Path(folder), Memo())
    return changes(kept[-1])


def changes(profile) -> list[tuple[str, str, int, str]]:
    deltas = zip(profile.events, profile.deltas(), strict=True)
    return [(event.place, event.category, delta, event.phase) for event, delta in deltas]


def test_every_single_change_of_a_step_is_forecast_in_its_order():
    words = ["sharding=per_block", "precision=bf16_mixed", "training.grad_accum_steps=2", "training.max_grad_norm=1"]
    measured = run_ranks(2, _events, words)[0]
    assert len(measured) > 1000
    assert changes(forecast_profile(config(*words), 2, cuda=False)) == measured
