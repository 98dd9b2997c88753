"""What a sweep and its trials leave in their folders, and what a resume makes of it; without Ray."""

from __future__ import annotations

import dataclasses
import json
import os
import pickle
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pandas as pd
import pytest

from fsdp_lab.config import SweepConfig, UserError
from fsdp_lab.config.metrics import MEMORY, MIB, SPEED
from fsdp_lab.config.status import TrialStatus
from fsdp_lab.record.hydra_folder import write_hydra_folder
from fsdp_lab.record.paths import storage
from fsdp_lab.record.reasons import Code, Reason
from fsdp_lab.record.sweep_json import SweepStart, begin_folder, read_start
from fsdp_lab.record.trial import with_forecast
from fsdp_lab.record.trial_files import clear_attempt, wait_until_alone
from fsdp_lab.record.trial_json import Outcome, RankFailure, changing, read_trial, set_aside_failures, write_outcome
from fsdp_lab.record.trials_jsonl import add_trial, read_trials
from fsdp_lab.sweep.state import TrialState
from fsdp_lab.sweep.store import resume as changes
from fsdp_lab.sweep.store.checkpoints import drop_checkpoints
from fsdp_lab.sweep.store.find import remember_last
from fsdp_lab.sweep.store.resume import changes_of_code, changes_of_config, changes_of_workers, resume_arguments
from fsdp_lab.sweep.sweep_data import sweep_of
from tests.report.sweeps import sweep
from tests.sweep.planted import sweep_of as planned_sweep
from tests.sweep.planted import trial_by_hand

WORDS = (["sharding=root"], ["sharding=ddp", "optimizer.lr=0.1"], ["sharding=per_block"])


def test_a_line_that_a_kill_cut_is_no_trial_and_spoils_no_other(tmp_path: Path, compose_trial):
    trials = [compose_trial(words, number) for number, words in enumerate(WORDS)]
    for trial in trials[:2]:
        add_trial(tmp_path, trial)
    with (tmp_path / "trials.jsonl").open("a") as lines:
        lines.write('{"overrides": ["shardi')
    assert read_trials(tmp_path) == [(trial.overrides, trial.folder) for trial in trials[:2]]
    add_trial(tmp_path, trials[2])
    assert read_trials(tmp_path) == [(trial.overrides, trial.folder) for trial in trials]


def test_a_trial_that_is_missing_is_refused(tmp_path: Path, compose_trial):
    for number, words in enumerate(WORDS):
        add_trial(tmp_path, compose_trial(words, number))
    path = tmp_path / "trials.jsonl"
    first, second, third = path.read_text().splitlines(keepends=True)
    for left, message in (
        ([first, second[:20] + "\n", third], "line 2 cannot be read"), ([first, third], "lacks a trial"),
        ([], "lacks a trial"), ([first, second, third[:20]], "lacks a trial"),
    ):  # fmt: skip
        path.write_text("".join(left))
        with pytest.raises(UserError, match=rf"{path}.* {message}.* restore"):
            read_trials(tmp_path, 3)


def test_checkpoints_and_models_are_dropped_wherever_they_lie(tmp_path: Path, compose_trial):
    own = compose_trial(["sharding=root"], 0)
    shared = compose_trial(["sharding=root", f"cluster.storage_path={tmp_path}/disk"], 1)
    begin_folder(tmp_path, [own, shared])
    assert storage(own, tmp_path) == tmp_path / "0" and storage(shared, tmp_path).is_relative_to(tmp_path / "disk")
    for trial in (own, shared):
        add_trial(tmp_path, trial)
        (storage(trial, tmp_path) / "checkpoints/step_1").mkdir(parents=True)
        (storage(trial, tmp_path) / "model").mkdir()  # exported in a format of its own
        for name in ("model/model.safetensors", "model.pt", "metrics.jsonl"):
            (storage(trial, tmp_path) / name).write_text("")
    drop_checkpoints(tmp_path)
    for trial in (own, shared):
        assert [path.name for path in storage(trial, tmp_path).iterdir()] == ["metrics.jsonl"]


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
    script = "import sys, time; from pathlib import Path; from fsdp_lab.storage.locks import share_until_exit\n"
    script += "share_until_exit(Path(sys.argv[1], '.alive')); print('lives', flush=True); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None and other.stdout.readline() == "lives\n"
        with pytest.raises(TimeoutError, match="still work in"):
            wait_until_alone(tmp_path, 0.1)
        other.kill()
    wait_until_alone(tmp_path, 60.0)


def test_the_command_line_of_a_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    SweepStart.of(["sharding=root,ddp", "optimizer.lr=0.1", "hydra.sweep.dir=out"], True, SweepConfig()).write(tmp_path)
    remember_last(tmp_path)
    meant = resume_arguments(["resume=last", "optimizer.lr=0.2", "cluster.max_failures=3"])
    assert meant == ["-m", "sharding=root,ddp", "optimizer.lr=0.2", "cluster.max_failures=3", f"resume={tmp_path}",
                     f"hydra.sweep.dir={tmp_path}"]  # fmt: skip
    SweepStart.of(["sharding=root"], False, SweepConfig()).write(tmp_path)
    meant = resume_arguments([f"resume={tmp_path}", "-m"])
    assert meant == ["sharding=root", f"resume={tmp_path}", f"hydra.run.dir={tmp_path}", "hydra.output_subdir=null"]


