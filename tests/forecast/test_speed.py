"""Predicted speeds: what the command says of them, and laws that hold for any device."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from fsdp_lab.config import ConfigError
from fsdp_lab.config.conf import device_file
from fsdp_lab.config.machine import RunningCluster
from fsdp_lab.forecast.answer import answers
from fsdp_lab.forecast.capacity import Forecast, Host, NoForecast
from fsdp_lab.forecast.devices import (
    capacity_bytes,
    capacity_here,
    check_device,
    check_here,
    data_sheet_here,
    gpu_memory,
    sheet_of,
)
from fsdp_lab.forecast.forecast import forecast, forecast_step
from fsdp_lab.forecast.run import Request
from fsdp_lab.forecast.sentences import request_notes, room_remedies
from fsdp_lab.forecast.speed.device import Device, Factors, load_device
from fsdp_lab.forecast.speed.predict import BOUNDS, predict
from fsdp_lab.forecast.table import Row, forecast_table, in_order, write_csv
from fsdp_lab.workloads.build import build_workload
from tests.conftest import FakeGpus
from tests.forecast.planted import row
from tests.ranks import config

Choice = tuple[list[str], list[str], str | None]  # recommended, tied, what decided

LANGUAGE = [
    "task=language",
    "model=lm_tiny",
    "model.num_layers=1",
    "precision=bf16_mixed",
    "training.global_batch_size=16",
]


def sheet(name: str = "a100_80gb") -> Device:
    file = device_file(name)
    assert file is not None
    return load_device(file)


def test_a_device_without_a_peak_or_with_nodes_that_do_not_divide_the_workers_is_reported(tmp_path: Path):
    mine = tmp_path / "mine.yaml"
    text = (device_file("a100_80gb") or Path()).read_text()
    mine.write_text(re.sub("peak_flops: .*", "peak_flops: {bfloat16: 312.0e+12}", text))
    settings = config(*LANGUAGE[:2], "precision=fp32", f"forecast.device={mine}")
    result = forecast(settings, 2, cuda=True, sheet=load_device(mine))
    assert (
        result.no_speed and "has no peak for float32; its data sheet has bfloat16. Use a precision" in result.no_speed
    )
    assert result.speed is None and result.error is None
    assert result.peaks == forecast(settings, 2, cuda=True).peaks, "the memory is known all the same"
    check_device(settings, 16)
    check_device(settings, 4)
    with pytest.raises(ConfigError, match=r"cluster.num_workers=12 .* nodes have 8 devices.* use a multiple of 8"):
        check_device(settings, 12)
    mine.write_text("name: mine")
    with pytest.raises(ConfigError, match=r"mine\.yaml is not a data sheet"):
        check_device(settings, 8)


def test_tf32_is_forecast_by_its_own_peak_and_fp32_says_that_it_exists() -> None:
    words = [*LANGUAGE[:2], "training.global_batch_size=64"]
    device = replace(sheet("h100_sxm"), launch_s=1e-9)
    speeds = {}
    for precision in ("fp32", "tf32", "grad_bf16", "bf16_mixed"):
        one = Request.of(config(*words, f"precision={precision}", "forecast.device=h100_sxm"), 2)
        speed = forecast(one.config, 2, cuda=True, sheet=device).speed
        assert speed is not None and speed.mfu is not None
        speeds[precision] = speed
        has_note = precision in ("fp32", "grad_bf16")
        assert has_note is any("precision=tf32 multiplies them in TF32" in note for note in request_notes([one]))
    assert speeds["bf16_mixed"].step_s < speeds["tf32"].step_s < speeds["fp32"].step_s
    peaks = {name: speeds[name].step_s * (speeds[name].mfu or 0) for name in ("fp32", "tf32")}
    assert peaks["fp32"] / peaks["tf32"] == pytest.approx(494.5 / 67)
    without = replace(device, peak_flops={"bfloat16": 1e14, "float32": 1e13})
    unknown = forecast(config(*words, "precision=tf32"), 2, cuda=True, sheet=without)
    assert unknown.speed is None and "has no peak for tfloat32" in (unknown.no_speed or "")
    on_cpu = Request.of(config(*words, "precision=tf32", "forecast.device=cpu"), 2)
    assert "precision=tf32 has no effect on a CPU: it computes as with precision=fp32." in request_notes([on_cpu])


def test_a_device_brings_its_memory_its_kind_and_the_speed(tmp_path: Path):
    mine = tmp_path / "mine.yaml"
    mine.write_text((device_file("a100_80gb") or Path()).read_text().replace("memory_gib: 79.25", "memory_gib: 1.5"))
    request = Request.of(config(*LANGUAGE, f"forecast.device={mine}"), 2)
    assert request.cuda and request.capacity_bytes == 1.5 * 2**30 and request.sheet is not None
    own = Request.of(config(*LANGUAGE, f"forecast.device={mine}", "forecast.capacity_gib=2"), 2)
    assert own.capacity_bytes == 2 * 2**30


@pytest.mark.parametrize(
    ("gpus", "device", "cuda", "known"),
    [
        (2, "auto", True, True),  # by the name that the driver reports: NVIDIA H200
        (2, "cuda", True, False),
        (0, "auto", False, False),
        (0, "cuda", True, False),
    ],
)
def test_auto_is_for_this_machines_gpus_and_for_cpus_without_one(
    fake_gpus: FakeGpus, gpus: int, device: str, cuda: bool, known: bool
):
    fake_gpus(gpus)
    request = Request.of(config(*LANGUAGE, f"forecast.device={device}"), 2)
    assert (request.cuda, request.sheet) == (cuda, sheet("h200") if known else None)
    assert sheet_of("NVIDIA GeForce 256") is None


def test_tokens_and_mfu_by_hand():
    """MFU is the FLOPs that the samples of a worker need, over what its device could do in the step."""
    settings, device = config(*LANGUAGE), sheet()
    speed = forecast(settings, 2, cuda=True, sheet=device).speed
    assert speed is not None
    assert speed.samples == 16 and speed.tokens == settings.data.arguments["seq_len"]
    assert speed.tokens_per_s == pytest.approx(16 * speed.tokens / speed.step_s)
    flops = build_workload(settings.model, settings.data, settings.task).train_flops_per_sample()
    assert flops and speed.mfu == pytest.approx(16 / 2 * flops / speed.step_s / 312e12)


@pytest.mark.parametrize("words", [["sharding=per_block"], ["sharding=ddp"], ["offload=cpu"]])
def test_the_shares_of_what_bounds_a_step_report_what_a_slower_device_costs(words: list[str]):
    """A step takes as long as its longest chain. So a tenth more time of one thing costs at least a tenth of its share,
    and with everything half as fast a step takes twice as long."""
    program = forecast_step(config(*LANGUAGE, *words), 4, cuda=True, traced=True).program
    device = sheet()
    speed = predict(program, device)
    assert sum(speed.shares.values()) == pytest.approx(1) and set(speed.shares) == set(BOUNDS)
    assert speed.low_s < speed.step_s < speed.high_s
    assert (speed.shares["transfer"] > 0) == (words == ["offload=cpu"])

    slower = {
        "launch": {"launch_s": device.launch_s * 1.1},
        "transfer": {
            "host_bandwidth": device.host_bandwidth / 1.1, "host_memory_bandwidth": device.host_memory_bandwidth / 1.1,
        },
        "compute": {
            "peak_flops": {dtype: peak / 1.1 for dtype, peak in device.peak_flops.items()},
            "memory_bandwidth": device.memory_bandwidth / 1.1,
        },
    }  # fmt: skip
    for name, changes in slower.items():
        costs = predict(program, replace(device, **changes)).step_s / speed.step_s - 1
        assert 0.1 * speed.shares[name] - 1e-6 <= costs <= 0.1, name
    assert set(slower) | {"gather", "scatter"} == set(BOUNDS)


def test_the_host_is_this_machine_if_the_device_is(fake_gpus: FakeGpus, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("fsdp_lab.forecast.devices.host_memory", lambda: 7)

    def host(*words: str, workers: int = 8) -> Host:
        return Request.of(config(*words), workers).host

    fake_gpus(2, 81920, 81920)  # which are called NVIDIA H200
    assert host() == host("forecast.device=cuda") == host("forecast.device=h200") == Host(7, 2)
    assert host(workers=1) == Host(7, 1)
    assert host("forecast.device=h100_sxm") == Host(None, 8) == host("forecast.device=h100_sxm", workers=16)
    assert host("forecast.device=cuda", "forecast.capacity_gib=80") == Host(None, 8), "of some other device"
    fake_gpus(0)
    assert host("forecast.device=h200") == host("forecast.device=cuda") == Host(None, 8)


def test_pageable_copies_are_slower_than_pinned_ones_by_an_assumption_that_the_range_covers():
    """The 62 MB of a worker's offloaded shard cross twice, at 50 GB/s if they are pinned."""
    words = ("model=vit_l_16", "sharding=per_block", "cluster.num_workers=2", "precision=bf16_mixed")
    pinned, paged = (
        forecast(config(*words, f"offload={place}"), 2, cuda=True, sheet=sheet("h100_sxm")).speed
        for place in ("cpu", "cpu_unpinned")
    )
    assert pinned is not None and paged is not None
    assert pinned.step_s < paged.step_s < paged.high_s and pinned.low_s == paged.low_s and pinned.high_s < paged.high_s
    assert "assumed to be half as fast" in " ".join(paged.unlike)


