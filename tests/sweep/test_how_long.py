"""What a sweep says at its start about the time of a trial."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from fsdp_lab.config import SweepConfig
from fsdp_lab.record.sweep import RECORD, SweepRecord
from fsdp_lab.record.trial import TrialRecord
from fsdp_lab.status import TrialStatus
from fsdp_lab.sweep.how_long import how_long
from fsdp_lab.sweep.store.find import last_folder, remember_last


def trial(number: int, seconds: float | None, status: TrialStatus = TrialStatus.finished) -> TrialRecord:
    return TrialRecord(number, {}, status, seconds=seconds, config=SweepConfig())


def test_trials_of_the_last_sweep_that_trained_the_same_tell_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    assert last_folder() is None and how_long(SweepConfig(), None) is None
    trials = [trial(0, 11.0), trial(1, 13.0), trial(2, 90.0), trial(3, 2.0, TrialStatus.failed), trial(4, None)]
    SweepRecord("a", "", [], trials, 0.02, 0.03).write(tmp_path)
    remember_last(tmp_path)
    note = how_long(SweepConfig(), last_folder())
    assert note is not None and note.endswith("about 13 s")
    other = SweepConfig()
    other.training = replace(other.training, epochs=other.training.epochs + 1)
    assert how_long(other, last_folder()) is None
    (tmp_path / RECORD).write_text((tmp_path / RECORD).read_text()[:-20])
    assert how_long(SweepConfig(), last_folder()) is None, "a damaged record tells nothing"
