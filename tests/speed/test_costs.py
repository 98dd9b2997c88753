"""Seconds of single operators, worked by hand on a device with round figures."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import pytest
import torch
from torch._inductor import comm_analysis

from fsdp_lab.config import ConfigError
from fsdp_lab.forecast.speed.costs import collective_seconds, in_tf32, occupied, seconds
from fsdp_lab.forecast.speed.device import Basis, Device, DeviceKind, Efficiency, KnownError, Reached
from fsdp_lab.forecast.speed.program import Kind, Operator, Stream

ROUND = Device(
    name="round", kind=DeviceKind.cuda, basis=Basis.data_sheet,
    memory_gib=80, peak_flops={"bfloat16": 1e14, "float32": 1e13}, memory_bandwidth=1e12, num_cores=100,
    link_bandwidth=1e11, node_size=8, network_bandwidth=4e10, host_bandwidth=1e10, host_memory_bandwidth=2e10,
    launch_s=0.0, latency_s=0.0, link_latency_s=0.0, network_latency_s=0.0, reached=Reached(),
    efficiency=Efficiency(matmul=0.5, attention=0.25, memory=0.5, link=1.0, network=1.0), error=KnownError(0.1, 0.2),
    error_elsewhere=KnownError(0.1, 0.2),
)  # fmt: skip


def operator(kind: Kind, **facts: object) -> Operator:
    return Operator("one", kind, Stream.compute, "forward", "", **facts)  # type: ignore[arg-type]


def gather(num_bytes: float, ranks: int, kind: Kind = Kind.gather) -> Operator:
    return operator(kind, num_bytes=num_bytes, group=tuple(range(ranks)))


def test_arithmetic_bounds_what_computes_more_than_it_reads():
    """5e11 operations at half of 1e14 a second, and 1e9 bytes at half of 1e12."""
    assert seconds(operator(Kind.matmul, flops=5e11, num_bytes=1e9, dtype="bfloat16"), ROUND) == pytest.approx(0.01)
    assert seconds(operator(Kind.matmul, flops=5e11, num_bytes=1e9, dtype="float32"), ROUND) == pytest.approx(0.1)
    assert seconds(operator(Kind.attention, flops=5e11, dtype="bfloat16"), ROUND) == pytest.approx(0.02)


def test_tf32_has_its_own_peak_and_convolutions_have_it_by_default():
    device = replace(ROUND, peak_flops={"float32": 1e13, "tfloat32": 8e13, "bfloat16": 1e14})
    one = replace(operator(Kind.matmul, flops=4e12, dtype="float32"), name="aten.mm")
    convolution, half = replace(one, name="aten.convolution_backward"), replace(one, dtype="bfloat16")
    attention = replace(one, kind=Kind.attention, name="aten._scaled_dot_product_efficient_attention")
    program = [one, convolution, half, attention]

    def times(products: bool, of: Device = device) -> list[float]:
        return [seconds(each, of) for each in in_tf32(program, of, products)]

    assert times(True) == pytest.approx([0.1, 0.1, 0.08, 1.6])  # half of the peaks, of attention a quarter
    assert times(False) == pytest.approx([0.8, 0.1, 0.08, 1.6])
    assert times(False, ROUND) == pytest.approx([0.8, 0.8, 0.08, 1.6]), "its data sheet has no TF32"
    with pytest.raises(ConfigError, match="round has no peak for tfloat32"):
        times(True, ROUND)


def test_attention_is_slower_backwards():
    """30 of 40 % of the peak, in the middle of what its paper says."""
    forwards = operator(Kind.attention, flops=5e11, dtype="bfloat16")
    backwards = replace(forwards, name="aten._scaled_dot_product_flash_attention_backward")
    assert seconds(backwards, ROUND) == pytest.approx(seconds(forwards, ROUND) * 40 / 30)


def test_hopper_and_blackwell_run_the_attention_of_cudnn():
    """80 instead of 40 % of the peak by microbenchmarks, of which a step reaches a quarter; backwards 86 % of that.

    In float32, which cuDNN's attention does not compute, and with a mask, other kernels run.
    """
    device = replace(ROUND, reached=Reached(attention=0.4, cudnn_attention=0.8))
    flash = replace(
        operator(Kind.attention, flops=4e12, dtype="bfloat16"), name="aten._scaled_dot_product_flash_attention"
    )
    assert seconds(flash, device) == pytest.approx(4e12 / (1e14 * 0.8 * 0.25))
    backwards = replace(flash, name=f"{flash.name}_backward")
    assert seconds(backwards, device) == pytest.approx(seconds(flash, device) / 0.86)
    masked = replace(flash, name="aten._scaled_dot_product_efficient_attention")
    assert seconds(masked, device) == pytest.approx(4e12 / (1e14 * 0.4 * 0.25))
    assert seconds(replace(flash, dtype="float32"), device) == pytest.approx(4e12 / (1e13 * 0.4 * 0.25))
    older = replace(device, reached=replace(device.reached, cudnn_attention=None))
    assert seconds(flash, older) == 2 * seconds(flash, device)


def test_bandwidth_bounds_the_rest():
    assert seconds(operator(Kind.memory, num_bytes=1e9), ROUND) == pytest.approx(0.002)
    assert seconds(operator(Kind.matmul, flops=1e6, num_bytes=1e9, dtype="bfloat16"), ROUND) == pytest.approx(0.002)
    assert seconds(operator(Kind.transfer, num_bytes=1e9), ROUND) == pytest.approx(0.1)
    on_host = replace(operator(Kind.memory, num_bytes=1e9), stream=Stream.host)
    assert seconds(on_host, ROUND) == pytest.approx(0.05)


@pytest.mark.parametrize(
    ("shape", "share"),
    [
        ((1, 1280, 1280, 64), 1.0),  # 100 tiles of 128 x 128, one for each core
        ((1, 1280, 1408, 64), 0.55),  # 110 tiles in two waves of 100
        ((1, 1216, 1280, 64), 0.95),  # of the last row of tiles half is computed for nothing
        ((2, 1280, 1280, 64), 1.0),
    ],
)
def test_tiles_run_in_waves(shape: tuple[int, int, int, int], share: float):
    assert occupied(shape, 100) == pytest.approx(share)


def test_a_ring_passes_all_parts_but_one():
    assert collective_seconds(gather(8e9, 8), ROUND) == pytest.approx(0.07)
    assert collective_seconds(gather(8e9, 8, Kind.scatter), ROUND) == pytest.approx(0.07)
    assert collective_seconds(gather(8e9, 8, Kind.reduce), ROUND) == pytest.approx(0.14)
    assert collective_seconds(gather(8e9, 16), ROUND) == pytest.approx(8e9 * 15 / 16 / 4e10), "the network is slower"


def test_an_all_reduce_reaches_more_of_the_network():
    """A gather reaches half of 4e10 bytes/s, an all-reduce 1.7 times as much but not more than all of it.

    Within a node both are as fast as the links.
    """
    for network, share in ((0.5, 0.85), (0.9, 1.0)):
        device = replace(ROUND, efficiency=replace(ROUND.efficiency, network=network))
        reduced = collective_seconds(gather(8e9, 16, Kind.reduce), device)
        assert reduced == pytest.approx(2 * 8e9 * 15 / 16 / (4e10 * share))
        assert collective_seconds(gather(8e9, 16), device) == pytest.approx(8e9 * 15 / 16 / (4e10 * network))
    device = replace(ROUND, efficiency=replace(ROUND.efficiency, network=0.5))
    assert collective_seconds(gather(8e9, 8, Kind.reduce), device) == pytest.approx(0.14)


def test_alone_nothing_is_sent():
    assert seconds(gather(8e9, 1), ROUND) == 0.0


def test_a_dtype_without_a_peak_names_those_that_have_one():
    with pytest.raises(ConfigError, match="round has no peak for float64; its data sheet has bfloat16, float32"):
        seconds(operator(Kind.matmul, flops=1.0, dtype="float64"), ROUND)


def test_what_microbenchmarks_reach_is_the_most_that_a_step_can():
    slower = replace(ROUND, reached=Reached(matmul=0.5, attention=0.4, memory=0.8))
    product = operator(Kind.matmul, flops=5e11, dtype="bfloat16")
    assert seconds(product, slower) == pytest.approx(0.02)
    assert seconds(operator(Kind.attention, flops=5e11, dtype="bfloat16"), slower) == pytest.approx(0.05)
    assert seconds(operator(Kind.memory, num_bytes=1e9), slower) == pytest.approx(0.0025)


def test_a_collective_takes_the_fastest_protocol():
    """8 ranks: 7 steps of 3.4 us after 8.4 us, or 0.6 after 6.6 at half of the bandwidth."""
    late = replace(ROUND, latency_s=8.4e-6, link_latency_s=3.4e-6, network_latency_s=14e-6)
    assert collective_seconds(gather(8.0, 8), late) == pytest.approx(6.6e-6 + 7 * 0.6e-6, rel=1e-3)
    assert collective_seconds(gather(8e9, 8), late) == pytest.approx(8.4e-6 + 7 * 3.4e-6 + 0.07)
    plain = replace(late, kind=DeviceKind.cpu)
    assert collective_seconds(gather(8.0, 8), plain) == pytest.approx(8.4e-6 + 7 * 3.4e-6, rel=1e-3)
    assert collective_seconds(gather(8.0, 16), plain) == pytest.approx(8.4e-6 + 14 * 3.4e-6 + 14e-6, rel=1e-3)


def test_groups_side_by_side_share_the_network_of_their_node():
    """Hybrid sharding: one rank of each of two nodes, and seven more such groups."""
    one = operator(Kind.reduce, num_bytes=8e9, group=(0, 8))
    assert collective_seconds(one, ROUND) == pytest.approx(2 * 8e9 / 2 / (4e10 / 8))


def test_an_all_reduce_between_nodes_can_be_a_tree():
    """16 ranks of 2 nodes: twice 7 steps within and 1 between, where a ring has 14 and 1."""
    late = replace(ROUND, latency_s=8.4e-6, link_latency_s=3.4e-6, network_latency_s=14e-6)
    tree = 6.8e-6 + 2 * (7 * 0.6e-6 + 5.0e-6)
    assert collective_seconds(gather(16.0, 16, Kind.reduce), late) == pytest.approx(tree, rel=1e-3)


# By how much one may be of the other, either way.
AGREED = {8: 1.25, 16: 1.4, 64: 1.75}


@pytest.mark.parametrize("ranks", AGREED)
@pytest.mark.parametrize("kind", [Kind.gather, Kind.scatter, Kind.reduce])
def test_collectives_agree_with_pytorchs_copy_of_nccls_model(ranks: int, kind: Kind):
    """From 64 KiB to 1 GiB. It takes an A100 where there is no GPU, nodes of 8 devices, and one adapter of 25 GB/s for
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
