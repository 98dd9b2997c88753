"""Sweeps that go on: `engine=inline`, so that a start takes seconds; what is killed for real is in test_chaos.py."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from tests import forked
from tests.conftest import STORE, run_cli
from tests.sweep.conftest import (
    PLAIN,
    TINY,
    artifacts,
    has_trained_an_epoch,
    history,
    results,
    runs,
    started,
    wait_for,
)

SMALL = tuple(word for word in TINY if not word.startswith("cluster.num_workers"))
INLINE = (*SMALL, *PLAIN, "engine=inline", "model=mlp", "forecast.enabled=false")
SWEEP = ("-m", *INLINE, "optimizer.lr=1e-3,1e-2,1e-1")


def output_of(done: subprocess.CompletedProcess[str]) -> str:
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sweep of three that ended; a test makes of it what it needs, and leaves it ended."""
    folder = tmp_path_factory.mktemp("finished")
    done = run_cli(folder, *SWEEP)
    assert done.returncode == 0, output_of(done)
    return folder


def forget(folder: Path, number: int) -> None:
    """As if everything had been killed in the middle of this trial."""
    (folder / "out" / str(number) / "outcome.json").unlink(missing_ok=True)


def when(folder: Path) -> list[tuple[str, int, int, str]]:
    """Of each run, the sweep's own first: its name, when it started, when it ended, and how."""
    (parent,), children = runs(folder)
    infos = [run.info for run in (parent, *children)]
    return [(info.run_name, info.start_time, info.end_time, info.status) for info in infos]


def test_the_trials_train_in_this_process(finished: Path):
    for number in range(3):
        assert json.loads((finished / "out" / str(number) / "facts.json").read_text())["world_size"] == 1
        assert not (finished / "out" / str(number) / "logs").exists()
    (parent,), children = runs(finished)
    assert [child.info.status for child in children] == ["FINISHED"] * 3
    assert parent.info.status == "FINISHED"
    assert [row["turnaround_s"] != "" for row in results(finished)] == [False, True, True]


def test_nothing_left_says_so_and_trains_nothing(finished: Path):
    """By the word and by the parent's id; with several objectives the trials that no other beats are marked."""
    before = [(finished / "out" / str(number) / "model.pt").stat().st_mtime_ns for number in range(3)]
    ended = when(finished)
    objective = ["objective=[train/loss:min,val/loss:max]", "resume_anyway=true"]
    for words in (["resume=last"], [f"resume={runs(finished)[0][0].info.run_id}", STORE, *objective]):
        done = run_cli(finished, *words)
        assert done.returncode == 0, output_of(done)
        assert "nothing is left to do: all 3 trials have a result" in done.stdout
        assert "starts" not in done.stdout
    assert when(finished) == ended, "a resume with nothing to do changes no duration"
    assert before == [(finished / "out" / str(number) / "model.pt").stat().st_mtime_ns for number in range(3)]
    rows = results(finished)
    points = {row["trial"]: (float(row["train/loss"]), -float(row["val/loss"])) for row in rows}
    best = {
        trial
        for trial, mine in points.items()
        if not any(o != mine and o[0] <= mine[0] and o[1] <= mine[1] for o in points.values())
    }
    assert {row["trial"] for row in rows if row["pareto"] == "yes"} == best


