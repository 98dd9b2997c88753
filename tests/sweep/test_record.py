"""What a sweep and its trials leave in their folders, and what a resume makes of it; without Ray."""

from __future__ import annotations

import dataclasses
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from fsdp_lab.config import SweepConfig, UserError
from fsdp_lab.config.metrics import MEMORY, SPEED
from fsdp_lab.config.status import TrialStatus
from fsdp_lab.record.paths import storage
from fsdp_lab.record.sweep_json import SweepStart, begin_folder, read_start
from fsdp_lab.record.trial import with_forecast
from fsdp_lab.record.trial_files import clear_attempt, wait_until_alone
from fsdp_lab.record.trial_json import Outcome, changing, read_trial, write_outcome
from fsdp_lab.record.trials_jsonl import add_trial, read_trials
from fsdp_lab.storage.files import write_text
from fsdp_lab.storage.locks import share_until_exit
from fsdp_lab.sweep.store.checkpoints import drop_checkpoints
from fsdp_lab.sweep.store.resume import changes_of_code, changes_of_workers, resume_arguments

WORDS = (["sharding=root"], ["sharding=ddp", "optimizer.lr=0.1"], ["sharding=per_block"])


def test_a_line_that_a_kill_cut_is_no_trial_and_spoils_no_other(tmp_path: Path, compose_trial):
    trials = [compose_trial(words, number) for number, words in enumerate(WORDS)]
    for trial in trials[:2]:
        add_trial(tmp_path, trial)
    with (tmp_path / "trials.jsonl").open("a") as lines:
        lines.write('{"overrides": ["shardi')
    assert [line["overrides"] for line in read_trials(tmp_path)] == list(WORDS[:2])
    add_trial(tmp_path, trials[2])
    expected = [(trial.overrides, trial.folder) for trial in trials]
    assert [(line["overrides"], line["folder"]) for line in read_trials(tmp_path)] == expected


@pytest.mark.parametrize("line", [{"folder": "../other"}, {"folder": "0", "storage": "other"}, {"folder": "link"}])
def test_what_does_not_belong_to_the_sweep_is_not_removed(line: dict[str, str], tmp_path: Path, compose_trial):
    """A folder may come from somebody else, and its record or the name of its shared folder name any path."""
    sweep, other = tmp_path / "sweep", tmp_path / "other"
    (other / "checkpoints").mkdir(parents=True)
    (other / "model.pt").write_text("")
    begin_folder(sweep, [compose_trial(["sharding=root"], 0)])
    (sweep / "link").symlink_to(other)
    (sweep / ".storage").write_text(tmp_path.name)
    absolute = {key: str(tmp_path / value) if key == "storage" else value for key, value in line.items()}
    (sweep / "trials.jsonl").write_text(json.dumps({"overrides": [], **absolute}) + "\n")
    with pytest.raises(OSError, match="not below the sweep's folder or its storage"):
        drop_checkpoints(sweep)
    assert {path.name for path in other.iterdir()} == {"checkpoints", "model.pt"}


def test_weights_are_removed_and_measurements_stay(tmp_path: Path, compose_trial):
    add_trial(tmp_path, compose_trial(["sharding=root"], 0))
    for name in ("checkpoints/epoch-1/0.distcp", "model.pt", "model/config.json", "metrics.jsonl"):
        write_text(tmp_path / "0" / name, "")
    drop_checkpoints(tmp_path)
    assert [path.name for path in (tmp_path / "0").iterdir()] == ["metrics.jsonl"]


