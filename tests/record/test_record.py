"""A sweep's record, and its data frame."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import pandas as pd
import pytest

from fsdp_lab.config import SweepConfig
from fsdp_lab.config.metrics import MEMORY, MIB, SPEED
from fsdp_lab.config.status import TrialStatus
from fsdp_lab.record.trial import with_forecast
from fsdp_lab.record.trial_json import Outcome, changing, write_outcome
from fsdp_lab.report.page import write_report
from tests.report.sweeps import sweep


def test_a_frame_has_a_row_a_trial_with_typed_columns():
    frame = sweep().frame()
    assert frame.index.name == "trial" and [*frame.index] == [0, 1, 2, 3, 4, 5]
    assert [*frame["precision"]] == ["fp32", "bf16"] * 3
    assert frame.loc[3, MEMORY] == 50 * MIB and frame.loc[3, SPEED] == 1980.0
    assert pd.isna(frame.loc[4, SPEED]) and frame.loc[4, "status"] == TrialStatus.oom
    assert frame[[MEMORY, SPEED, "seconds"]].dtypes.unique().tolist() == [float]


def test_a_report_imports_no_code_of_a_trial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The folder may be another user's."""
    (tmp_path / "theirs.py").write_text("raise SystemExit('it was imported')")
    monkeypatch.syspath_prepend(str(tmp_path))
    config, facts = SweepConfig(), {"device": "cpu", "world_size": 2, "num_params": 10, "data_num_train": 64}
    config.model.target, config.data.target, config.data.collate_fn = "theirs.model", "theirs.Data", "theirs.collate"
    config.task.name, config.task.loss = "custom", "theirs.loss"
    config.data.arguments = {"depth": 2}
    facts |= {"layout": {"units": ["blocks.*"]}}
    trials = [dataclasses.replace(trial, config=config, facts=facts) for trial in sweep().trials]
    write_report(dataclasses.replace(sweep(), trials=trials), tmp_path)
    assert "def parallelize(model):" in (tmp_path / "use_pytorch.py").read_text()
    assert "theirs" not in sys.modules


def test_the_errors_of_a_forecast_stand_beside_it():
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
