"""What holds for every forecast, on programs traced of a tiny language model and on random ones."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest

from fsdp_lab.forecast.forecast import forecast_step
from fsdp_lab.forecast.speed.costs import seconds
from fsdp_lab.forecast.speed.device import Device, load_device
from fsdp_lab.forecast.speed.program import Kind, Operator, Stream
from fsdp_lab.forecast.speed.streams import Slot, schedule
from tests.ranks import config
from tests.speed.test_streams import busy, end

pytestmark = pytest.mark.ci

A100 = load_device(Path(__file__).parents[2] / "conf" / "device" / "a100_80gb.yaml")
LM = [
    "model=lm_tiny",
    "model.num_layers=1",
    "task=language",
    "data=synthetic_tokens",
    "data.vocab_size=256",
    "data.seq_len=64",
]
SETTINGS = {
    "sharded": ("sharding=per_block", "precision=bf16_mixed"),
    "replicas": ("sharding=ddp", "precision=fp32"),
    "hybrid": ("sharding=per_block", "sharding.dp_replicate=2", "activation_checkpointing=full"),
    "offloaded": ("sharding=per_block", "offload=cpu"),
}
BANDWIDTHS = ["memory_bandwidth", "link_bandwidth", "network_bandwidth", "host_bandwidth", "host_memory_bandwidth"]


@cache
def traced(words: tuple[str, ...], workers: int = 16, batch: int = 32) -> tuple[Operator, ...]:
    setting = config(*LM, *words, f"training.global_batch_size={batch}")
    return tuple(forecast_step(setting, workers, cuda=True, traced=True).program)


def step(program: tuple[Operator, ...], device: Device = A100) -> list[Slot]:
    return schedule(program, [seconds(operator, device) for operator in program], device.launch_s)


def invented(seed: int) -> tuple[Operator, ...]:
    """Operators of all kinds and streams in any order, on 20 storages."""
    chance = random.Random(seed)
    collected = []
    for _ in range(150):
        kind, stream = chance.choice(list(Kind)), chance.choice(list(Stream))
        sizes = {"flops": 10 ** chance.uniform(6, 12), "num_bytes": 10 ** chance.uniform(3, 9)}
        touched = [tuple(chance.sample(range(20), 2)) for _ in range(2)]
        group = tuple(range(chance.choice([1, 8, 16, 64])))
        name = chance.choice(["mm", "fsdp.split_with_sizes_copy", "some_backward"])
        phase = chance.choice(["forward", "backward", "optimizer"])
        reads, writes = touched
        collected.append(
            Operator(name, kind, stream, phase, "", dtype="bfloat16", group=group, reads=reads, writes=writes, **sizes)
        )
    return tuple(collected)


def test_more_bandwidth_and_arithmetic_never_slow_a_step_down():
    """Traced or invented, with and without the time of launches."""
    programs = [traced(words) for words in SETTINGS.values()] * 2 + [invented(seed) for seed in range(30)]
    for number, program in enumerate(programs):
        launch_s = A100.launch_s if number < len(SETTINGS) else number % 2 * 1e-6
        _never_slower(program, replace(A100, launch_s=launch_s))


def _never_slower(program: tuple[Operator, ...], device: Device) -> None:
    before = end(step(program, device))
    for factor in (1.1, 3.0, 100.0):
        for key in BANDWIDTHS:
            faster = replace(device, **{key: factor * getattr(device, key)})
            assert end(step(program, faster)) <= before * (1 + 1e-12), (key, factor)
        peaks = {dtype: factor * peak for dtype, peak in device.peak_flops.items()}
        assert end(step(program, replace(device, peak_flops=peaks))) <= before * (1 + 1e-12), factor


@pytest.mark.parametrize("name", SETTINGS)
def test_twice_the_batch_computes_for_twice_as_long_at_most(name: str):
    once, twice = (busy(step(traced(SETTINGS[name], batch=batch)))[Stream.compute] for batch in (32, 64))
    assert once < twice <= 2 * once


@pytest.mark.parametrize("name", SETTINGS)
def test_a_stream_does_one_thing_at_a_time_and_is_busy_for_as_long_as_its_operators_take(name: str):
    program = traced(SETTINGS[name])
    made = step(program)
    for stream, taken in busy(made).items():
        assert taken == pytest.approx(sum(seconds(o, A100) for o in program if o.stream is stream)), stream
        slots = [slot for slot in made if slot.operator.stream is stream]
        assert all(one.end <= other.begin for one, other in pairwise(slots)), stream
    issued = len(program) * A100.launch_s
    assert max(busy(made).values()) <= end(made) <= sum(busy(made).values()) + issued
