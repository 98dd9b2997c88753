"""Sweeps that go on: `engine=inline`, so that a start takes seconds; what is killed for real is in test_kills.py."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import trained
from tests.conftest import INLINE, run_cli
from tests.folders import Store, SweepFolder
from tests.sweep.conftest import has_trained_an_epoch, started, wait_for


def output_of(done: subprocess.CompletedProcess[str]) -> str:
    return done.stdout + done.stderr


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """In which a sweep of four has ended."""
    return trained.copy_trained(tmp_path)


def forget(folder: Path, number: int) -> None:
    """As if everything had been killed in the middle of this trial."""
    SweepFolder(folder / "out").trials[number].change(outcome=None)


def begun(done: subprocess.CompletedProcess[str]) -> list[int]:
    """The trials that a command started."""
    return [n for n in range(9) if f"trial {n} starts" in done.stdout]


@pytest.mark.documents("python -m fsdp_lab resume=last")
def test_nothing_left_says_so_and_trains_nothing(folder: Path):
    """It changes no duration in MLflow and no model."""

    def left() -> list[object]:
        store = Store(folder)
        infos = [run.info for run in (*store.parents, *store.trials)]
        ends = [(info.run_name, info.start_time, info.end_time, info.status) for info in infos]
        return [*ends, *(path.stat().st_mtime_ns for path in sorted(folder.glob("out/*/model.pt")))]

    before = left()
    done = run_cli(folder, "resume=last")
    assert done.returncode == 0, output_of(done)
    assert "nothing to do: all 4 trials have a result" in done.stdout and begun(done) == []
    assert left() == before and len(before) == 1 + 2 * trained.COUNT


def test_exactly_what_has_no_result_goes_on_into_the_same_runs(folder: Path):
    sweep, store = SweepFolder(folder / "out"), Store(folder)
    before = [row["run_id"] for row in sweep.rows]
    losses = [store.history(run, "train/loss") for run in store.trials]
    forget(folder, 1)
    file = folder / "out" / "1" / "metrics.jsonl"
    first, last = (json.loads(line) for line in file.read_text().splitlines())
    last = {key: value for key, value in last.items() if not key.startswith("perf/")}  # nothing of it was timed
    # the kill came in the middle of a line
    file.write_text(f'{json.dumps(first)}\n{json.dumps(last)}\n{{"epoch": 3, "train')
    done = run_cli(folder, "resume=out")
    assert done.returncode == 0, output_of(done)
    assert begun(done) == [1] and [row["run_id"] for row in sweep.rows] == before
    assert float(sweep.rows[1]["perf/samples_per_s"]) == first["perf/samples_per_s"], "the latest there is"
    assert [run.info.status for run in store.trials] == ["FINISHED"] * trained.COUNT
    assert [store.history(run, "train/loss") for run in store.trials] == losses, "each epoch once, as it was"
    trial = sweep.trials[1]
    assert [epoch["epoch"] for epoch in trial.epochs] == [1, 2], "the file has each once, too"
    assert "out/1/checkpoints/step_" in trial.facts["resumed_from"]


def test_other_settings_data_and_code_are_refused_by_name(folder: Path):
    """Unless `resume_anyway` is typed; `cluster.max_failures` may be another."""
    forget(folder, 2)
    trial, record = SweepFolder(folder / "out").trials[0], folder / "out" / "sweep.json"
    trial.change(facts={**trial.facts, "data_digest": "0123"})
    record.write_text(json.dumps({**json.loads(record.read_text()), "code": "0"}))
    done = run_cli(folder, "resume=out", "optimizer.weight_decay=0.5", "cluster.max_failures=3")
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "optimizer.weight_decay was 0.0 and is 0.5" in done.stderr and "resume_anyway=true" in done.stderr
    assert "the code of fsdp_lab changed" in done.stderr and "data=digits: its digest was 0123 and is" in done.stderr
    assert "max_failures" not in done.stderr
    done = run_cli(folder, "resume=out", "resume_anyway=true")
    assert done.returncode == 0 and begun(done) == [2], output_of(done)


def test_a_resume_relabels_no_trial_that_has_a_result(folder: Path):
    """What was typed is of the rest alone, which is not compared with trials of the start."""
    forget(folder, 2)
    refused = run_cli(folder, "resume=out", "++optimizer.lr=0.5", "resume_anyway=true")
    assert refused.returncode == 2 and "optimizer.lr=0.5 is an axis of this sweep" in refused.stderr
    words = ["training.epochs=3", "optimizer.weight_decay=0.5"]
    refused = run_cli(folder, "resume=out", *words, "resume_anyway=true")
    assert refused.returncode == 2 and "trial 2 resumes from its checkpoint" in refused.stderr
    assert "optimizer.weight_decay was 0.0 and is 0.5. Leave that out" in refused.stderr and "Ray" not in refused.stdout
    shutil.rmtree(folder / "out" / "2" / "checkpoints")
    done = run_cli(folder, "resume=out", *words, "resume_anyway=true")
    assert done.returncode == 0 and begun(done) == [2], output_of(done)
    assert [row["precision"] for row in SweepFolder(folder / "out").rows] == ["fp32", "fp32", "bf16", "bf16"]
    named = "precision=bf16 changed=optimizer.weight_decay=0.5, training.epochs=3: not compared: it was trained with"
    assert named in " ".join(done.stdout.split())
    assert "Resumed with training.epochs=3." in SweepFolder(folder / "out").rows[2]["note"]
    assert "weight_decay=0.0" in (folder / "out" / "use_pytorch.py").read_text()
    forget(folder, 2)
    done = run_cli(folder, "resume=out")  # without what was typed: it is in the folder
    assert done.returncode == 0 and begun(done) == [2], output_of(done)
    (line,) = [json.loads(line) for line in (folder / "out" / "trials.jsonl").read_text().splitlines()][2:3]
    assert sorted(line["resumed"]) == sorted(line["changed"]) == sorted(words)
    assert SweepFolder(folder / "out").trials[2].epochs[-1]["epoch"] == 3
    done = run_cli(folder, "resume=out", "optimizer.weight_decay=0.1", "resume_anyway=true")
    assert "optimizer.weight_decay=0.1 changes nothing: every trial has a result" in done.stdout


def lines_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "trials.jsonl").read_text().splitlines()]


@pytest.mark.ci
def test_what_a_resume_changes_may_be_changed_back_and_is_marked_after_a_kill(folder: Path):
    """What changes no trial marks none. A kill while a resume opens leaves what it had begun to write."""
    out = folder / "out"
    words = ["training.epochs=3", "resume_anyway=true"]
    forget(folder, 2)
    refused = run_cli(folder, "resume=out", "cluster.storage_path=elsewhere", "resume_anyway=true")
    assert refused.returncode == 2 and "names another place than the one where the results" in refused.stderr
    done = run_cli(folder, "resume=out", "export=false", "resume_anyway=true")
    assert done.returncode == 0 and begun(done) == [2], output_of(done)
    assert not any("changed" in line for line in lines_of(out))
    forget(folder, 2)
    killed = "import fsdp_lab.sweep.sweep as s, os; s.write_hydra_folder = lambda trial: os._exit(9); "
    command = [sys.executable, "-c", f"{killed}from fsdp_lab.commands.main import main; main()", "resume=out", *words]
    assert subprocess.run(command, cwd=folder, capture_output=True, timeout=100).returncode == 9
    done = run_cli(folder, "resume=out", *words)
    assert done.returncode == 0 and begun(done) == [2], output_of(done)
    assert lines_of(out)[2]["changed"] == ["training.epochs=3"]
    forget(folder, 2)
    shutil.rmtree(out / "2" / "checkpoints")
    (out / "2" / "metrics.jsonl").unlink()
    done = run_cli(folder, "resume=out", "training.epochs=2", "resume_anyway=true")
    assert done.returncode == 0 and begun(done) == [2], output_of(done)
    assert lines_of(out)[2]["resumed"] == ["training.epochs=2"]
    assert SweepFolder(out).trials[2].epochs[-1]["epoch"] == 2


@pytest.mark.full
def test_a_search_that_is_resumed_with_other_settings_marks_what_it_draws(tmp_path: Path):
    words = ["-m", "optimizer.lr=interval(0.001,0.1)", "search=random", "search.num_trials=1", *INLINE]
    assert run_cli(tmp_path, *words).returncode == 0
    for more, typed in ((2, ["optimizer.weight_decay=0.5", "resume_anyway=true"]), (3, [])):
        done = run_cli(tmp_path, "resume=out", f"search.num_trials={more}", *typed)
        assert done.returncode == 0, output_of(done)
    first, *rest = lines_of(tmp_path / "out")
    assert "changed" not in first and [line["changed"] for line in rest] == [["optimizer.weight_decay=0.5"]] * 2
    done = run_cli(tmp_path, "resume=out", "search.num_trials=4", "optimizer.weight_decay=0.0", "resume_anyway=true")
    assert done.returncode == 0 and "changed" not in lines_of(tmp_path / "out")[3], output_of(done)


@pytest.mark.ci
def test_a_trial_alone_with_options_of_ones_own_is_resumed_twice(tmp_path: Path):
    (tmp_path / "mine" / "optimizer").mkdir(parents=True)
    (tmp_path / "mine" / "optimizer" / "slow.yaml").write_text("# @package optimizer\nname: sgd\nlr: 0.001\n")
    done = run_cli(tmp_path, "--config-dir=mine", "optimizer=slow", *INLINE)
    assert done.returncode == 0, output_of(done)
    for epochs in (2, 3):
        done = run_cli(tmp_path, "--config-dir=mine", "resume=out", f"training.epochs={epochs}", "resume_anyway=true",
                       "resume_failed=true")  # fmt: skip
        assert done.returncode == 0, output_of(done)
        (line,) = lines_of(tmp_path / "out")
        assert not any(word.startswith(("-", "hydra.")) for word in line["overrides"])


@pytest.mark.ci
def test_sigterm_prints_the_command_that_goes_on(tmp_path: Path):
    words = ("-m", *INLINE, "optimizer.lr=1e-3,1e-2,1e-1", "training.epochs=400", "checkpoint.every_epochs=10")
    with started(tmp_path, *words) as process:
        wait_for(lambda: has_trained_an_epoch(tmp_path / "out" / "0"), process)
        process.terminate()
        stdout, stderr = process.communicate(timeout=300)
    assert process.returncode == 130, stdout + stderr
    assert "Traceback" not in stdout + stderr
    assert stdout.count("to resume: python -m fsdp_lab resume=out\n") == 2, "at once, and last"
    assert SweepFolder(tmp_path / "out").statuses == ["interrupted", "waiting", "waiting"]
    assert [run.info.status for run in Store(tmp_path).trials] == ["KILLED"]
    done = run_cli(tmp_path, "resume=out", "training.max_steps=30", "resume_anyway=true")  # few, for the test's sake
    assert done.returncode == 0, output_of(done)
    assert SweepFolder(tmp_path / "out").statuses == ["finished"] * 3
    assert [run.info.status for run in Store(tmp_path).trials] == ["FINISHED"] * 3


@pytest.mark.ci
def test_a_trial_alone_goes_on_too(tmp_path: Path):
    assert run_cli(tmp_path, *INLINE).returncode == 0
    forget(tmp_path, 0)
    done = run_cli(tmp_path, "resume=last")
    assert done.returncode == 0, output_of(done)
    store = Store(tmp_path)
    (run,) = store.parents
    assert run.info.status == "FINISHED" and store.trials == []
    assert [epoch for epoch, _ in store.history(run, "train/loss")] == [1, 2]
    for words in (["training.epochs=3", "resume_anyway=true"], []):  # what was typed is in the folder
        forget(tmp_path, 0)
        done = run_cli(tmp_path, "resume=last", *words)
        assert done.returncode == 0, output_of(done)
        assert SweepFolder(tmp_path / "out").trials[0].epochs[-1]["epoch"] == 3


@pytest.mark.ci
def test_a_search_goes_on_to_its_number_of_trials(tmp_path: Path):
    search = ("search=random", "search.num_trials=3", "optimizer.lr=tag(log,interval(1e-4,1e-2))")
    assert run_cli(tmp_path, "-m", *INLINE, *search).returncode == 0
    sweep = SweepFolder(tmp_path / "out")
    before = [row["optimizer.lr"] for row in sweep.rows]
    listed = tmp_path / "out" / "trials.jsonl"
    listed.write_text("".join(listed.read_text().splitlines(keepends=True)[:2]))
    forget(tmp_path, 1)
    shutil.rmtree(tmp_path / "out" / "2")  # the kill came before its line was whole, and so before it began
    done = run_cli(tmp_path, "resume=out", "search.num_trials=4")
    assert done.returncode == 0 and begun(done) == [1, 2, 3], output_of(done)
    after = [row["optimizer.lr"] for row in sweep.rows]
    assert sweep.statuses == ["finished"] * 4 and after[:2] == before[:2] and len(set(after)) == 4
    (parent,) = Store(tmp_path).parents
    assert parent.data.tags["num_trials"] == "4"


@pytest.mark.ci
def test_each_setting_is_trained_so_often_and_a_resume_goes_on(tmp_path: Path):
    done = run_cli(tmp_path, "-m", *INLINE, "training.grad_accum_steps=1,2", "repeats=2")
    assert done.returncode == 0, output_of(done)
    assert "4 trials: training.grad_accum_steps × repeat" in done.stdout
    cells = [(row["training.grad_accum_steps"], row["repeat"]) for row in SweepFolder(tmp_path / "out").rows]
    assert sorted(cells) == [("1", "0"), ("1", "1"), ("2", "0"), ("2", "1")]
    order = [int(number) for number in re.findall(r"trial (\d+) starts", done.stdout)]
    assert [cells[number][1] for number in order] == ["0", "0", "1", "1"]
    assert "95 % interval of its speed, from repeats" in done.stdout

    forget(tmp_path, 3)
    again = run_cli(tmp_path, "resume=last")
    assert again.returncode == 0, output_of(again)
    assert "1 of 4 trials left" in again.stdout and begun(again) == [3]
