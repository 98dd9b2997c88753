"""Sweeps that are killed at a call that changes a file or the store, or at a named state, or by Ctrl-C, and resumed."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import psutil
import pytest

from tests.conftest import HERE, PLAIN, TINY, without
from tests.folders import Store, SweepFolder
from tests.forked import Done, run_all
from tests.processes import called, descendants, still_running
from tests.ranks import Memo, config, run_ranks
from tests.servers import free_port, lay_store, mlflow_server
from tests.sweep.conftest import KILLED, has_trained_an_epoch, results, runs, started, wait_for
from tests.sweep.gates import MODEL, SETTINGS, GatedSweep, gated_sweep

SWEEP = (
    "fsdp_lab", "-m", "optimizer.lr=1e-3,1e-2", *PLAIN, "data.num_train=64", "data.num_val=32",
    "training.global_batch_size=32", "training.timing_warmup_steps=0", "training.epochs=2", "engine=inline",
    "model=mlp", "model.hidden_dim=4", "memory_profile=off", "forecast.enabled=false",
    *HERE,
)  # fmt: skip
# The figures that are the same each time, to the last digit.
EXACT = ("epoch", "train/loss", "val/loss", "val/accuracy")


def killed_at(folders: Mapping[int, Path], words: Sequence[str]) -> None:
    """Run a command in each folder, and kill it at the point whose number is the folder's key."""
    jobs = [(folder, ["-c", KILLED, f"{folder}.points", str(number), *words]) for number, folder in folders.items()]
    numbers = list(folders)
    for job, done in run_all(jobs):
        assert done.code == -signal.SIGKILL, f"the kill at point {numbers[job]} was not made: {done}"


def left_in(folder: Path) -> dict[str, object]:
    """What the sweep left, without what differs from run to run."""
    sweep, store = SweepFolder(folder / "out"), Store(folder)
    points = store.points()
    return {
        "status": sweep.statuses,
        "results": [{key: row[key] for key in EXACT} for row in sweep.rows],
        "losses": [trial.losses for trial in sweep.trials],
        "outcomes": [(trial.outcome or {}).get("status") for trial in sweep.trials],
        "runs": store.ends(),
        "stored": {point: values for point, values in points.items() if point[1] in EXACT},
        "stored twice": [point for point, values in points.items() if len(values) > 1],
    }


def resumed(folders: Mapping[int, Path]) -> dict[int, Done]:
    """Resume the sweep in each folder, or start it again where it was killed before there was anything to resume."""
    numbers = list(folders)
    ends = {numbers[job]: done for job, done in run_all([(f, ["fsdp_lab", "resume=out"]) for f in folders.values()])}
    again = [number for number in numbers if not (folders[number] / "out/sweep.json").exists()]
    for number in again:
        assert ends[number].code == 2 and "there is no sweep.json" in ends[number].err, ends[number].output
    ends |= {again[job]: done for job, done in run_all([(folders[number], SWEEP) for number in again])}
    return ends


@pytest.fixture(scope="module")
def undisturbed(memory: Path) -> tuple[list[str], dict[str, object]]:
    """The points that a sweep passes, and what it leaves when nothing is killed."""
    folder = memory / "undisturbed"
    folder.mkdir()
    lay_store(folder)
    ((_, done),) = run_all([(folder, ["-c", KILLED, f"{folder}.points", "0", *SWEEP])])
    assert done.code == 0, done.output
    left = left_in(folder)
    assert left["status"] == ["finished"] * 2 and left["runs"] == [(trial, "FINISHED") for trial in ("", "0", "1")]
    assert [[epoch for epoch, *_ in losses] for losses in left["losses"]] == [[1, 2]] * 2  # type: ignore[attr-defined]
    assert left["stored twice"] == []
    return Path(f"{folder}.points").read_text().splitlines(), left