def test_a_sweep_takes_the_memory_of_its_own_gpus_and_no_speed_of_others(
    fake_gpus: FakeGpus, monkeypatch: pytest.MonkeyPatch
):
    fake_gpus(2, 81920, 81920)  # which are called NVIDIA H200
    theirs, ours = config("forecast.device=a100_40gb"), config("forecast.device=h200")
    assert capacity_here(theirs, cuda=True) == capacity_here(ours, cuda=True) == gpu_memory()
    assert data_sheet_here(theirs, cuda=True) is None and data_sheet_here(ours, cuda=True) == sheet("h200")
    assert capacity_bytes(theirs, cuda=True) == int(39.5 * 2**30), "fsdp_lab.forecast is asked about that device"
    keep = config("forecast.device=a100_40gb", "forecast.keep='2'")
    with pytest.raises(ConfigError, match="predictions for another device do not apply to them"):
        check_here(keep, 2, cuda=True)
    check_here(config("forecast.device=h200", "forecast.keep='2'"), 2, cuda=True)
    monkeypatch.setattr("fsdp_lab.config.machine._asks", [RunningCluster])
    for here, memory in ((True, gpu_memory()), (False, None)):
        monkeypatch.setattr("fsdp_lab.config.machine._clusters", {"head:6379": RunningCluster(8, here)})
        there = config("forecast.device=auto", "cluster.address=head:6379")
        assert capacity_here(there, cuda=True) == memory, "other nodes' GPUs are not this machine's"
    fake_gpus(0)
    check_here(config("forecast.device=h200", "forecast.prune=true", "forecast.capacity_gib=1"), 2, cuda=False)


