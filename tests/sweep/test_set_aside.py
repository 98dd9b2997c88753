"""Trials whose timing is excluded: which are measured again, and what is kept."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import pytest

from fsdp_lab.compose import Trial
from fsdp_lab.config import UserError
from fsdp_lab.files import write_json
from fsdp_lab.metrics import OTHERS_CPU, SPEED
from fsdp_lab.record.reasons import TimingExcluded
from fsdp_lab.record.trial_files import Outcome, append_line, read_metrics, read_outcome, write_outcome
from fsdp_lab.status import TrialStatus
from fsdp_lab.storage import Storage, StorageAway
from fsdp_lab.sweep.state import TrialState
from fsdp_lab.sweep.store.resume import read_state, resumed_states
from fsdp_lab.sweep.store.set_aside import set_aside


def trial(folder: Path) -> Path:
    (folder / "checkpoints").mkdir()
    (folder / "outcome.json").write_text("{}")
    return folder


def test_what_is_set_aside_gets_a_number_that_is_free(tmp_path: Path):
    for name in ("excluded.2", "excluded.10", "excluded.old"):
        (tmp_path / name).mkdir()
    (tmp_path / "trace_rank0.json.gz").touch()
    set_aside(trial(tmp_path), None)
    assert not (tmp_path / "checkpoints").exists()
    assert [path.name for path in sorted((tmp_path / "excluded.11").iterdir())] == [
        "outcome.json",
        "trace_rank0.json.gz",
    ]


def test_nothing_goes_where_the_record_finds_no_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The failures are made by hand: a disk that is full, a store that is away."""

    def full(self: Path) -> None:
        raise OSError(28, "No space left on device")

    def away(self: Storage) -> None:
        raise StorageAway("memory://: the store does not answer")

    folder = trial(tmp_path)
    before = sorted(folder.iterdir())
    with monkeypatch.context() as patch:
        patch.setattr(Path, "mkdir", full)
        with pytest.raises(OSError, match="No space"):
            set_aside(folder, None)
    monkeypatch.setattr(Storage, "files", away)
    with pytest.raises(UserError, match="resume the sweep when it answers"):
        set_aside(folder, "memory://sweeps/s/0")
    assert sorted(folder.iterdir()) == before


@pytest.mark.parametrize("status", ["finished", "stopped"])
@pytest.mark.parametrize("renames", [0, 1, 2, 3])
def test_a_kill_in_between_leaves_no_epoch_of_a_trial_that_starts_over(
    renames: int,
    status: str,
    compose_trial: Callable[[Sequence[str], int], Trial],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    one = compose_trial([], 0)
    one.folder.mkdir()
    write_json(one.folder / "facts.json", {"device": "cpu"})
    append_line(one.folder / "metrics.jsonl", json.dumps({"epoch": 1, SPEED: 10.0, OTHERS_CPU: 0.9}))
    write_outcome(one.folder, Outcome(TrialStatus(status), None, 1.0), 0.25)
    rename, left = Path.rename, [None] * renames

    def until_killed(self: Path, to: Path) -> None:
        if not left:
            raise KeyboardInterrupt
        left.pop()
        rename(self, to)

    with monkeypatch.context() as patch, suppress(KeyboardInterrupt):
        patch.setattr(Path, "rename", until_killed)
        set_aside(one.folder, None)
    (state,) = resumed_states([one], tmp_path, one.config)
    if state.ended:
        assert renames == 0 and state.timing_excluded, "a resume with resume_failed=true sets it aside again"
    else:
        assert list(read_metrics(one.folder)) == []


@pytest.mark.parametrize("status", ["finished", "stopped", "failed", "diverged", "oom"])
def test_only_what_would_have_a_speed_is_measured_again(
    compose_trial: Callable[[Sequence[str], int], Trial], tmp_path: Path, status: str
):
    one = compose_trial(["resume_failed=true"], 0)
    one.folder.mkdir()
    write_json(one.folder / "facts.json", {"device": "cpu"})
    append_line(one.folder / "metrics.jsonl", json.dumps({"epoch": 1, SPEED: 10.0, OTHERS_CPU: 0.9}))
    write_outcome(one.folder, Outcome(TrialStatus(status), None, 1.0), 0.25)
    (state,) = resumed_states([one], tmp_path, one.config)
    assert state.again is (status in ("finished", "stopped"))
    assert state.ended is (status in ("diverged", "oom")), "one that failed runs again, too"


def test_whether_a_speed_may_be_used_is_decided_when_the_trial_ends(
    compose_trial: Callable[[Sequence[str], int], Trial], tmp_path: Path
):
    """By the limit of that start, whatever is lost later; another limit, or an outcome without one, decides again."""
    one, other = compose_trial([], 0), compose_trial(["report.others_cpu=1"], 0)
    one.folder.mkdir()
    write_json(one.folder / "facts.json", {"device": "NVIDIA H200"})
    append_line(one.folder / "metrics.jsonl", json.dumps({"epoch": 1, SPEED: 10.0, OTHERS_CPU: 0.9}))

    def excluded(trial: Trial) -> TimingExcluded | None:
        return read_state(TrialState(trial), one.folder).timing_excluded

    write_outcome(one.folder, Outcome(TrialStatus.finished), 0.25)
    assert read_outcome(one.folder) == Outcome(TrialStatus.finished, None, None, 1, None, 0.25)
    (one.folder / "facts.json").unlink()
    assert excluded(one) is None, "on a GPU others take nothing from it"
    write_json(one.folder / "facts.json", {"device": "cpu"})
    write_outcome(one.folder, Outcome(TrialStatus.finished), 0.25)
    for lost in ("facts.json", "metrics.jsonl"):
        assert excluded(one) is TimingExcluded.others_cpu and excluded(other) is None
        path = one.folder / "outcome.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"epochs": 0}))
        (one.folder / lost).unlink()
    assert excluded(one) is TimingExcluded.others_cpu
    append_line(one.folder / "metrics.jsonl", json.dumps({"epoch": 1, SPEED: 10.0, OTHERS_CPU: 0.9}))
    for text in ('{"status": "finished"}', '{"status": "finished", "timing_excluded": "later", "others_cpu": 0.25}'):
        path.write_text(text)
        assert excluded(one) is TimingExcluded.others_cpu, text
