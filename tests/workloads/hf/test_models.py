"""Models of transformers under fake tensors of a GPU. What they learn on a CPU: `tests/training/test_parity.py`."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers")

from fsdp_lab.forecast.forecast import forecast_profile
from tests.ranks import config
from tests.workloads.hf.cases import WORDS


@pytest.mark.ci
@pytest.mark.parametrize("precision", [pytest.param("fp32", marks=pytest.mark.ci), "bf16_mixed"])
def test_a_forecast_for_gpus_needs_no_value(precision: str) -> None:
    for words in WORDS.values():
        trial = config(*words, "sharding=per_block", f"precision={precision}")
        assert forecast_profile(trial, 8, cuda=True).peaks["device"]["total"] > 0