@pytest.mark.parametrize(
    ("words", "workers", "known"),
    [
        ([], 8, True),
        ([], 16, False),
        (["sharding=root"], 8, False),
        (["precision=fp32"], 8, False),
        (["offload=cpu"], 8, False),
        (["compile=true"], 8, False),
    ],
)
def test_the_error_is_that_of_the_steps_that_were_looked_at(words: list[str], workers: int, known: bool):
    device = replace(sheet("h100_sxm"), launch_s=1e-9)
    speed = forecast(config(*LANGUAGE, *words), workers, cuda=True, sheet=device).speed
    assert speed is not None and device.relative is not None
    assert speed.error == (device.error if known else device.error_elsewhere).p90
    assert speed.relative == (device.relative.p90 if known else None)
    assert known == (not speed.unlike)


@pytest.mark.parametrize("name", ["h100_sxm", "h200"])
def test_of_a_step_that_launches_bound_no_error_is_claimed(name: str):
    device = sheet(name)
    small = forecast(config(*LANGUAGE), 8, cuda=True, sheet=device)
    assert small.speed is not None and small.speed.shares["launch"] > 0.5
    assert small.speed.bound_unseen and small.speed.relative is None
    assert small.speed.error == device.error_elsewhere.p90
    seen = replace(device, factors=Factors(settings=8))
    corrected = forecast(config(*LANGUAGE), 8, cuda=True, sheet=seen).speed
    assert corrected is not None and not corrected.bound_unseen, "the error of trials is that of such steps, too"


