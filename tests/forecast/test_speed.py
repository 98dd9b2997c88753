"""Seconds of operators, of their schedules and of whole steps, worked by hand on a device with round figures."""

from __future__ import annotations

import math
from dataclasses import replace
from unittest import mock

import pytest
import torch
from torch._inductor import comm_analysis

from fsdp_lab.config import ConfigError
from fsdp_lab.forecast.forecast import forecast, kinds_of
from fsdp_lab.forecast.keep import unlike
from fsdp_lab.forecast.request import Request
from fsdp_lab.forecast.sentences import request_notes
from fsdp_lab.forecast.speed.costs import collective_seconds, gathers_at, in_tf32, seconds
from fsdp_lab.forecast.speed.device import Device, DeviceKind, Errors, Factors, KnownError, Reached, on_network
from fsdp_lab.forecast.speed.predict import BOUNDS, Speed, predict, step_seconds
from fsdp_lab.forecast.speed.program import FUSED, Kind, Operator, Stream
from fsdp_lab.forecast.speed.streams import Slot, schedule
from fsdp_lab.workloads.build import build_workload
from tests.forecast.planted import ROUND, gather, operator, sheet
from tests.ranks import config

TILED = {"flops": 5e11, "dtype": "bfloat16"}


@pytest.mark.parametrize(
    ("one", "expected"),
    [
        # 5e11 operations at half of 1e14 a second, and 1e9 bytes at half of 1e12
        (operator(Kind.matmul, flops=5e11, num_bytes=1e9, dtype="bfloat16"), 0.01),
        (operator(Kind.matmul, flops=5e11, num_bytes=1e9, dtype="float32"), 0.05 / 0.95),  # outside of the tensor cores
        (operator(Kind.matmul, flops=5e11, dtype="float8_e4m3fn"), 0.00625),  # two fifths of 2e14
        (operator(Kind.matmul, flops=1e6, num_bytes=1e9, dtype="bfloat16"), 0.002),
        # on 100 cores, tiles of 128 x 128: 10 x 11 in two waves; in one 10 x 10, of which the last ten are half full
        (operator(Kind.matmul, shape=(1, 1280, 1408, 64), **TILED), 0.01 / 0.55),
        (operator(Kind.matmul, shape=(1, 1216, 1280, 64), **TILED), 0.01 / 0.95),
        (operator(Kind.attention, flops=5e11, dtype="bfloat16"), 0.02),  # a quarter of the peak
        (operator(Kind.memory, num_bytes=1e9), 0.002),
        (replace(operator(Kind.memory, num_bytes=1e9), name=FUSED), 0.00125),  # four fifths
        (replace(operator(Kind.memory, num_bytes=1e9), stream=Stream.host), 0.05),
        (operator(Kind.transfer, num_bytes=1e9), 0.1),
        # 7 of 8 parts at 1e11, of an all-reduce twice; between two nodes 15 of 16 parts at 88.88 % of 4e10
        (gather(8e9, 8), 0.07),
        (gather(8e9, 8, Kind.scatter), 0.07),
        (gather(8e9, 8, Kind.reduce), 0.14),
        (gather(8e9, 16), 8e9 * 15 / 16 / (4e10 * (0.96 - 0.105 * math.log2(320 / 200)))),
        # hybrid sharding: one rank of each of two nodes shares the network with seven more such groups
        (operator(Kind.reduce, num_bytes=8e9, group=(0, 8)), 2 * 8e9 / 2 / (4e10 / 8)),
        (gather(8e9, 1), 0.0),  # alone nothing is sent
    ],
)
def test_arithmetic_or_bytes_bound_an_operator(one: Operator, expected: float):
    assert seconds(one, ROUND) == pytest.approx(expected)


def test_a_cpu_computes_16_bits_in_float32_but_for_products():
    """4e8 bytes as 8e8 at half of 1e12 a second; a quarter of 1e13 operations a second; half of 1e14."""
    cpu, half = replace(ROUND, kind=DeviceKind.cpu), {"dtype": "bfloat16"}
    assert seconds(operator(Kind.memory, num_bytes=4e8, **half), cpu) == pytest.approx(1.6e-3)
    assert seconds(operator(Kind.attention, flops=5e11, **half), cpu) == pytest.approx(0.2)
    assert seconds(operator(Kind.matmul, flops=5e11, **half), cpu) == pytest.approx(0.01)


