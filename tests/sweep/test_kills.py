"""Sweeps that are killed at every call that changes a file or the store, and then resumed; Ctrl-C; full disks."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from fsdp_lab.commands.explain import explain
from fsdp_lab.storage.files import write_text
from tests.conftest import HERE, PLAIN, TINY, run_cli
from tests.folders import Store, SweepFolder
from tests.forked import Commands, Done
from tests.processes import called, descendants, still_running
from tests.servers import lay_store
from tests.sweep.conftest import KILLED, has_trained_an_epoch, results, runs, started, wait_for

SWEEP = (
    "fsdp_lab", "-m", "optimizer.lr=1e-3,1e-2", *PLAIN, "data.num_train=64", "data.num_val=32",
    "training.global_batch_size=32", "training.timing_warmup_steps=0", "training.epochs=2", "engine=inline",
    "model=mlp", "model.hidden_dim=4", "memory_profile=off", "forecast.enabled=false",
    *HERE,
)  # fmt: skip
# The figures that are the same each time, to the last digit.
EXACT = ("epoch", "train/loss", "val/loss", "val/accuracy")
A_KIND = 3  # points of each kind in `make test`


@pytest.fixture(scope="module")
def commands() -> Iterator[Commands]:
    with Commands() as running:
        yield running


def killed_at(commands: Commands, folders: Mapping[int, Path], words: Sequence[str]) -> None:
    """Run a command in each folder, and kill it at the point whose number is the folder's key."""
    jobs = [(folder, ["-c", KILLED, f"{folder}.points", str(number), *words]) for number, folder in folders.items()]
    numbers = list(folders)
    for job, done in commands.run(jobs):
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


def resumed(commands: Commands, folders: Mapping[int, Path]) -> dict[int, Done]:
    """Resume the sweep in each folder, or start it again where it was killed before there was anything to resume."""
    numbers = list(folders)
    ends = {
        numbers[job]: done for job, done in commands.run([(f, ["fsdp_lab", "resume=out"]) for f in folders.values()])
    }
    again = [number for number in numbers if not (folders[number] / "out/sweep.json").exists()]
    for number in again:
        assert ends[number].code == 2 and "there is no sweep.json" in ends[number].err, ends[number].output
    ends |= {again[job]: done for job, done in commands.run([(folders[number], SWEEP) for number in again])}
    return ends


@pytest.fixture(scope="module")
def undisturbed(commands: Commands, memory: Path) -> tuple[list[str], dict[str, object]]:
    """The points that a sweep passes, and what it leaves when nothing is killed."""
    folder = memory / "undisturbed"
    folder.mkdir()
    lay_store(folder)
    ((_, done),) = commands.run([(folder, ["-c", KILLED, f"{folder}.points", "0", *SWEEP])])
    assert done.code == 0, done.output
    left = left_in(folder)
    assert left["status"] == ["finished"] * 2 and left["runs"] == [(trial, "FINISHED") for trial in ("", "0", "1")]
    assert [[epoch for epoch, *_ in losses] for losses in left["losses"]] == [[1, 2]] * 2  # type: ignore[attr-defined]
    assert left["stored twice"] == []
    return Path(f"{folder}.points").read_text().splitlines(), left


def sample(points: Sequence[str]) -> list[int]:
    """The numbers of some points of each kind, from the sweep's start to its end."""
    kinds: dict[str, list[int]] = {}
    for number, point in enumerate(points, 1):
        kinds.setdefault(point.split()[0], []).append(number)
    assert sorted(kinds) == ["append", "commit", "fsync", "rename"]
    return [of[len(of) * (2 * part + 1) // (2 * A_KIND)] for of in kinds.values() for part in range(A_KIND)]


@pytest.mark.timeout(3000)
@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.full)], ids=["sample", "every point"])
def test_a_sweep_that_is_killed_at_any_point_resumes_as_if_it_had_not_been(
    commands: Commands, memory: Path, undisturbed: tuple[list[str], dict[str, object]], every: bool
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
        killed_at(commands, folders, SWEEP)
        for number, done in resumed(commands, folders).items():
            left = left_in(folders[number]) if done.code == 0 else {"status": f"exit status {done.code}"}
            faults = [f"{key}: {left.get(key)}, and not {sound[key]}" for key in sound if left.get(key) != sound[key]]
            if faults:
                wrong.append("\n".join([f"{number}, {points[number - 1]}:", *faults, done.output]))
            shutil.rmtree(folders[number])
    assert not wrong, f"{len(wrong)} of {len(numbers)} kills:\n\n" + "\n\n".join(wrong)


def last(points: Sequence[str], point: str) -> int:
    """Its last place: a trial's record is written several times, and its outcome last."""
    return len(points) - 1 - points[::-1].index(point)


def test_what_a_resume_needs_is_on_the_disk_before_its_name_and_its_name_after(
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


def test_a_kill_beyond_the_last_point_is_noticed(commands: Commands, tmp_path: Path):
    (folder := tmp_path / "here").mkdir()
    with pytest.raises(AssertionError, match="the kill at point 1 was not made"):
        killed_at(commands, {1: folder}, ["fsdp_lab", "--version"])


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
    once = [word for word in LONG if not word.startswith("sharding=")]
    with started(tmp_path, *once, "sharding=root,per_block", "-m") as process:
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


@pytest.fixture
def small_disk(tmp_path: Path):
    """A file system of 6 MB: room for MLflow's store and a checkpoint or two."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = shutil.which("mount")
    if mount is None or subprocess.run([mount, "-t", "tmpfs", "-o", "size=6m", "tmpfs", disk], check=False).returncode:
        pytest.skip("a small disk cannot be mounted here (it takes root)")
    yield disk
    subprocess.run(["umount", "--lazy", disk], check=True)


def test_a_file_that_a_full_disk_does_not_take_is_named_and_leaves_nothing(small_disk: Path):
    write_text(small_disk / "a/night.json", "whole")
    (small_disk / "filler").write_bytes(b"\0" * (5 * 2**20))
    with pytest.raises(OSError, match="No space left on device") as raised:
        write_text(small_disk / "a/night.json", "x" * 2**22)
    assert raised.value.filename == str(small_disk / "a/night.json") and "night.json: No space" in str(
        explain(raised.value)
    )
    assert (small_disk / "a/night.json").read_text() == "whole"
    assert [path.name for path in (small_disk / "a").iterdir()] == ["night.json"]


@pytest.mark.parametrize(
    "words",
    [
        pytest.param(("engine=inline", "cluster.num_workers=1"), marks=pytest.mark.ci, id="inline"),
        pytest.param(("cluster.max_failures=0",), marks=pytest.mark.full, id="ray"),
    ],
)
def test_a_full_disk_is_reported_and_ends_the_run(small_disk: Path, words: tuple[str, ...]):
    store = f"tracking.uri=sqlite:///{small_disk.parent}/mlflow.db"
    long = [word for word in LONG if not word.startswith("tracking.uri")]
    done = run_cli(small_disk, *long, "training.epochs=8", store, "checkpoint.keep_last=99", *words, timeout=300)
    output = done.stdout + done.stderr
    assert done.returncode in (1, 2), output
    assert "No space left on device" in output
    assert "Traceback" not in output
    (run,), _ = runs(small_disk.parent)
    assert run.info.status == "FAILED"
    assert Store(small_disk.parent).history(run, "train/loss"), "what was recorded before stays"
