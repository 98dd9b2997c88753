"""A trial's `trial.json`, which several processes change, and a sweep's `sweep.json` and data frame."""

from __future__ import annotations

import pickle
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pandas as pd
import pytest

from fsdp_lab.config import UserError
from fsdp_lab.config.metrics import MEMORY, MIB, SPEED
from fsdp_lab.config.status import TrialStatus
from fsdp_lab.record.reasons import Code, Reason
from fsdp_lab.record.sweep_json import SweepStart, read_start
from fsdp_lab.record.trial import with_forecast
from fsdp_lab.record.trial_files import clear_attempt
from fsdp_lab.record.trial_json import Outcome, RankFailure, changing, read_trial, set_aside_failures, write_outcome
from tests.report.sweeps import sweep


def test_a_frame_has_a_row_a_trial_with_typed_columns():
    frame = sweep().frame()
    assert frame.index.name == "trial" and [*frame.index] == [0, 1, 2, 3, 4, 5]
    assert [*frame["precision"]] == ["fp32", "bf16"] * 3
    assert frame.loc[3, MEMORY] == 50 * MIB and frame.loc[3, SPEED] == 1980.0
    assert pd.isna(frame.loc[4, SPEED]) and frame.loc[4, "status"] == TrialStatus.oom
    assert frame[[MEMORY, SPEED, "seconds"]].dtypes.unique().tolist() == [float]


def test_the_errors_of_a_forecast_stand_beside_it():
    """100 bytes were 90 in the forecast, 10 % too few; 50 samples/s were 40, so its step was 25 % too long."""
    measured, forecast = {MEMORY: 100.0, SPEED: 50.0}, {"forecast/peak_bytes": 90.0, "forecast/samples_per_s": 40.0}
    figures = with_forecast(measured, forecast)
    assert figures["forecast/error"] == pytest.approx(-0.1) and figures["perf/forecast_error"] == pytest.approx(0.25)


def test_an_outcome_stays_on_the_disk_when_its_file_is_written_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A forecast that comes late replaces the file: without a sync, a power cut would take the outcome with it."""
    synced = list[int]()
    monkeypatch.setattr("os.fsync", synced.append)
    with changing(tmp_path) as trial:
        trial.forecast = {"forecast/peak_bytes": 1.0}
    assert synced == [], "a forecast alone can be made again"
    write_outcome(tmp_path, Outcome(TrialStatus.finished))
    before = len(synced)
    with changing(tmp_path) as trial:
        trial.forecast = {"forecast/peak_bytes": 2.0}
    assert 0 < before < len(synced)


def test_the_first_of_two_outcomes_counts_and_nothing_else_is_lost(tmp_path: Path):
    """As the trial's own process and the driver may each have one."""

    def write(number: int) -> TrialStatus:
        with changing(tmp_path) as trial:
            trial.forecast[str(number)] = 1.0
        write_outcome(tmp_path, Outcome(TrialStatus.finished if number % 2 else TrialStatus.stopped))
        outcome = read_trial(tmp_path).outcome
        assert outcome is not None
        return outcome.status

    with ThreadPoolExecutor(8) as threads:
        read = set(threads.map(write, range(40)))
    assert len(read) == 1 and len(read_trial(tmp_path).forecast) == 40


def test_a_trial_is_read_as_it_was_written(tmp_path: Path):
    failure = pickle.loads(pickle.dumps(RankFailure(Reason.of(Code.error, rank=1, text="boom"), "Traceback", time=9.0)))
    lost = RankFailure(Reason.of(Code.peer_lost, rank=0), time=1.0)
    with changing(tmp_path) as trial:
        trial.failures += [lost, failure]
        trial.facts = {"device": "cpu", "notes": ["one"]}
    outcome = Outcome(TrialStatus.failed, failure.reason, 2.0, 3.0)
    write_outcome(tmp_path, outcome)
    trial = read_trial(tmp_path)
    assert trial.outcome == outcome and trial.any_facts == {"device": "cpu", "notes": ["one"]}
    assert trial.cause is not None and trial.cause.traceback == "Traceback", "a rank that lost its peers is not it"
    set_aside_failures(tmp_path)
    clear_attempt(tmp_path)
    clear_attempt(tmp_path)  # a start that was killed before rank 0 reported
    trial = read_trial(tmp_path)
    assert (trial.outcome, trial.cause, trial.facts) == (None, None, None)
    earlier = [[failure.rank for failure in attempt] for attempt in trial.earlier_failures]
    assert trial.any_facts["device"] == "cpu" and earlier == [[0, 1]]


def test_a_folder_that_was_removed_is_not_made_again(tmp_path: Path):
    with pytest.raises(FileNotFoundError), changing(tmp_path / "gone"):
        pass
    assert not list(tmp_path.iterdir())


def test_a_sweep_of_a_version_with_other_files_is_refused(tmp_path: Path):
    """Else a resume would train every trial again."""
    SweepStart("id", [], True, str(tmp_path), 1).write(tmp_path)
    assert read_start(tmp_path).id == "id"
    file = tmp_path / "sweep.json"
    file.write_text(file.read_text().replace(',\n "layout": 1', ""))
    with pytest.raises(UserError, match="another version of fsdp_lab started this sweep"):
        read_start(tmp_path)
