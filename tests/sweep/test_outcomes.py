"""How sweeps and trials end otherwise than well, each with a start of its own; test_fates.py has the most, in one."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest

from fsdp_lab.sweep import shutdown
from tests import forked
from tests.conftest import INLINE, PLAIN, STORE, TINY, command_line, run_cli
from tests.folders import Store, SweepFolder
from tests.processes import enter, group, marked, still_running
from tests.servers import lay_store, mlflow_server
from tests.sweep import fates
from tests.sweep.conftest import has_trained_an_epoch, started, wait_for
from tests.sweep.gates import gated_sweep

pytestmark = pytest.mark.timeout(2400)

FAST = (*TINY, *PLAIN, "model=mlp", "forecast.enabled=false")
MARK = "FSDP_LAB_OUTCOMES"  # in the environment of a sweep's processes


@pytest.mark.ci
@pytest.mark.parametrize("lets_go_s", ["30", "0"])
def test_more_trials_than_places_half_of_them_stopped_ends_and_frees_what_they_held(tmp_path: Path, lets_go_s: str):
    """The known way to hang. Those that come later start because the stopped ones let go, or in processes of their own.

    With no time to let go, Tune ends each trial that was to begin in the process of a stopped one, and reports nothing.
    """
    search = ["search=random", "search.num_trials=5", "scheduler=asha", "scheduler.reduction_factor=2"]
    search += ["optimizer.lr=tag(log,interval(1e-6,1e-2))", "training.epochs=30", "data.num_train=640"]
    words = ("-m", *FAST, *search, "cluster.num_workers=1", "memory_profile=off")
    lay_store(tmp_path)
    environment = {**os.environ, MARK: str(tmp_path), "TUNE_FUNCTION_THREAD_TIMEOUT_S": lets_go_s}
    done = forked.run(tmp_path, "fsdp_lab", *words, seconds=450, environment=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert ("it starts in a new one" in done.stdout) is (lets_go_s == "0")
    sweep, store = SweepFolder(tmp_path / "out"), Store(tmp_path)
    assert len(sweep.rows) == 5 and set(sweep.statuses) == {"finished", "stopped"}, sweep.statuses
    assert sweep.statuses.count("stopped") >= 2
    assert {row["status"] for row in sweep.rows if int(row["epoch"]) == 30} == {"finished"}
    assert [run.info.status for run in store.parents] == ["FINISHED"]
    assert [run.data.tags["status"] for run in store.trials] == sweep.statuses
    assert "RUNNING" not in {run.info.status for run in store.trials}
    assert still_running(marked(MARK, str(tmp_path)), 15) == []


@pytest.mark.ci
@pytest.mark.parametrize("scheduler", ["asha", "median"])
@pytest.mark.documents("python -m fsdp_lab -m optimizer.lr=... search=optuna search.num_trials=20 scheduler=asha ...")
def test_a_search_with_a_scheduler_tries_each_setting_once_and_ends(tmp_path: Path, scheduler: str):
    """Of six settings, two train side by side, and those that learn nothing may be stopped."""
    search = ["search=optuna", "search.num_trials=9", f"scheduler={scheduler}", "training.epochs=4"]
    axes = ["sharding=root,per_block", "optimizer.lr=1e-2,1e-9,1e-8"]
    fixed = [word for word in FAST if not word.startswith("sharding=")]
    words = ("-m", *fixed, *search, *axes, "cluster.num_workers=1", "memory_profile=off")
    lay_store(tmp_path)
    environment = {**os.environ, MARK: str(tmp_path)}
    done = forked.run(tmp_path, "fsdp_lab", *words, seconds=450, environment=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = SweepFolder(tmp_path / "out").rows
    cells = {(row["sharding"], float(row["optimizer.lr"])) for row in rows}
    assert len(rows) == len(cells) == 6, "each once"
    assert {row["status"] for row in rows} <= {"finished", "stopped"}
    assert "the search ends after 6 of search.num_trials=9: 1000 random suggestions in a row were dupl" in done.stdout
    assert still_running(marked(MARK, str(tmp_path)), 15) == []


@pytest.mark.ci
def test_a_sweep_goes_on_without_a_reader_of_its_output(tmp_path: Path):
    """As in `... | head -1`."""
    words = ("-m", *FAST, "optimizer.lr=0.01,0.001", "engine=inline", "cluster.num_workers=1", "training.epochs=1")
    with started(tmp_path, *words) as sweep:
        assert sweep.stdout is not None and sweep.stderr is not None
        sweep.stdout.readline()
        sweep.stdout.close()
        assert (sweep.wait(200), sweep.stderr.read()) == (0, "")
    assert SweepFolder(tmp_path / "out").statuses == ["finished", "finished"]


@pytest.mark.ci
def test_a_trial_alone_is_a_plain_run_whose_model_predicts_what_it_measured(tmp_path: Path):
    words = [word for word in TINY if not word.startswith("hydra.")]
    done = run_cli(tmp_path, *PLAIN, *words, "training.epochs=1", timeout=450)
    assert done.returncode == 0, done.stderr
    store, (folder,) = Store(tmp_path), tmp_path.glob("outputs/????-??-??/??-??-??")
    (run,) = store.parents
    assert store.trials == [] and run.info.status == "FINISHED" and run.data.metrics["train/step"] == 4
    assert {file.name for file in (folder / ".hydra").iterdir()} == {"config.yaml", "hydra.yaml", "overrides.yaml"}
    assert (folder / "results.csv").exists() and run.data.metrics["forecast/error"] == 0
    for argument in (f"file={folder / 'model.pt'}", f"run={run.info.run_id}"):
        done = forked.run(tmp_path, "fsdp_lab.predict", argument, STORE, "out=.")
        assert done.returncode == 0, done.stderr
        accuracy = float(re.findall(r"accuracy ([0-9.]+)", done.stdout)[0])
        assert accuracy == pytest.approx(run.data.metrics["val/accuracy"], abs=1e-4)
        assert (tmp_path / "predictions.png").read_bytes().startswith(b"\x89PNG")
        (tmp_path / "predictions.png").unlink()


@pytest.mark.full
def test_a_trial_of_which_a_rank_is_suspended_is_ended_and_the_next_one_runs(tmp_path: Path):
    """It answers nothing and dumps no stack, as native code that holds Python's lock."""
    with gated_sweep(tmp_path) as sweep:
        lay_store(tmp_path)
        sweep.start_trials(2, "training.epochs=2", "trial_timeout_s=10", "cluster.num_workers=2", STORE)
        sweep.let_go(0, 1)
        sweep.rank(0, 2, rank=1).suspend()
        sweep.let_go(0, 2)
        sweep.let_go(1, 1, 2)
        assert sweep.wait() == 1, sweep.log()
        assert sweep.sweep.statuses == ["failed", "finished"]
        assert "no progress for trial_timeout_s=10 s since step" in sweep.sweep.rows[0]["error"]
        assert still_running(sweep.processes(), 15) == []