def sample(points: Sequence[str]) -> list[int]:
    """The number of a point of each of the four kinds, at an eighth, three, five and seven eighths of its kind."""
    kinds: dict[str, list[int]] = {}
    for number, point in enumerate(points, 1):
        kinds.setdefault(point.split()[0], []).append(number)
    assert sorted(kinds) == ["append", "commit", "fsync", "rename"]
    return [kinds[kind][len(kinds[kind]) * (2 * n + 1) // 8] for n, kind in enumerate(sorted(kinds))]


@pytest.mark.timeout(3000)
@pytest.mark.parametrize(
    "every", [False, pytest.param(True, marks=pytest.mark.full)], ids=["four points", "every point"]
)
def test_a_sweep_killed_at_any_point_resumes_undisturbed(
    memory: Path, undisturbed: tuple[list[str], dict[str, object]], every: bool
):
    """Every epoch once, the losses of an undisturbed sweep, each trial once in MLflow, and a whole results.csv."""
    points, sound = undisturbed
    numbers = range(1, len(points) + 1) if every else sample(points)
    print(f"{len(numbers)} of {len(points)} points")
    wrong = []
    for start in range(0, len(numbers), 20):
        folders = {number: memory / f"killed-{number}" for number in numbers[start : start + 20]}
        for folder in folders.values():
            folder.mkdir()
            lay_store(folder)
        killed_at(folders, SWEEP)
        for number, done in resumed(folders).items():
            left = left_in(folders[number]) if done.code == 0 else {"status": f"exit status {done.code}"}
            faults = [f"{key}: {left.get(key)}, and not {sound[key]}" for key in sound if left.get(key) != sound[key]]
            if faults:
                wrong.append("\n".join([f"{number}, {points[number - 1]}:", *faults, done.output]))
            shutil.rmtree(folders[number])
    assert not wrong, f"{len(wrong)} of {len(numbers)} kills:\n\n" + "\n\n".join(wrong)


def last(points: Sequence[str], point: str) -> int:
    """Its last place: a trial's record is written several times, and its outcome last."""
    return len(points) - 1 - points[::-1].index(point)


def test_what_a_resume_needs_is_on_the_disk_before_its_name(
    undisturbed: tuple[list[str], dict[str, object]],
):
    """A power cut loses what was not synced. What a resume makes anew is whole at any time, and no more."""
    points, _ = undisturbed
    for name in ("multirun.yaml", "trials.jsonl", "results.csv"):
        assert f"append after out/{name}" in points or f"rename after out/{name}" in points, name
    for number in ("0", "1"):
        outcome = last(points, f"rename before out/{number}/trial.json")
        assert f"fsync after out/{number}/metrics.jsonl" in points[:outcome], "it says how many epochs there are"
    checkpoints = [f"out/{number}/checkpoints/step_{step:08d}.json" for number in (0, 1) for step in (2, 4)]
    for path in ("out/sweep.json", "out/0/trial.json", "out/1/trial.json", *checkpoints):
        folder, _, name = path.rpartition("/")
        renamed = last(points, f"rename after {path}")
        assert any(point.startswith(f"fsync after {folder}/.{name}.") for point in points[:renamed]), path
        assert points[renamed + 1 : renamed + 3] == [f"fsync before {folder}", f"fsync after {folder}"]


# For a run that does not end before something happens to it.
LONG = (*PLAIN, *TINY, "training.epochs=200", "data.num_train=960")


def press_ctrl_c(process: subprocess.Popen[str]) -> None:
    os.killpg(process.pid, signal.SIGINT)  # to the whole group, as a terminal does


@pytest.mark.ci
@pytest.mark.parametrize("public", ["", "1"], ids=["", "without the shortcut"])
def test_an_interrupt_ends_it_and_leaves_nothing_running(public: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("FSDP_LAB_PUBLIC_RAY", public)
    with started(tmp_path, *LONG) as process:
        wait_for(lambda: has_trained_an_epoch(tmp_path / "out"), process)
        family = descendants(process.pid)
        assert called("raylet/raylet", process.pid)
        press_ctrl_c(process)
        stdout, stderr = process.communicate(timeout=300)
    assert process.returncode == 130, stdout + stderr
    assert "Traceback" not in stdout + stderr
    assert still_running(family, 60) == []
    (row,) = results(tmp_path)
    assert row["status"] == "interrupted" and int(row["epoch"]) >= 1
    (run,), _ = runs(tmp_path)
    assert run.info.status == "KILLED" and run.data.tags["status"] == "interrupted"


STATES: dict[str, Callable[[int], object]] = {
    "Ray is imported": lambda pid: True,
    "Ray starts its servers": lambda pid: called("gcs_server", pid),
    "trials are forecast": lambda pid: called("forecast.pool", pid),
}


@pytest.mark.parametrize(
    "state", [pytest.param(s, marks=pytest.mark.full if n else pytest.mark.ci) for n, s in enumerate(STATES)]
)
def test_an_interrupt_before_the_first_trial_ends_it_in_order(tmp_path: Path, state: str):
    with started(tmp_path, *without(LONG, "sharding="), "sharding=root,per_block", "-m") as process:
        assert process.stdout
        message = ""
        while "Ray starts" not in message:
            line = process.stdout.readline()
            assert line, message + process.communicate(timeout=30)[1]
            message += line
        wait_for(lambda: STATES[state](process.pid), process)
        family = descendants(process.pid)
        press_ctrl_c(process)
        while process.poll() is None:  # Ray's servers may start in this moment yet
            family += [child for child in descendants(process.pid) if child not in family]
            time.sleep(0.05)
        stdout, stderr = process.communicate(timeout=200)
    assert process.returncode == 130, message + stdout + stderr
    assert "trial 0 starts" not in message + stdout
    assert still_running(family, 60) == []
    assert "Traceback" not in stdout + stderr


CHAOS_EPOCHS = 4
CHAOS = (
    f"training.epochs={CHAOS_EPOCHS}", "cluster.num_workers=2", "cluster.cpus_per_worker=1", "cluster.max_failures=9",
    "tracking.patience_s=60",
)  # fmt: skip


@pytest.mark.ci
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("public", ["", pytest.param("1", marks=pytest.mark.full)], ids=["", "without the shortcut"])
def test_a_sweep_survives_every_kill(public: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Each process is killed once, at a named state: every epoch is there once, and nothing runs on."""
    monkeypatch.setenv("FSDP_LAB_PUBLIC_RAY", public)
    serve = partial(mlflow_server, tmp_path, "--artifacts-destination", str(tmp_path / "kept"), port=free_port())
    with gated_sweep(tmp_path) as sweep:
        with serve() as (address, _):
            sweep.start_trials(2, *CHAOS, f"tracking.uri={address}")
            kill_ranks_of_the_first_trial(sweep)
        sweep.let_go(0, 3)  # the server was killed
        sweep.rank(0, 4)  # it has gone on without the store
        with serve():
            sweep.kill("controller", sweep.named("ImplicitFunc"))
            sweep.let_go(0, 4)
            kill_ray_and_the_driver_under_the_second_trial(sweep)
        assert sweep.sweep.statuses == ["finished"] * 2, sweep.log()
        assert still_running(sweep.processes(), 15) == []
        kept = list(sweep.temporary.glob("ray/session_2*"))
        assert len(kept) == 2, "the logs of the lost raylet and of the killed driver may have the reason; the last's go"
    check_runs(Store(tmp_path), run_ranks(2, train_alone, str(tmp_path))[0])


def kill_ranks_of_the_first_trial(sweep: GatedSweep) -> None:
    """The driver lives on, and another attempt resumes from the epochs that are written."""
    sweep.kill("rank 0", [sweep.rank(0, 1)])
    sweep.let_go(0, 1)
    sweep.rank(0, 2)
    sweep.kill("rank 1", [sweep.rank(0, 2, rank=1)])
    sweep.let_go(0, 2)
    sweep.rank(0, 3)


def kill_ray_and_the_driver_under_the_second_trial(sweep: GatedSweep) -> None:
    """Each resume goes on from the epochs that are written."""
    sweep.rank(1, 1)
    sweep.kill("actor by which ranks report", sweep.named("SynchronizationActor"))
    sweep.let_go(1, 1)
    sweep.rank(1, 2)
    sweep.kill("raylet", sweep.named("raylet/raylet"))
    assert sweep.wait() == 130, sweep.log()
    assert "resume=out" in sweep.log()
    sweep.start("resume=out")
    sweep.let_go(1, 2)
    sweep.rank(1, 3)
    assert sweep.sweep.trials[1].checkpoints, "of the epochs before"
    sweep.kill("driver", [psutil.Process(sweep.driver.pid)])
    sweep.wait()
    assert still_running(sweep.processes(), 15) == [], "the driver's death ends Ray and its workers"
    sweep.let_go(1, 3)  # not before: a worker that has yet to end would go on
    sweep.start("resume=out")
    sweep.rank(1, 4)
    sweep.let_go(1, 4)
    assert sweep.wait() == 0, sweep.log()


def check_runs(store: Store, undisturbed: list[float]) -> None:
    """One run a trial, every epoch once, and the losses of a run that nobody kills."""
    runs = store.trials
    assert len(runs) == 2 and {run.info.status for run in (*store.parents, *runs)} == {"FINISHED"}
    assert len(store.parents) == 1
    for run in runs:
        for key in ("train/loss", "val/loss", "perf/samples_per_s", "memory/peak_bytes"):
            assert [step for step, _ in store.history(run, key)] == list(range(1, CHAOS_EPOCHS + 1)), key
        losses = [loss for _, loss in store.history(run, "train/loss")]
        assert losses == pytest.approx(undisturbed, rel=1e-6)


def train_alone(folder: str) -> list[float]:
    """The losses of a trial without the platform, whose epochs all may begin."""
    from fsdp_lab.training.train import train

    os.chdir(folder)
    sys.path.insert(0, folder)
    Path("go", "9.1").touch()
    memo = Memo()
    with tempfile.TemporaryDirectory() as own:
        train(config(*SETTINGS, MODEL, f"training.epochs={CHAOS_EPOCHS}", "model.trial=9"), Path(own), memo)
    return [metrics["train/loss"] for metrics in memo.reported]