@pytest.mark.parametrize(
    ("swept", "words", "expected"),
    [
        ([], [], ["activation_checkpointing=full", "a smaller training.global_batch_size"]),
        (["activation_checkpointing"], [], ["a smaller training.global_batch_size"]),
        (["training.global_batch_size"], [], ["activation_checkpointing=full"]),
        ([], ["activation_checkpointing=full", "training.global_batch_size=8"], []),
    ],
)
def test_what_was_not_varied_is_to_be_tried_where_a_gpu_is_nearly_full(
    swept: list[str], words: list[str], expected: list[str]
):
    asked = Request(config("model=mlp", "sharding=ddp", *words), 8, True, None, sheet=sheet())
    assert room_remedies([asked], swept) == expected


def recommendations(rows: list[Row], swept: Sequence[str] = ("sharding",), tolerance: float = 0.03) -> list[Choice]:
    """Return of each answer the recommended values, those that are tied with them, and what decided."""
    made = [answer.recommendation for answer in answers(rows, swept, tolerance)]
    return [
        ([*r.setting.values.values()] if r.setting else [], [s.name.partition("=")[2] for s in r.tied], r.tie_break)
        for r in made
    ]


FAST, LARGE = row("root", 1.2, 300), row("ddp", 1.0, fits=False)


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([LARGE, FAST, row("per_block", 1.21), row("other", 2.0)], (["root"], ["per_block"], "speed")),
        ([FAST, row("per_layer", 1.2003, 200)], (["per_layer"], ["root"], "memory")),  # 0.03 % are nothing
        ([FAST, row("other", 2.0)], (["root"], [], None)),
        ([LARGE], ([], [], None)),
        # 5 % apart: the ranges overlap, but of one model the ratio is known to 2 %
        ([row("root", 1.0, relative=0.02), row("ddp", 1.05, relative=0.02)], (["root"], [], None)),
        ([row("root", 1.0, relative=0.02), row("ddp", 1.05, group="another")], (["root"], ["ddp"], "speed")),
    ],
)
def test_the_fastest_that_fits_is_recommended_and_of_equals_the_smallest(rows: list[Row], expected: Choice):
    assert recommendations(rows) == [expected]


@pytest.mark.parametrize(("relative", "low", "high"), [(None, 0.81, 1.21), (0.3, 0.76, 1.29)])
def test_another_speed_has_the_range_of_both_predictions_or_of_their_ratio(relative: float, low: float, high: float):
    """1.2 / 1.21 = 0.992, times 0.9 / 1.1 and 1.1 / 0.9; or over and times 1.3."""
    (answer,) = answers([row("root", 1.2, relative=relative), row("ddp", 1.21, relative=relative)], ["sharding"], 0.03)
    (other,) = answer.recommendation.others
    assert other.speed is not None and other.tied
    assert [other.speed.value, other.speed.low, other.speed.high] == pytest.approx([0.992, low, high], abs=0.005)


def test_where_the_fastest_nearly_fills_its_gpu_the_smallest_of_ties_is_recommended():
    rows = [LARGE, row("root", 1.2, 950), row("per_block", 1.21, 100), row("other", 2.0)]
    assert recommendations(rows) == [(["per_block"], ["root"], "memory")]
    assert recommendations(rows, tolerance=0.0)[0][0] == ["root"]


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([row("bf16_mixed", 1.0, 1000), row("float16", 1.02, 999)], "bf16_mixed"),  # 1 % less is nothing: the faster
        ([row("bf16_mixed", 1.0, 1020), row("float16", 1.02, 999)], "float16"),  # 2 % less
        ([row("root", 1.0, 999), row("ddp", 1.02, 1000)], "ddp"),  # the simplest
    ],
)
def test_of_those_that_need_hardly_more_the_plainest_is_recommended(rows: list[Row], expected: str):
    ((settings, _, _),) = recommendations(rows, ["sharding" if expected == "ddp" else "precision"])
    assert settings == [expected]


