"""The error of ratios of predictions."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path

import pytest
import yaml

from fsdp_lab.config import ConfigError
from fsdp_lab.config.conf import device_file
from fsdp_lab.speed.device import KnownError, load_device
from fsdp_lab.speed.pairs import pair_error

RATIOS = [0.9, 0.95, 1.0, 1.0, 1.05, 1.1, 1.2]


def test_it_is_that_of_each_pair_and_a_common_factor_changes_nothing():
    result = pair_error([RATIOS])
    assert result is not None
    errors = sorted(max(a, b) / min(a, b) - 1 for a, b in combinations(RATIOS, 2))
    assert result.median == pytest.approx(errors[10]) and result.p90 == pytest.approx(errors[18])
    doubled = pair_error([[2 * ratio for ratio in RATIOS]])
    assert doubled is not None and doubled.p90 == pytest.approx(result.p90)


def test_only_settings_of_one_model_are_compared():
    exact = [[level] * 7 for level in (0.5, 1.0, 3.0)]
    assert pair_error(exact) == KnownError(0.01, 0.01), "no error is below a hundredth"
    assert pair_error([[level for level, *_ in exact] * 3]) != pair_error(exact)


def test_few_pairs_report_nothing():
    assert pair_error([]) is None and pair_error([RATIOS[:6]]) is None and pair_error([[1.0]] * 100) is None


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ({"median": 0.01, "p90": 0.05}, KnownError(0.01, 0.05)),
        (None, None),
        ({"median": 0.01}, "relative is not a data sheet of a device: missing"),
        ({"median": 0.01, "p90": 1.5}, "relative.p90=1.5 is a share of a step's time"),
    ],
)
def test_a_device_file_may_have_it(tmp_path: Path, value: object, expected: KnownError | str | None):
    content = yaml.safe_load((device_file("l40s") or Path()).read_text())
    file = tmp_path / "mine.yaml"
    file.write_text(yaml.safe_dump({**content, "relative": value}))
    if isinstance(expected, str):
        with pytest.raises(ConfigError, match=expected):
            load_device(file)
    else:
        assert load_device(file).relative == expected
