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

from fsdp_lab.config import ConfigError, SweepConfig, UserError, check_forecast
from fsdp_lab.config.conf import device_file
from fsdp_lab.forecast.answer import answers, recommended, sentences
from fsdp_lab.forecast.capacity import Forecast, NoForecast
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
from fsdp_lab.forecast.keep import number_kept, passed_over, ratio_group, why_all
from fsdp_lab.forecast.notes import room_remedies
from fsdp_lab.forecast.run import Request
from fsdp_lab.forecast.table import Row, forecast_table, in_order, write_csv
from fsdp_lab.report.reason_texts import reason_text
from fsdp_lab.speed.device import Basis, Device, DeviceKind, Factors, load_device
from fsdp_lab.speed.predict import BOUNDS, Speed, predict
from fsdp_lab.workloads.build import build_workload
from tests.conftest import FakeGpus
from tests.ranks import config

LANGUAGE = [
    "task=language",
    "model=lm_tiny",
    "model.num_layers=1",
    "precision=bf16_mixed",
    "training.global_batch_size=16",
]


def said(rows: list[Row], swept: list[str], tolerance: float = 0.03, remedies: Sequence[str] = ()) -> str:
    return sentences(rows, swept, "items", answers(rows, swept, tolerance, remedies), tolerance)


def best(rows: list[Row], swept: list[str], tolerance: float = 0.03) -> list[list[str]]:
    return [one.settings for one in recommended(rows, swept, tolerance)]


def sheet(name: str = "a100_80gb") -> Device:
    file = device_file(name)
    assert file is not None
    return load_device(file)


@pytest.mark.parametrize(
    ("named", "message"),
    [
        ("a10080", "did you mean a100_80gb"),
        ("tpu", "auto, cpu, cuda, a100_40gb"),
        ("mine/gpu.yaml", "mine/gpu.yaml is not a file"),
    ],
)
def test_an_unknown_device_is_refused_and_the_known_ones_are_named(named: str, message: str):
    with pytest.raises(ConfigError, match=message):
        config(f"forecast.device={named}").check(2)


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


def test_a_device_brings_its_memory_its_kind_and_the_speed(tmp_path: Path):
    mine = tmp_path / "mine.yaml"
    mine.write_text((device_file("a100_80gb") or Path()).read_text().replace("memory_gib: 79.25", "memory_gib: 1.5"))
    request = Request.of(config(*LANGUAGE, f"forecast.device={mine}"), 2)
    assert request.cuda and request.capacity_bytes == 1.5 * 2**30 and request.sheet is not None
    own = Request.of(config(*LANGUAGE, f"forecast.device={mine}", "forecast.capacity_gib=2"), 2)
    assert own.capacity_bytes == 2 * 2**30
    assert Request.of(config(*LANGUAGE, "forecast.device=cuda"), 2).sheet is None


def test_a_gpu_with_a_data_sheet_is_known_by_the_name_that_its_driver_reports(fake_gpus: FakeGpus):
    fake_gpus(2)  # which are called NVIDIA H200
    request = Request.of(config(*LANGUAGE), 2)
    assert request.sheet == sheet("h200") and request.cuda
    assert Request.of(config(*LANGUAGE, "forecast.device=cuda"), 2).sheet is None
    assert sheet_of("NVIDIA GeForce 256") is None
    fake_gpus(0)
    assert Request.of(config(*LANGUAGE), 2).sheet is None


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


