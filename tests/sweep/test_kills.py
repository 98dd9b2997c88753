"""Sweeps that are killed at a call that changes a file or the store, or at a named state, or by Ctrl-C, and resumed."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import HERE, PLAIN, TINY, without
from tests.folders import Store, SweepFolder
from tests.forked import Done, run_all
from tests.processes import called, marked, still_running
from tests.ranks import run_ranks
from tests.servers import free_port, lay_store, mlflow_server
from tests.sweep.conftest import GatedSweep, has_trained_an_epoch, results, started, train_alone, wait_for

KILLED = (Path(__file__).parents[1] / "killed.py").read_text()  # what runs a command that kills itself
SWEEP = (
    "fsdp_lab", "-m", "optimizer.lr=1e-3,1e-2", *PLAIN, "data.num_train=64", "data.num_val=32",
    "training.global_batch_size=32", "training.timing_warmup_steps=0", "training.epochs=2", "engine=inline",
    "model=mlp", "model.hidden_dim=4", "memory_profile=off", "forecast.enabled=false", *HERE,
)  # fmt: skip
# The figures that are the same each time, to the last digit.
EXACT = ("epoch", "train/loss", "val/loss", "val/accuracy")


@pytest.fixture(scope="module")
def memory() -> Iterator[Path]:
    """A folder in memory where there is some: a database on a disk waits for it at every write."""
    shared = "/dev/shm"
    in_memory = os.path.isdir(shared) and shutil.disk_usage(shared).free > 2**30
    with tempfile.TemporaryDirectory(prefix="fsdp_lab-", dir=shared if in_memory else None) as folder:
        yield Path(folder)


def run_in(words: Mapping[Path, Sequence[str]]) -> dict[Path, Done]:
    """Run a command in each folder."""
    folders = list(words)
    return {folders[number]: done for number, done in run_all(list(words.items()))}


def swept_until(points: Mapping[Path, int]) -> dict[Path, Done]:
    """Start the sweep in each folder, to be killed at a point."""
    for folder in points:
        folder.mkdir()
        lay_store(folder)
    return run_in({f: ["-c", KILLED, f"{f}.points", str(at), *SWEEP] for f, at in points.items()})


def resumed(folders: Sequence[Path]) -> dict[Path, Done]:
    """Resume the sweep in each folder, or start it again where it was killed before there was anything to resume."""
    ends = run_in(dict.fromkeys(folders, ("fsdp_lab", "resume=out")))
    again = [folder for folder in folders if not (folder / "out/sweep.json").exists()]
    for folder in again:
        assert ends[folder].returncode == 2 and "there is no sweep.json" in ends[folder].stderr, ends[folder].stdout
    return ends | run_in(dict.fromkeys(again, SWEEP))


def left_in(folder: Path) -> dict[str, Any]:
    """What the sweep left, without what differs from run to run."""
    sweep, store = SweepFolder(folder / "out"), Store(folder)
    points = store.points()
    return {
        "results": [{key: row[key] for key in ("status", *EXACT)} for row in sweep.rows],
        "losses": [trial.losses for trial in sweep.trials],
        "outcomes": [(trial.outcome or {}).get("status") for trial in sweep.trials],
        "runs": store.ends(),
        "stored": [point for point in points if point[1] in EXACT],
        "stored twice": [point for point, times in Counter(point[:3] for point in points).items() if times > 1],
    }


Undisturbed = tuple[list[str], dict[str, Any]]


@pytest.fixture(scope="module")
def undisturbed(memory: Path) -> Undisturbed:
    """The points that a sweep passes, and what it leaves when nothing is killed."""
    folder = memory / "undisturbed"
    done = swept_until({folder: 0})[folder]
    assert done.returncode == 0, done.stdout + done.stderr
    left = left_in(folder)
    assert left["outcomes"] == ["finished"] * 2 and left["runs"] == [(trial, "FINISHED") for trial in ("", "0", "1")]
    assert [[epoch for epoch, *_ in losses] for losses in left["losses"]] == [[1, 2]] * 2
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
def test_a_sweep_killed_at_any_point_resumes_undisturbed(memory: Path, undisturbed: Undisturbed, every: bool):
    """Every epoch once, the losses of an undisturbed sweep, each trial once in MLflow, and a whole results.csv."""
    points, sound = undisturbed
    numbers = range(1, len(points) + 1) if every else sample(points)
    wrong = []
    for start in range(0, len(numbers), 20):
        folders = {memory / f"killed-{number}": number for number in numbers[start : start + 20]}
        killed = swept_until(folders)
        assert {done.returncode for done in killed.values()} == {-signal.SIGKILL}, killed
        for folder, done in resumed(list(folders)).items():
            left = left_in(folder) if done.returncode == 0 else {}
            faults = [f"{key}: {left.get(key)}, and not {sound[key]}" for key in sound if left.get(key) != sound[key]]
            if faults:
                wrong.append(
                    "\n".join([f"killed at {points[folders[folder] - 1]}:", *faults, done.stdout + done.stderr])
                )
            shutil.rmtree(folder)
    assert not wrong, f"{len(wrong)} of {len(numbers)} kills:\n\n" + "\n\n".join(wrong)


def last(points: Sequence[str], point: str) -> int:
    """Its last place: a trial's record is written several times, and its outcome last."""
    return len(points) - 1 - points[::-1].index(point)


