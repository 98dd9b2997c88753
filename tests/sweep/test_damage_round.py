"""Every file of a finished, a failed and a killed sweep, cut, emptied, removed or of another shape: what reads it, and
the commands, end with the figures of the undamaged sweep, or with one message that names the file."""

from __future__ import annotations

import csv
import io
import json
import os
import shutil
import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import redirect_stderr
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from fsdp_lab import files
from fsdp_lab.config import UserError
from fsdp_lab.record.failures import read_failures
from fsdp_lab.record.trial_files import read_forecast, read_progress
from fsdp_lab.sweep.store.resume import resume_arguments
from fsdp_lab.sweep.sweep_data import sweep_in
from fsdp_lab.training.checkpoint_place import OnDisk
from tests.conftest import STORE
from tests.folders import Store, SweepFolder
from tests.forked import Commands, Done
from tests.servers import lay_store
from tests.sweep.conftest import KILLED, PLAIN

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
DIES_AT = "append after out/1/metrics.jsonl"  # in its second trial, with the first epoch
DAMAGES = ("cut", "emptied", "removed", "other")
TEXTS = (".json", ".jsonl", ".yaml", ".csv")  # where other content is of the right kind, and says something else
RESUME = {"finished": "resume=out", "failed": "resume=out", "killed": "resume=last"}
NEXT = ("fsdp_lab", *TINY, "training.epochs=1", "export=false", "hydra.run.dir=next")
REPORTED = "reported.csv"
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


@pytest.fixture(scope="module")
def commands() -> Iterator[Commands]:
    with Commands() as running:
        yield running


@pytest.fixture(scope="module")
def sweeps(commands: Commands, memory: Path) -> Path:
    """A folder with the three sweeps: `finished-000` and so on, each with a store of its own."""
    for name, words in SWEEPS.items():
        folder = memory / f"{name}-000"
        folder.mkdir()
        lay_store(folder)
        command = ["fsdp_lab", "-m", *TINY, *words]
        if name == "killed":
            command = ["-c", KILLED, f"{folder}.points", DIES_AT, *command]
        ((_, done),) = commands.run([(folder, command)])
        assert done.code == {"finished": 0, "failed": 1, "killed": -signal.SIGKILL}[name], done.output
        first = SweepFolder(folder / "out").trials[0].files
        (folder / first / "forecast.json").write_text(json.dumps(FORECAST))  # only sweeps on Ray make one
    return memory


def cases(sweeps: Path) -> list[Case]:
    """Of two finished trials, each has half of the cases: they are alike."""
    collected = []
    for sweep in SWEEPS:
        base = sweeps / f"{sweep}-000"
        paths = [path for top in ("out", "disk", "outputs") for path in sorted((base / top).rglob("*"))]
        for path in filter(Path.is_file, paths):
            for turn, how in enumerate(DAMAGES):
                within = path.relative_to(base)
                alike = sweep == "finished" and len(within.parts) > 2 and within.parts[1] != str(turn % 2)
                if not alike and (how != "other" or path.suffix in TEXTS):
                    collected.append(Case(sweep, str(within), how))
    return collected