def test_exactly_what_has_no_result_goes_on_into_the_same_runs(finished: Path):
    before = {row["trial"]: row["run_id"] for row in results(finished)}
    losses = [history(finished, run, "train/loss") for run in runs(finished)[1]]
    forget(finished, 1)
    first, last = (json.loads(line) for line in (finished / "out/1/metrics.jsonl").read_text().splitlines())
    last = {key: value for key, value in last.items() if not key.startswith("perf/")}  # nothing of it was timed
    with (finished / "out" / "1" / "metrics.jsonl").open("w") as lines:
        lines.write(f"{json.dumps(first)}\n{json.dumps(last)}\n")
        lines.write('{"epoch": 3, "train')  # the kill came in the middle of a line
    done = run_cli(finished, "resume=out")
    assert done.returncode == 0, output_of(done)
    assert "trial 1 starts" in done.stdout
    assert "trial 0 starts" not in done.stdout and "trial 2 starts" not in done.stdout
    assert {row["trial"]: row["run_id"] for row in results(finished)} == before
    assert float(results(finished)[1]["perf/samples_per_s"]) == first["perf/samples_per_s"], "the latest there is"
    (_,), children = runs(finished)
    assert [child.info.status for child in children] == ["FINISHED"] * 3
    assert [history(finished, run, "train/loss") for run in children] == losses, "each epoch once, as it was"
    lines = (finished / "out/1/metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["epoch"] for line in lines] == [1, 2], "the file has each once, too"
    assert "out/1/checkpoints/step_" in json.loads((finished / "out/1/facts.json").read_text())["resumed_from"]


def test_other_settings_are_refused_by_name(finished: Path):
    forget(finished, 2)
    done = run_cli(finished, "resume=out", "training.epochs=3", "cluster.max_failures=3")
    assert done.returncode == 2
    assert "trial 0 and 2 others: training.epochs was 2 and is 3" in done.stderr and "resume_anyway=true" in done.stderr
    assert "Traceback" not in done.stderr
    assert "max_failures" not in done.stderr, "this may be another"


def test_other_data_and_other_code_are_refused_by_name_unless_forced(finished: Path):
    facts = finished / "out" / "0" / "facts.json"
    record = finished / "out" / "sweep.json"
    kept = [(path, path.read_text()) for path in (facts, record)]
    forget(finished, 2)
    facts.write_text(json.dumps({**json.loads(facts.read_text()), "data_digest": "0123"}))
    content = json.loads(record.read_text())
    record.write_text(json.dumps({**content, "code": {**content["code"], "training/loop.py": "0"}}))
    done = run_cli(finished, "resume=out")
    assert done.returncode == 2
    assert "fsdp_lab's code: training/loop.py" in done.stderr
    assert "data=digits: its digest was 0123 and is" in done.stderr
    done = run_cli(finished, "resume=out", "resume_anyway=true")
    assert done.returncode == 0, output_of(done)
    for path, text in kept:
        path.write_text(text)


def test_a_failed_trial_has_a_result_and_is_tried_again_when_requested(finished: Path):
    outcome = finished / "out" / "0" / "outcome.json"
    outcome.write_text(json.dumps({"status": "failed", "error": "it fell over"}))
    done = run_cli(finished, "resume=out")
    assert done.returncode == 1 and "nothing is left to do" in done.stdout
    assert "resume_failed=true" in done.stdout
    done = run_cli(finished, "resume=out", "resume_failed=true")
    assert done.returncode == 0, output_of(done)
    assert "trial 0 finished" in done.stdout


def disturb(folder: Path, *numbers: int, by: float) -> None:
    """As if others had used so much of the cores while these trials were timed."""
    for number in numbers:
        file = folder / "out" / str(number) / "metrics.jsonl"
        epochs = [json.loads(line) for line in file.read_text().splitlines()]
        file.write_text("".join(f"{json.dumps({**epoch, 'perf/others_cpu': by})}\n" for epoch in epochs))


def test_exactly_what_was_disturbed_is_measured_again_and_its_record_kept(finished: Path):
    disturb(finished, 0, 2, by=0.0)
    disturb(finished, 1, by=0.9)
    first = (finished / "out/1/metrics.jsonl").read_text()
    before = {row["trial"]: row["run_id"] for row in results(finished)}
    (finished / "elsewhere").mkdir()
    done = run_cli(finished / "elsewhere", f"resume={finished / 'out'}", "resume_disturbed=true")
    assert done.returncode == 0, output_of(done)
    store = f"resumes in {finished}, where the sweep was started; its MLflow store is {finished / 'mlflow.db'}\n"
    assert store in done.stdout and not list((finished / "elsewhere").iterdir())
    assert "resumes: 1 of 3 trials left, 1 of them to be measured again: " in done.stdout
    assert "trial 1 starts: " in done.stdout, "from its first step"
    assert "trial 0 starts" not in done.stdout and "trial 2 starts" not in done.stdout
    assert (
        (finished / "out/1/disturbed.1/metrics.jsonl").read_text()
        == first
        != (finished / "out/1/metrics.jsonl").read_text()
    )
    assert not json.loads((finished / "out/1/facts.json").read_text())["resumed_from"], (
        "no checkpoint is there any more"
    )
    after = {row["trial"]: row["run_id"] for row in results(finished)}
    assert {number for number in before if before[number] != after[number]} == {"1"}
    old = next(run for run in runs(finished)[1] if run.info.run_id == before["1"])
    assert old.info.run_name.endswith(" (disturbed)") and old.data.metrics["train/loss"]
    by_id = forked.run(finished, "fsdp_lab.report", f"sweep={runs(finished)[0][0].info.run_id}", STORE, "out=again")
    assert by_id.returncode == 0 and ", 3 trials" in (finished / "again" / "report.md").read_text()
    disturb(finished, 1, by=0.0)
    done = run_cli(finished, "resume=out", "resume_disturbed=true")
    assert "nothing is left to do: all 3 trials have a result" in done.stdout


def test_a_disturbed_sweep_prints_what_measures_it_again(finished: Path):
    disturb(finished, 0, 1, 2, by=0.9)
    done = forked.run(finished, "fsdp_lab.report", "sweep=out")
    assert done.returncode == 0, output_of(done)
    command = "python -m fsdp_lab resume=out resume_disturbed=true"
    for output in (done.stdout, *((finished / "out" / name).read_text() for name in ("report.md", "report.html"))):
        assert command in output and "No setting is recommended" in output and "Recommended:" not in output
    disturb(finished, 0, 1, 2, by=0.0)


def test_sigterm_prints_the_command_that_goes_on(tmp_path: Path):
    with started(
        tmp_path, *SWEEP, "training.epochs=400", "data.num_train=960", "checkpoint.every_epochs=10"
    ) as process:
        wait_for(lambda: has_trained_an_epoch(tmp_path / "out" / "0"), process)
        process.terminate()
        stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 130, stdout + stderr
    assert "Traceback" not in stdout + stderr
    assert "to resume: python -m fsdp_lab resume=out" in stdout
    assert "compare: python -m mlflow ui --backend-store-uri sqlite:///mlflow.db" in stdout.splitlines()
    assert [row["status"] for row in results(tmp_path)] == ["interrupted", "waiting", "waiting"]
    assert [run.info.status for run in runs(tmp_path)[1]] == ["KILLED"]
    soon = "training.max_steps=30"  # for the test's sake
    done = run_cli(tmp_path, "resume=out", soon, "resume_anyway=true")
    assert done.returncode == 0, output_of(done)
    assert [row["status"] for row in results(tmp_path)] == ["finished"] * 3
    assert [run.info.status for run in runs(tmp_path)[1]] == ["FINISHED"] * 3


def test_a_trial_alone_goes_on_too(tmp_path: Path):
    done = run_cli(tmp_path, *INLINE)
    assert done.returncode == 0, output_of(done)
    (tmp_path / "out" / "outcome.json").unlink()
    done = run_cli(tmp_path, "resume=last")
    assert done.returncode == 0, output_of(done)
    (run,), children = runs(tmp_path)
    assert run.info.status == "FINISHED" and children == []
    assert [epoch for epoch, _ in history(tmp_path, run, "train/loss")] == [1, 2]


def test_a_search_goes_on_to_its_number_of_trials(tmp_path: Path):
    search = ("-m", *INLINE, "search=random", "search.num_trials=4", "optimizer.lr=tag(log,interval(1e-4,1e-2))")
    done = run_cli(tmp_path, *search)
    assert done.returncode == 0, output_of(done)
    before = [row["optimizer.lr"] for row in results(tmp_path)]
    assert len(set(before)) == 4
    lines = (tmp_path / "out" / "trials.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "out" / "trials.jsonl").write_text("".join(lines[:3]))
    forget(tmp_path, 1)
    shutil.rmtree(tmp_path / "out" / "3")  # the kill came before its line was whole, and so before it began
    done = run_cli(tmp_path, "resume=out", "search.num_trials=5")
    assert done.returncode == 0, output_of(done)
    assert "trial 0 starts" not in done.stdout and "trial 2 starts" not in done.stdout
    rows = results(tmp_path)
    assert [row["status"] for row in rows] == ["finished"] * 5
    assert [row["optimizer.lr"] for row in rows][:3] == before[:3]
    (parent,), _ = runs(tmp_path)
    assert parent.data.tags["num_trials"] == "5"
    assert parent.info.run_name == "lr (random, 5 trials)"


def test_what_diverges_is_a_result_and_takes_no_other_along(tmp_path: Path):
    done = run_cli(tmp_path, "-m", *INLINE, "optimizer.lr=1e30,1e-3")
    assert done.returncode == 0, output_of(done)
    diverged, finished = results(tmp_path)
    assert (diverged["status"], finished["status"]) == ("diverged", "finished")
    assert "the loss of step 2 is nan" in diverged["error"]
    (_,), (run, _) = runs(tmp_path)
    assert run.info.status == "FAILED" and run.data.tags["status"] == "diverged"
    assert "failures/rank0.json" in artifacts(tmp_path, run)
