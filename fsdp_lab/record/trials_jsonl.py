"""The trials of a sweep, one line per trial in `trials.jsonl`."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fsdp_lab.config import UserError
from fsdp_lab.config.compose import Trial
from fsdp_lab.record.paths import storage, trial_address
from fsdp_lab.storage.files import append_line, read_lines, write_text

_REMEDY = (
    "restore it from a copy, or write that line again, with the overrides in .hydra/overrides.yaml of its trial; "
    "without the file the sweep cannot be resumed"
)


def add_trial(folder: Path, trial: Trial) -> None:
    """Append a trial to `trials.jsonl`, before it starts."""
    append_line(folder / "trials.jsonl", _line_of(folder, trial))


def write_trials(folder: Path, trials: Sequence[Trial]) -> None:
    """Write `trials.jsonl` again, before a resume trains some trials with other values than the first start."""
    lines = "".join(f"{_line_of(folder, trial)}\n" for trial in trials)
    write_text(folder / "trials.jsonl", lines, durable=True, parents=False)


def _line_of(folder: Path, trial: Trial) -> str:
    content: dict[str, Any] = {"overrides": trial.overrides, "folder": os.path.relpath(trial.folder, folder)}
    if trial.config.cluster.storage_path is not None:
        content["storage"] = trial_address(trial, folder) or str(storage(trial, folder))
    content |= {key: words for key in ("resumed", "changed") if (words := getattr(trial, key))}
    return json.dumps(content)


def read_trials(folder: Path, num_trials: int | None = None, key: str = "resume") -> list[dict[str, Any]]:
    """Return the line of each trial, in order, with its `folder` as a path.

    Args:
        num_trials: how many there are; None: not known.
        key: the key that names the folder on the command line.

    Raises:
        UserError: the file cannot be read, or lacks a trial, whose results would be lost.
    """
    trials = [{**line, "folder": folder / line["folder"]} for line in lines_of(folder)]
    known = {line["folder"] for line in trials}
    unknown = num_trials is None and [path for path in folder.glob("*/trial.json") if path.parent not in known]
    if unknown or len(trials) < (num_trials or 0):
        raise UserError(
            f"{key}={folder}: {folder / 'trials.jsonl'} lacks {unknown[0].parent if unknown else 'a trial'}; restore "
            "the file from a copy, or start a new sweep."
        )
    return trials


def changes_of_resumes(line: Mapping[str, Any]) -> dict[str, Any]:
    """Return `Trial.resumed` and `Trial.changed`."""
    return {key: line.get(key, []) for key in ("resumed", "changed")}


def lines_of(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield the lines of a folder's `trials.jsonl`.

    A last line that a kill truncated is ignored: its trial had not started.

    Raises:
        UserError: a line cannot be read.
    """
    words = dict.fromkeys(("resumed", "changed"), list[str] | None)
    types = {"overrides": list[str], "folder": str, "storage": str | None, **words}
    return read_lines(folder / "trials.jsonl", _REMEDY, **types)