def damage_file(path: Path, how: str) -> None:
    content = path.read_bytes()
    if how == "removed":
        path.unlink()
    else:
        path.write_bytes({"cut": content[: len(content) // 2], "emptied": b"", "other": b'["other"]\n'}[how])


# In this process: what reads the files.


def read_all(folder: Path, trials: Sequence[Path]) -> dict[str, Any]:
    """What each reader of a sweep's files returns: a report's figures, a resume's command line, and the rest by trial;
    where one refuses, its message."""

    def values(read: Any) -> Any:
        try:
            return read()
        except UserError as error:
            return f"refused: {error}"

    return {
        "report": values(lambda: reported_rows(folder)),
        "resume": values(lambda: resume_arguments(["resume=last"])),
        "checkpoints": [str(OnDisk(trial / "checkpoints").find_latest()) for trial in trials],
        "failures": [[failure.args for failure in read_failures(trial)] for trial in trials],
        "progress": [read_progress(trial) for trial in trials],
        "forecast": [read_forecast(trial) for trial in trials],
    }


def reported_rows(folder: Path) -> list[dict[str, str]]:
    sweep, _, _ = sweep_in(folder / "out")
    return [
        {"trial": str(trial.number), "status": str(trial.status), **trial.setting, "epochs": str(len(trial.epochs)),
         **{key: str(trial.figures.get(key, "")) for key in (*EXACT, *FORECAST)}}
        for trial in sweep.trials
    ]  # fmt: skip


def wrongly_read(case: Case, read: Mapping[str, Any], sound: Mapping[str, Any], warned: str) -> Iterator[str]:
    """What is wrong with what was read: it may lack what the damaged file had, if a message names that file."""
    name = Path(case.file).name
    for what, value in read.items():
        if value == sound[what]:
            continue
        known = f"{value}{warned}" + (name if case.damage == "removed" else "")
        if what == "report" and isinstance(value, list):
            if difference := differing(value, sound[what], name, known):
                yield f"report: {difference}"
        elif name not in (value if isinstance(value, str) else known):
            yield f"{what}: {value}, and no message names {name}: {warned}"


@pytest.mark.parametrize("sweep", SWEEPS)
def test_damage_is_named_by_what_reads_a_file(sweep: str, sweeps: Path, monkeypatch: pytest.MonkeyPatch):
    folder = sweeps / f"{sweep}-000"
    monkeypatch.chdir(folder)
    trials = [trial.files for trial in SweepFolder(folder / "out").trials]
    sound = read_all(folder, trials)
    assert isinstance(sound["report"], list) and sound["report"][0]["epoch"] == "3", sound
    assert sound["resume"][0] == "-m"
    bad = []
    of_this = [case for case in cases(sweeps) if case.sweep == sweep]
    for case in of_this:
        path = folder / case.file
        content = path.read_bytes()
        monkeypatch.setattr(files, "_reported", set())
        try:
            damage_file(path, case.damage)
            with redirect_stderr(io.StringIO()) as warned:
                read = read_all(folder, trials)
        except Exception as error:  # noqa: BLE001 - no reader may raise anything but UserError
            bad.append(f"{case}: {error!r}")
        else:
            bad += [f"{case}: {fault}" for fault in wrongly_read(case, read, sound, warned.getvalue())]
        finally:
            path.write_bytes(content)
    print(f"{len(of_this)} cases")
    assert not bad, f"{len(bad)} of {len(of_this)} cases:\n" + "\n".join(bad)
    assert read_all(folder, trials) == sound


# Through commands.


@dataclass(frozen=True)
class Left:
    """What the commands left: the status and the exact figures of each trial, and each epoch's by trial."""

    report: list[dict[str, str]]
    results: list[dict[str, str]]
    epochs: list[list[tuple[int, float, float]]]
    stored: dict[tuple[str, str, int], list[float]]
    following: list[dict[str, str]]


def left_in(folder: Path, done: Mapping[str, Done]) -> Left:
    def rows(program: str, name: str) -> list[dict[str, str]]:
        return [] if program not in done or done[program].code == 2 else rows_of(folder / name)

    points = Store(folder).points().items()
    return Left(
        rows("report", REPORTED),
        rows("resume", "out/results.csv"),
        [trial.losses for trial in SweepFolder(folder / "out").trials],
        {point: values for point, values in points if point[1] in EXACT},
        rows("next", "next/results.csv"),
    )


def rows_of(path: Path) -> list[dict[str, str]]:
    exact = ("trial", "status", "optimizer.lr", "checkpoint.resume_from", *EXACT, *FORECAST, "train loss", "val loss")
    with path.open(newline="") as file:
        return [{key: value for key, value in row.items() if key in exact} for row in csv.DictReader(file)]


def faults(case: Case, done: Mapping[str, Done], left: Left, sound: Left) -> Iterator[str]:
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


def copied(sweeps: Path, sweep: str, number: int) -> Path:
    """A copy that is another sweep's folder in everything: its own path stands wherever the old one did."""
    base, copy = sweeps / f"{sweep}-000", sweeps / f"{sweep}-{number:03}"
    shutil.copytree(base, copy)
    for path in copy.rglob("*"):
        if path.is_file() and os.fsencode(base) in (content := path.read_bytes()):
            path.write_bytes(content.replace(os.fsencode(base), os.fsencode(copy)))
    return copy


def run_all(
    commands: Commands, folders: Sequence[Path], resumes: Sequence[str], follow: Sequence[bool]
) -> list[dict[str, Done]]:
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


def output_of(done: Mapping[str, Done]) -> str:
    return "\n".join(f"--- {program}: {end.code}\n{end.output}" for program, end in done.items())


@pytest.fixture(scope="module")
def sound(commands: Commands, sweeps: Path) -> dict[str, Left]:
    """What the commands leave of each sweep without damage."""
    left: dict[str, Left] = {}
    for sweep in SWEEPS:
        folder = copied(sweeps, sweep, 999)
        (done,) = run_all(commands, [folder], [RESUME[sweep]], [True])
        assert [end.code for end in done.values()] == [0, int(sweep == "failed"), 0], output_of(done)
        left[sweep] = left_in(folder, done)
        assert all(len(values) == 1 for values in left[sweep].stored.values())
        assert {epoch for losses in left[sweep].epochs for epoch, *_ in losses} == {1, 2, 3}
    return left


def one_of_each_name(of: Sequence[Case]) -> list[Case]:
    """A case for each name of a file, in turn of another sweep and with another damage."""
    names: dict[str, list[Case]] = {}
    for case in of:
        names.setdefault(Path(case.file).name, []).append(case)
    chosen = [names[name][5 * turn % len(names[name])] for turn, name in enumerate(sorted(names))]
    assert {case.damage for case in chosen} == set(DAMAGES) and {case.sweep for case in chosen} == set(SWEEPS)
    return chosen


@pytest.mark.ci
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.full)], ids=["each name", "every file"])
def test_damage_is_repaired_or_named_by_commands(commands: Commands, sweeps: Path, sound: dict[str, Left], every: bool):
    all_cases = cases(sweeps) if every else one_of_each_name(cases(sweeps))
    bad = []
    for start in range(0, len(all_cases), 40):
        chunk = all_cases[start : start + 40]
        folders = [copied(sweeps, case.sweep, 1 + start + i) for i, case in enumerate(chunk)]
        for folder, case in zip(folders, chunk, strict=True):
            damage_file(folder / case.file, case.damage)
        follow = [case.damage == "emptied" for case in chunk]
        ends = run_all(commands, folders, [RESUME[case.sweep] for case in chunk], follow)
        for folder, case, done in zip(folders, chunk, ends, strict=True):
            problems = faults(case, done, left_in(folder, done), sound[case.sweep])
            bad += [f"{case}: {fault}\n{output_of(done)}" for fault in problems]
            shutil.rmtree(folder)
    print(f"{len(all_cases)} cases")
    assert not bad, f"{len(bad)} of {len(all_cases)} cases:\n" + "\n\n".join(bad)