@pytest.mark.parametrize(("gbit", "share"), [(100, 24 / 25), (200, 24 / 25), (800, 0.75), (3200, 216 / 400)])
def test_more_adapters_reach_a_smaller_share_of_their_network(gbit: float, share: float):
    """As NCCL's users measured: one of 200 Gbit/s, eight of 100, eight of 400; of a CPU's gloo nothing is known."""
    assert gathers_at(on_network(ROUND, gbit)) == pytest.approx(share, rel=2e-3)
    assert gathers_at(on_network(replace(ROUND, kind=DeviceKind.cpu), gbit)) == 1


def test_tf32_has_its_own_peak_which_convolutions_have_anyway():
    """Half of the peaks are reached, 95 % of that of float32 on GPUs, of attention a quarter."""
    device = replace(ROUND, peak_flops={"float32": 1e13, "tfloat32": 8e13, "bfloat16": 1e14})
    one = operator(Kind.matmul, flops=4e12, dtype="float32")
    convolution, half = replace(one, name="aten.convolution_backward"), replace(one, dtype="bfloat16")
    program = [one, convolution, half, replace(one, kind=Kind.attention)]

    def times(products: bool, of: Device = device) -> list[float]:
        return [seconds(each, of) for each in in_tf32(program, of, products)]

    assert times(True) == pytest.approx([0.1, 0.1, 0.08, 1.6])
    assert times(False) == pytest.approx([0.4 / 0.95, 0.1, 0.08, 1.6])
    assert times(True, replace(device, kind=DeviceKind.cpu)) == pytest.approx([0.8, 0.8, 0.08, 1.6])
    assert times(False, ROUND) == pytest.approx([0.4 / 0.95, 0.4 / 0.95, 0.08, 1.6]), "its data sheet has no TF32"
    with pytest.raises(ConfigError, match="round has no peak for tfloat32"):
        times(True, ROUND)


def test_hopper_and_blackwell_run_the_attention_of_cudnn():
    """80 instead of 40 % of the peak by microbenchmarks, of which a step reaches a quarter; backwards 86 % of that, and
    without cuDNN 30 / 40. In float32, which cuDNN's attention does not compute, and with a mask, other kernels run."""
    device = replace(ROUND, reached=Reached(attention=0.4, cudnn_attention=0.8))
    older = replace(device, reached=replace(device.reached, cudnn_attention=None))
    one = operator(Kind.attention, flops=4e12, dtype="bfloat16")
    flash = replace(one, name="aten._scaled_dot_product_flash_attention")
    backwards = replace(flash, name=f"{flash.name}_backward")
    masked = replace(flash, name="aten._scaled_dot_product_efficient_attention")
    assert seconds(flash, device) == pytest.approx(4e12 / (1e14 * 0.8 * 0.25))
    assert seconds(backwards, device) == pytest.approx(seconds(flash, device) / 0.86)
    assert seconds(masked, device) == seconds(flash, older) == pytest.approx(4e12 / (1e14 * 0.4 * 0.25))
    assert seconds(backwards, older) == pytest.approx(seconds(flash, older) * 40 / 30)
    assert seconds(replace(flash, dtype="float32"), device) == pytest.approx(4e12 / (1e13 * 0.4 * 0.25))


# By how much one may be of the other, either way.
AGREED = {8: 1.25, 16: 1.4, 64: 1.75}