def test_a_sweep_takes_the_memory_of_its_own_gpus_and_no_speed_of_others(fake_gpus: FakeGpus):
    fake_gpus(2, 81920, 81920)  # which are called NVIDIA H200
    theirs, ours = config("forecast.device=a100_40gb"), config("forecast.device=h200")
    assert capacity_here(theirs, cuda=True) == capacity_here(ours, cuda=True) == gpu_memory()
    assert data_sheet_here(theirs, cuda=True) is None and data_sheet_here(ours, cuda=True) == sheet("h200")
    assert capacity_bytes(theirs, cuda=True) == int(39.5 * 2**30), "fsdp_lab.forecast is asked about that device"
    keep = config("forecast.device=a100_40gb", "forecast.keep='2'")
    with pytest.raises(ConfigError, match="predictions for another device do not apply to them"):
        check_here(keep, 2, cuda=True)
    check_here(config("forecast.device=h200", "forecast.keep='2'"), 2, cuda=True)
    fake_gpus(0)
    with pytest.raises(ConfigError, match="predictions for another device do not apply to them"):
        check_here(keep, 2, cuda=False)
    with pytest.raises(ConfigError, match=r"forecast.prune=true with forecast.device=h200"):
        check_here(config("forecast.device=h200", "forecast.prune=true"), 2, cuda=False)
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
    observed = said([Row([], Forecast(True, workers, {"device": {"total": 1}}, speed=speed))], [])
    assert ("Those were GPT models (MPT)" in observed) is known and ("Its error is not known" in observed) is not known


@pytest.mark.parametrize("name", ["h100_sxm", "h200"])
def test_of_a_step_that_launches_bound_no_error_is_claimed(name: str):
    device = sheet(name)
    small = forecast(config(*LANGUAGE), 8, cuda=True, sheet=device)
    assert small.speed is not None and small.speed.shares["launch"] > 0.5
    assert small.speed.bound_unseen and small.speed.relative is None
    assert small.speed.error == device.error_elsewhere.p90
    assert re.search(
        r"launches bound \d+ % of this step, and almost none of the .* not known; .* within the range of 15 %",
        said([Row([], small)], []),
    )
    seen = replace(device, factors=Factors(settings=8))
    corrected = forecast(config(*LANGUAGE), 8, cuda=True, sheet=seen).speed
    assert corrected is not None and not corrected.bound_unseen, "the error of trials is that of such steps, too"


def test_each_number_of_workers_and_each_device_has_its_own_answer_and_their_basis_is_named_once():
    few, many = row("root", 1.0), row("root", 0.5)
    rows = [replace(few, settings=["root", "8"]), replace(few, settings=["ddp", "8"])]
    sixteen = replace(many.forecast, num_workers=16)
    rows += [replace(many, forecast=sixteen, settings=[name, "16"]) for name in ("root", "ddp")]
    axes = ["sharding", "cluster.num_workers"]
    assert best(rows, axes) == [["ddp", "8"], ["ddp", "16"]]
    text = said(rows, axes)
    assert text.index("cluster.num_workers=8: Recommended: sharding=ddp: ") < text.index("cluster.num_workers=16: Reco")
    assert text.count("Predicted for X with ") == 1 and text.count("May be as fast: sharding=root;") == 2
    assert "16 instead of 8 workers: 2 times the total speed, both with sharding=ddp; bound by" in text
    devices = [replace(one, settings=[name, one.settings[1]]) for one, name in zip(rows, "xxyy", strict=True)]
    assert said(devices, ["forecast.device", "trial"]).count("forecast.device=") == 2


def test_what_more_workers_bring_is_reported_of_one_setting_or_names_both():
    """Of 16 workers per_block fits, which of 8 is slower than root."""
    few = [replace(row(name, step_s), settings=[name, "8"]) for name, step_s in (("root", 1.0), ("per_block", 1.5))]
    one = replace(row("per_block", 0.5), settings=["per_block", "16"])
    many = replace(one, forecast=replace(one.forecast, num_workers=16))
    axes = ["sharding", "cluster.num_workers"]
    assert "16 instead of 8 workers: 3 times the total speed, both with sharding=per_block (more " in said(
        [*few, many], axes
    )
    assert "2 times the total speed, sharding=per_block instead of sharding=root; " in said([few[0], many], axes)


