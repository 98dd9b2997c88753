"""What nights leave on disk, and how the next start understands it.

| path below `nightly.folder`/<study> | what |
| --- | --- |
| `.lock`, `.schedule` | locked while a night runs here, and while a process waits for the nights |
| `since.json` | from when on the schedule counts: nights before its first start were not missed |
| `<night>/night.json` | what became of the night, with the results that it is compared by |
| `<night>/sweep/` | its sweep, as any other |
| `<night>/gate.md` | the table of what moved |
| `nights.html` | the last thirty |
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
    """A night.

    Attributes:
        id: when it began, and the name of its folder.
        due, begun, ended: seconds since 1970.
        verdict: running (or interrupted, and to be resumed), good, regression, accepted, failed (nothing finished),
            left (interrupted, and never resumed).
        study: the settings that all its trials share, by which another study is told.
        results: by setting, what it is compared by.
        machine: host, device and workers.
        accepted: reason, by whom and when, of a night that was made the baseline by hand.
        attempts: how often its sweep came to an end by itself.
        pruned: its checkpoints were taken away; where nights are in storage, those there.
        sweeps: the addresses of its sweeps in object storage.
        others, busy: the share of all cores that others had, and whether that was too much to judge speed.
        speed_baseline: the night whose speeds it was compared with; None where speed was not judged.
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
    pruned: bool = False
    sweeps: list[str] = field(default_factory=list)

    @property
    def is_good(self) -> bool:
        return self.verdict in (GOOD, ACCEPTED)

    @property
    def is_compared(self) -> bool:
        """Whether it was held against its baseline."""
        return self.baseline is not None and self.verdict not in (FAILED, LEFT)

    @property
    def over(self) -> bool:
        return self.verdict != RUNNING


def night_id(moment: float) -> str:
    return datetime.fromtimestamp(moment, UTC).strftime("%Y-%m-%dT%H-%M-%SZ")


def write_night(folder: Path, night: Night) -> None:
    (folder / night.id).mkdir(parents=True, exist_ok=True)
    write_json(folder / night.id / "night.json", asdict(night), durable=True)


def read_nights(folder: Path) -> list[Night]:
    """All that began, the oldest first. A folder that was killed before its first word is none.

    Raises:
        UserError: a night that cannot be read.
    """
    found = [night_of(path.read_text(errors="replace"), str(path)) for path in sorted(folder.glob("*/night.json"))]
    return sorted(found, key=lambda night: night.begun)


def night_of(text: str, source: str) -> Night:
    """Return the night that a `night.json` tells of; keys of a newer version are left out.

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
            f"{source} cannot be read ({error}); put it right, or move it away: without it nights would be compared "
            "with an older one."
        ) from None


def read_since(folder: Path, now: float) -> float:
    """From when on nights count; the first call is that moment."""
    path = folder / "since.json"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        write_json(path, {"since": now}, durable=True)
    return float(json.loads(path.read_text())["since"])


def last_good(nights: Sequence[Night]) -> Night | None:
    return next((night for night in reversed(nights) if night.is_good), None)
