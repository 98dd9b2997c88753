"""The files of nights on disk, and how the next start reads them.

| path below `nightly.folder`/<study> | what |
| --- | --- |
| `.lock`, `.schedule` | locked while a night runs here, and while a process waits for the nights |
| `since.json` | when the schedule began: no earlier night was missed |
| `<night>/night.json` | the verdict on the night, with the results that it is compared by |
| `<night>/sweep/` | its sweep, like any other |
| `<night>/gate.md` | the table of changes |
| `nights.html` | the last thirty nights |
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fsdp_lab.config import UserError
from fsdp_lab.files import write_json
from fsdp_lab.nightly.gate import Result
from fsdp_lab.status import TrialStatus

RUNNING, GOOD, REGRESSION, ACCEPTED, FAILED, LEFT = "running", "good", "regression", "accepted", "failed", "left"


@dataclass(frozen=True)
class Night:
    """A night of a study.

    Attributes:
        id: when it began, and the name of its folder.
        due: seconds since 1970.
        begun: seconds since 1970.
        ended: seconds since 1970; None: it has not.
        verdict: running (or interrupted, and to be resumed), good, regression, accepted, failed (nothing finished),
            left (interrupted, and never resumed).
        study: the settings that all its trials share, which identify the study.
        results: by setting, for comparisons.
        machine: host, device and workers.
        commit: of the code; "": not known.
        libraries: name -> version.
        baseline: the night it was compared with; None: none.
        findings: the changes since the baseline, as plain values of `gate.Finding`.
        run_id: of its sweep's MLflow run; "": none.
        accepted: reason, by whom and when, of a night that was made the baseline by hand.
        attempts: how often its sweep ended by itself.
        code: what changed in code, libraries and machine since the baseline; "": not compared.
        pruned: its checkpoints were removed; if nights are in storage, those there.
        sweeps: the addresses of its sweeps in object storage.
        others: the share of all cores that other processes used.
        busy: whether that was too much to judge speed.
        speed_baseline: the night whose speeds it was compared with, or several; None: speed was not judged.
    """

    id: str
    due: float
    begun: float
    ended: float | None = None
    verdict: str = RUNNING
    study: dict[str, Any] = field(default_factory=dict)
    results: dict[str, Result] = field(default_factory=dict)
    machine: str = ""
    commit: str = ""
    libraries: dict[str, str] = field(default_factory=dict)
    baseline: str | None = None
    findings: list[dict[str, Any]] = field(default_factory=list)
    run_id: str = ""
    accepted: dict[str, str] | None = None
    attempts: int = 0
    others: float = 0.0
    busy: bool = False
    speed_baseline: str | None = None
    code: str = ""
    pruned: bool = False
    sweeps: list[str] = field(default_factory=list)

    @property
    def is_good(self) -> bool:
        """Whether it can be a baseline."""
        return self.verdict in (GOOD, ACCEPTED)

    @property
    def is_compared(self) -> bool:
        """Whether it was held against its baseline."""
        return self.baseline is not None and self.verdict not in (FAILED, LEFT)

    @property
    def over(self) -> bool:
        """Whether it has a verdict."""
        return self.verdict != RUNNING


def night_id(moment: float) -> str:
    """Return the name of a night that begins at a moment, in UTC."""
    return datetime.fromtimestamp(moment, UTC).strftime("%Y-%m-%dT%H-%M-%SZ")


def write_night(folder: Path, night: Night) -> None:
    """Write a night's `night.json`, durably."""
    (folder / night.id).mkdir(parents=True, exist_ok=True)
    write_json(folder / night.id / "night.json", asdict(night), durable=True)


def read_nights(folder: Path) -> list[Night]:
    """Return all nights that began, the oldest first. A folder without a `night.json` is none.

    Raises:
        UserError: a night cannot be read.
    """
    nights = [night_of(path.read_text(errors="replace"), str(path)) for path in sorted(folder.glob("*/night.json"))]
    return sorted(nights, key=lambda night: night.begun)


def night_of(text: str, source: str) -> Night:
    """Return the night in the text of a `night.json`; keys of a newer version are ignored.

    Raises:
        UserError: it cannot be read.
    """
    known = {f.name for f in fields(Night)}
    try:
        content = {key: value for key, value in json.loads(text).items() if key in known}
        content["results"] = {
            setting: Result([TrialStatus(status) for status in result["statuses"]], result["values"])
            for setting, result in content["results"].items()
        }
        return Night(**content)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise UserError(
            f"{source} cannot be read ({error}); repair it, or move it away to compare with an older night."
        ) from None


def read_since(folder: Path, now: float) -> float:
    """Return when the schedule began; the first call defines that moment."""
    path = folder / "since.json"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        write_json(path, {"since": now}, durable=True)
    return float(json.loads(path.read_text())["since"])


def last_good(nights: Sequence[Night]) -> Night | None:
    """Return the last night that can be a baseline; None without one."""
    return next((night for night in reversed(nights) if night.is_good), None)


def changes(before: Night, night: Night) -> list[str]:
    """Return the changes of code and libraries since an earlier night, in words."""
    commits = before.commit, night.commit
    differences = [f"commit {_short(commits[0])} → {_short(commits[1])}"] if commits[0] != commits[1] else []
    names = sorted(before.libraries.keys() | night.libraries.keys())
    pairs = [(name, before.libraries.get(name, "none"), night.libraries.get(name, "none")) for name in names]
    differences += [f"{name} {there} → {here}" for name, there, here in pairs if there != here]
    if before.machine != night.machine:
        differences.append(f"machine {before.machine or 'unknown'} → {night.machine}")
    return differences


def _short(commit: str) -> str:
    """Return a commit as short as `git log` takes it, with the mark of uncommitted changes."""
    name, mark, _ = commit.partition("+")
    return f"{name[:10]}{' with uncommitted changes' if mark else ''}" if name else "unknown"