def of_batch(row: Row, samples: int) -> Row:
    assert row.forecast.speed is not None
    speed = replace(row.forecast.speed, samples=samples)
    return replace(row, settings=[*row.settings, str(samples)], forecast=replace(row.forecast, speed=speed))


def test_each_global_batch_size_has_its_own_recommendation():
    """More samples in a step are more samples a second, and another training."""
    rows = [of_batch(row("root", 1.0), 100), of_batch(row("ddp", 1.5), 100)]
    rows += [of_batch(row("root", 1.9), 200), of_batch(row("ddp", 1.6), 200)]
    text = said(rows, ["sharding", "training.global_batch_size"], 0.0)
    assert "training.global_batch_size=100: Recommended: sharding=root: 12.5 samples/s per device" in text
    assert "training.global_batch_size=200: Recommended: sharding=ddp: 15.6 samples/s per device" in text


def test_each_global_batch_size_is_warned_of_a_full_gpu_and_of_close_settings():
    rows = [of_batch(row(name, step_s, peak=950), samples) for name, step_s, samples in
            (("root", 1.0, 100), ("ddp", 1.0, 100), ("root", 1.9, 200), ("ddp", 1.9, 200))]  # fmt: skip
    text = said(rows, ["sharding", "training.global_batch_size"], 0.0)
    assert text.count("It needs 95 % of its GPU") == text.count("May be as fast: ") == 2


@pytest.mark.parametrize(
    ("swept", "words", "expected"),
    [
        ([], [], ["activation_checkpointing=full", "a smaller training.global_batch_size"]),
        (["activation_checkpointing"], [], ["a smaller training.global_batch_size"]),
        (["training.global_batch_size"], [], ["activation_checkpointing=full"]),
        ([], ["activation_checkpointing=full", "training.global_batch_size=8"], []),
    ],
)
def test_what_was_not_varied_is_to_be_tried_first_where_a_gpu_is_nearly_full(
    swept: list[str], words: list[str], expected: list[str]
):
    assert room_remedies([asked(*words)], swept) == expected
    rows = [row("none", 1.0, peak=950), row("cpu", 2.0, peak=100)]
    text = said(rows, ["offload"], 0.0, expected)
    first = f"Try {' or '.join(expected)} first: this grid does not vary {'them' if len(expected) > 1 else 'it'}. "
    assert ((first if expected else "") + "The fastest setting that leaves room: offload=cpu.") in text
    assert ("Try" in text) is bool(expected)
    assert "Try" not in said(rows[1:], ["offload"], 0.0, expected), "it has room"


def row(setting: str, step_s: float, peak: int = 100, fits: bool = True) -> Row:
    shares = dict.fromkeys(BOUNDS, 0.2)
    speed = Speed(step_s, shares, step_s / 1.1, step_s / 0.9, 0.1, Basis.fitted, "X", samples=100, group="one model")
    peaks = {"device": {"total": peak}}
    return Row([setting], Forecast(True, 8, peaks, capacity_bytes=1000 if fits else 50, data_sheet="X", speed=speed))


def with_ratio(row: Row, error: float, group: str = "one model") -> Row:
    assert row.forecast.speed is not None
    speed = replace(row.forecast.speed, relative=error, group=group)
    return replace(row, forecast=replace(row.forecast, speed=speed))


