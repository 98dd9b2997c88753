"""One small sweep that has trained, made once a test run and copied for each test that reads or changes its folder."""

from __future__ import annotations

import fcntl
import json
import shutil
import sqlite3
from collections.abc import Mapping
from contextlib import closing
from functools import cache
from pathlib import Path

from tests import forked
from tests.conftest import INLINE, run_cli, without

AXES = ("precision=fp32,bf16", "optimizer.lr=0.001,1e-09")  # with a rate of 1e-9 a trial learns nothing
COUNT = 4
SWEEP = ("-m", *without(INLINE, "precision="), *AXES, "report.loss_tolerance=0.03")


@cache
def _trained() -> tuple[Path, str]:
    """The folder in which the sweep ran, and what it printed; the first process that needs it runs it."""
    folder = forked.shared_folder() / "trained"
    output = folder.with_suffix(".txt")
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not output.exists():
            folder.mkdir()
            done = run_cli(folder, *SWEEP)
            assert done.returncode == 0, done.stdout + done.stderr
            output.write_text(done.stdout)
    return folder, output.read_text()


def printed() -> str:
    """What the sweep printed."""
    return _trained()[1]


def copy_trained(folder: Path) -> Path:
    """Put the sweep's `out`, its store and `outputs/last_sweep` into a folder as if it had run there; return it."""
    source, _ = _trained()
    shutil.copytree(source, folder, dirs_exist_ok=True)
    _rename_in_texts(folder, str(source), str(folder))
    _rename_in_store(folder / "mlflow.db", str(source), str(folder))
    return folder


def copy_sweep(folder: Path, speeds: Mapping[str, float]) -> None:
    """Copy the sweep's own folder to `folder`, with planted speeds: precision -> samples/s of all its trials."""
    source, _ = _trained()
    shutil.copytree(source / "out", folder)
    for number in range(COUNT):
        plant(folder / str(number), **{"perf/samples_per_s": speeds[("fp32", "bf16")[number // 2]]})


def plant(trial: Path, **metrics: float) -> None:
    """Write metrics into every epoch of a trial, as if they had been measured."""
    file = trial / "metrics.jsonl"
    epochs = [json.loads(line) for line in file.read_text().splitlines()]
    file.write_text("".join(f"{json.dumps({**epoch, **metrics})}\n" for epoch in epochs))


def _rename_in_texts(folder: Path, old: str, new: str) -> None:
    for path in folder.rglob("*"):
        if path.suffix in ("", ".json", ".jsonl", ".yaml", ".csv", ".md") and path.is_file():
            text = path.read_bytes()
            if old.encode() in text and b"\0" not in text:
                path.write_bytes(text.replace(old.encode(), new.encode()))


def _rename_in_store(store: Path, old: str, new: str) -> None:
    places = (("experiments", "artifact_location"), ("runs", "artifact_uri"), ("tags", "value"), ("params", "value"))
    with closing(sqlite3.connect(store)) as database, database:
        for table, column in places:
            database.execute(f"UPDATE {table} SET {column} = replace({column}, ?, ?)", (old, new))
