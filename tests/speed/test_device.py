"""The data sheets in `conf/device`, and what is told of a wrong one."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from fsdp_lab.config import ConfigError
from fsdp_lab.speed.device import Basis, load_device

SHEETS = sorted((Path(__file__).parents[2] / "conf" / "device").glob("*.yaml"))


@pytest.mark.parametrize("path", SHEETS, ids=lambda path: path.stem)
def test_a_data_sheet_can_be_read_and_reaches_no_more_than_its_peaks(path: Path):
    device = load_device(path)
    assert device.source and device.memory_gib > 0
    assert 0 < device.peak("float32") <= device.peak("bfloat16")
    shares = [*vars(device.reached).values(), *vars(device.efficiency).values()]
    assert all(0 < share <= 1 for share in shares)
    assert 0 < device.error.median <= device.error.p90


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("basis", "hearsay", "basis=hearsay is none of data sheet, fitted, calibration"),
        ("kind", "tpu", "kind=tpu is none of cuda, cpu"),
        ("efficiency", {"matmul": 1.0}, r"efficiency is no data sheet of a device: missing \['attention', 'link'"),
        ("colour", "green", r"unknown \['colour'\]"),
    ],
)
def test_a_wrong_data_sheet_says_what_is_wrong(tmp_path: Path, key: str, value: object, said: str):
    content = yaml.safe_load(SHEETS[0].read_text())
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump({**content, key: value}))
    with pytest.raises(ConfigError, match=said):
        load_device(tmp_path / "mine.yaml")
    assert load_device(SHEETS[0]).basis in Basis
