"""The states of a trial and of a sweep, from tables, and the figures of a trial."""

from __future__ import annotations

from pathlib import Path

import pytest
from omegaconf import DictConfig

from fsdp_lab.config import SweepConfig
from fsdp_lab.config.compose import Trial
from fsdp_lab.config.status import ExitCode, TrialStatus
from fsdp_lab.forecast.capacity import Forecast
from fsdp_lab.record.trial_json import Outcome
from fsdp_lab.sweep.state import TrialState
from fsdp_lab.sweep.sweep import Sweep
from tests.sweep.planted import LOSS, sweep_of

TRIAL = Trial(0, SweepConfig(), {}, [], Path(), DictConfig({}))


def in_status(*statuses: str) -> Sweep:
    return sweep_of([TrialState(TRIAL, TrialStatus(status)) for status in statuses])


def test_an_interrupted_trial_alone_has_ended_without_a_result():
    assert [status for status in TrialStatus if status.ended and not status.is_result] == [TrialStatus.interrupted]


@pytest.mark.parametrize(
    ("statuses", "interrupted", "error", "expected"),
    [
        ("finished finished", False, None, ExitCode.finished),
        ("finished oom diverged stopped skipped", False, None, ExitCode.finished),
        ("finished failed", False, None, ExitCode.failed),
        ("finished running", False, None, ExitCode.interrupted),  # nobody ended it: the watch over the interrupt
        ("failed waiting", False, None, ExitCode.interrupted),
        ("finished running", True, None, ExitCode.interrupted),
        ("finished finished", True, None, ExitCode.interrupted),
        ("running", False, RuntimeError("a bug"), ExitCode.failed),
        ("", False, None, ExitCode.finished),
    ],
)
def test_the_exit_code_says_how_a_sweep_ended(
    statuses: str, interrupted: bool, error: Exception | None, expected: ExitCode
):
    assert in_status(*statuses.split()).exit_code(interrupted, error) is expected


def test_a_trial_is_timed_from_its_first_begin_to_its_end():
    state = TrialState(TRIAL, TrialStatus.starting)
    state.begin(100.0)
    state.begin(103.0)  # its process was killed
    state.end(Outcome(TrialStatus.finished), 110.5)
    assert state.seconds == 10.5


def test_an_epoch_counts_once_and_what_it_lacks_stays():
    state = TrialState(TRIAL, TrialStatus.running)
    assert state.record_epoch({"epoch": 1, "val/loss": 2.0, "perf/samples_per_s": 5.0})
    assert not state.record_epoch({"epoch": 1, "val/loss": 9.0})
    assert state.record_epoch({"epoch": 2, "val/loss": 1.0})
    assert state.figures == {"epoch": 2, "val/loss": 1.0, "perf/samples_per_s": 5.0}


def test_trials_begin_in_their_order():
    sweep = in_status("finished", "waiting", "waiting")
    assert sweep.next_waiting() == 1 and sweep.has_more()
    sweep.trials[1].status = TrialStatus.starting
    assert sweep.next_waiting() == 2
    assert in_status("finished", "interrupted").next_waiting() is None


def test_the_front_is_of_finished_trials_in_several_objectives():
    sweep = in_status("finished", "oom", "finished", "finished")
    sweep.objectives = [("a", "min"), ("b", "max")]
    for state, (a, b) in zip(sweep.trials, [(1.0, 1.0), (0.0, 9.0), (2.0, 3.0), (3.0, 2.0)], strict=True):
        state.figures = {"a": a, "b": b}
    assert sweep.front() == {0, 2}  # 1 would beat all, and has no result; 2 beats 3
    sweep.objectives = LOSS
    assert sweep.front() == set()


MIB = 2**20


def state(cuda: bool) -> TrialState:
    """A trial of 9 MiB, as a GPU holds it beside 64 MiB of workspaces."""
    allowances = {"kernel workspaces": 64 * MIB} if cuda else {}
    reserved = 74 * MIB if cuda else None
    forecast = Forecast(cuda, 1, {"device": {"total": 9 * MIB}}, allowances, reserved_bytes=reserved)
    trial = Trial(None, SweepConfig(), {}, [], Path(), DictConfig({}))
    state = TrialState(trial)
    state.take_forecast(forecast)
    return state


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
