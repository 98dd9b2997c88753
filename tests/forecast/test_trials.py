"""What is kept of finished trials."""

from __future__ import annotations

from pathlib import Path

import pytest

from fsdp_lab.forecast.trials import read_trials, record_trials, trials_file
from fsdp_lab.speed.device import Factors
from tests.speed.test_refine import trials


def test_trials_are_kept_by_device_and_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    one, two, three = trials(3, Factors())
    record_trials("A CPU, 2 cores", {"a/0": one, "a/1": two})
    record_trials("A CPU, 2 cores", {"a/1": three})
    assert read_trials("A CPU, 2 cores", "2.15.0") == [one, three]
    assert read_trials("A CPU, 2 cores", "2.11.0") == []
    assert read_trials("another", "2.15.0") == []
    trials_file("A CPU, 2 cores").write_text("[")
    assert read_trials("A CPU, 2 cores", "2.15.0") == []
    trials_file("A CPU, 2 cores").write_text('{"a/0": {"measured_s": 1}}')
    assert read_trials("A CPU, 2 cores", "2.15.0") == []


def test_the_oldest_trials_leave(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    many = trials(510, Factors())
    record_trials("x", {str(number): one for number, one in enumerate(many)})
    assert read_trials("x", "2.15.0") == many[10:]
