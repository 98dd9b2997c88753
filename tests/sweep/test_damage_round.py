"""Every file of a finished, a failed and a killed sweep, cut, emptied, removed or of another shape: `report`, `resume`
and the next sweep end with the figures of the undamaged sweep, or with one message that names the file."""

from __future__ import annotations

import csv
import json
import os
import shutil
import signal
import sqlite3
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.conftest import STORE
from tests.forked import Commands, Done
from tests.servers import lay_store
from tests.sweep.conftest import PLAIN, has_trained_an_epoch

pytestmark = [pytest.mark.ci, pytest.mark.timeout(1500)]

TINY = (
    "data.num_train=64", "data.num_val=32", "training.global_batch_size=32", "training.timing_warmup_steps=0",
    "training.epochs=3", "checkpoint.keep_last=2", STORE, "hydra.run.dir=out", "hydra.sweep.dir=out", *PLAIN,
    "engine=inline", "model=mlp", "model.hidden_dim=4", "memory_profile=off",
)  # fmt: skip
SWEEPS = {
    "finished": ["optimizer.lr=1e-3,1e-2"],
    "failed": ["checkpoint.resume_from=null,nowhere", "cluster.storage_path=disk"],
    "killed": ["optimizer.lr=1e-3,1e-2,1e-1"],
}
REPORTED = "reported.csv"
SAMPLED = 5  # every fifth case, which is of every kind of damage: four or three of each file
RESUME = {"finished": "resume=out", "failed": "resume=out", "killed": "resume=last"}
NEXT = ("fsdp_lab", *TINY, "training.epochs=1", "export=false", "hydra.run.dir=next")
# The figures that are the same each time, to the last digit.
EXACT = ("epoch", "train/loss", "val/loss", "val/accuracy")
FORECAST = {"forecast/peak_bytes": 2.0**20, "forecast/needed_bytes": 2.0**20}


@dataclass(frozen=True)
class Case:
    sweep: str
    file: str
    damage: str

    def __str__(self) -> str:
        return f"{self.sweep}: {self.file} {self.damage}"


@dataclass(frozen=True)
class Left:
    """What the commands left: the status and the exact figures of each trial, and each epoch's by trial."""

    report: list[dict[str, str]]
    results: list[dict[str, str]]
    epochs: dict[str, dict[int, dict[str, float]]]
    stored: dict[tuple[str, str, int], list[float]]
    following: list[dict[str, str]]


def left_in(folder: Path, done: dict[str, Done]) -> Left:
    def rows(program: str, name: str) -> list[dict[str, str]]:
        return [] if program not in done or done[program].code == 2 else rows_of(folder / name)

    return Left(
        rows("report", REPORTED),
        rows("resume", "out/results.csv"),
        {
            path.parent.name: epochs_in(path)
            for top in ("out", "disk")
            for path in (folder / top).rglob("metrics.jsonl")
        },
        points_in(folder / "mlflow.db"),
        rows("next", "next/results.csv"),
    )


def rows_of(path: Path) -> list[dict[str, str]]:
    exact = ("trial", "status", "optimizer.lr", "checkpoint.resume_from", *EXACT, *FORECAST, "train loss", "val loss")
    with path.open(newline="") as file:
        return [{key: value for key, value in row.items() if key in exact} for row in csv.DictReader(file)]


def epochs_in(path: Path) -> dict[int, dict[str, float]]:
    """Each epoch as every line tells it that can be read: the same each time."""
    epochs: dict[int, dict[str, float]] = {}
    for line in path.read_text(errors="replace").splitlines():
        try:
            epoch_line = {key: value for key, value in json.loads(line).items() if key in EXACT}
        except (ValueError, AttributeError):
            continue
        assert epochs.setdefault(epoch_line["epoch"], epoch_line) == epoch_line, (
            f"{path} tells epoch {epoch_line['epoch']} in two ways"
        )
    return epochs


def points_in(store: Path) -> dict[tuple[str, str, int], list[float]]:
    """The values of the exact metrics of the sweep's trials in MLflow, by trial, metric and epoch: one each."""
    query = """select t.value, m.key, m.step, m.value from metrics m join tags t on t.run_uuid = m.run_uuid
        join tags p on p.run_uuid = m.run_uuid and p.key = 'mlflow.parentRunId' where t.key = 'fsdp_lab.trial'"""
    points: dict[tuple[str, str, int], list[float]] = {}
    with sqlite3.connect(store) as database:
        for trial, key, step, value in database.execute(query):
            if key in EXACT:
                points.setdefault((trial, key, step), []).append(value)
    return points