@pytest.mark.parametrize("ranks", AGREED)
@pytest.mark.parametrize("kind", [Kind.gather, Kind.scatter, Kind.reduce])
def test_collectives_agree_with_pytorchs_copy_of_nccls_model(ranks: int, kind: Kind):
    """From 64 KiB to 1 GiB. Where there is no GPU it takes an A100 in nodes of 8. It has one adapter of 25 GB/s for
    what a ring sends between nodes; ours has the adapters of all devices, and is given that one here."""
    names = {Kind.gather: "ALL_GATHER", Kind.scatter: "REDUCE_SCATTER", Kind.reduce: "ALL_REDUCE"}
    a100 = replace(
        ROUND, link_bandwidth=240e9, network_bandwidth=25e9, latency_s=8.4e-6, link_latency_s=3.4e-6,
        network_latency_s=14e-6,
    )  # fmt: skip
    with mock.patch.object(torch.cuda, "is_available", return_value=False):
        comm_analysis.get_gpu_type.cache_clear()
        for exponent in range(16, 31):
            theirs = comm_analysis.estimate_nccl_collective_runtime_impl(
                2**exponent, ranks, comm_analysis.NCCL_COLL[names[kind]]
            )
            ours = collective_seconds(gather(2.0**exponent, ranks, kind), a100)
            assert 1 / AGREED[ranks] <= ours / (theirs / 1e3) <= AGREED[ranks], 2**exponent


def forward(units: int, seconds: float) -> list[tuple[Operator, float]]:
    """Of each unit: copy in, gather, copy out and compute, in 0, 2, 0 and so many seconds."""
    made = []
    for unit in range(units):
        one, shard, buffer, weights, result = (unit + 100 * number for number in range(5))
        for name, kind, stream, read, write, duration in (
            ("copy", Kind.memory, Stream.copy_in, one, shard, 0.0),
            ("gather", Kind.gather, Stream.gather, shard, buffer, 2.0),
            ("fsdp.split_with_sizes_copy", Kind.memory, Stream.compute, buffer, weights, 0.0),
            ("mm", Kind.matmul, Stream.compute, weights, result, seconds),
        ):
            made.append((Operator(name, kind, stream, "forward", "", reads=(read,), writes=(write,)), duration))
    return made


def backward(name: str, kind: Kind, stream: Stream, storage: int, group: tuple[int, ...] = ()) -> Operator:
    return Operator(name, kind, stream, "backward", "", reads=(storage,), writes=(storage + 1,), group=group)


def run(*timed: tuple[Operator, float], separate: bool = False, **more: object) -> list[Slot]:
    program, durations = zip(*timed, strict=True)
    return schedule(program, durations, 0.0, separate, **more)  # type: ignore[arg-type]


def end(made: list[Slot]) -> float:
    return max(slot.end for slot in made)


def test_a_gather_hides_behind_the_unit_before():
    """Units of 3 s wait for the first gather only: 2 + 3 * 3. Units of 1 s: three gathers and the last second. Before
    units of 9 s two gathers are ahead at most: the fourth waits until the second was copied out, 9 s after 2 s."""
    assert end(run(*forward(3, 3.0))) == pytest.approx(11.0)
    assert end(run(*forward(3, 1.0))) == pytest.approx(7.0)
    slow = [slot for slot in run(*forward(4, 9.0)) if slot.operator.kind is Kind.gather]
    assert [slot.begin for slot in slow] == pytest.approx([0.0, 2.0, 4.0, 11.0])


def test_groups_wait_for_those_that_share_their_communicator():
    """2 s each: side by side in different groups, one after the other in one, where scatters have none of their own."""
    first = (backward("gather", Kind.gather, Stream.gather, 10, (0, 1)), 2.0)
    for group, expected in (((0, 2), 2.0), ((0, 1), 4.0)):
        assert end(run(first, (backward("reduce", Kind.reduce, Stream.scatter, 20, group), 2.0))) == expected
    scatter = (backward("scatter", Kind.scatter, Stream.scatter, 20, (0, 1)), 2.0)
    assert end(run(first, scatter)) == 4.0
    assert end(run(first, scatter, separate=True)) == 2.0


def test_gradients_are_copied_when_the_scatter_before_is_over():
    """Copied at 0, scattered from 1 to 6; the unit after computes until 2, and its copying waits for 6."""

    def reduces(unit: int) -> list[tuple[Operator, float]]:
        copy = backward("fsdp.chunk_cat", Kind.memory, Stream.compute, unit)
        return [(copy, 1.0), (backward("scatter", Kind.scatter, Stream.scatter, unit + 1, (0, 1)), 5.0)]

    result = run(*reduces(1), (backward("mm", Kind.matmul, Stream.compute, 4), 1.0), *reduces(5))
    assert [(slot.begin, slot.end) for slot in result] == [(0, 1), (1, 6), (1, 2), (6, 7), (7, 12)]