@pytest.mark.full
@pytest.mark.parametrize("by", ["Ray's monitor", "the limit of a container"])
def test_out_of_memory_is_an_outcome_without_a_second_attempt(by: str, tmp_path: Path):
    """A rank takes 4 GiB. Ray's monitor allows 2 GiB more than is in use now, or a control group 4 GiB in all."""
    shutil.copy(Path(fates.__file__), tmp_path)
    lay_store(tmp_path)
    environment = {**os.environ, MARK: str(tmp_path)}
    tiny = [word for word in TINY if not word.startswith("cluster.")]
    words = ["-m", *tiny, *PLAIN, "model._target_=fates.Fate", "model.fate=fills_the_host,finishes",
             f"model.mark={MARK}", "cluster.num_workers=1", "cluster.cpus_per_worker=2",
             "forecast.enabled=false"]  # fmt: skip
    with ExitStack() as stack:
        limits: list[Path] = []
        if by == "Ray's monitor":
            memory = psutil.virtual_memory()
            environment["RAY_memory_usage_threshold"] = f"{1 - (memory.available - 2 * 2**30) / memory.total:.4f}"
        else:
            limits.append(stack.enter_context(group("memory", limit_in_bytes=4 * 2**30)))
        done = subprocess.run(
            command_line(*words), cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=400,
            preexec_fn=lambda: [enter(folder) for folder in limits],
        )  # fmt: skip
        assert still_running(marked(MARK, str(tmp_path)), 15) == []
    assert done.returncode == 0, done.stdout + done.stderr
    sweep, store = SweepFolder(tmp_path / "out"), Store(tmp_path)
    assert sweep.statuses == ["oom", "finished"], done.stdout
    assert "rank 0" in sweep.rows[0]["error"] and "out of memory" in sweep.rows[0]["error"]
    assert sweep.trials[0].earlier_failures == [], "there was one attempt"
    run = store.trials[0]
    assert (run.info.status, run.data.tags["status"]) == ("FAILED", "oom")
    assert "trial.json" in store.artifacts(run)


