"""The documents of a study's nights: one JSON file each.

| path below `nightly.folder`/<study> | what |
| --- | --- |
| `<night>.json` | the night: its trials, its verdict, and what it was compared with |
| `<night>/sweep/` | its sweep, like any other |
| `<night>/gate.md` | the verdict and the table of changes |
| `nights.html` | the last thirty nights |
| `.lock` | locked while a night runs here |
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fsdp_lab.config import UserError, from_dict
from fsdp_lab.nightly.gate import Finding
from fsdp_lab.storage.files import write_text

if TYPE_CHECKING:
    import pandas as pd

_USER_CODE, _TOOL = "user code ", "library fsdp_lab"
_DOCUMENT = re.compile(r"\d{4}-\d\d-\d\dT\d\d-\d\d-\d\dZ\.json")


class Verdict(StrEnum):
    incomplete = "incomplete"  # it runs, or was interrupted
    good = "good"
    regression = "regression"
    accepted = "accepted"  # made the baseline by hand
    failed = "failed"  # nothing finished


@dataclass(frozen=True)
class Night:
    """A night of a study.

    Attributes:
        id: when it began; the name of its document and of its folder.
        begun: seconds since 1970, by the clock of then.
        study: the settings that all its trials share, which identify the study.
        origin: what it ran: `machine` (device and workers: what speeds depend on), `commit` of the user's
            working folder, `code` of fsdp_lab (a digest), `library <name>` (a version), and of packages that targets
            name `user code <name>` (a digest).
        trials: a row for each trial, with the columns of `gate.judged_columns`.
        baseline: the last good night, with which it was compared; None: there was none.
        changed: what changed since the baseline: see `changes`.
        run_id: of its sweep's MLflow run; "": none.
        accepted: reason, by whom and when, of a night that was made the baseline by hand.
        note: why the webhook did not get the verdict; "": it did, or there is none.
        number: its place in the order in which nights ran, from 1; 0: not recorded.
    """

    id: str
    begun: float
    verdict: Verdict = Verdict.incomplete
    study: dict[str, Any] = field(default_factory=dict)
    origin: dict[str, str] = field(default_factory=dict)
    trials: list[dict[str, Any]] = field(default_factory=list)
    baseline: str | None = None
    changed: list[list[str]] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    run_id: str = ""
    accepted: dict[str, str] | None = None
    note: str = ""
    number: int = 0

    @property
    def is_good(self) -> bool:
        return self.verdict in (Verdict.good, Verdict.accepted)

    @property
    def regressions(self) -> list[Finding]:
        return [finding for finding in self.findings if finding.is_regression]

    @property
    def frame(self) -> pd.DataFrame:
        import pandas as pd

        return pd.DataFrame(self.trials)


def night_id(moment: float) -> str:
    """Return the name of a night that begins at a moment, in UTC."""
    return datetime.fromtimestamp(moment, UTC).strftime("%Y-%m-%dT%H-%M-%SZ")


def read_nights(folder: Path) -> list[Night]:
    """Return all nights of a study that began, the oldest first.

    Their numbers order them, whatever clocks said. Of nights without a number one that is dated in the future ran at an
    unknown time, and comes first.

    Raises:
        UserError: a document cannot be read.
    """
    now, paths = time.time(), [path for path in folder.glob("*.json") if _DOCUMENT.fullmatch(path.name)]
    return sorted(map(_night_in, paths), key=lambda night: (night.number, night.begun <= now, night.begun))


def dated_ahead(nights: Sequence[Night]) -> list[str]:
    """Return the ids of nights that are dated in the future."""
    return [night.id for night in nights if night.begun > time.time()]


def write_night(folder: Path, night: Night) -> None:
    """Write the document of a night into its study's folder, durably."""
    write_text(folder / f"{night.id}.json", json.dumps(asdict(night), indent=1), durable=True)


def since_accepted(nights: Sequence[Night]) -> list[Night]:
    """Return the good nights from the last accepted one on: with them a night is compared."""
    good = [night for night in nights if night.is_good]
    accepted = [place for place, night in enumerate(good) if night.verdict is Verdict.accepted]
    return good[accepted[-1] :] if accepted else good


def changes(before: Night, night: Night) -> list[list[str]]:
    """Return `(what, before, now)` of what changed since an earlier night; if fsdp_lab's commit did, not its code."""
    there, here = before.origin, night.origin
    keys = [key for key in sorted(there.keys() | here.keys()) if there.get(key) != here.get(key)]
    if _TOOL in keys and "code" in keys:
        keys.remove("code")
    if not all(any(key.startswith(_USER_CODE) for key in origin) for origin in (there, here)):
        keys = [key for key in keys if not key.startswith(_USER_CODE)]  # one was interrupted before that was known
    return [[key, there.get(key, "none"), here.get(key, "none")] for key in keys]


def _night_in(path: Path) -> Night:
    try:
        night = from_dict(Night, json.loads(path.read_bytes()))
        if path.stem != night.id:  # which becomes the name of a folder
            raise ValueError(f"it is the document of night {night.id!r}")
    except (ValueError, TypeError, AttributeError) as error:
        raise UserError(
            f"{path} cannot be read ({error}); fix it, or move it away to compare with an older night."
        ) from None
    return night
