"""What a trial leaves in its folder, and how it is read: the interface between its processes and the driver.

| file | who writes it | what |
| --- | --- | --- |
| `facts.json` | rank 0 | device, data digest, notes; there when training starts |
| `metrics.jsonl` | rank 0 | a line of metrics an epoch |
| `failures/rank<r>.json` | a rank that fails | message, traceback; taken away when a restart gets further |
| `outcome.json` | the trial's own process | how it ended |
| `logs/rank<r>.log` | every rank | what it printed |
| `memory_*_rank<r>.*` | every rank | the profile of a step: peaks, with `timeline` also a page and a snapshot |
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Outcome:
    """`status`: finished, failed, oom or interrupted; `error` is one line for people."""

    status: str
    error: str | None = None


def write_json(path: Path, content: Any) -> None:
    """Write under a temporary name, then rename: a reader never sees half a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    making = path.with_name(f".{path.name}.{os.getpid()}.making")
    making.write_text(json.dumps(content, indent=1))
    making.rename(path)


def read_json(path: Path) -> Any:
    """The content, or None where there is no such file."""
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        return None


def read_metrics(folder: Path) -> Iterator[dict[str, float]]:
    """Each whole line of `metrics.jsonl`; an epoch that was told twice comes once, as it was last."""
    path = folder / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    epochs: dict[int, dict[str, float]] = {}
    for line in lines:
        try:
            metrics = json.loads(line)
        except json.JSONDecodeError:
            continue  # cut short by a kill in the middle of writing
        epochs[int(metrics["epoch"])] = metrics
    yield from (epochs[epoch] for epoch in sorted(epochs))


def read_failures(folder: Path) -> list[dict[str, Any]]:
    """Failures by rank, the cause first: a rank whose peers went away says so, and is not the cause."""
    found = [read_json(path) for path in sorted((folder / "failures").glob("rank*.json"))]
    return sorted((f for f in found if f), key=lambda f: (f["kind"] == "peer", f["time"]))


def read_outcome(folder: Path) -> Outcome | None:
    content = read_json(folder / "outcome.json")
    return Outcome(**content) if content else None


# What another command may have left in a folder that is used again. Checkpoints stay: a trial looks at them
# itself, and goes on or refuses.
_LEFT_OVER = ("outcome.json", "facts.json", "metrics.jsonl", "error.txt", "model.pt")


def clear_left_over(folder: Path) -> None:
    """Take away what a trial before left in its folder, so that nobody takes it for this one's."""
    for path in (*(folder / name for name in _LEFT_OVER), *folder.glob("memory_*_rank*.*")):
        path.unlink(missing_ok=True)
    shutil.rmtree(folder / "failures", ignore_errors=True)


def no_space(folder: Path, reason: str = "No space left on device") -> str:
    """A disk that takes no more, and what to do."""
    return (
        f"{folder}: {reason}; free the disk, or set hydra.run.dir (hydra.sweep.dir with -m) to a folder on another one"
    )


def why_unwritten(folder: Path) -> str:
    """Why a trial left no outcome: the disk has no room, or its process was killed."""
    probe = folder / f".probe.{os.getpid()}"
    try:
        probe.write_bytes(b"\0" * 4096)
        probe.unlink()
    except OSError as error:
        with suppress(OSError):
            probe.unlink()
        return no_space(folder, error.strerror or "it cannot be written")
    return "its process ended without a word: see the trial's logs"
