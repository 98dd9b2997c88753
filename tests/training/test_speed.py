"""Speed and its error, FLOPs and their use, against values worked out by hand; clocks are read in test_loop.py."""

from __future__ import annotations

import math
import statistics

import numpy as np
import pytest
import torch
from torchvision.models import ViT_B_16_Weights

from fsdp_lab.training import speed
from fsdp_lab.training.distributed import DistributedContext
from fsdp_lab.training.speed import Timed, speed_metrics, variance_of_sum
from fsdp_lab.workloads.build import build_workload
from tests.ranks import config

ALONE = DistributedContext(0, 0, 2, torch.device("cpu"))


def test_flops_are_those_by_hand_and_torchvisions() -> None:
    """MLP: a product of 1024 x 1024 and one of 1024 x 10: two operations each, and twice that again backwards, but for
    the gradient of the images. Torchvision publishes giga multiply-adds of the forward pass; ours are operations,
    three times that, but for those of the images."""
    by_hand = {
        "model=mlp": 2 * (2 * 1024 * 1024 + 3 * 1024 * 10),
        "model=vit_b_16 data=synthetic": pytest.approx(6 * ViT_B_16_Weights.IMAGENET1K_V1.meta["_ops"] * 1e9, rel=0.01),
    }
    trials = [config(*words.split()) for words in by_hand]
    flops = [build_workload(trial.model, trial.data).train_flops_per_sample() for trial in trials]
    assert flops == [*by_hand.values()]


def test_a_speed_is_that_of_all_timed_steps_of_the_run() -> None:
    """An epoch of 4 steps in 1 s and one of 2 in 3 s are 6 steps in 4 s; others had 0.1 and 0.5 of the cores meanwhile.
    Batches of two steps have means of 0.3 and 0.2, whose variance is 0.005: that of the sum of four is 4 * 2 * 0.005.
    The two later steps, each a batch, have one of 0.5: 2 * 0.5. A resume finds the first epoch in its metrics."""
    trial = config("training.global_batch_size=32")
    first = Timed().plus([0.5, 0.1, 0.1, 0.3], 0.1, 0.8)  # for data that are slow when they are first read
    metrics = speed_metrics([0.5, 0.1, 0.1, 0.3], trial, ALONE, 1.0, run=first)
    assert metrics == pytest.approx(
        {
            "perf/samples_per_s": 4 * 32 / 1.0, "perf/step_time_p50_s": 0.1, "perf/step_time_p95_s": 0.5,
            "perf/timed_steps": 4, "perf/timed_s": 1.0, "perf/others_cpu": 0.1, "perf/speed_error": math.sqrt(0.04),
            "perf/data_wait_share": 0.8,
        }
    )  # and no MFU: a CPU's peak is not known  # fmt: skip
    for before in (first, Timed.before([metrics, {"train/loss": 1.0}])):
        reported = speed_metrics([1.0, 2.0], trial, ALONE, None, run=before.plus([1.0, 2.0], 0.5, 0.2))
        assert reported == pytest.approx(
            {
                "perf/samples_per_s": 6 * 32 / 4, "perf/step_time_p50_s": 1.0, "perf/step_time_p95_s": 2.0,
                "perf/timed_steps": 6, "perf/timed_s": 4.0, "perf/others_cpu": (0.1 * 1 + 0.5 * 3) / 4,
                "perf/speed_error": math.sqrt(0.04 + 1) / 4, "perf/data_wait_share": 1.0 / 4,
            }
        )  # fmt: skip
    assert speed_metrics([], trial, ALONE, 1.0) == {}


def test_the_variance_of_correlated_steps() -> None:
    """Of an autoregressive series with coefficient 0.5 and unit noise the variance of a long mean is 1 / (1 - 0.5)**2
    over its length; taken for independent, its steps would say a third of that: 1 / (1 - 0.25)."""
    rng, collected = np.random.default_rng(0), []
    for _ in range(200):
        series = [0.0]
        for noise in rng.normal(size=1100):
            series.append(0.5 * series[-1] + noise)
        collected.append(variance_of_sum([10 + x for x in series[101:]]) / 1000)
    assert statistics.fmean(collected) == pytest.approx(4.0, rel=0.1)


def test_use_of_a_gpu_at_a_published_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchtitan's table for Llama 3.1 8B has 5,762 tokens/s on each of 8 H100s, sequence 8192. At 57.9 GFLOP a token
    that is 333.7 TFLOP/s, 33.7 % of 989."""
    monkeypatch.setattr(speed, "device_peak_flops", lambda config, ranks: 989e12)
    per_sample = (6 * 7_504_924_672 + 6 * 32 * 32 * 256 * 8192) * 8192.0
    ranks, trial = DistributedContext(0, 0, 8, torch.device("cpu")), config("training.global_batch_size=16")
    metrics = speed_metrics([16 * 8192 / (5762 * 8)], trial, ranks, per_sample, tokens_per_sample=8192)
    assert metrics["perf/tokens_per_s_per_device"] == pytest.approx(5762)
    assert metrics["perf/tflops_per_device"] == pytest.approx(333.70, abs=0.01)
    assert metrics["perf/mfu"] == pytest.approx(0.3374, abs=1e-4)