_FILLS_THE_HOST = """
import os, time
from pathlib import Path

from fsdp_lab.commands.main import main
from fsdp_lab.engine.cluster import set_environment

set_environment()
from fsdp_lab.sweep.executors import tuner

here, trial_function = Path.cwd(), tuner.trial_function

def fills_the_host_once(config):
    if config["number"] == 0 and not (here / "filled").exists():
        while not (here / "out" / "1" / "metrics.jsonl").exists():
            time.sleep(0.1)
        (here / "filled").touch()
        taken = [os.urandom(2**20) * 64 for _ in range(96)]
        time.sleep(600)
    trial_function(config)

tuner.trial_function = fills_the_host_once
main()
"""


@pytest.mark.full
def test_a_trials_own_process_that_ray_kills_for_memory_ends_no_sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """It takes 6 GiB before its ranks begin, and Ray's monitor allows 4 GiB more than is in use now."""
    memory = psutil.virtual_memory()
    monkeypatch.setenv("RAY_memory_usage_threshold", f"{1 - (memory.available - 4 * 2**30) / memory.total:.4f}")
    with gated_sweep(tmp_path) as sweep:
        lay_store(tmp_path)
        sweep.command = [sys.executable, "-c", _FILLS_THE_HOST]
        sweep.start_trials(2, "training.epochs=2", "cluster.num_workers=1", "cluster.cpus_per_worker=1", STORE)
        sweep.let_go(0, 1, 2)
        sweep.let_go(1, 1)
        wait_for(lambda: "Ray killed a trial's own process" in sweep.log(), sweep.driver, 200, sweep.log)
        sweep.let_go(1, 2)
        assert sweep.wait() == 0, sweep.log()
        assert still_running(sweep.processes(), 15) == []
        trials = sweep.sweep.trials
    assert [trial.outcome["status"] for trial in trials if trial.outcome] == ["finished"] * 2, sweep.log()
    assert [[epoch for epoch, *_ in trial.losses] for trial in trials] == [[1, 2]] * 2
    assert [bool(trial.facts["resumed_from"]) for trial in trials] == [False, True]
    assert "Traceback" not in sweep.log()