def test_the_fastest_that_fits_is_recommended_and_of_equals_the_smallest():
    rows = [row("ddp", 1.0, fits=False), row("root", 1.2, 300), row("per_block", 1.21, 100), row("other", 2.0)]
    assert best(rows, ["sharding"]) == [["root"]]
    assert best([*rows, row("per_layer", 1.2003, 200)], ["sharding"]) == [["per_layer"]], "0.03 % are nothing"
    text = said(rows, ["sharding"])
    assert "Recommended: sharding=root: 10.4 samples/s per device, " in text and "Step 1.20 s (1.09 to 1.33)." in text
    assert "fitted to published steps: nine of ten published steps that were not fitted were within 10 %" in text
    assert "Those were GPT models (MPT) of 125M to 70B parameters, not compiled, with PyTorch 1.13 to 2.0;" in text
    assert "May be as fast: sharding=per_block; this one is predicted fastest." in text
    assert "sharding=per_block: 0.99× (0.81 to 1.21) the speed (may be as fast),\n    " in text
    related = [with_ratio(each, 0.3) for each in rows]
    assert "sharding=per_block: 0.99× (0.76 to 1.29) the speed (may be as fast)" in said(related, ["sharding"])
    assert "as fast" not in said([rows[1], rows[3]], ["sharding"], 0.0)
    close = [with_ratio(row("root", 1.0), 0.02), with_ratio(row("ddp", 1.05), 0.02)]
    assert "as fast" not in said(close, ["sharding"]), "though the ranges overlap"
    close[1] = with_ratio(close[1], 0.02, "another model")
    assert "May be as fast: sharding=ddp;" in said(close, ["sharding"])
    assert "No setting fits: sharding=ddp needs " in said([rows[0], rows[0]], ["sharding"])


def test_where_the_fastest_nearly_fills_its_gpu_the_smallest_of_ties_is_recommended():
    rows = [row("ddp", 1.0, fits=False), row("root", 1.2, 950), row("per_block", 1.21, 100), row("other", 2.0)]
    assert best(rows, ["sharding"]) == [["per_block"]] and best(rows, ["sharding"], 0.0) == [["root"]]
    text = said(rows, ["sharding"])
    assert "Recommended: sharding=per_block: 10.3 samples/s per device" in text
    assert "May be as fast: sharding=root; the smallest peak memory decided." in text
    assert "  sharding=root: 1.01× (0.82 to 1.23) the speed (may be as fast),\n    " in text
    assert "It needs 95 % of its GPU" in said(rows, ["sharding"], 0.0)


def test_of_those_that_need_hardly_more_the_plainest_is_recommended():
    rows = [row("bf16_mixed", 1.0, 1000), row("float16", 1.02, 999)]
    assert best(rows, ["precision"]) == [["bf16_mixed"]], "1 % less is nothing, and it is the faster"
    assert best([row("bf16_mixed", 1.0, 1020), rows[1]], ["precision"]) == [["float16"]], "2 % less"
    plain = [row("root", 1.0, 999), row("ddp", 1.02, 1000)]
    assert best(plain, ["sharding"]) == [["ddp"]]
    assert "May be as fast: sharding=root; the simplest setting decided." in said(plain, ["sharding"])


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
    rows = [row("root", 1.0), with_ratio(row("ddp", 2.0), 0.1)]
    shown = io.StringIO()
    Console(file=shown, width=200).print(forecast_table(rows, ["sharding"]))
    write_csv(tmp_path / "f.csv", rows, ["sharding"])
    lines = shown.getvalue().splitlines()[-2:]
    for line, cells in zip(lines, csv.DictReader((tmp_path / "f.csv").open()), strict=True):
        assert float(cells["samples_per_s_of_all"]) == 8 * float(cells["samples_per_s_per_device"])
        assert f"{float(cells['samples_per_s_per_device']):,.4g}" in line.split()
        assert cells["tokens_per_s_of_all"] == ""
    assert cells["ratio_error_p90"] == "0.1"
    assert "12.5 samples/s per device" in said(rows, ["sharding"])


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


def asked(*words: str) -> Request:
    return Request(config("model=mlp", "sharding=ddp", *words), 8, True, None, sheet=sheet())


def test_what_is_recommended_is_kept_though_it_is_surely_slower():
    """Of those within report.speed_tolerance the smaller is recommended, because the fastest nearly fills its GPU."""
    rows = [with_ratio(row("root", 1.0, 950), 0.01), with_ratio(row("per_block", 1.02, 100), 0.01), row("ddp", 3.0)]
    forecasts = {number: each.forecast for number, each in enumerate(rows)}
    names = {number: each.settings[0] for number, each in enumerate(rows)}
    assert best(rows, ["sharding"]) == [["per_block"]]
    assert set(passed_over(forecasts, names, "1")) == {1, 2}
    assert set(passed_over(forecasts, names, "1", recommended={"per_block"})) == {2}
    forecasts[2] = replace(forecasts[2], speed=None)
    assert set(passed_over(forecasts, names, "1")) == {1}, "what has no prediction is measured"


