"""The figures of a trial: what was forecast beside what was measured."""

from __future__ import annotations

from pathlib import Path

import pytest
from omegaconf import DictConfig

from fsdp_lab.compose import Trial
from fsdp_lab.config import SweepConfig
from fsdp_lab.forecast.capacity import Forecast
from fsdp_lab.sweep.state import TrialState

MIB = 2**20


def state(cuda: bool) -> TrialState:
    """A trial of 9 MiB, as a GPU holds it beside 64 MiB of workspaces."""
    allowances = {"kernel workspaces": 64 * MIB} if cuda else {}
    reserved = 74 * MIB if cuda else None
    forecast = Forecast(cuda, 1, {"device": {"total": 9 * MIB}}, allowances, reserved_bytes=reserved)
    trial = Trial(None, SweepConfig(), {}, [], Path(), DictConfig({}))
    return TrialState(trial, forecast=forecast)


@pytest.mark.parametrize(
    ("cuda", "metrics"),
    [
        (False, {"memory/peak_bytes": 9 * MIB}),
        (True, {"memory/peak_bytes": 9 * MIB, "memory/reserved_bytes": 80 * MIB, "memory/workspace_bytes": 32 * MIB}),
        (True, {"memory/peak_bytes": 73 * MIB, "memory/reserved_bytes": 80 * MIB}),  # workspaces not told apart
    ],
)
def test_workspaces_are_no_error_of_a_forecast(cuda: bool, metrics: dict[str, float]):
    assert state(cuda).figures_at(metrics)["forecast/error"] == 0


def test_what_is_reserved_is_forecast_for_gpus_alone():
    assert state(cuda=True).figures_at({})["forecast/reserved_bytes"] == 74 * MIB
    assert "forecast/reserved_bytes" not in state(cuda=False).figures_at({})
