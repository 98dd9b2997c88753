"""The data sheets in `conf/device`, and what is told of a wrong one."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from fsdp_lab.config import ConfigError
from fsdp_lab.config.conf import known_devices
from fsdp_lab.forecast.speed.device import KnownError, load_device
from fsdp_lab.training.speed import PEAK_FLOPS

MISSING = object()
SHEETS = sorted((Path(__file__).parents[2] / "conf" / "device").glob("*.yaml"))


def test_every_data_sheet_can_be_read_and_reaches_no_more_than_its_peaks():
    assert {path.stem for path in SHEETS} == set(known_devices()) >= {"a100_40gb", "a100_80gb", "h100_sxm"}
    for path in SHEETS:
        device = load_device(path)
        assert device.source and device.memory_gib > 0, path
        assert 0 < device.peak("float32") <= device.peak("bfloat16"), path
        shares = [*vars(device.reached).values(), *vars(device.efficiency).values()]
        assert all(0 < share <= 1 for share in shares if share is not None), path
        assert 0 < device.error.median <= device.error.p90 < 1, path


def test_training_knows_the_same_peaks_without_reading_yaml():
    """By these it measures the MFU that a forecast predicts."""
    types = ("bfloat16", "float16", "tfloat32", "float32")
    collected = {
        device.name: {dtype: device.peak_flops[dtype] for dtype in types} for device in map(load_device, SHEETS)
    }
    assert {name: PEAK_FLOPS[name] for name in collected} == collected
    for name, peaks in PEAK_FLOPS.items():  # the tensor cores' rate in TF32 is half of that in 16 bits
        assert peaks["tfloat32"] == pytest.approx(peaks["bfloat16"] / 2, rel=0.02), name


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("basis", "hearsay", "basis=hearsay is not one of data sheet, fitted, trials"),
        ("kind", "tpu", "kind=tpu is not one of cuda, cpu"),
        ("efficiency", {"matmul": 1.0}, r"efficiency is not a data sheet of a device: missing \['attention', 'link'"),
        ("colour", "green", r"unknown \['colour'\]"),
        ("memory_gib", "much", "memory_gib=much is not a positive number"),
        ("node_size", 0, "node_size=0 is not a positive number"),
        ("node_size", MISSING, r"missing \['node_size'\], unknown \[\]"),
        ("relative", {"median": 0.01}, "relative is not a data sheet of a device: missing"),
        ("relative", {"median": 0.01, "p90": 1.5}, "relative.p90=1.5 is a share of a step's time"),
        ("peak_flops", {"bfloat16": "312e12"}, r"peak_flops\.bfloat16=312e12 .*; YAML writes 1\.0e\+12"),
    ],
)
def test_a_wrong_data_sheet_says_what_is_wrong(tmp_path: Path, key: str, value: object, message: str):
    content = {**yaml.safe_load(SHEETS[0].read_text()), key: value}
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump({k: v for k, v in content.items() if v is not MISSING}))
    with pytest.raises(ConfigError, match=message):
        load_device(tmp_path / "mine.yaml")


@pytest.mark.parametrize(("value", "expected"), [({"median": 0.01, "p90": 0.05}, KnownError(0.01, 0.05)), (None, None)])
def test_a_data_sheet_may_have_the_error_of_ratios(tmp_path: Path, value: object, expected: KnownError | None):
    content = {**yaml.safe_load(SHEETS[0].read_text()), "relative": value}
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(content))
    assert load_device(tmp_path / "mine.yaml").relative == expected
