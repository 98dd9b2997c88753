"""A probe of a device of known speed finds its figures: nothing runs but the forecasts of two small steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fsdp_lab.commands.probe import Asked, device_text, lines, read_arguments, run, source
from fsdp_lab.config import ConfigError, UserError
from fsdp_lab.forecast.speed.costs import ALONE, collective_seconds, seconds
from fsdp_lab.forecast.speed.device import Basis, Device, DeviceKind, KnownError, Reached, load_device
from fsdp_lab.forecast.speed.predict import predict, step_seconds
from fsdp_lab.forecast.speed.program import FUSED, Kind, Operator
from fsdp_lab.probe import cases
from fsdp_lab.probe import measure as probe
from fsdp_lab.probe.cases import transfer_cases
from fsdp_lab.probe.collectives import (
    Sent,
    collective_cases,
    fit_links,
    measure_links,
    measure_overlap,
    read_nccl_log,
)
from fsdp_lab.probe.figures import Measurement, blank
from fsdp_lab.probe.measure import device_here, measure
from fsdp_lab.probe.steps import launch_steps
from fsdp_lab.probe.timer import Case, Timed, Timer
from fsdp_lab.training.distributed import DistributedContext
from tests.forecast.planted import ROUND, operator, sheet

H100 = sheet("h100_sxm")
# Unlike the H100 in every figure that a probe measures.
PLANTED = replace(
    H100, launch_s=7e-6, compiled_launch_s=3e-6, host_bandwidth=2.1e10, pageable_bandwidth=6e9,
    host_memory_bandwidth=1.2e10, link_bandwidth=2e11, latency_s=2 * H100.latency_s,
    link_latency_s=2 * H100.link_latency_s, reached=Reached(0.7, 0.3, 0.8, 0.55),
    efficiency=replace(H100.efficiency, float8=0.6, memory=0.6, fused=0.4, link=ALONE,
                       network=0.3, overlap=0.66),
    product_shares={"float16": 0.65, "tfloat32": 0.5, "float32": 0.9},
)  # fmt: skip
FOUND = ("reached.matmul", "reached.attention", "reached.cudnn_attention", "reached.memory", "efficiency.memory",
         "efficiency.fused", "efficiency.float8", "product_shares.float16", "product_shares.tfloat32",
         "product_shares.float32", "host_bandwidth", "pageable_bandwidth", "host_memory_bandwidth", "launch_s",
         "compiled_launch_s")  # fmt: skip


def timed_on(planted: Device, spread: float = 0.0) -> Any:
    """Return what times cases on a device of known speed, without running them."""

    def time(case: Case) -> Timed:
        first, one = case.program[0], replace(planted, launch_s=0.0, compiled_launch_s=None)
        if first.name == "aten.copy_":  # which reaches more of the memory than operators of a step do
            one = replace(one, efficiency=replace(one.efficiency, memory=1.0))
        if first.name == "pageable":
            one = replace(one, host_bandwidth=planted.pageable_bandwidth or 1.0)
        return Timed(step_seconds(case.program, one), spread)

    return time


def small_steps(steps: Sequence[Any], *_: Any) -> list[list[Operator]]:
    eager = [operator(Kind.memory, num_bytes=1e4)] * 100
    compiled = [replace(operator(Kind.memory, num_bytes=1e4), name=FUSED, compiled=True)] * 60
    return [eager, [*eager[:20], *compiled]][: len(steps)]


def value(device: Device, name: str) -> float:
    found: Any = device
    for part in name.split("."):
        found = found[part] if isinstance(found, dict) else getattr(found, part)
    return float(found)


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch, rank_alone: None) -> Measurement:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(cases, "prefers_cudnn", lambda _: True)
    monkeypatch.setattr(probe, "programs", small_steps)
    ranks = DistributedContext(0, 0, 1, torch.device("cuda"))
    return measure(
        ranks, H100, H100, time_case=timed_on(PLANTED),
        time_step=lambda step, _: Timed(step_seconds(small_steps("12")[step.name == "compiled"], PLANTED), 0.0),
    )  # fmt: skip


def test_planted_rates_are_found(found: Measurement):
    assert {figure.name for figure in found.figures} == set(FOUND)
    for name in FOUND:
        assert value(found.device, name) == pytest.approx(value(PLANTED, name), rel=0.02), name
    assert found.device.basis is Basis.probed and found.device.peak_flops == H100.peak_flops
    assert "torchrun" in found.left["collectives"] and found.device.link_bandwidth == H100.link_bandwidth


def test_a_file_says_what_was_measured_and_composes(found: Measurement, tmp_path: Path):
    file = tmp_path / "device" / "mine.yaml"
    file.parent.mkdir()
    busy = replace(found, figures=[found.figures[0]._replace(spread=0.2), *found.figures[1:]])
    file.write_text(device_text(found.device, source(busy, 1)))
    read = load_device(file)
    for name in FOUND:
        assert value(read, name) == pytest.approx(value(PLANTED, name), rel=0.02), name
    assert read.knows_host and read.errors.probed is None and read.errors.other == H100.errors.other
    for part in ("fsdp_lab.probe on", "PyTorch", "1 rank", "Not measured: collectives", "was busy: reached.matmul"):
        assert part in read.source
    shown = "\n".join(lines(busy))
    assert "launch_s                     4.9e-05      7e-06" in shown or f"{H100.launch_s:.3g}" in shown
    assert "not measured: collectives" in shown and "something else uses the device" in shown
    assert "something else" not in "\n".join(lines(found))


def test_a_late_probe_keeps_what_it_has_and_names_the_rest(monkeypatch: pytest.MonkeyPatch, rank_alone: None):
    monkeypatch.setattr(probe, "programs", small_steps)
    ranks, begun = DistributedContext(0, 0, 1, torch.device("cpu")), blank("a CPU", DeviceKind.cpu, 8.0, 1, 4096)
    measured = measure(ranks, begun, None, limit_s=0.0, time_case=timed_on(PLANTED))
    assert not measured.figures and {"products in float32", "launch_s"} < set(measured.left)
    assert not measured.device.knows_host and measured.device.launch_s == begun.launch_s
    late = Measurement(H100, H100, timed_on(PLANTED), lambda needs_s: True)
    probe._attention(late, torch.device("cuda"))
    unmeasured, flash = late.device, operator(Kind.attention, flops=1e12, dtype="bfloat16")
    flash = replace(flash, name="aten._scaled_dot_product_flash_attention")
    assert seconds(flash, unmeasured) == pytest.approx(seconds(flash, H100)), "cuDNN's"
    for kind, facts in ((Kind.matmul, {"dtype": "bfloat16"}), (Kind.matmul, {"dtype": "float8_e4m3fn"}),
                        (Kind.attention, {"dtype": "bfloat16"}), (Kind.memory, {"num_bytes": 1e9})):  # fmt: skip
        one = operator(kind, **({"flops": 1e12} | facts))
        assert seconds(one, unmeasured) == pytest.approx(seconds(one, H100)), "what is left stays as before"


def test_what_has_no_kernel_is_left_with_the_reason(monkeypatch: pytest.MonkeyPatch):
    def fails(_: Case) -> Timed:
        raise RuntimeError("no kernel image\nis available")

    measured = Measurement(H100, H100, fails)
    measured.share("reached.memory", [Case([operator(Kind.memory, num_bytes=1e6)], lambda: lambda n: None)])
    assert measured.left == {"reached.memory": "no kernel image is available"} and not measured.figures


def test_an_error_of_our_own_is_not_taken_for_a_missing_kernel():
    def fails(_: Case) -> Timed:
        raise KeyError("a bug")

    with pytest.raises(KeyError, match="a bug"):
        Measurement(H100, H100, fails).timed("reached.memory", [Case([], lambda: lambda n: None)])


def test_launches_that_no_forecast_explains_are_left():
    measured = Measurement(PLANTED, H100, timed_on(PLANTED))
    program = [operator(Kind.memory, num_bytes=1e12)]
    measured.fit(["launch_s"], lambda on: step_seconds(program, on) / 1e-3, 0.0, "as long without launches")
    assert not measured.figures and measured.device.launch_s == PLANTED.launch_s
    assert "without launches" in measured.left["launch_s"]


def test_latencies_that_no_forecast_explains_are_left():
    measured = Measurement(PLANTED, H100, timed_on(PLANTED))
    sent = [Sent(case.program[0], timed_on(PLANTED)(case).seconds / (50 if case.program[0].num_bytes < 2**25 else 1))
            for case in collective_cases(torch.device("cuda"), range(8), None)]  # fmt: skip
    fit_links(measured, sent)
    assert {*measured.left} == {"latency_s", "link_latency_s"} and measured.has("link_bandwidth")
    assert measured.device.latency_s == PLANTED.latency_s


def test_a_gpus_share_of_its_host_is_measured_with_its_share_of_the_cores(monkeypatch: pytest.MonkeyPatch):
    threads, before, add = list[int](), torch.get_num_threads(), torch.add
    monkeypatch.setattr(cases, "num_cpus", lambda: 12)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch, "add", lambda *_, **rest: (threads.append(torch.get_num_threads()), add(*_, **rest)))
    transfer_cases(torch.device("cpu"))["host_memory_bandwidth"].make()(0)
    assert threads == [3] and torch.get_num_threads() == before


LINKS = {  # what nccl measures from 1 MiB on, within a node of eight and between two of them
    "within": (tuple(range(8)), ("link_bandwidth", "efficiency.link", "latency_s", "link_latency_s")),
    "between": (tuple(range(16)), ("efficiency.network",)),
}


@pytest.mark.parametrize("where", LINKS)
@pytest.mark.parametrize("kind", [DeviceKind.cuda, DeviceKind.cpu])
def test_links_and_networks_are_found_by_least_squares(where: str, kind: DeviceKind):
    group, names = LINKS[where]
    planted = replace(PLANTED, kind=kind, link_bandwidth=2e11)
    between = replace(planted, efficiency=replace(planted.efficiency, network=0.9))  # links are measured first
    measured = Measurement(replace(between if where == "between" else H100, kind=kind), H100, timed_on(planted))
    measure_links(measured, collective_cases(torch.device("cuda"), group, None))
    for name in names:
        assert value(measured.device, name) == pytest.approx(value(planted, name), rel=0.02), name


@pytest.mark.parametrize(("until", "left"), [(2, "collectives"), (4, "collectives of 256 MiB")])
def test_collectives_are_measured_as_long_as_there_is_time(until: int, left: str):
    """The smallest first; too few of them tell nothing, and fewer than all tell less exactly."""
    sizes = list[float]()

    def time(case: Case) -> Timed:
        sizes.append(case.program[0].num_bytes)
        return timed_on(PLANTED)(case)

    measured = Measurement(H100, H100, time, lambda needs_s: len({*sizes}) >= until)
    measure_links(measured, collective_cases(torch.device("cuda"), range(8), None))
    assert sizes == sorted(sizes) and measured.left == {left: "no time was left"}
    assert measured.has("link_bandwidth") == (until == 4)
    if until == 4:
        assert measured.device.link_bandwidth == pytest.approx(PLANTED.link_bandwidth, rel=0.1)


def test_what_overlap_loses_is_found():
    measured = Measurement(replace(PLANTED, efficiency=H100.efficiency), H100, timed_on(PLANTED))
    product = Case([operator(Kind.matmul, flops=2e11, dtype="bfloat16")], lambda: lambda n: None)
    measure_overlap(measured, product, torch.device("cuda"), range(8))
    assert measured.device.efficiency.overlap == pytest.approx(PLANTED.efficiency.overlap, rel=0.02)


def nccl_log(file: Path, hosts: Sequence[str], planted: Device) -> Path:
    rows = ["# nThread 1 nGpus 1 minBytes 8 maxBytes 1073741824 step: 4(factor) warmup iters: 5 iters: 20"]
    rows += [f"#  Rank {n:2d} Group  0 Pid  {n + 100} on {host} device  {n % 8} [0x1b] NVIDIA H100 80GB HBM3"
             for n, host in enumerate(hosts)]  # fmt: skip
    rows.append("#       size         count      type   redop    root     time   algbw   busbw #wrong     time   algbw")
    group = tuple(8 * sorted({*hosts}).index(host) + hosts[:n].count(host) for n, host in enumerate(hosts))
    for size in (2**exponent for exponent in range(10, 31, 2)):
        one = operator(Kind.gather, num_bytes=size, group=group)
        times = f"{collective_seconds(one, planted) * 1e6:>8.2f}    1.00    0.90      0"
        rows.append(f"{size:>12} {size // 32:>12}     float    none      -1 {times} {times}")
    file.write_text("\n".join([*rows, "# Avg bus bandwidth    : 91.5"]))
    return file


def test_a_log_of_a_part_of_each_node_tells_the_whole_network(tmp_path: Path):
    measured = Measurement(replace(PLANTED, efficiency=H100.efficiency), H100, timed_on(PLANTED))
    fit_links(measured, read_nccl_log(nccl_log(tmp_path / "all_gather.log", ["n1", "n2"], PLANTED)).sent(8))
    assert measured.device.efficiency.network == pytest.approx(PLANTED.efficiency.network, rel=0.02)


def test_all_reduces_alone_tell_nothing_of_a_network(tmp_path: Path):
    measured = Measurement(H100, H100, timed_on(PLANTED))
    fit_links(measured, read_nccl_log(nccl_log(tmp_path / "all_reduce.log", ["n1", "n2"], PLANTED)).sent(8))
    assert measured.left == {"efficiency.network": "needs gathers or scatters"} and not measured.figures


def test_some_gpus_of_a_node_do_not_make_it_smaller(monkeypatch: pytest.MonkeyPatch, rank_alone: None):
    gpu = SimpleNamespace(name="a GPU", total_memory=2**34, multi_processor_count=100)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: gpu.name)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    ranks = DistributedContext(0, 0, 2, torch.device("cuda"))
    for sheet_of, size in ((lambda name: None, 8), (lambda name: replace(H100, node_size=4), 4)):
        assert device_here(ranks, sheet_of)[0].node_size == size
    over_nodes = replace(ranks, world_size=4)
    assert device_here(over_nodes, lambda name: replace(H100, node_size=4))[0].node_size == 8


def test_ranks_on_some_gpus_of_their_nodes_are_on_several(monkeypatch: pytest.MonkeyPatch):
    groups = list[tuple[int, ...]]()
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setattr(probe.dist, "new_group", lambda ranks: ranks)
    monkeypatch.setattr(probe, "measure_links", lambda _, sent: groups.append(sent[0].program[0].group))
    ranks = DistributedContext(3, 1, 4, torch.device("cpu"))
    probe._links(Measurement(H100, H100, timed_on(PLANTED)), ranks, [], {}, lambda what: None)
    assert groups == [(0, 1), (0, 1, 8, 9)], "of nodes with eight"


def test_logs_stand_for_collectives_on_every_rank(tmp_path: Path):
    log = read_nccl_log(nccl_log(tmp_path / "all_gather.log", ["n1"] * 8, PLANTED))
    for rank in (0, 1):
        measured = Measurement(H100, H100, timed_on(PLANTED))
        ranks = DistributedContext(rank, rank, 2, torch.device("cpu"))
        probe._links(measured, ranks, log.sent(8), {}, lambda what: None)
        assert [figure.name for figure in measured.figures].count("link_bandwidth") == 1


def test_a_log_that_cannot_be_read_is_refused_before_ranks_meet(tmp_path: Path):
    for words in ((), ("cluster.address=10.0.0.1:6379",)):
        with pytest.raises(ConfigError, match="cannot be read"):
            run(read_arguments([f"nccl={tmp_path / 'missing.log'}", *words]))


def test_nodes_that_differ_are_refused_on_every_rank(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(probe, "gather", lambda mine: [mine, (mine[0] + 1, mine[1])])
    with pytest.raises(UserError, match=r"nodes that are alike, and these are not: 3 rank\(s\) on a node with cpu, 4"):
        device_here(DistributedContext(0, 0, 3, torch.device("cpu")), lambda name: None)


def test_a_log_of_nccl_tests_is_read(tmp_path: Path):
    sent = read_nccl_log(nccl_log(tmp_path / "all_gather.log", ["n1"] * 8, PLANTED)).sent(8)
    assert [one.operator.num_bytes for one in sent] == [2**n for n in range(20, 31, 2)]
    assert sent[0].operator.kind is Kind.gather and sent[0].operator.group == tuple(range(8))
    measured = Measurement(H100, H100, timed_on(PLANTED))
    fit_links(measured, sent)
    assert measured.device.link_bandwidth == pytest.approx(PLANTED.link_bandwidth, rel=0.02)
    over = read_nccl_log(nccl_log(tmp_path / "all_gather_2.log", ["n1"] * 8 + ["n2"] * 8, PLANTED)).sent(8)
    assert over[0].operator.group == tuple(range(16))
    for name, text in (("all_gather_none.log", "nothing"), ("what.log", (tmp_path / "all_gather.log").read_text())):
        (tmp_path / name).write_text(text)
        with pytest.raises(ConfigError, match=r"is no table of nccl-tests .* all_gather_perf"):
            read_nccl_log(tmp_path / name)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_nccl_log(tmp_path / "missing.log")


def test_a_range_rests_on_probed_errors_where_there_are_any():
    """Of steps that launches bound, too; without them on the other errors, as widened by later publishers."""
    program = [operator(Kind.memory, num_bytes=1e4)] * 100
    for probed, expected in ((None, max(PLANTED.errors.other.p90, 0.22)), (KnownError(0.05, 0.12, 1), 0.12)):
        speed = predict(program, replace(PLANTED, errors=replace(PLANTED.errors, probed=probed)))
        assert not speed.bound_unseen and speed.error == expected
        assert speed.kinds == (("probed",) if probed else ("other",))
    known = replace(PLANTED, errors=replace(PLANTED.errors, probed=KnownError(0.05, 0.12, 1)))
    assert predict(program, known, kinds=("other",)).kinds == ("other",), "the probe ran no such step"
    assert predict(program, replace(known, compiled_launch_s=None)).bound_unseen


def test_compiled_code_has_launches_of_its_own():
    eager = [operator(Kind.memory, num_bytes=1.0)] * 10
    compiled = [replace(one, compiled=True) for one in eager]
    device = replace(ROUND, launch_s=5e-5, compiled_launch_s=1e-5)
    assert step_seconds(eager, device) == pytest.approx(5e-4, rel=1e-3)
    assert step_seconds(compiled, device) == pytest.approx(1e-4, rel=1e-3)
    assert step_seconds(compiled, replace(device, compiled_launch_s=None)) == step_seconds(eager, device)


def test_a_timer_takes_medians_and_says_how_far_they_are_apart(rank_alone: None):
    turns: list[int] = []
    timed = Timer(torch.device("cpu")).time(Case([], lambda: turns.append))
    assert timed.seconds > 0 and timed.spread >= 0 and turns == [*range(5), *[*range(50)] * 3]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--out {there}", "is there already; name another file, or overwrite it with --force"),
        ("--out mine", "is not the name of a device file; use --out conf_of_mine/device/mine.yaml"),
        ("--out mine/auto.yaml", "is not a name of your own, as forecast.device=auto is another device"),
        ("--out mine/device/h100_sxm.yaml", "forecast.device=h100_sxm is another device; use --out conf_of_mine"),
        ("steps", "steps is not an option; use --out FILE, --force, --steps, nccl=FILE or cluster"),
    ],
)
def test_bad_arguments_are_refused(tmp_path: Path, words: str, message: str):
    there = tmp_path / "there.yaml"
    there.write_text("")
    with pytest.raises(ConfigError, match=message):
        read_arguments(words.format(there=there).split())
    asked = read_arguments(["--out", str(there), "--force", "nccl=/a.log", "nccl=/b.log", "cluster.address=auto"])
    assert asked == Asked(there, True, False, [Path("/a.log"), Path("/b.log")], "auto")


def test_both_kinds_of_launches_have_a_step():
    assert [*launch_steps("cpu")] == ["launch_s", "compiled_launch_s"]
