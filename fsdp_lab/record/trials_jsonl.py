"""The trials of a sweep, a line each in `trials.jsonl`."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

from fsdp_lab.compose import Trial
from fsdp_lab.config import UserError
from fsdp_lab.record.paths import storage, trial_address
from fsdp_lab.record.trial_files import append_line

_MOST_NAMED = 10  # of trials that are missing: a number may be damaged, too


def add_trial(folder: Path, trial: Trial) -> None:
    """Append a trial to `trials.jsonl`, before it starts."""
    content = {
        "number": trial.index or 0,
        "overrides": trial.overrides,
        "folder": os.path.relpath(trial.folder, folder),
    }
    if trial.config.cluster.storage_path is not None:
        content["storage"] = trial_address(trial, folder) or str(storage(trial, folder))
    append_line(folder / "trials.jsonl", json.dumps(content))


def read_trials(folder: Path, num_trials: int | None = None, key: str = "resume") -> list[tuple[list[str], Path]]:
    """Return the overrides and the folder of each trial, in order.

    A last line that a kill cut short is no trial: it is written before its trial starts.

    Args:
        folder: the sweep's.
        num_trials: how many there are; None: not known.
        key: the key that names the folder on the command line.

    Raises:
        UserError: a trial is missing. Without it, results would be assigned to the wrong trials.
    """
    lines = {line.get("number", position): line for position, line in enumerate(lines_of(folder))}
    count = max(num_trials or 0, 1 + max(lines, default=-1))
    known = {folder / line["folder"] for line in lines.values()}
    if num_trials is None and (unknown := sorted({path.parent for path in folder.glob("*/outcome.json")} - known)):
        raise UserError(
            f"{key}={folder}: {folder / 'trials.jsonl'} lacks the trial in {unknown[0]}: a line is damaged or missing. "
            "Restore the file from a copy, or move that trial's folder away if it belongs to an earlier sweep."
        )
    if missing := list(islice((number for number in range(count) if number not in lines), _MOST_NAMED)):
        more = " …" if len(missing) == _MOST_NAMED else ""
        raise UserError(
            f"{key}={folder}: {folder / 'trials.jsonl'} lacks trial {', '.join(map(str, missing))}{more} of {count}: a "
            "line is damaged or missing. Restore the file from a copy, or start a new sweep. To report from MLflow: "
            "python -m fsdp_lab.report sweep=<id of the sweep's run>."
        )
    return [(lines[number]["overrides"], folder / lines[number]["folder"]) for number in range(count)]


def lines_of(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield the valid lines of a folder's `trials.jsonl`."""
    path = folder / "trials.jsonl"
    for line in path.read_text(errors="replace").splitlines() if path.exists() else ():
        with suppress(json.JSONDecodeError):
            if _is_trial(content := json.loads(line)):
                yield content


def _is_trial(content: Any) -> bool:
    if not isinstance(content, dict) or not is_words(content.get("overrides")):
        return False
    kinds = {"folder": str, "number": int, "storage": str}
    return "folder" in content and all(isinstance(content.get(key, kind()), kind) for key, kind in kinds.items())


def is_words(value: Any) -> bool:
    """Return whether a value is a list of strings."""
    return isinstance(value, list) and all(isinstance(word, str) for word in value)
