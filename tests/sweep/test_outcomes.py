"""How sweeps and trials end otherwise than well, each with a start of its own; test_fates.py has the most, in one."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest

from fsdp_lab.forecast.forecast import forecast_profile
from fsdp_lab.training.__main__ import read_config
from tests import forked
from tests.conftest import INLINE, PLAIN, STORE, TINY, command_line, run_cli, without
from tests.folders import Store, SweepFolder
from tests.processes import enter, group, marked, still_running
from tests.servers import lay_store, mlflow_server
from tests.sweep import fates
from tests.sweep.conftest import has_trained_an_epoch, started, wait_for
from tests.sweep.gates import gated_sweep
from tests.sweep.planted import CPU

pytestmark = pytest.mark.timeout(2400)

FAST = (*TINY, *PLAIN, "model=mlp", "forecast.enabled=false")
MARK = "FSDP_LAB_OUTCOMES"  # in the environment of a sweep's processes


@pytest.mark.ci
@pytest.mark.parametrize(("scheduler", "lets_go_s"), [("asha", "30"), ("asha", "0"), ("median", "30")])
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
def test_a_trial_with_a_suspended_rank_ends_and_the_next_runs(tmp_path: Path):
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
def test_a_trials_own_process_killed_for_memory_ends_no_sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
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
def test_a_resume_sends_what_a_store_that_was_away_lacks(tmp_path: Path):
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
def test_an_interrupt_ends_in_time_where_mlflow_says_nothing(tmp_path: Path):
    """The server takes connections and never answers: it is stopped, and the kernel takes them for it."""
    words = [word for word in INLINE if not word.startswith("tracking.uri=")]
    with mlflow_server(tmp_path) as (address, server):
        with started(tmp_path, *words, f"tracking.uri={address}", "training.epochs=5000") as process:
            wait_for(lambda: has_trained_an_epoch(tmp_path / "out"), process, 200)
            os.killpg(server.pid, signal.SIGSTOP)
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=60)
        os.killpg(server.pid, signal.SIGCONT)
    assert process.returncode == 130, err
    assert "resume=" in out and "did not reach the MLflow store" in out, "it was closed in order"


# A main thread that hangs, whatever signal comes, as one in native code does.
_HANGS = """
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
            if sweep.ending is None:  # Python may miss a signal that comes as it begins to wait
                os.kill(os.getpid(), signal.SIGINT)
            time.sleep(1)
"""


@pytest.mark.ci
def test_a_sweep_that_hangs_is_closed_and_ends_at_its_deadline(tmp_path: Path) -> None:
    done = forked.run(tmp_path, "-c", _HANGS)  # without the deadline it would never end
    assert (done.returncode, done.stdout) == (130, "closed\n"), done.stderr


AXES = ("sharding=per_block", "precision=fp16", "offload=none", "training.epochs=1", "memory_profile=timeline")
GIB = 2**30


@pytest.mark.full
def test_what_cannot_fit_is_recorded_and_never_started(tmp_path: Path):
    """There is room for `always` and not for `never`: the middle of their peaks."""
    words = without((*AXES, *TINY), "hydra.", "tracking.")
    both = ("always", "never")
    configs = [read_config(None, [*words, f"reshard_after_forward={option}"]) for option in both]
    peaks = [forecast_profile(config, 2, cuda=False).peaks["device"]["total"] for config in configs]
    capacity = sum(peaks) / 2 / GIB
    prune = ("forecast.prune=true", f"forecast.capacity_gib={capacity}", "forecast.largest_microbatch=true")
    done = run_cli(tmp_path, *AXES, *TINY, *prune, "-m", timeout=390)
    assert done.returncode == 0, done.stderr
    sweep, store = SweepFolder(tmp_path / "out"), Store(tmp_path)
    never = sweep.rows[1]
    assert sweep.statuses == ["finished", "skipped"] and float(never["forecast/peak_bytes"]) == peaks[1]
    assert f"{peaks[1] / 2**20:.2f} MiB of {capacity * 1024:.2f} MiB" in never["error"]
    assert {path.name for path in sweep.trials[1].path.iterdir()} == {".hydra", "trial.json", ".trial.lock"}
    for number, size in enumerate((16, 15)):
        assert f"trial {number}: the largest microbatch that fits is {size}" in done.stdout
    ran, skipped = store.trials
    assert (ran.info.status, skipped.info.status, skipped.data.tags["status"]) == ("FINISHED", "KILLED", "skipped")
    assert skipped.data.metrics["forecast/capacity_bytes"] == int(capacity * GIB)
    assert ran.data.metrics["forecast/error"] == 0
    assert "memory/memory_timeline_rank1.html" in store.artifacts(ran)


# A trial is learnt from however busy the machine is, as with many tests side by side.
_LEARNS = """
from fsdp_lab.commands.main import main
from fsdp_lab.sweep import forecasts
forecasts.MAX_OTHERS_CPU = 1.0
main()
"""


@pytest.mark.full
def test_only_the_most_promising_settings_are_measured(tmp_path: Path):
    """Eight passes over 8 images each take several times as long as one over 64; the measurement corrects forecasts."""
    lay_store(tmp_path)
    (tmp_path / "cpu.yaml").write_text(CPU)
    sizes = ("data.num_train=512", "training.global_batch_size=64", "training.grad_accum_steps=1,8")
    keep = ("forecast.device=cpu.yaml", "forecast.keep=1", "reshard_after_forward=always", "model=mlp")
    words = without(TINY, "training.global_batch_size", "data.num_train")
    done = forked.run(tmp_path, "-c", _LEARNS, "-m", *AXES[:-1], *words, *sizes, *keep, seconds=390)
    assert done.returncode == 0, done.stderr
    at_once, in_parts = SweepFolder(tmp_path / "out").rows
    assert (at_once["status"], in_parts["status"]) == ("finished", "skipped")
    measured, predicted = float(at_once["perf/samples_per_s"]), float(at_once["forecast/samples_per_s"])
    assert 0 < float(in_parts["forecast/samples_per_s"]) < predicted
    run, _ = Store(tmp_path).trials
    assert run.data.metrics["perf/forecast_error"] == pytest.approx(measured / predicted - 1, rel=1e-3, abs=1e-3)
    assert run.data.tags["predicted_by"] == "data sheet"
    (kept,) = json.loads((tmp_path / "outputs/devices/trials/two_cores.json").read_text()).values()
    assert 0 < kept["measured_s"] <= 1.001 * 64 / measured
    predicted_s = sum(seconds for part, seconds in kept["parts"].items() if part != "hidden")
    assert predicted_s == pytest.approx(64 / predicted, rel=0.02)
