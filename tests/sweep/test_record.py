"""What a sweep leaves in its folder, and what a resume makes of it; without Ray."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fsdp_lab.config import SweepConfig, UserError, from_dict
from fsdp_lab.config.machine import RunningCluster
from fsdp_lab.config.status import TrialStatus
from fsdp_lab.record.hydra_folder import write_hydra_folder
from fsdp_lab.record.paths import storage
from fsdp_lab.record.sweep_json import SweepStart, begin_folder, read_start
from fsdp_lab.record.trial_files import wait_until_alone
from fsdp_lab.record.trial_json import Outcome, write_outcome
from fsdp_lab.record.trials_jsonl import add_trial, read_trials
from fsdp_lab.sweep.grid import with_overrides
from fsdp_lab.sweep.store import resume as changes
from fsdp_lab.sweep.store.checkpoints import drop_checkpoints
from fsdp_lab.sweep.store.find import remember_last
from fsdp_lab.sweep.store.resume import changes_of_code, changes_of_config, changes_of_workers, resume_arguments

WORDS = (["sharding=root"], ["sharding=ddp", "optimizer.lr=0.1"], ["sharding=per_block"])


def test_a_line_that_a_kill_cut_short_is_no_trial_and_spoils_no_other(tmp_path: Path, compose_trial):
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


def test_checkpoints_go_wherever_they_lie_and_whatever_code_they_are_of(tmp_path: Path, compose_trial):
    own = compose_trial(["sharding=root"], 0)
    shared = compose_trial(["sharding=root", f"cluster.storage_path={tmp_path}/disk"], 1)
    begin_folder(tmp_path, [own, shared])
    for trial in (own, shared):
        add_trial(tmp_path, trial)
        (storage(trial, tmp_path) / "checkpoints/step_1").mkdir(parents=True)
        (storage(trial, tmp_path) / "model").mkdir()  # exported in a format of its own
        for name in ("model/model.safetensors", "model.pt", "metrics.jsonl"):
            (storage(trial, tmp_path) / name).write_text("")
    (tmp_path / "0/.hydra").mkdir()
    (tmp_path / "0/.hydra/config.yaml").write_text("a_key_that_is_no_more: 1")
    assert storage(own, tmp_path) == tmp_path / "0" and storage(shared, tmp_path).is_relative_to(tmp_path / "disk")
    drop_checkpoints(tmp_path)
    for trial in (own, shared):
        left = {path.name for path in storage(trial, tmp_path).iterdir()}
        assert left - {".hydra"} == {"metrics.jsonl"}


@pytest.mark.parametrize("named", ["shared folder", ""])
@pytest.mark.parametrize("line", [{"folder": "../other"}, {"folder": "0", "storage": "other"}, {"folder": "link"}])
def test_what_does_not_belong_to_the_sweep_is_not_removed(
    line: dict[str, str], named: str, tmp_path: Path, compose_trial
):
    """A folder may come from somebody else, and its record or the name of its shared folder name any path."""
    sweep, other = tmp_path / "sweep", tmp_path / "other"
    (other / "checkpoints").mkdir(parents=True)
    (other / "model.pt").write_text("")
    begin_folder(sweep, [compose_trial(["sharding=root"], 0)])
    (sweep / "link").symlink_to(other)
    if named:
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


def started_in(folder: Path, launched_in: Path) -> None:
    SweepStart.of(["sharding=root"], False, SweepConfig()).write(folder)
    record = json.loads((folder / "sweep.json").read_text())
    (folder / "sweep.json").write_text(json.dumps({**record, "launched_in": str(launched_in)}))


def test_another_users_sweep_and_one_of_a_job_resume_where_that_is_typed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Python imports modules from where a command is typed; and Ray deletes its copy of a job's files."""
    (tmp_path / "theirs").mkdir()
    started_in(tmp_path, tmp_path / "theirs")
    monkeypatch.setattr("fsdp_lab.sweep.store.resume.find_trusted", lambda *_: (tmp_path, False))
    assert "sharding=root" in resume_arguments([f"resume={tmp_path}", "trust=true"])
    monkeypatch.undo()
    copy = tmp_path / "runtime_resources" / "working_dir_files" / "_ray_pkg_1"
    copy.mkdir(parents=True)
    started_in(tmp_path, copy)
    assert "sharding=root" in resume_arguments([f"resume={tmp_path}"])