def of_seconds(*seconds: float, error: float = 0.1) -> dict[int, Forecast]:
    collected = {}
    for number, step_s in enumerate(seconds):
        low, high = step_s / (1 + error), step_s / (1 - error)
        speed = Speed(step_s, dict.fromkeys(BOUNDS, 0.2), low, high, error, Basis.fitted, "X", samples=10, group="one")
        collected[number] = Forecast(True, 8, {"device": {"total": 10}}, capacity_bytes=100, speed=speed)
    return collected


@pytest.mark.parametrize(
    ("keep", "expected"),
    [
        ("1", {2, 3, 4}),  # 1.1 s may be as fast as 1.0 s: 1.1 / 1.1 is below 1.0 / 0.9
        ("2", {2, 3, 4}),  # 1.5 / 1.1 is above 1.1 / 0.9
        ("3", {4}),  # 1.6 / 1.1 is below 1.5 / 0.9
        ("40%", {2, 3, 4}),  # two of five
        ("100%", set()),
        ("9", set()),
    ],
)
def test_those_are_kept_that_may_be_as_fast_as_the_last_that_was_asked_for(keep: str, expected: set[int]):
    forecasts = of_seconds(1.0, 1.1, 1.5, 1.6, 3.0)
    left_out = passed_over(forecasts, {number: str(number) for number in forecasts}, keep)
    assert set(left_out) == expected
    if 4 in left_out:
        why = reason_text(left_out[4])
        assert "predicted 3.33 samples/s (3.00 to 3.67)" in why and f"forecast.keep={keep}" in why


def test_what_is_common_to_all_predictions_keeps_no_setting():
    """Each is known to ±40 %, which would keep all but the last; their ratios to ±8 %."""
    alone = of_seconds(1.0, 1.05, 1.2, 1.5, 3.0, error=0.4)
    settings = {number: str(number) for number in alone}
    assert set(passed_over(alone, settings, "1")) == {4}
    related = {n: replace(f, speed=replace(f.speed, relative=0.08)) for n, f in alone.items() if f.speed}
    left_out = passed_over(related, settings, "1")
    assert set(left_out) == {2, 3, 4}
    assert reason_text(left_out[2]) == (
        "predicted 8.33 samples/s, 83.3% of the last of the most promising. Less than 1 / 1.08 = 92.6% is too "
        "slow: predicted ratios have an error of up to ±8%; forecast.keep=1 does not start it"
    )
    assert set(passed_over({**related, 2: alone[2]}, settings, "1")) == {3, 4}, "of one the ratio is not known"


def test_the_fastest_of_each_global_batch_size_is_kept():
    """What is learned from a sample may differ between batch sizes: the answer need not be in the fastest."""
    forecasts = {
        number: replace(result, speed=replace(result.speed, samples=samples))
        for (number, result), samples in zip(
            of_seconds(1.0, 2.0, 3.0, 1.0, 2.0).items(), (10, 10, 10, 1, 1), strict=True
        )
        if result.speed is not None
    }
    settings = {number: str(number) for number in forecasts}
    assert set(passed_over(forecasts, settings, "1")) == {1, 2, 4}


@pytest.mark.parametrize(
    ("words", "workers", "same"),
    [
        (["sharding=root", "precision=bf16", "training.global_batch_size=32", "data.num_train=64"], 8, True),
        (["model.num_layers=24"], 8, False),
        (["model=mlp"], 8, False),
        (["compile=true"], 8, False),
        (["offload=cpu"], 8, False),
        ([], 16, False),
    ],
)
def test_a_group_is_of_one_model_on_so_many_workers(words: list[str], workers: int, same: bool):
    gpu = sheet("h100_sxm")
    mine = ratio_group(config("sharding=per_block", "precision=fp32"), 8, gpu)
    assert (ratio_group(config("sharding=per_block", "precision=fp32", *words), workers, gpu) == mine) is same


