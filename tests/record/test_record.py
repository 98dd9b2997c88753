"""A sweep's record: its data frame, and the file that every sweep logs."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path

import pandas as pd
import pytest

from fsdp_lab.config import SweepConfig, UserError
from fsdp_lab.metrics import MEMORY, MIB, SPEED
from fsdp_lab.record.sweep import SweepRecord
from fsdp_lab.record.trial import with_forecast
from fsdp_lab.report.data import SweepData
from fsdp_lab.report.write import write_report
from fsdp_lab.status import TrialStatus
from tests.report.sweeps import sweep


def test_a_frame_has_a_row_a_trial_with_typed_columns():
    frame = sweep().frame()
    assert frame.index.name == "trial" and [*frame.index] == [0, 1, 2, 3, 4, 5]
    assert [*frame["precision"]] == ["fp32", "bf16"] * 3
    assert frame.loc[3, MEMORY] == 50 * MIB and frame.loc[3, SPEED] == 1980.0
    assert pd.isna(frame.loc[4, SPEED]) and frame.loc[4, "status"] == TrialStatus.oom
    assert frame[[MEMORY, SPEED, "seconds"]].dtypes.unique().tolist() == [float]


def test_a_record_is_read_as_it_was_written(tmp_path: Path):
    first, *others = sweep().trials
    first = dataclasses.replace(
        first, config=SweepConfig(), facts={"device": "cpu"}, folder=tmp_path,
        choices={"sharding": "ddp"},
    )  # fmt: skip
    written = SweepRecord("a/sweep", "python -m fsdp_lab -m", ["sharding", "precision"], [first, *others], 0.02, 0.03)
    written.write(tmp_path)
    read = SweepRecord.read(tmp_path / "record.json")
    assert read.trials[0].config == first.config
    assert read == dataclasses.replace(written, about=[], objectives=[], log_axes=[])
    pd.testing.assert_frame_equal(read.frame(), written.frame())


def test_a_record_is_data_and_runs_no_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """It may come from anywhere. A report of it writes the setting of a trial whose modules it does not import."""
    (tmp_path / "theirs.py").write_text("raise SystemExit('it was imported')")
    monkeypatch.syspath_prepend(str(tmp_path))
    config, facts = SweepConfig(), {"device": "cpu", "world_size": 2, "num_params": 10, "data_num_train": 64}
    config.model.target, config.data.target, config.data.collate_fn = "theirs.model", "theirs.Data", "theirs.collate"
    config.task.name, config.task.loss = "custom", "theirs.loss"
    config.data.arguments = {"depth": 2}
    facts |= {"layout": {"units": ["blocks.*"]}}
    trials = [dataclasses.replace(trial, config=config, facts=facts) for trial in sweep().trials]
    dataclasses.replace(sweep(), trials=trials).write(tmp_path)
    write_report(SweepData.read(tmp_path / "record.json"), tmp_path)
    assert "def parallelize(model):" in (tmp_path / "use_pytorch.py").read_text()
    assert "theirs" not in sys.modules


@pytest.mark.parametrize("keys", [["trials"], ["trials", 0, "status"], ["axes"]])
def test_a_damaged_record_is_named(tmp_path: Path, keys: list[str | int]):
    sweep().write(tmp_path)
    path = tmp_path / "record.json"
    content = within = json.loads(path.read_text())
    for key in keys[:-1]:
        within = within[key]
    del within[keys[-1]]
    for text in (json.dumps(content), path.read_text()[:100], "[]"):
        path.write_text(text)
        with pytest.raises(UserError, match=str(path)):
            SweepRecord.read(path)


def test_the_errors_of_a_forecast_stand_beside_it():
    measured, forecast = {MEMORY: 100.0, SPEED: 50.0}, {"forecast/peak_bytes": 90.0, "forecast/samples_per_s": 40.0}
    figures = with_forecast(measured, forecast)
    assert figures["forecast/error"] == pytest.approx(-0.1) and figures["perf/forecast_error"] == pytest.approx(0.25)
