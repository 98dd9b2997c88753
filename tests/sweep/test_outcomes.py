"""How trials in processes of their own end otherwise than well: each is recorded, and takes no other down."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest

from fsdp_lab.engine.trial_files import read_outcome, read_progress, wait_until_alone
from tests.conftest import command_line
from tests.processes import descendants, still_running
from tests.sweep.conftest import PLAIN, TINY, artifacts, history, ranks_of, results, runs, started, wait_for

pytestmark = [pytest.mark.ci, pytest.mark.timeout(500)]

FAST = (*TINY, *PLAIN, "model=mlp", "forecast.enabled=false")
FREED_S = 2.0


def test_more_trials_than_places_half_of_them_stopped_ends_and_frees_what_they_held(tmp_path: Path):
    """The known way to hang. Whose processes are gone lets others have the lock of its folder."""
    search = ["search=random", "search.num_trials=5", "scheduler=asha", "scheduler.reduction_factor=2"]
    search += ["optimizer.lr=tag(log,interval(1e-6,1e-2))", "training.epochs=30", "data.num_train=640"]
    freed: dict[int, float] = {}
    with started(tmp_path, "-m", *FAST, *search, "cluster.num_workers=1", "memory_profile=off") as process:
        family = set()
        while process.poll() is None:
            family.update(descendants(process.pid))
            for number in range(5):
                folder = tmp_path / "out" / str(number)
                outcome = read_outcome(folder)
                if outcome is not None and outcome.status == "stopped" and number not in freed:
                    assert wait_until_alone(folder, 10.0)
                    freed[number] = time.time() - read_progress(folder)["reported"]  # since the report that stopped it
            time.sleep(0.05)
        stdout, stderr = process.communicate(timeout=200)
    assert process.returncode == 0, stdout + stderr
    rows = results(tmp_path)
    statuses = [row["status"] for row in rows]
    assert len(rows) == 5 and set(statuses) == {"finished", "stopped"}, statuses
    assert statuses.count("stopped") >= 2
    assert sorted(freed) == [number for number, status in enumerate(statuses) if status == "stopped"]
    # of cores that others do not use: beside other tests it takes as many times as long as processes wait for a core
    waiting = max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))
    assert max(freed.values()) < FREED_S * waiting, (freed, waiting)
    assert {row["status"] for row in rows if int(row["epoch"]) == 30} == {"finished"}
    (parent,), children = runs(tmp_path)
    assert parent.info.status == "FINISHED"
    assert [run.data.tags["status"] for run in children] == statuses
    assert "RUNNING" not in {run.info.status for run in children}
    assert still_running(family, 10) == []


def test_a_trial_without_progress_is_ended_and_the_next_one_runs(tmp_path: Path):
    """A rank that was stopped in the middle of a step, as a hang in a collective looks."""
    slow = ["training.epochs=400", "data.num_train=640", "trial_timeout_s=4", "checkpoint.mode=off"]
    with started(tmp_path, "-m", *FAST, *slow, "optimizer.lr=1e-3,1e-4") as process:
        folder = tmp_path / "out" / "0"
        wait_for(lambda: (folder / "metrics.jsonl").exists(), process)
        ranks = ranks_of(process)
        assert len(ranks) == 2 and [os.getsid(rank.pid) for rank in ranks] == [rank.pid for rank in ranks], (
            "Linux divides the cores among sessions"
        )
        ranks[1].suspend()
        wait_for(lambda: read_outcome(folder), process, 40)
        wait_for(lambda: (tmp_path / "out" / "1" / "metrics.jsonl").exists(), process)
        os.killpg(process.pid, signal.SIGINT)
        stdout, stderr = process.communicate(timeout=20)
    assert process.returncode == 130, stdout + stderr
    ended, _ = results(tmp_path)
    assert ended["status"] == "failed"
    assert "no progress for trial_timeout_s=4 s since step" in ended["error"]
    assert wait_until_alone(folder, 5.0)


@pytest.mark.full  # other tests take memory, too
def test_out_of_memory_on_the_host_is_an_outcome_without_a_second_attempt(tmp_path: Path):
    """Ray's own watch over the machine's memory kills, at a limit a little above what is in use now."""
    memory = psutil.virtual_memory()
    limit = (memory.total - memory.available + 5 * 2**30) / memory.total  # Ray, a small trial and another test take two
    if limit > 0.95:
        pytest.skip("this machine has no 5 GiB to spare")
    env = {**os.environ, "RAY_memory_usage_threshold": f"{limit:.3f}"}
    words = ["-m", *FAST, "model.hidden_dim=1000000,64", "export=false"]
    done = subprocess.run(command_line(*words), cwd=tmp_path, env=env, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    oom, finished = results(tmp_path)
    assert (oom["status"], finished["status"]) == ("oom", "finished")
    assert "rank" in oom["error"] and "the host is out of memory" in oom["error"]
    assert not list((tmp_path / "out" / "0").glob("failures.*")), "there was one attempt"
    (_,), (run, _) = runs(tmp_path)
    assert (run.info.status, run.data.tags["status"]) == ("FAILED", "oom")
    assert any(name.startswith("failures/rank") for name in artifacts(tmp_path, run))


@pytest.mark.timeout(900)  # half a minute alone on two quiet cores, four times that beside another file of tests
def test_a_store_that_stays_away_loses_nothing_that_a_resume_does_not_send(tmp_path: Path):
    """The database is taken away in the middle and comes back after the sweep."""
    store, away = tmp_path / "mlflow.db", tmp_path / "away.db"
    inline = [word for word in FAST if not word.startswith("cluster.num_workers")]
    words = ["-m", *inline, "engine=inline", "optimizer.lr=1e-3,1e-2", "training.epochs=30", "data.num_train=640",
             "checkpoint.every_epochs=30", "tracking.patience_s=1"]  # fmt: skip
    with started(tmp_path, *words) as process:
        wait_for(lambda: (tmp_path / "out" / "0" / "metrics.jsonl").exists(), process)
        store.rename(away)
        store.mkdir()  # what is there now cannot be opened
        stdout, stderr = process.communicate(timeout=400)
    assert process.returncode == 0, stdout + stderr
    assert "the MLflow store does not answer" in stdout
    assert "python -m fsdp_lab resume=out" in stdout
    assert [row["status"] for row in results(tmp_path)] == ["finished"] * 2
    store.rmdir()
    away.rename(store)
    sent = subprocess.run(command_line("resume=out"), cwd=tmp_path, capture_output=True, text=True, timeout=400)
    assert sent.returncode == 0, sent.stdout + sent.stderr
    assert "nothing is left to do" in sent.stdout
    (parent,), children = runs(tmp_path)
    assert parent.info.status == "FINISHED"
    assert [run.info.status for run in children] == ["FINISHED"] * 2
    for run in children:
        assert [epoch for epoch, _ in history(tmp_path, run, "train/loss")] == list(range(1, 31))
        assert "model/model.pt" in artifacts(tmp_path, run)
