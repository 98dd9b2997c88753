"""The documents of a study's nights: one JSON file or object each.

| path below `nightly.folder`/<study> | what |
| --- | --- |
| `<night>.json` | the night: its trials, its verdict, what it was compared with, and when the next one was due |
| `<night>/sweep/` | its sweep, like any other |
| `<night>/gate.md` | the verdict and the table of changes |
| `nights.html` | the last thirty nights |
| `.lock` | locked while a night runs here |

With object storage in `cluster.storage_path`, `<night>.json` and `nights.html` are below
`<cluster.storage_path>/nights/<study>` instead, where every machine finds them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fsdp_lab.config import UserError, from_dict, is_address
from fsdp_lab.files import write_text
from fsdp_lab.nightly.gate import Finding
from fsdp_lab.storage import Storage

if TYPE_CHECKING:
    import pandas as pd

_USER_CODE = "user code "
_DOCUMENT = re.compile(r"\d{4}-\d\d-\d\dT\d\d-\d\d-\d\dZ(-\w+)?\.json")


class Verdict(StrEnum):
    """The verdict on a night."""

    running = "running"  # or interrupted, and to be resumed
    good = "good"
    regression = "regression"
    accepted = "accepted"  # made the baseline by hand
    failed = "failed"  # nothing finished
    left = "left"  # interrupted, and never resumed


@dataclass(frozen=True)
class Night:
    """A night of a study.

    Attributes:
        id: when it began; the name of its document and of its folder.
        begun: seconds since 1970.
        next_due: when the night after it was due, seconds since 1970.
        host: on which it runs; only there it can be resumed.
        verdict: see `Verdict`.
        study: the settings that all its trials share, which identify the study.
        origin: what it ran: `machine` (host, device and workers: what speeds depend on), `commit` and `code` (a digest)
            of fsdp_lab, `library <name>` (a version), and of packages that targets name `user code <name>` (a digest).
        trials: a row for each trial, with the columns of `gate.judged_columns`.
        baseline: the last good night, with which it was compared; None: there was none.
        changed: what changed since the baseline: see `changes`.
        findings: what the gate found.
        run_id: of its sweep's MLflow run; "": none.
        accepted: reason, by whom and when, of a night that was made the baseline by hand.
    """

    id: str
    begun: float
    next_due: float
    host: str = ""
    verdict: Verdict = Verdict.running
    study: dict[str, Any] = field(default_factory=dict)
    origin: dict[str, str] = field(default_factory=dict)
    trials: list[dict[str, Any]] = field(default_factory=list)
    baseline: str | None = None
    changed: list[list[str]] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    run_id: str = ""
    accepted: dict[str, str] | None = None

    @property
    def is_good(self) -> bool:
        """Whether it can be a baseline."""
        return self.verdict in (Verdict.good, Verdict.accepted)

    @property
    def over(self) -> bool:
        """Whether it has a verdict."""
        return self.verdict is not Verdict.running

    @property
    def regressions(self) -> list[Finding]:
        """What got worse."""
        return [finding for finding in self.findings if finding.is_regression]

    @property
    def frame(self) -> pd.DataFrame:
        """Its trials, a row each."""
        import pandas as pd

        return pd.DataFrame(self.trials)


def night_id(moment: float) -> str:
    """Return the name of a night that begins at a moment, in UTC."""
    return datetime.fromtimestamp(moment, UTC).strftime("%Y-%m-%dT%H-%M-%SZ")


class Nights:
    """The documents of a study's nights.

    Args:
        place: their folder, or their address in object storage.

    Every method raises StorageRefused and StorageAway.
    """

    def __init__(self, place: str) -> None:
        self.place = place

    def read(self) -> list[Night]:
        """Return all nights that began, the oldest first.

        Raises:
            UserError: a document cannot be read.
        """
        if is_address(self.place):
            storage = Storage(self.place)
            texts = storage.read_all([name for name in storage.files() if _DOCUMENT.fullmatch(name)])
        else:
            files = (path for path in Path(self.place).glob("*.json") if _DOCUMENT.fullmatch(path.name))
            texts = {path.name: path.read_bytes() for path in files}
        nights = [_night_of(text, f"{self.place}/{name}") for name, text in texts.items()]
        return sorted(nights, key=lambda night: night.begun)

    def write(self, night: Night) -> None:
        """Keep a night, durably."""
        self.put(f"{night.id}.json", json.dumps(asdict(night), indent=1))

    def put(self, name: str, text: str) -> None:
        """Keep a text beside the documents."""
        if is_address(self.place):
            Storage(self.place).write(name, text.encode())
        else:
            write_text(Path(self.place, name), text, durable=True)


def since_accepted(nights: Sequence[Night]) -> list[Night]:
    """Return the good nights from the last accepted one on: with them a night is compared."""
    good = [night for night in nights if night.is_good]
    accepted = [place for place, night in enumerate(good) if night.verdict is Verdict.accepted]
    return good[accepted[-1] :] if accepted else good


def changes(before: Night, night: Night) -> list[list[str]]:
    """Return `(what, before, now)` of what changed since an earlier night; if the commit did, not that the code did."""
    there, here = before.origin, night.origin
    keys = [key for key in sorted(there.keys() | here.keys()) if there.get(key) != here.get(key)]
    if "commit" in keys and "code" in keys:
        keys.remove("code")
    if not all(any(key.startswith(_USER_CODE) for key in origin) for origin in (there, here)):
        keys = [key for key in keys if not key.startswith(_USER_CODE)]  # one was interrupted before that was known
    return [[key, there.get(key, "none"), here.get(key, "none")] for key in keys]


def _night_of(text: bytes, path: str) -> Night:
    try:
        night = from_dict(Night, json.loads(text))
        if Path(path).name != f"{night.id}.json":  # the id becomes the name of a folder
            raise ValueError(f"it is the document of night {night.id!r}")
    except (ValueError, TypeError, AttributeError) as error:
        raise UserError(
            f"{path} cannot be read ({error}); repair it, or move it away to compare with an older night."
        ) from None
    return night
