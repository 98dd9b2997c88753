"""What holds for every forecast, on programs traced of a tiny language model and on random ones."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest

from fsdp_lab.forecast.forecast import forecast_step
from fsdp_lab.speed.costs import seconds
from fsdp_lab.speed.device import Device, load_device
from fsdp_lab.speed.program import Kind, Operator, Stream
from fsdp_lab.speed.streams import Schedule, schedule
from tests.ranks import config
from tests.speed.test_streams import busy

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


def step(program: tuple[Operator, ...], device: Device = A100) -> Schedule:
    launches = [device.launch_s] * len(program)
    return schedule(program, [seconds(operator, device) for operator in program], launches)


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


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("launch_s", [0.0, A100.launch_s])
def test_more_bandwidth_and_arithmetic_never_slow_a_traced_step(name: str, launch_s: float):
    program, device = traced(SETTINGS[name]), replace(A100, launch_s=launch_s)
    _never_slower(program, device)


def test_more_bandwidth_and_arithmetic_never_slow_an_invented_step():
    for seed in range(30):
        _never_slower(invented(seed), replace(A100, launch_s=seed % 2 * 1e-6))


def _never_slower(program: tuple[Operator, ...], device: Device) -> None:
    before = step(program, device).seconds
    for factor in (1.1, 3.0, 100.0):
        for key in BANDWIDTHS:
            faster = replace(device, **{key: factor * getattr(device, key)})
            assert step(program, faster).seconds <= before * (1 + 1e-12), (key, factor)
        peaks = {dtype: factor * peak for dtype, peak in device.peak_flops.items()}
        assert step(program, replace(device, peak_flops=peaks)).seconds <= before * (1 + 1e-12), factor


def test_alone_a_rank_communicates_nothing():
    program = traced(("sharding=per_block",), workers=1)
    assert sum(seconds(operator, A100) for operator in program if operator.kind.is_collective) == 0.0
    together = traced(("sharding=per_block",), workers=8)
    assert sum(seconds(operator, A100) for operator in together if operator.kind.is_collective) > 0.0


@pytest.mark.parametrize("name", SETTINGS)
def test_twice_the_batch_computes_for_twice_as_long_at_most(name: str):
    once, twice = (busy(step(traced(SETTINGS[name], batch=batch)))[Stream.compute] for batch in (32, 64))
    assert once < twice <= 2 * once


@pytest.mark.parametrize("name", SETTINGS)
def test_busy_times_of_streams_add_up_to_what_each_operator_takes(name: str):
    program = traced(SETTINGS[name])
    made = step(program)
    for stream, taken in busy(made).items():
        assert taken == pytest.approx(sum(seconds(o, A100) for o in program if o.stream is stream)), stream
    issued = len(program) * A100.launch_s
    assert max(busy(made).values()) <= made.seconds <= sum(busy(made).values()) + issued


@pytest.mark.parametrize("name", SETTINGS)
def test_no_stream_does_two_things_at_once(name: str):
    slots = step(traced(SETTINGS[name])).slots
    for stream in Stream:
        mine = [slot for slot in slots if slot.operator.stream is stream]
        assert all(one.end <= other.begin for one, other in pairwise(mine)), stream


def test_equal_settings_have_equal_predictions():
    first = step(traced(SETTINGS["hybrid"]))
    traced.cache_clear()
    assert step(traced(SETTINGS["hybrid"])) == first