@pytest.mark.parametrize("key", ["cluster.num_workers", "forecast.device", "training.global_batch_size"])
def test_each_number_of_workers_device_and_batch_size_has_its_own_recommendation(key: str):
    """More samples in a step are more samples a second, and another training."""
    rows = []
    for name, value, step_s in (("root", "8", 1.0), ("ddp", "8", 1.5), ("root", "16", 1.9), ("ddp", "16", 1.6)):
        one = row(name, step_s, samples=int(value) if "batch" in key else 100)
        workers = int(value) if "workers" in key else 8
        rows.append(replace(one, settings=[name, value], forecast=replace(one.forecast, num_workers=workers)))
    assert [settings for settings, _, _ in recommendations(rows, ["sharding", key], 0.0)] == [["root"], ["ddp"]]


def test_the_fastest_comes_first_and_what_does_not_fit_last(tmp_path: Path):
    rows = in_order([row("slow", 2.0), row("large", 0.1, fits=False), row("fast", 1.0)])
    assert [r.settings[0] for r in rows] == ["fast", "slow", "large"]
    write_csv(tmp_path / "f.csv", rows, ["sharding"])
    (first, *_) = csv.DictReader((tmp_path / "f.csv").open())
    assert (first["device"], first["data_sheet"]) == ("cuda", "X")
    assert float(first["step_s"]) == 1.0 and first["basis"] == "fitted"
    assert (first["error_p90"], first["ratio_error_p90"], first["no_forecast"]) == ("0.1", "", "")
    no_peak = replace(rows[0].forecast, speed=None, no_speed="no peak")
    none = Forecast(True, 8, error=NoForecast("needs_values", "asks for a value"))
    write_csv(tmp_path / "f.csv", [replace(rows[0], forecast=result) for result in (no_peak, none)], ["sharding"])
    observed = [
        (row["peak_bytes"], row["no_forecast"], row["no_speed"]) for row in csv.DictReader((tmp_path / "f.csv").open())
    ]
    assert observed == [("100", "", "no peak"), ("", "asks for a value", "")]


def test_the_table_and_the_csv_have_the_speed_of_a_device_and_the_csv_that_of_all(tmp_path: Path):
    rows = [row("root", 1.0), row("ddp", 2.0, relative=0.1)]
    shown = io.StringIO()
    Console(file=shown, width=200).print(forecast_table(rows, ["sharding"]))
    write_csv(tmp_path / "f.csv", rows, ["sharding"])
    lines = shown.getvalue().splitlines()[-2:]
    for line, cells in zip(lines, csv.DictReader((tmp_path / "f.csv").open()), strict=True):
        assert float(cells["samples_per_s_of_all"]) == 8 * float(cells["samples_per_s_per_device"])
        assert f"{float(cells['samples_per_s_per_device']):,.4g}" in line.split()
        assert cells["tokens_per_s_of_all"] == ""
    assert cells["ratio_error_p90"] == "0.1"


def test_a_long_step_has_no_exponent_in_the_table():
    steps = forecast_table([row("root", 10.0704)], ["sharding"])
    (column,) = [column for column in steps.columns if column.name == "step ms"]
    assert column.cells == ["10,070"]


def test_the_rows_of_each_number_of_workers_are_sorted_by_what_is_shown():
    rows = []
    for workers, step_s in ((8, 1.0), (2, 1.5), (8, 0.5), (2, 3.0)):
        one = row(f"{workers} {step_s}", step_s)
        rows.append(replace(one, forecast=replace(one.forecast, num_workers=workers)))
    assert [r.settings[0] for r in in_order(rows)] == ["2 1.5", "2 3.0", "8 0.5", "8 1.0"]