def test_the_figures_of_a_device_separate_groups_and_on_a_cpu_nothing_is_offloaded():
    gpu = sheet("h100_sxm")
    cpu = replace(gpu, kind=DeviceKind.cpu)
    assert ratio_group(config(), 8, gpu) != ratio_group(config(), 8, replace(gpu, launch_s=1e-9))
    assert ratio_group(config("sharding=root", "offload=cpu"), 8, cpu) == ratio_group(config(), 8, cpu)
    longer = [*LANGUAGE, "data.seq_len=32"]
    assert ratio_group(config(*LANGUAGE), 8, gpu) != ratio_group(config(*longer), 8, gpu)


def test_a_sweep_says_why_it_skips_nothing():
    forecasts = of_seconds(1.0, 1.1, 1.2)
    settings = {0: "a", 1: "b", 2: "c"}
    assert passed_over(forecasts, settings, "2") == {}
    assert why_all(forecasts, settings, "2") == (
        "nothing is skipped: each of the 3 settings may be one of the 2 fastest, by the errors of their predictions"
    )
    assert why_all(forecasts, settings, "3") == (
        "nothing is skipped: 3 settings have a predicted speed, and forecast.keep asks for 3"
    )
    without = {0: replace(forecasts[0], speed=None)}
    assert why_all(without, settings, "1") == "nothing is skipped: no setting has a predicted speed"


def test_repeats_are_one_setting_and_what_cannot_fit_or_has_no_prediction_is_not_ranked():
    forecasts = of_seconds(1.0, 1.0, 5.0, 0.1, 9.0)
    forecasts[3] = replace(forecasts[3], peaks={"device": {"total": 10 * 2**20}}, capacity_bytes=5 * 2**20)
    forecasts[4] = replace(forecasts[4], speed=None)
    settings = {0: "a", 1: "a", 2: "b", 3: "c", 4: "d"}
    assert set(passed_over(forecasts, settings, "1")) == {2, 3}
    assert "needs 10.00 MiB of 5.00 MiB per device, by its forecast" in reason_text(
        passed_over(forecasts, settings, "1")[3]
    )
    assert set(passed_over(forecasts, settings, "2")) == {3}


def test_a_share_is_of_all_settings():
    forecasts = of_seconds(*(1.5**number for number in range(20)))
    settings = {number: str(number) for number in forecasts}
    assert set(passed_over(forecasts, settings, "20%")) == set(range(4, 20))
    assert number_kept("7%", 100) == 7


KEEP = ["forecast.keep='5'", "forecast.device=h100_sxm"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["forecast.keep='0'"], "forecast.keep=0 is not a number of settings; use a whole number of 1 or more"),
        (["forecast.keep=0%"], "forecast.keep=0% is not a number"),
        (["forecast.keep=some"], "forecast.keep=some is not a number"),
        (
            ["forecast.keep='5'"],
            "data sheets exist for GPUs only; leave it out on CPUs. For GPUs set forecast.device=<a100_40gb|",
        ),
        ([*KEEP, "forecast.enabled=false"], "forecast.enabled=false: without forecasts"),
        ([*KEEP, "search=random"], "a search suggests its trials one by one"),
        ([*KEEP, "engine=inline"], "engine=inline with forecast.keep=5"),
    ],
)
def test_a_keep_that_cannot_be_is_refused(words: list[str], message: str):
    settings = config(*words)
    with pytest.raises(UserError, match=re.escape(message)):
        _check(settings)


def _check(settings: SweepConfig) -> None:
    settings.check(1)
    check_forecast(settings)
