"""Models of transformers under fake tensors of a GPU. What they learn on a CPU: `tests/training/test_parity.py`."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers")

from fsdp_lab.forecast.forecast import forecast_profile
from tests.ranks import config
from tests.workloads.hf.cases import WORDS


@pytest.mark.ci
def test_a_forecast_for_gpus_needs_no_value() -> None:
    for words in WORDS.values():
        trial = config(*words, "sharding=per_block", "precision=bf16_mixed")
        assert forecast_profile(trial, 8, cuda=True).peaks["device"]["total"] > 0