@pytest.mark.ci
def test_a_store_that_stays_away_loses_nothing_that_a_resume_does_not_send(tmp_path: Path):
    """The database is taken away after an epoch and comes back after the sweep."""
    database, away = tmp_path / "mlflow.db", tmp_path / "away.db"
    with gated_sweep(tmp_path) as sweep:
        lay_store(tmp_path)
        sweep.start_trials(2, "engine=inline", "training.epochs=3", "tracking.patience_s=1", STORE)
        sweep.let_go(0, 1)
        sweep.rank(0, 2)
        database.rename(away)
        database.mkdir()  # what is there now cannot be opened
        sweep.let_go(0, 2, 3)
        sweep.let_go(1, 1, 2, 3)
        assert sweep.wait() == 0, sweep.log()
        assert "the MLflow store does not answer" in sweep.log()
        assert "python -m fsdp_lab resume=out" in sweep.log()
        assert sweep.sweep.statuses == ["finished"] * 2
    database.rmdir()
    away.rename(database)
    sent = run_cli(tmp_path, "resume=out")
    assert sent.returncode == 0, sent.stdout + sent.stderr
    assert "nothing to do" in sent.stdout
    store = Store(tmp_path)
    assert [run.info.status for run in (*store.parents, *store.trials)] == ["FINISHED"] * 3
    for run in store.trials:
        assert [epoch for epoch, _ in store.history(run, "train/loss")] == [1, 2, 3]
        assert "model/model.pt" in store.artifacts(run)


@pytest.mark.ci
@pytest.mark.timeout(300)
def test_an_interrupt_ends_in_its_time_where_the_mlflow_server_says_nothing(tmp_path: Path):
    """The server takes connections and never answers: it is stopped, and the kernel takes them for it."""
    words = [word for word in INLINE if not word.startswith("tracking.uri=")]
    with mlflow_server(tmp_path) as (address, server):
        with started(tmp_path, *words, f"tracking.uri={address}", "training.epochs=5000") as process:
            wait_for(lambda: has_trained_an_epoch(tmp_path / "out"), process, 200)
            os.killpg(server.pid, signal.SIGSTOP)
            begun = time.monotonic()
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=60)
            took = time.monotonic() - begun
        os.killpg(server.pid, signal.SIGCONT)
    assert process.returncode == 130, err
    assert took < shutdown._LIMIT_S, (took, out)
    assert "resume=" in out and "did not reach the MLflow store" in out, "it was closed in order"


# A store whose client hangs, and a main thread that hangs, whatever signal comes, as one in native code does.
_HANGS = """
import os, signal, threading, time
from contextlib import suppress
from fsdp_lab.config.sweep import TrackingConfig
from fsdp_lab.sweep import shutdown
from fsdp_lab.tracking import Projection, WantedRun

class Client:
    def create_run(self, *args, **kwargs):
        print("create_run by", threading.current_thread().name, flush=True)
        time.sleep(1000)

class Sweep:
    ending = None
    ends_by = None
    def log(self, text):
        print(text, flush=True)
    def close(self, interrupted):
        if self.ending is not None:
            return
        self.ending = "interrupted"
        print("to resume: resume", flush=True)
        projection.changed(0)
        print("unsent", projection.settle(60.0, 0.2), flush=True)

shutdown._LIMIT_S = 3.0
projection = Projection(TrackingConfig(), "night", lambda number: WantedRun("a"), print)
projection._client = Client()
projection._thread.start()
projection.changed(0)
sweep = Sweep()
with shutdown.interruptible(sweep):
    try:
        while True:
            with suppress(KeyboardInterrupt):
                if sweep.ending is None:  # Python may miss a signal that comes as it begins to wait
                    os.kill(os.getpid(), signal.SIGINT)
                time.sleep(1)
    except KeyboardInterrupt:  # it came between two turns
        time.sleep(1000)
"""


@pytest.mark.ci
def test_a_deadline_in_the_middle_of_a_store_write_ends_in_time_and_sends_nothing_twice(tmp_path: Path) -> None:
    done = forked.run(tmp_path, "-c", _HANGS)  # without the deadline it would never end
    assert done.returncode == 130, done.stderr
    assert done.stdout.count("create_run by") == 1, done.stdout
    assert "to resume: resume" in done.stdout and "unsent 2" in done.stdout, "its start, and its end"