LANGUAGE = ["task=language", "model=lm_tiny", "model.num_layers=1", "precision=bf16_mixed"]


def speed_of(*words: str, workers: int = 2, device: Device) -> Speed:
    speed = forecast(config(*LANGUAGE, "training.global_batch_size=16", *words), workers, True, sheet=device).speed
    assert speed is not None
    return speed


def test_tf32_is_forecast_by_its_peak_and_named_with_fp32() -> None:
    """MFU is the FLOPs that a worker's half of 16 samples needs, over what its device could do in the step with what
    multiplies: an H100 does 494.5 TFLOP/s in TF32 and 67 in float32."""
    device, settings = replace(sheet("h100_sxm"), launch_s=1e-9), config(*LANGUAGE)
    tf32, fp32 = (speed_of(f"precision={precision}", device=device) for precision in ("tf32", "fp32"))
    flops = build_workload(settings.model, settings.data, settings.task).train_flops_per_sample()
    assert flops and tf32.step_s < fp32.step_s
    for speed, peak in ((tf32, 494.5e12), (fp32, 67e12)):
        assert speed.mfu == pytest.approx(16 / 2 * flops / speed.step_s / peak)
        assert speed.tokens_per_s == pytest.approx(16 * settings.data.arguments["seq_len"] / speed.step_s)
    for precision, device_name, note in (
        ("fp32", "h100_sxm", "precision=tf32 multiplies them in TF32"),
        ("bf16_mixed", "h100_sxm", ""),
        ("tf32", "cpu", "precision=tf32 has no effect on a CPU: it computes as with precision=fp32."),
        ("float8", "h100_sxm", "precision=float8 without compile=true: one such step was published"),
        ("float8 compile=true", "h100_sxm", ""),
    ):
        asked = Request.of(config(*f"precision={precision}".split(), f"forecast.device={device_name}"), 2)
        notes = " ".join(each for each in request_notes([asked]) if "precision=tf32" in each or "float8" in each)
        assert (note in notes) and bool(note) == bool(notes), precision


def test_the_range_covers_how_slow_pageable_copies_are_assumed():
    """The 34 MB of a worker's offloaded shard cross twice, at 50 GB/s if they are pinned."""
    words = ("model=mlp", "model.hidden_dim=4096", "sharding=per_block", "precision=bf16_mixed")
    pinned, paged = (
        forecast(config(*words, f"offload={place}"), 2, cuda=True, sheet=sheet("h100_sxm")).speed
        for place in ("cpu", "cpu_unpinned")
    )
    assert pinned is not None and paged is not None
    assert pinned.step_s < paged.step_s < paged.high_s and pinned.low_s == paged.low_s and pinned.high_s < paged.high_s
    assert "assumed to be half as fast" in " ".join(paged.unlike)
    probed = replace(sheet("h100_sxm"), pageable_bandwidth=2e10)
    known = forecast(config(*words, "offload=cpu_unpinned"), 2, cuda=True, sheet=probed).speed
    assert (
        known is not None and pinned.step_s < known.step_s and known.step_s / known.low_s < paged.step_s / paged.low_s
    )


def test_a_step_is_known_by_how_it_differs_from_those_compared():
    for words, differs, kinds in (
        ("", [], ["eager"]),
        ("sharding=root precision=fp32", ["sharding=root", "parameters in float32"], ["eager"]),
        ("precision=fp16", ["parameters in float16"], ["eager"]),
        ("sharding.api=fsdp1", [], ["eager"]),
        ("sharding.tp=2", ["sharding.tp=2"], ["eager"]),
        ("offload=cpu compile=true", ["offload=cpu"], ["compiled"]),
        ("activation_offload=cpu", ["activation_offload=cpu"], ["eager"]),
        ("compile=true precision=float8", [], ["float8"]),
    ):
        asked, device = config(*LANGUAGE, *words.split()), sheet("h100_sxm")
        assert ([*unlike(asked, device)], kinds_of(asked, 8, device)) == (differs, kinds)
        assert kinds_of(asked, 16, device) == [*kinds, "several_nodes"]