def test_a_resume_is_typed_where_the_sweep_was_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "a place").mkdir()
    monkeypatch.chdir(tmp_path / "a place")
    SweepStart.of(["sharding=root"], False, SweepConfig()).write(tmp_path)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=f"was started in {tmp_path}/a place, .*cd '{tmp_path}/a place'"):
        resume_arguments([f"resume={tmp_path}"])
    (tmp_path / "a place").rmdir()
    assert "sharding=root" in resume_arguments([f"resume={tmp_path}"])


def test_a_record_that_is_none_is_reported(tmp_path: Path):
    (tmp_path / "sweep.json").write_text('{"arguments": 3}')
    with pytest.raises(UserError, match=r"sweep\.json cannot be read"):
        read_start(tmp_path)


def test_a_record_that_only_its_owner_may_read_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def read_text(path: Path, **options: object) -> str:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "read_text", read_text)
    with pytest.raises(UserError, match=rf"resume={tmp_path}: only its owner may read {tmp_path}/sweep.json"):
        read_start(tmp_path)


def test_the_keys_of_one_start_are_not_recorded():
    words = ["-m", "sharding=root", "resume_failed=true", "+resume_anyway=true"]
    assert SweepStart.of(words, True, SweepConfig()).arguments == ["sharding=root"]


def test_changed_code_is_named(monkeypatch: pytest.MonkeyPatch):
    record = SweepStart.of([], True, SweepConfig())
    assert changes_of_code(record) == []
    looked_at_by_others = dataclasses.replace(record, libraries={**record.libraries, "other": "1"})
    assert changes_of_code(looked_at_by_others) == []
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
    elsewhere = from_dict(SweepConfig, {"cluster": {"address": "head:6379"}})
    monkeypatch.setattr("fsdp_lab.config.machine._clusters", {"head:6379": RunningCluster(8, False)})
    monkeypatch.setattr("fsdp_lab.config.machine._asks", [RunningCluster])
    assert changes_of_workers(dataclasses.replace(record, num_workers=8), elsewhere) == [], "not this machine's"
    assert changes_of_workers(dataclasses.replace(record, num_workers=4), elsewhere) != []


def test_changed_settings_are_named(compose_trial):
    trial = compose_trial(["optimizer.lr=0.1", "training.epochs=2"], 0)
    write_hydra_folder(trial)
    assert changes_of_config(trial.folder, trial.config) == []
    longer = compose_trial(["optimizer.lr=0.1", "training.epochs=3", "cluster.max_failures=9", "resume=x"], 0).config
    assert changes_of_config(trial.folder, longer) == ["training.epochs was 2 and is 3"]
    path = trial.folder / ".hydra" / "config.yaml"
    path.write_text(path.read_text() + "\nold_key: 1\n")
    assert "old_key is not a key" in changes_of_config(trial.folder, SweepConfig())[0]


def test_settings_that_cannot_be_compared_are_named(compose_trial):
    trial = compose_trial(["optimizer.lr=0.1"], 0)
    for _ in ("missing", "cut"):
        (change,) = changes_of_config(trial.folder, trial.config)
        assert f"{trial.folder}/.hydra/config.yaml cannot be read" in change and "resume_anyway=true" in change
        write_hydra_folder(trial)
        (trial.folder / ".hydra/config.yaml").write_text("optimizer:\n")


def test_overrides_take_the_place_of_those_for_the_same_key():
    assert with_overrides(["a=1", "+b=2", "c=3"], ["b=4", "a=5"]) == ["c=3", "b=4", "a=5"]


def test_a_search_whose_record_lost_a_trial_with_a_result_is_refused(tmp_path: Path, compose_trial):
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