def test_a_sweeps_folder_on_the_disk_of_all_nodes_stays_its_own(tmp_path: Path, compose_trial):
    """Where the sweep's folder is moved, or seen from another node; one that is begun in its place has another."""
    trial = compose_trial(["sharding=root", f"cluster.storage_path={tmp_path}/disk"], 0)
    here = dataclasses.replace(trial, folder=tmp_path / "a/sweep/0")
    begin_folder(tmp_path / "a/sweep", [here])
    (tmp_path / "a/sweep").rename(tmp_path / "a/sweep.1")
    moved = dataclasses.replace(trial, folder=tmp_path / "a/sweep.1/0")
    assert storage(moved, tmp_path / "a/sweep.1").parent.name.startswith("a-sweep-")
    begin_folder(tmp_path / "a/sweep", [here])
    assert storage(here, tmp_path / "a/sweep") != storage(moved, tmp_path / "a/sweep.1")


def test_nobody_begins_while_a_process_of_the_run_before_lives(tmp_path: Path):
    """Which here is the test's own."""
    wait_until_alone(tmp_path, 0.1)
    share_until_exit(tmp_path / ".alive")
    with pytest.raises(TimeoutError, match="still work in"):
        wait_until_alone(tmp_path, 0.1)


def test_a_resume_is_typed_where_the_sweep_was_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """For its relative paths, if that folder is still there."""
    place = tmp_path / "a place"
    place.mkdir()
    monkeypatch.chdir(place)
    SweepStart.of(["sharding=root"], False, SweepConfig()).write(tmp_path)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=f"was started in {place}, .*cd '{place}'"):
        resume_arguments([f"resume={tmp_path}"])
    place.rmdir()
    assert "sharding=root" in resume_arguments([f"resume={tmp_path}"])


def test_another_library_and_number_of_workers_are_named():
    record = SweepStart.of([], True, SweepConfig())
    assert changes_of_code(record) == changes_of_workers(record, SweepConfig()) == {}
    other = dataclasses.replace(record, libraries={**record.libraries, "torch": "2.9.0"}, num_workers=8)
    ((torch, _),) = changes_of_code(other).values()
    ((workers, _),) = changes_of_workers(other, SweepConfig()).values()
    assert torch.startswith("torch was 2.9.0 and is ")
    assert workers.startswith("cluster.num_workers=null was 8 workers and is ")


def test_facts_outlast_starts_that_reported_none(tmp_path: Path):
    """A resume compares the data with it."""
    with changing(tmp_path) as trial:
        trial.facts = {"data_digest": "0123"}
    for _ in range(2):  # the second was killed before rank 0 reported
        clear_attempt(tmp_path)
        assert read_trial(tmp_path).any_facts == {"data_digest": "0123"}


def test_the_errors_of_a_forecast_stand_beside_it():
    """100 bytes were 90 in the forecast, 10 % too few; 50 samples/s were 40, so its step was 25 % too long."""
    measured, forecast = {MEMORY: 100.0, SPEED: 50.0}, {"forecast/peak_bytes": 90.0, "forecast/samples_per_s": 40.0}
    figures = with_forecast(measured, forecast)
    assert figures["forecast/error"] == pytest.approx(-0.1) and figures["perf/forecast_error"] == pytest.approx(0.25)


def test_a_search_whose_record_lost_a_result_is_refused(tmp_path: Path, compose_trial):
    """Going on without it would train that trial's number again, into its folder."""
    add_trial(tmp_path, compose_trial(["sharding=root"], 0))
    (tmp_path / "1").mkdir()
    write_outcome(tmp_path / "1", Outcome(TrialStatus.finished))
    with pytest.raises(UserError, match=rf"trials.jsonl lacks {tmp_path}/1"):
        read_trials(tmp_path)


def test_an_outcome_stays_on_disk_when_its_file_is_written_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
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


def test_the_first_of_two_outcomes_counts_and_nothing_is_lost(tmp_path: Path):
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


def test_a_sweep_of_a_version_with_other_files_is_refused(tmp_path: Path):
    """Else a resume would train every trial again."""
    SweepStart("id", [], True, str(tmp_path), 1).write(tmp_path)
    file = tmp_path / "sweep.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "layout": 0}))
    with pytest.raises(UserError, match="another version of fsdp_lab started this sweep"):
        read_start(tmp_path)
