"""Step times, percentiles and FLOPs, against numbers worked out by hand."""

from __future__ import annotations

import math
import statistics

import numpy as np
import pytest
import torch
from torchvision.models import ViT_B_16_Weights

from fsdp_lab.training import speed
from fsdp_lab.training.distributed import DistributedContext
from fsdp_lab.training.speed import StepTimer, Timed, percentile, speed_metrics, variance_of_sum
from fsdp_lab.workloads.build import build_workload
from tests.ranks import config

ALONE = DistributedContext(0, 0, 2, torch.device("cpu"))


@pytest.mark.parametrize(
    ("count", "q", "expected"),
    [(1, 0.95, 1), (2, 0.5, 1), (3, 0.5, 2), (20, 0.95, 19), (21, 0.95, 20), (100, 0.95, 95)],
)
def test_the_smallest_that_a_share_does_not_exceed(count: int, q: float, expected: int) -> None:
    """The smallest of 1, 2, ... count that at least a share q of them does not exceed."""
    assert percentile([float(i) for i in range(1, count + 1)], q) == expected


def test_flops_are_those_by_hand_and_torchvisions() -> None:
    """MLP: a product of 1024 x 1024 and one of 1024 x 10: two operations each, and twice that again backwards.
    Torchvision publishes giga multiply-adds of the forward pass; ours are operations, three times that."""
    trial = config("model=mlp")
    assert build_workload(trial.model, trial.data).train_flops_per_sample() == 3 * 2 * (1024 * 1024 + 1024 * 10)
    published = ViT_B_16_Weights.IMAGENET1K_V1.meta["_ops"] * 1e9
    trial = config("model=vit_b_16", "data=synthetic")
    assert build_workload(trial.model, trial.data).train_flops_per_sample() == pytest.approx(6 * published, rel=0.01)


class Clock:
    def __init__(self, *times: float) -> None:
        self.times = iter(times)

    def __call__(self) -> float:
        return next(self.times)


def test_speed_of_an_epoch_by_hand() -> None:
    trial = config("training.global_batch_size=32")
    reported = speed_metrics([0.5, 0.1, 0.1, 0.3], trial, ALONE, 1.0)
    # two batches of two: means of 0.3 and 0.2, of which the variance is 0.005; that of the sum of four 4 * 2 * 0.005
    assert reported == pytest.approx(
        {
            "perf/samples_per_s": 4 * 32 / 1.0, "perf/step_time_p50_s": 0.1, "perf/step_time_p95_s": 0.5,
            "perf/timed_steps": 4, "perf/timed_s": 1.0, "perf/others_cpu": 0, "perf/speed_error": math.sqrt(0.04),
        }
    )  # and no MFU: a CPU's peak is not known  # fmt: skip
    assert speed_metrics([], trial, ALONE, 1.0) == {}


def test_a_speed_is_that_of_all_timed_steps_of_the_run() -> None:
    """An epoch of 4 steps in 1 s and one of 2 in 3 s are 6 steps in 4 s; others had 0.1 and 0.5 of the cores meanwhile.
    A resume finds what the epochs before it have timed in their metrics."""
    trial = config("training.global_batch_size=32")
    first = Timed().plus([0.5, 0.1, 0.1, 0.3], 0.1)
    metrics = speed_metrics([0.5, 0.1, 0.1, 0.3], trial, ALONE, None, run=first)
    for before in (first, Timed.before([metrics, {"train/loss": 1.0}])):
        reported = speed_metrics([1.0, 2.0], trial, ALONE, None, run=before.plus([1.0, 2.0], 0.5))
        assert reported["perf/samples_per_s"] == pytest.approx(6 * 32 / 4)
        assert reported["perf/others_cpu"] == pytest.approx((0.1 * 1 + 0.5 * 3) / 4)
        assert reported["perf/speed_error"] == pytest.approx(math.sqrt(0.04 + 1) / 4), (
            "batches of two steps, and of one"
        )
        assert reported["perf/step_time_p50_s"] == 1.0, "of the epoch alone"
    assert Timed.before([{"perf/samples_per_s": 1.0}]) == Timed(), "of a version that told less"


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
    assert variance_of_sum([1.0, 2.0, 3.0]) == pytest.approx(3.0), "three batches of one step, whose variance is 1"
    assert variance_of_sum([1.0]) == 0.0


def test_the_timer_leaves_out_warm_up_gaps_and_their_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wait is part of the step that follows it; those of warm-up and of untimed steps are left out."""
    clock = Clock(0.0, 1.0, 5.0, 9.0, 10.0, 13.0, 20.0, 30.0, 80.0, 100.0, 101.0, 103.0, 110.0, 120.0, 190.0)
    monkeypatch.setattr(speed.time, "perf_counter", clock)
    timer = StepTimer(warmup_steps=1, ranks=ALONE)
    timer.start()  # 0
    with timer.waiting():  # 1 to 5: of a step of warm-up
        pass
    timer.step_done()  # 9
    with timer.waiting():  # 10 to 13
        pass
    timer.step_done()  # 20
    with timer.waiting():  # 30 to 80: of a step that is not timed
        pass
    timer.start()  # 100
    with timer.waiting():  # 101 to 103
        pass
    timer.step_done()  # 110
    with timer.waiting():  # 120 to 190: the epoch is over
        pass
    assert timer.take() == [11, 10] and timer.waited_s == 3 + 2
    assert timer.take() == [] and timer.waited_s == 0


def test_use_of_a_gpu_at_a_published_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchtitan's table for Llama 3.1 8B has 5,762 tokens/s on each of 8 H100s, sequence 8192. At 57.9 GFLOP a token
    that is 333.7 TFLOP/s, 33.7 % of 989."""
    monkeypatch.setattr(speed, "device_peak_flops", lambda config, ranks: 989e12)
    per_sample = (6 * 7_504_924_672 + 6 * 32 * 32 * 256 * 8192) * 8192.0
    ranks, batch = DistributedContext(0, 0, 8, torch.device("cpu")), 16
    trial = config(f"training.global_batch_size={batch}")
    metrics = speed_metrics([batch * 8192 / (5762 * 8)], trial, ranks, per_sample, None, 8192)
    assert metrics["perf/tokens_per_s_per_device"] == pytest.approx(5762)
    assert metrics["perf/tflops_per_device"] == pytest.approx(333.70, abs=0.01)
    assert metrics["perf/mfu"] == pytest.approx(0.3374, abs=1e-4)
    unknown = speed_metrics([0.5], trial, ranks, None, 0.1, 10)
    assert unknown["perf/data_wait_share"] == 0.2
    assert "perf/tokens_per_s" in unknown and not {"perf/mfu", "perf/tflops_per_device"} & unknown.keys()