def damage_file(path: Path, how: str) -> None:
    content = path.read_bytes()
    if how == "removed":
        path.unlink()
    else:
        path.write_bytes({"cut": content[: len(content) // 2], "emptied": b"", "other": b'["other"]\n'}[how])


def faults(case: Case, done: dict[str, Done], left: Left, sound: Left) -> Iterator[str]:
    """What is wrong with what the commands did."""
    name = Path(case.file).name
    for program, end in done.items():
        if end.code not in (0, 1, 2) or "Traceback" in end.output:
            yield f"{program} ended with {end.code}"
        # that a trial had an outcome, nobody knows once it is removed: it counts as not finished
        unknown = program == "report" and case.damage == "removed" and "no trial has finished" in end.output
        if end.code == 2 and (name not in end.output or program == "next") and not unknown:
            yield f"{program} was refused without naming {name}"
    known = done["report"].output + (name if case.damage == "removed" else "")
    if done["report"].code != 2 and (wrong := differing(left.report, sound.report, name, known)):
        yield f"report: {wrong}"
    if done["resume"].code == 2:
        return
    if wrong := differing(left.results, sound.results, name, ""):
        yield f"resume: {wrong}"
    if left.epochs != sound.epochs:
        yield f"epochs: {left.epochs}, and not {sound.epochs}"
    if left.stored != sound.stored:
        yield f"MLflow: {left.stored}, and not {sound.stored}"
    if "next" in done and left.following != sound.following:
        yield f"next: {left.following}, and not {sound.following}"


def differing(expected: list[dict[str, str]], sound: list[dict[str, str]], name: str, output: str) -> str:
    """Where rows differ. A trial that counts as not ended may have fewer epochs, where a message names the file or it
    had not ended before; and what was forecast may be missing with its file."""
    if len(expected) != len(sound):
        return f"{len(expected)} rows, and not {len(sound)}"
    for row, other in zip(expected, sound, strict=True):
        waits = row["status"] == "waiting" and (name in output or other["status"] == "waiting")
        if waits and float(row["epoch"] or 0) < float(other["epoch"] or 0):
            continue
        for key in row.keys() | other.keys():
            forecast = row.get(key, "") == "" and key in FORECAST and name == "forecast.json"
            if row.get(key) != other.get(key) and not forecast and not (waits and key == "status"):
                return f"{key} of {row} is not that of {other}"
    return ""


def output_of(done: dict[str, Done]) -> str:
    return "\n".join(f"--- {program}: {end.code}\n{end.output}" for program, end in done.items())


@pytest.fixture(scope="module")
def commands() -> Iterator[Commands]:
    with Commands() as running:
        yield running


@pytest.fixture(scope="module")
def sweeps(commands: Commands, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with the three sweeps: `finished-000` and so on, each with a store of its own. In memory where there is
    some: a database on a disk waits for it at every write."""
    memory = Path("/dev/shm")
    in_memory = memory.is_dir() and shutil.disk_usage(memory).free > 2**30
    root = Path(tempfile.mkdtemp(prefix="round-", dir=memory if in_memory else tmp_path_factory.getbasetemp()))
    try:
        make_sweeps(commands, root)
        yield root
    finally:
        shutil.rmtree(root)


def make_sweeps(commands: Commands, root: Path) -> None:
    for name, words in SWEEPS.items():
        folder = root / f"{name}-000"
        folder.mkdir()
        lay_store(folder)
        if name == "killed":
            start_and_kill(commands, folder, words)
        else:
            ((_, done),) = commands.run([(folder, ["fsdp_lab", "-m", *TINY, *words])])
            assert done.code == (name == "failed"), done.output
        first = next(path.parent for path in folder.rglob("metrics.jsonl"))
        (first / "forecast.json").write_text(json.dumps(FORECAST))  # only sweeps on Ray make one


def start_and_kill(commands: Commands, folder: Path, words: list[str]) -> None:
    """Kill it when its second trial has told its first epoch."""
    second = folder / "out/1"
    done = commands.run_and_kill(folder, ["fsdp_lab", "-m", *TINY, *words], lambda: has_trained_an_epoch(second))
    assert done.code == -signal.SIGKILL, done.output
    assert not (folder / "out/1/outcome.json").exists()


def copied(sweeps: Path, sweep: str, number: int) -> Path:
    """A copy that is another sweep's folder in everything: its own path stands wherever the old one did."""
    base, copy = sweeps / f"{sweep}-000", sweeps / f"{sweep}-{number:03}"
    shutil.copytree(base, copy)
    for path in copy.rglob("*"):
        if path.is_file() and os.fsencode(base) in (content := path.read_bytes()):
            path.write_bytes(content.replace(os.fsencode(base), os.fsencode(copy)))
    return copy


def cases(sweeps: Path) -> list[Case]:
    """Of two finished trials, each has half of the cases: they are alike."""
    collected = []
    for sweep in SWEEPS:
        base = sweeps / f"{sweep}-000"
        paths = [
            path for top in ("out", "disk", "outputs") for path in sorted((base / top).rglob("*")) if path.is_file()
        ]
        for path in paths:
            for turn, how in enumerate(("cut", "emptied", "removed", "other")):
                within = path.relative_to(base)
                if not path.is_file():
                    continue
                if how == "other" and path.suffix not in (".json", ".jsonl", ".yaml", ".csv"):
                    continue
                if sweep == "finished" and len(within.parts) > 2 and within.parts[1] != str(turn % 2):
                    continue
                collected.append(Case(sweep, str(within), how))
    return collected


def run_all(commands: Commands, folders: list[Path], resumes: list[str], follow: list[bool]) -> list[dict[str, Done]]:
    """`report`, `resume` and, where wanted, the next sweep in each folder, one after the other."""
    done: list[dict[str, Done]] = [{} for _ in folders]
    for program in ("report", "resume", "next"):
        words = {"report": lambda i: ["fsdp_lab.report", "sweep=out"], "resume": lambda i: ["fsdp_lab", resumes[i]],
                 "next": lambda i: list(NEXT)}[program]  # fmt: skip
        wanted = [i for i in range(len(folders)) if program != "next" or follow[i]]
        for job, end in commands.run([(folders[i], words(i)) for i in wanted]):
            done[wanted[job]][program] = end
            if program == "report" and end.code == 0:  # a resume writes its own in this place
                shutil.copy(folders[job] / "out/report.csv", folders[job] / REPORTED)
    return done


def test_damage_is_mended_or_named(commands: Commands, sweeps: Path):
    all_cases = cases(sweeps)
    if not os.environ.get("FSDP_LAB_EVERY"):  # all of them take ten minutes
        all_cases = all_cases[::SAMPLED]
    sound: dict[str, Left] = {}
    for sweep in SWEEPS:
        folder = copied(sweeps, sweep, 999)
        (done,) = run_all(commands, [folder], [RESUME[sweep]], [True])
        assert [end.code for end in done.values()] == [0, int(sweep == "failed"), 0], output_of(done)
        sound[sweep] = left_in(folder, done)
        assert all(len(values) == 1 for values in sound[sweep].stored.values())
        assert {epoch for epochs in sound[sweep].epochs.values() for epoch in epochs} == {1, 2, 3}
    bad = []
    for start in range(0, len(all_cases), 40):
        chunk = all_cases[start : start + 40]
        folders = [copied(sweeps, case.sweep, 1 + start + i) for i, case in enumerate(chunk)]
        for folder, case in zip(folders, chunk, strict=True):
            damage_file(folder / case.file, case.damage)
        ends = run_all(
            commands, folders, [RESUME[case.sweep] for case in chunk], [case.damage == "emptied" for case in chunk]
        )
        for folder, case, done in zip(folders, chunk, ends, strict=True):
            problems = faults(case, done, left_in(folder, done), sound[case.sweep])
            bad += [f"{case}: {fault}\n{output_of(done)}" for fault in problems]
            shutil.rmtree(folder)
    print(f"{len(all_cases)} cases")
    assert not bad, f"{len(bad)} of {len(all_cases)} cases:\n" + "\n\n".join(bad)
