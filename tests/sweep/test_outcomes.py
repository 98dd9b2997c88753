"""How sweeps and trials end otherwise than well, each with a start of its own; test_fates.py has the most, in one."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import psutil
import pytest

from fsdp_lab.config.without_hydra import read_config
from fsdp_lab.forecast.forecast import forecast_profile
from tests import forked
from tests.conftest import INLINE, PLAIN, STORE, TINY, command_line, run_cli, without
from tests.folders import Store, SweepFolder
from tests.processes import enter, group, marked, still_running
from tests.servers import lay_store, mlflow_server
from tests.sweep import fates
from tests.sweep.conftest import GatedSweep, has_trained_an_epoch, started, wait_for

pytestmark = pytest.mark.timeout(2400)

FAST = (*TINY, *PLAIN, "model=mlp", "forecast.enabled=false")
MARK = "FSDP_LAB_OUTCOMES"  # in the environment of a sweep's processes
GIB = 2**30
MONITOR = "RAY_memory_usage_threshold"


def allowing_more(gib: int) -> str:
    """The share of the host's memory at which Ray's monitor kills, so many GiB above what is in use now."""
    memory = psutil.virtual_memory()
    return f"{1 - (memory.available - gib * GIB) / memory.total:.4f}"


@pytest.mark.full
@pytest.mark.parametrize(("scheduler", "lets_go_s"), [("asha", "30"), ("median", "30"), ("asha", "0")])
def test_a_search_with_a_scheduler_ends_and_frees_what_it_held(tmp_path: Path, scheduler: str, lets_go_s: str):
    """Six settings, each tried once, of which those that learn nothing are stopped: the known way to hang.

    Trials that come later begin because the stopped ones let go. With no time for that, Tune ends each trial that was
    to begin in the process of a stopped one, and reports nothing: it begins in a process of its own.
    """
    search = ["search=optuna", "search.num_trials=9", f"scheduler={scheduler}", "scheduler.reduction_factor=2"]
    axes = ["training.seed=0,1", "optimizer.lr=1e-2,1e-9,1e-8", "training.epochs=30", "data.num_train=640"]
    words = ("-m", *FAST, *search, *axes, "cluster.num_workers=1", "memory_profile=off")
    lay_store(tmp_path)
    environment = {**os.environ, MARK: str(tmp_path), "TUNE_FUNCTION_THREAD_TIMEOUT_S": lets_go_s}
    done = forked.run(tmp_path, "fsdp_lab", *words, seconds=450, environment=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert ("it starts in a new one" in done.stdout) is (lets_go_s == "0")
    assert "the search ends after 6 of search.num_trials=9" in done.stdout
    sweep, store = SweepFolder(tmp_path / "out"), Store(tmp_path)
    cells = {(row["training.seed"], float(row["optimizer.lr"])) for row in sweep.rows}
    assert len(sweep.rows) == len(cells) == 6 and set(sweep.statuses) == {"finished", "stopped"}, sweep.statuses
    assert {row["status"] for row in sweep.rows if int(row["epoch"]) == 30} == {"finished"}
    assert [run.info.status for run in store.parents] == ["FINISHED"]
    assert [run.data.tags["status"] for run in store.trials] == sweep.statuses
    assert "RUNNING" not in {run.info.status for run in store.trials}
    assert still_running(marked(MARK, str(tmp_path)), 15) == []


@pytest.mark.full
@pytest.mark.parametrize("by", ["Ray's monitor", "the limit of a container"])
def test_out_of_memory_is_an_outcome_without_a_second_attempt(by: str, tmp_path: Path):
    """A rank takes 4 GiB. Ray's monitor allows 2 GiB more than is in use now, or a control group 4 GiB in all."""
    shutil.copy(Path(fates.__file__), tmp_path)
    lay_store(tmp_path)
    environment = {**os.environ, MARK: str(tmp_path)}
    words = ("-m", *without(TINY, "cluster."), *PLAIN, "model._target_=fates.Fate", f"model.mark={MARK}",
             "model.fate=fills_the_host,finishes", "cluster.num_workers=1", "cluster.cpus_per_worker=2",
             "forecast.enabled=false")  # fmt: skip
    environment |= {MONITOR: allowing_more(2)} if by == "Ray's monitor" else {}
    with group("memory", limit_in_bytes=4 * GIB) if by == "the limit of a container" else nullcontext() as limit:
        done = subprocess.run(
            command_line(*words), cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=400,
            preexec_fn=(lambda: enter(limit)) if limit else None,
        )  # fmt: skip
        assert still_running(marked(MARK, str(tmp_path)), 15) == []
    assert done.returncode == 0, done.stdout + done.stderr
    sweep, run = SweepFolder(tmp_path / "out"), Store(tmp_path).trials[0]
    assert sweep.statuses == ["oom", "finished"], done.stdout
    assert "rank 0" in sweep.rows[0]["error"] and "out of memory" in sweep.rows[0]["error"]
    assert sweep.trials[0].earlier_failures == [], "there was one attempt"
    assert (run.info.status, run.data.tags["status"]) == ("FAILED", "oom")


