"""A night that goes on waits for what was left of its sweep."""

from __future__ import annotations

from pathlib import Path

import pytest

from fsdp_lab.config import SweepConfig, UserError
from fsdp_lab.nightly import attempt
from fsdp_lab.record.sweep_json import Record
from tests.test_locks import held


@pytest.fixture
def begun(tmp_path: Path) -> Path:
    Record.of(["-m", "sharding=root,ddp"], True, SweepConfig()).write(tmp_path)
    return tmp_path


def test_a_sweep_that_still_runs_is_waited_for(begun: Path):
    logged: list[str] = []
    with held(begun / ".lock") as other:

        def ends_it(text: str) -> None:
            logged.append(text)
            assert other.stdin is not None
            other.stdin.close()

        assert not attempt.set_aside_if_changed(begun, ends_it)
    assert len(logged) == 1 and f"for the sweep in {begun} to end" in logged[0]
    assert not attempt.set_aside_if_changed(begun, logged.append) and len(logged) == 1


def test_a_sweep_that_does_not_end_is_reported_with_its_process(begun: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(attempt, "_LOCK_LIMIT_S", 0.3)
    with held(begun / ".lock") as other:
        message = rf"the sweep in {begun} still runs \(process {other.pid}, since .*\); end it first."
        with pytest.raises(UserError, match=message):
            attempt.set_aside_if_changed(begun, lambda text: None)