def test_a_resume_is_typed_where_the_sweep_was_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """But another user's, whose modules Python would import there, and one of a job, whose folder Ray deletes."""

    def start_in(place: Path) -> None:
        place.mkdir(parents=True)
        monkeypatch.chdir(place)
        SweepStart.of(["sharding=root"], False, SweepConfig()).write(tmp_path)
        monkeypatch.chdir(tmp_path)

    words = [f"resume={tmp_path}"]
    start_in(tmp_path / "runtime_resources/working_dir_files/_ray_pkg_1")
    assert "sharding=root" in resume_arguments(words)
    start_in(tmp_path / "a place")
    with pytest.raises(UserError, match=f"was started in {tmp_path}/a place, .*cd '{tmp_path}/a place'"):
        resume_arguments(words)
    with monkeypatch.context() as theirs:
        theirs.setattr(changes, "find_trusted", lambda *_: (tmp_path, False))
        assert "sharding=root" in resume_arguments(words)
    (tmp_path / "a place").rmdir()
    assert "sharding=root" in resume_arguments(words)


def test_changed_code_is_named(monkeypatch: pytest.MonkeyPatch):
    record = SweepStart.of([], True, SweepConfig())
    assert changes_of_code(record) == []
    other = dataclasses.replace(record, code="0", libraries={**record.libraries, "torch": "2.9.0"})
    code, torch = changes_of_code(other)
    assert code == "the code of fsdp_lab changed", "the commit is the same"
    assert torch.startswith("torch was 2.9.0 and is ")
    monkeypatch.setattr(changes, "commit", lambda: "b" * 40)
    older = dataclasses.replace(record, code="0", commit="a" * 40, user_packages=["mine"])
    commits = f"fsdp_lab's commit {'a' * 12} then, {'b' * 12} now"
    assert changes_of_code(older) == [f"the code of fsdp_lab or mine changed ({commits})"]
    assert changes_of_code(dataclasses.replace(record, commit="a" * 40)) == [], "the same code in another commit"


def test_another_number_of_workers_by_default_is_named(monkeypatch: pytest.MonkeyPatch):
    record = SweepStart.of([], True, SweepConfig())
    assert changes_of_workers(record, SweepConfig()) == []
    (change,) = changes_of_workers(dataclasses.replace(record, num_workers=8), SweepConfig())
    assert change.startswith("cluster.num_workers=null was 8 workers and is ")


def test_changed_settings_are_named(compose_trial):
    trial = compose_trial(["optimizer.lr=0.1", "training.epochs=2"], 0)
    write_hydra_folder(trial)
    assert changes_of_config(trial.folder, trial.config) == []
    longer = compose_trial(["optimizer.lr=0.1", "training.epochs=3", "cluster.max_failures=9", "resume=x"], 0).config
    assert changes_of_config(trial.folder, longer) == ["training.epochs was 2 and is 3"]
    (trial.folder / ".hydra/config.yaml").write_text("optimizer:\n")
    (change,) = changes_of_config(trial.folder, trial.config)
    assert f"{trial.folder}/.hydra/config.yaml cannot be read" in change and "resume_anyway=true" in change


def test_a_search_whose_record_lost_a_result_is_refused(tmp_path: Path, compose_trial):
    """Going on without it would train that trial's number again, into its folder."""
    SweepStart.of([], True, SweepConfig()).write(tmp_path)
    for number in range(2):
        trial = compose_trial(["sharding=root"], number)
        add_trial(tmp_path, trial)
        trial.folder.mkdir()
        write_outcome(trial.folder, Outcome(TrialStatus.finished))
    assert len(read_trials(tmp_path)) == 2
    path = tmp_path / "trials.jsonl"
    path.write_text(path.read_text().splitlines(keepends=True)[0])
    os.utime(tmp_path / "sweep.json", (2**33, 2**33))  # as where the folder was copied
    with pytest.raises(UserError, match=rf"trials.jsonl lacks {tmp_path}/1"):
        read_trials(tmp_path)


def test_a_frame_has_a_row_a_trial_with_typed_columns():
    frame = sweep().frame()
    assert frame.index.name == "trial" and [*frame.index] == [0, 1, 2, 3, 4, 5]
    assert [*frame["precision"]] == ["fp32", "bf16"] * 3
    assert frame.loc[3, MEMORY] == 50 * MIB and frame.loc[3, SPEED] == 1980.0
    assert pd.isna(frame.loc[4, SPEED]) and frame.loc[4, "status"] == TrialStatus.oom
    assert frame[[MEMORY, SPEED, "seconds"]].dtypes.unique().tolist() == [float]


def test_the_workers_of_a_report_are_those_that_trained():
    states = [TrialState(trial_by_hand([])) for _ in range(3)]
    planned = planned_sweep(states)
    assert "workers" not in dict(sweep_of(planned, lambda number: "").about), "none has started"
    states[1].facts, states[2].facts = {"world_size": 8}, {"world_size": 4}
    assert dict(sweep_of(planned, lambda number: "").about)["workers"] == "4, 8"


def test_the_errors_of_a_forecast_stand_beside_it():
    """100 bytes were 90 in the forecast, 10 % too few; 50 samples/s were 40, so its step was 25 % too long."""
    measured, forecast = {MEMORY: 100.0, SPEED: 50.0}, {"forecast/peak_bytes": 90.0, "forecast/samples_per_s": 40.0}
    figures = with_forecast(measured, forecast)
    assert figures["forecast/error"] == pytest.approx(-0.1) and figures["perf/forecast_error"] == pytest.approx(0.25)


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