_FILLS_THE_HOST = """
import json, os, time
from pathlib import Path

from fsdp_lab.commands.main import main
from fsdp_lab.engine.cluster import set_environment

set_environment()
from fsdp_lab.engine.job import note_process
from fsdp_lab.sweep import tuner

here, trial_function = Path.cwd(), tuner.trial_function

def fills_the_host(config):
    if config["number"] == 0 and (ALWAYS or not (here / "filled").exists()):
        note_process(Path(json.loads(config["job"])["folder"]))
        while not (here / "out" / "1" / "metrics.jsonl").exists():
            time.sleep(0.1)
        (here / "filled").touch()
        taken = [os.urandom(2**20) * 64 for _ in range(96)]
        time.sleep(600)
    trial_function(config)

tuner.trial_function = fills_the_host
main()
"""


@pytest.mark.full
@pytest.mark.parametrize("always", [False, True])
def test_a_trials_own_process_killed_for_memory_ends_no_sweep(
    gated: GatedSweep, monkeypatch: pytest.MonkeyPatch, always: bool
):
    """It takes 6 GiB before its ranks begin, and Ray's monitor allows 4 GiB more than is in use now."""
    monkeypatch.setenv(MONITOR, allowing_more(4))
    gated.command = [sys.executable, "-c", f"ALWAYS = {always}\n{_FILLS_THE_HOST}"]
    gated.start_two_trials("training.epochs=2", "cluster.num_workers=1", "cluster.cpus_per_worker=1", STORE)
    gated.let_go(0, 1, 2)
    gated.let_go(1, 1)
    killed = re.compile("Ray killed the own process of.* trial 0 ")
    wait_for(lambda: killed.search(gated.log()), gated.driver, 200, gated.log)
    gated.let_go(1, 2)
    assert gated.wait() == 0 and "Traceback" not in gated.log(), gated.log()
    assert still_running(gated.processes(), 15) == []
    trials = gated.sweep.trials
    assert gated.sweep.statuses == ["oom" if always else "finished", "finished"], gated.log()
    assert [[epoch for epoch, *_ in trial.losses] for trial in trials] == [[] if always else [1, 2], [1, 2]]
    assert trials[1].facts["resumed_from"]


@pytest.mark.ci
def test_a_resume_sends_what_a_store_that_was_away_lacks(gated: GatedSweep, tmp_path: Path):
    """The database is taken away after an epoch and comes back after the sweep."""
    database, away = tmp_path / "mlflow.db", tmp_path / "away.db"
    gated.start_two_trials("engine=inline", "training.epochs=3", "tracking.patience_s=1", STORE)
    gated.let_go(0, 1)
    gated.rank(0, 2)
    database.rename(away)
    database.mkdir()  # what is there now cannot be opened
    gated.let_go(0, 2, 3)
    gated.let_go(1, 1, 2, 3)
    assert gated.wait() == 0 and gated.sweep.statuses == ["finished"] * 2, gated.log()
    assert "the MLflow store does not answer" in gated.log() and "python -m fsdp_lab resume=out" in gated.log()
    database.rmdir()
    away.rename(database)
    sent = run_cli(tmp_path, "resume=out")
    assert sent.returncode == 0 and "nothing to do" in sent.stdout, sent.stdout + sent.stderr
    store = Store(tmp_path)
    assert [run.info.status for run in (*store.parents, *store.trials)] == ["FINISHED"] * 3
    for run in store.trials:
        assert [epoch for epoch, _ in store.history(run, "train/loss")] == [1, 2, 3]
        assert "model/model.pt" in store.artifacts(run)


