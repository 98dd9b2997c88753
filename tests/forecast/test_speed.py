"""Predicted speeds of whole steps: what they are worked out from, and how sure they are."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fsdp_lab.forecast.forecast import forecast, unlike
from fsdp_lab.forecast.run import Request
from fsdp_lab.forecast.sentences import request_notes
from fsdp_lab.forecast.speed.device import Device, Factors, on_network
from fsdp_lab.forecast.speed.predict import Speed, predict
from fsdp_lab.workloads.build import build_workload
from tests.forecast.planted import ROUND, gather, sheet
from tests.ranks import config

LANGUAGE = ["task=language", "model=lm_tiny", "model.num_layers=1", "precision=bf16_mixed"]


def speed_of(*words: str, workers: int = 2, device: Device) -> Speed:
    speed = forecast(config(*LANGUAGE, "training.global_batch_size=16", *words), workers, True, sheet=device).speed
    assert speed is not None
    return speed


def test_tokens_and_mfu_by_hand():
    """MFU is the FLOPs that the samples of a worker need, over what its device could do in the step."""
    settings, speed = config(*LANGUAGE), speed_of(device=sheet())
    assert speed.samples == 16 and speed.tokens == settings.data.arguments["seq_len"]
    assert speed.tokens_per_s == pytest.approx(16 * speed.tokens / speed.step_s)
    flops = build_workload(settings.model, settings.data, settings.task).train_flops_per_sample()
    assert flops and speed.mfu == pytest.approx(16 / 2 * flops / speed.step_s / 312e12)


def test_tf32_is_forecast_by_its_own_peak_and_fp32_says_that_it_exists() -> None:
    """An H100 does 494.5 TFLOP/s in TF32 and 67 in float32; MFU is over the peak of what multiplies."""
    device = replace(sheet("h100_sxm"), launch_s=1e-9)
    tf32, fp32 = (speed_of(f"precision={precision}", device=device) for precision in ("tf32", "fp32"))
    assert tf32.mfu and fp32.mfu and tf32.step_s < fp32.step_s
    assert (fp32.step_s * fp32.mfu) / (tf32.step_s * tf32.mfu) == pytest.approx(494.5 / 67)
    without = replace(device, peak_flops={"bfloat16": 1e14, "float32": 1e13})
    unknown = forecast(config(*LANGUAGE, "precision=tf32"), 2, cuda=True, sheet=without)
    assert unknown.speed is None and "has no peak for tfloat32" in (unknown.no_speed or "")
    for precision, device_name, note in (
        ("fp32", "h100_sxm", "precision=tf32 multiplies them in TF32"),
        ("grad_bf16", "h100_sxm", "precision=tf32 multiplies them in TF32"),
        ("bf16_mixed", "h100_sxm", ""),
        ("tf32", "h100_sxm", ""),
        ("tf32", "cpu", "precision=tf32 has no effect on a CPU: it computes as with precision=fp32."),
    ):
        asked = Request.of(config(f"precision={precision}", f"forecast.device={device_name}"), 2)
        notes = " ".join(each for each in request_notes([asked]) if "precision=tf32" in each)
        assert (note in notes) and bool(note) == bool(notes), precision


def test_pageable_copies_are_slower_than_pinned_ones_by_an_assumption_that_the_range_covers():
    """The 34 MB of a worker's offloaded shard cross twice, at 50 GB/s if they are pinned."""
    words = ("model=mlp", "model.hidden_dim=4096", "sharding=per_block", "precision=bf16_mixed")
    pinned, paged = (
        forecast(config(*words, f"offload={place}"), 2, cuda=True, sheet=sheet("h100_sxm")).speed
        for place in ("cpu", "cpu_unpinned")
    )
    assert pinned is not None and paged is not None
    assert pinned.step_s < paged.step_s < paged.high_s and pinned.low_s == paged.low_s and pinned.high_s < paged.high_s
    assert "assumed to be half as fast" in " ".join(paged.unlike)


@pytest.mark.parametrize(
    ("words", "workers", "differs"),
    [
        ([], 8, []),
        ([], 16, ["several nodes"]),
        (["sharding.dp_replicate=2"], 16, ["several nodes", "hybrid sharding over several nodes"]),
        (["sharding=root", "precision=fp32"], 8, ["sharding=root", "parameters in float32"]),
        (["offload=cpu", "compile=true"], 8, ["compile=true", "offload=cpu"]),
        (["precision=float8"], 8, ["float8"]),
    ],
)
def test_a_step_is_known_by_how_it_differs_from_those_looked_at(words: list[str], workers: int, differs: list[str]):
    assert [*unlike(config(*LANGUAGE, *words), workers, sheet("h100_sxm"))] == differs


@pytest.mark.parametrize(("words", "known"), [([], True), (["sharding=root"], False)])
def test_the_error_is_that_of_the_steps_that_were_looked_at(words: list[str], known: bool):
    device = replace(sheet("h100_sxm"), launch_s=1e-9)
    speed = speed_of(*words, workers=8, device=device)
    assert device.relative is not None and known == (not speed.unlike)
    assert speed.error == (device.error if known else device.error_elsewhere).p90
    assert speed.relative == (device.relative.p90 if known else None)


def test_of_a_step_that_launches_bound_no_error_is_claimed():
    device = sheet("h100_sxm")
    small = speed_of(workers=8, device=device)
    assert small.shares["launch"] > 0.5 and small.bound_unseen and small.relative is None
    assert small.error == device.error_elsewhere.p90
    corrected = speed_of(workers=8, device=replace(device, factors=Factors(settings=8)))
    assert not corrected.bound_unseen, "the error of trials is that of such steps, too"


NODES = 2 * ROUND.node_size  # 320 Gbit/s a node


def test_a_range_covers_half_and_twice_of_a_network_that_is_assumed():
    """15 of 16 parts of 4e10 bytes cross at 4e10 bytes/s; twice of it is still below the links' 1e11."""
    device = replace(ROUND, error_elsewhere=replace(ROUND.error_elsewhere, p90=0.1))
    speed = predict([gather(4e10, NODES)], device, looked_at=False)
    step_s = 15 / 16
    assert speed.step_s == pytest.approx(step_s)
    assert speed.low_s == pytest.approx(step_s / 2 / 1.1) and speed.high_s == pytest.approx(step_s * 2 / 0.9)
    assert speed.network is not None and speed.network.gbit == 320 and len(speed.network.steps) == 9
    assert min(speed.network.steps) == pytest.approx(160) and max(speed.network.steps) == pytest.approx(640)
    assert predict([gather(4e10, ROUND.node_size)], ROUND).network is None, "one node uses none"


@pytest.mark.parametrize("device", [on_network(ROUND, 320), replace(ROUND, factors=Factors(settings=8))])
def test_a_network_that_is_given_or_that_trials_ran_on_widens_no_range(device: Device):
    speed = predict([gather(4e10, NODES)], device)
    assert speed.network is not None and not speed.network.steps
    assert speed.high_s == pytest.approx(speed.step_s / (1 - device.error.p90))