def test_what_a_resume_needs_is_on_the_disk_before_its_name(undisturbed: Undisturbed):
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


MOMENTS: dict[str, Callable[[Path, int], object]] = {
    "a trial trains": lambda sweep, pid: has_trained_an_epoch(sweep / "0"),
    "Ray is imported": lambda sweep, pid: "_raylet" in Path(f"/proc/{pid}/maps").read_text(),
    "Ray starts its servers": lambda sweep, pid: called("gcs_server", pid),
    "trials are forecast": lambda sweep, pid: called("forecast.pool", pid),
}


@pytest.mark.parametrize(
    ("moment", "public"),
    [
        *(pytest.param("a trial trains", public, marks=pytest.mark.ci) for public in ("", "1")),
        *(pytest.param(m, "", marks=pytest.mark.full if n > 1 else pytest.mark.ci) for n, m in enumerate(MOMENTS) if n),
    ],
)
def test_an_interrupt_ends_a_sweep_and_leaves_nothing_running(
    moment: str, public: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("FSDP_LAB_PUBLIC_RAY", public)
    monkeypatch.setenv("FSDP_LAB_KILLS", str(tmp_path))
    words = (*without(PLAIN, "sharding="), *TINY, "training.epochs=200", "data.num_train=960")
    with started(tmp_path, "-m", *words, "sharding=root,per_block") as process:
        wait_for(lambda: MOMENTS[moment](tmp_path / "out", process.pid), process)
        os.killpg(process.pid, signal.SIGINT)  # to the whole group, as a terminal does
        stdout, stderr = process.communicate(timeout=300)
    assert process.returncode == 130 and "Traceback" not in stdout + stderr, stdout + stderr
    assert still_running(marked("FSDP_LAB_KILLS", str(tmp_path)), 60) == []
    assert ("trial 0 starts" in stdout) is (moment == "a trial trains")
    if moment == "a trial trains":
        first, second = results(tmp_path)
        assert (first["status"], second["status"]) == ("interrupted", "waiting") and int(first["epoch"]) >= 1
        (run,) = Store(tmp_path).trials
        assert run.info.status == "KILLED" and run.data.tags["status"] == "interrupted"


CHAOS_EPOCHS = 4
CHAOS = (
    f"training.epochs={CHAOS_EPOCHS}", "cluster.num_workers=2", "cluster.cpus_per_worker=1", "cluster.max_failures=9",
    "tracking.patience_s=60",
)  # fmt: skip


@pytest.mark.ci
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("public", ["", pytest.param("1", marks=pytest.mark.full)], ids=["", "without the shortcut"])
def test_a_sweep_survives_every_kill(public: str, gated: GatedSweep, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Each process is killed once, at a named state: every epoch is there once, and nothing runs on."""
    monkeypatch.setenv("FSDP_LAB_PUBLIC_RAY", public)
    serve = partial(mlflow_server, tmp_path, "--artifacts-destination", str(tmp_path / "kept"), port=free_port())
    with serve() as (address, _):
        gated.start_two_trials(*CHAOS, f"tracking.uri={address}")
        kill_ranks_of_the_first_trial(gated)
    gated.let_go(0, 3)  # the server was killed
    gated.rank(0, 4)  # it has gone on without the store
    with serve():
        gated.kill("ImplicitFunc")  # the controller
        gated.let_go(0, 4)
        kill_ray_and_the_driver_under_the_second_trial(gated)
    assert gated.sweep.statuses == ["finished"] * 2, gated.log()
    assert still_running(gated.processes(), 15) == []
    kept = list(gated.temporary.glob("ray/session_2*"))
    assert len(kept) == 2, "the logs of the lost raylet and of the killed driver may have the reason; the last's go"
    gated.let_go(9, 1)
    alone = gated.sweep.trials[0].config
    alone["model"]["mark"] = 9
    undisturbed = [metrics["train/loss"] for metrics in run_ranks(2, train_alone, alone, tmp_path)[0]]
    check_runs(Store(tmp_path), undisturbed)


def kill_ranks_of_the_first_trial(gated: GatedSweep) -> None:
    """The driver lives on, and another attempt resumes from the epochs that are written."""
    gated.rank(0, 1).kill()
    gated.let_go(0, 1)
    gated.rank(0, 2)
    gated.rank(0, 2, rank=1).kill()
    gated.let_go(0, 2)
    gated.rank(0, 3)


def kill_ray_and_the_driver_under_the_second_trial(gated: GatedSweep) -> None:
    """Each resume goes on from the epochs that are written."""
    gated.rank(1, 1)
    gated.kill("SynchronizationActor")  # by which ranks report
    gated.let_go(1, 1)
    gated.rank(1, 2)
    gated.kill("raylet/raylet")
    assert gated.wait() == 130 and "resume=out" in gated.log(), gated.log()
    gated.start("resume=out")
    gated.let_go(1, 2)
    gated.rank(1, 3)
    assert any(gated.sweep.trials[1].files.glob("checkpoints/step_*.json")), "of the epochs before"
    gated.driver.kill()
    gated.wait()
    assert still_running(gated.processes(), 15) == [], "the driver's death ends Ray and its workers"
    gated.let_go(1, 3)  # not before: a worker that has yet to end would go on
    gated.start("resume=out")
    gated.rank(1, 4)
    gated.let_go(1, 4)
    assert gated.wait() == 0, gated.log()


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