@pytest.mark.ci
@pytest.mark.timeout(300)
def test_an_interrupt_ends_in_time_where_mlflow_says_nothing(tmp_path: Path):
    """The server takes connections and never answers: it is stopped, and the kernel takes them for it."""
    words = without(INLINE, "tracking.uri=")
    with mlflow_server(tmp_path) as (address, server):
        with started(tmp_path, *words, f"tracking.uri={address}", "training.epochs=5000") as process:
            wait_for(lambda: has_trained_an_epoch(tmp_path / "out"), process, 200)
            os.killpg(server.pid, signal.SIGSTOP)
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=60)
        os.killpg(server.pid, signal.SIGCONT)
    assert process.returncode == 130, err
    assert "resume=" in out and "did not reach the MLflow store" in out, "it was closed in order"


HANGS = """
import os, signal, time
from contextlib import suppress
from types import SimpleNamespace
from fsdp_lab.sweep import shutdown

def close(interrupted):
    sweep.ending = "interrupted"
    print("closed", flush=True)

sweep = SimpleNamespace(ending=None, ends_by=None, close=close)
shutdown._LIMIT_S = 3.0
with shutdown.interruptible(sweep):
    while True:
        with suppress(KeyboardInterrupt):
            if sweep.ends_by is None:
                os.kill(os.getpid(), signal.SIGINT)
            time.sleep(1)
"""


@pytest.mark.ci
def test_a_sweep_that_hangs_is_closed_and_ends_at_its_deadline(tmp_path: Path):
    """Its main thread swallows what signals raise. Without the deadline it would never end."""
    done = forked.run(tmp_path, "-c", HANGS, seconds=30)
    assert (done.returncode, done.stdout) == (130, "closed\n"), done.stderr


@pytest.mark.full
def test_what_cannot_fit_is_recorded_and_never_started(tmp_path: Path):
    """There is room for `always` and not for `never`: the middle of their peaks."""
    axes = ("sharding=per_block", "precision=fp16", "offload=none", "training.epochs=1")
    words = without((*axes, *TINY), "hydra.", "tracking.")
    configs = [read_config(None, [*words, f"reshard_after_forward={option}"]) for option in ("always", "never")]
    peaks = [forecast_profile(config, 2, cuda=False).peaks["device"]["total"] for config in configs]
    capacity = sum(peaks) / 2 / GIB
    prune = ("forecast.prune=true", f"forecast.capacity_gib={capacity}")
    done = run_cli(tmp_path, *axes, *TINY, *prune, "-m", timeout=390)
    assert done.returncode == 0, done.stderr
    sweep = SweepFolder(tmp_path / "out")
    never = sweep.rows[1]
    assert sweep.statuses == ["finished", "skipped"] and float(never["forecast/peak_bytes"]) == peaks[1]
    assert f"{peaks[1] / 2**20:.2f} MiB of {capacity * 1024:.2f} MiB" in never["error"]
    assert {path.name for path in sweep.trials[1].path.iterdir()} == {".hydra", "trial.json", ".trial.lock"}
    ran, skipped = Store(tmp_path).trials
    assert (ran.info.status, skipped.info.status, skipped.data.tags["status"]) == ("FINISHED", "KILLED", "skipped")
    assert skipped.data.metrics["forecast/capacity_bytes"] == int(capacity * GIB)
    assert ran.data.metrics["forecast/error"] == 0