@pytest.mark.parametrize(
    ("several_nodes", "expected"),
    [(KnownError(0.1, 0.15, 2), (0.2, 4)), (KnownError(0.1, 0.2, 1), (0.2, 1)), (None, (0.3, 0))],
)
def test_the_widest_error_of_its_kinds_is_that_of_a_step(several_nodes: KnownError | None, expected: tuple[float, int]):
    """Of equals that of fewer sources; `other` stands for a kind without one."""
    errors = Errors(KnownError(0.1, 0.3), float8=KnownError(0.1, 0.2, 4), several_nodes=several_nodes)
    speed = predict([gather(8e9, 16)], replace(ROUND, errors=errors), kinds=("float8", "several_nodes"))
    assert (speed.error, speed.sources) == expected


@pytest.mark.parametrize(
    ("words", "launch_s", "known"), [("", 1e-9, True), ("sharding=root", 1e-9, False), ("", 4e-6, False)]
)
def test_the_error_is_that_of_the_steps_that_were_compared(words: str, launch_s: float, known: bool):
    """Of steps that launches bound none were; of trials, if there were any, all were."""
    device = replace(sheet("a100_80gb"), launch_s=launch_s)
    speed = speed_of(*words.split(), workers=8, device=device)
    assert device.relative is not None and speed.bound_unseen == (speed.shares["launch"] > 0.5) == (launch_s > 1e-6)
    assert speed.of_sources == device.errors.of(["eager" if known else "other"]).p90
    assert speed.error == (0.13 if known else 0.254), "what later publishers showed: eager steps, and the widest"
    assert speed.relative == (device.relative.p90 if known else None)
    if speed.bound_unseen:  # and another host's launches may take a third
        faster = speed_of(workers=8, device=replace(device, launch_s=launch_s / 3)).step_s
        assert speed.low_s == pytest.approx(faster / (1 + speed.error))
    assert not speed_of(workers=8, device=replace(device, factors=Factors(settings=8, alike=True))).bound_unseen


def layer(kind: Kind, read: int) -> Operator:
    """Of a tensor-parallel layer, one second: a collective of ranks 0 and 1, at 0.8 of 1e11 bytes/s, or a product."""
    is_sent = kind.is_collective
    return Operator(
        "one", kind, Stream.layers if is_sent else Stream.compute, "backward", "", num_bytes=1.6e11 * is_sent,
        flops=5e13 * (not is_sent), dtype="bfloat16", group=(0, 1) * is_sent, reads=(read,), writes=(read + 1,),
    )  # fmt: skip


def test_what_tensor_parallel_layers_send_is_waited_for_and_hides_nothing():
    """Gather, product, scatter and product take 4 s, each after the one before. A transfer of 2 s hides beside them for
    nothing. A gather of FSDP2's does, too, but for the half that is lost of what collectives hide. Gradients are copied
    when FSDP2's own scatter is over, whatever layers scatter meanwhile."""
    layers = [layer(kind, n) for n, kind in enumerate((Kind.gather, Kind.matmul, Kind.scatter, Kind.matmul))]
    assert [slot.begin for slot in schedule(layers, [1.0] * 4, 0.0)] == [0, 1, 2, 3]
    lossy = replace(ROUND, efficiency=replace(ROUND.efficiency, overlap=0.5))
    transfer = replace(operator(Kind.transfer, num_bytes=2e10), stream=Stream.copy_in)
    ahead = replace(gather(4e11, 2), stream=Stream.gather, group=(0, 2))
    for program, expected in ((layers, 4.0), ([transfer, *layers], 4.0), ([ahead, *layers], 5.0)):
        assert step_seconds(program, lossy) == pytest.approx(expected)
    assert predict(layers, ROUND).shares == pytest.approx({**dict.fromkeys(BOUNDS, 0.0), "compute": 0.5, "tp": 0.5})
    reduced = (backward("scatter", Kind.scatter, Stream.scatter, 20, (0, 2)), 5.0)
    copy = (backward("fsdp.chunk_cat", Kind.memory, Stream.compute, 30), 1.0)
    assert run(reduced, (layers[2], 1.0), copy)[-1].begin == 5.0
