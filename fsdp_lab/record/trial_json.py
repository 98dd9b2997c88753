"""`trial.json`: all that is known of a trial, except for its metrics and its ranks' files.

The driver and the trial's own processes, which are on the driver's node, change it one at a time.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from fsdp_lab.config import UserError, from_dict
from fsdp_lab.config.serialize import typed
from fsdp_lab.config.status import TrialStatus
from fsdp_lab.record.reasons import Code, Reason
from fsdp_lab.storage.files import RESTORE, sync, write_json
from fsdp_lab.storage.locks import exclusive

_LIMIT_S = 60.0  # to wait while another process writes it, which takes milliseconds


@dataclass(eq=False)
class RankFailure(Exception):
    """An error of a rank, as plain values: it crosses process boundaries, where the error's own class may be unknown.

    Attributes:
        reason: with the `rank`.
        traceback: of the error; "": there is none, or the reason is enough.
        time: when it failed, in seconds since 1970 by its node's clock; by default now.
    """

    reason: Reason
    traceback: str = ""
    time: float = field(default_factory=time.time)

    def __post_init__(self) -> None:
        super().__init__(self.reason, self.traceback, self.time)  # pickle creates it again from these

    def __str__(self) -> str:
        return str(self.reason)

    @property
    def rank(self) -> int:
        rank: int = self.reason.values["rank"]
        return rank


@dataclass(frozen=True)
class Outcome:
    """How a trial ended.

    Attributes:
        reason: why it did not finish; None: it finished, or the scheduler stopped it.
        seconds: from its start to its end; None: not known.
        ended: when it ended, in seconds since 1970; None: not known.
    """

    status: TrialStatus
    reason: Reason | None = None
    seconds: float | None = None
    ended: float | None = None


@dataclass
class TrialJson:
    """The content of `trial.json`.

    Attributes:
        forecast: its figures, by the keys of metrics; empty without one.
        forecast_words: its values that are text (`FORECAST_WORDS`).
        nodes: the node of each rank: `node` is Ray's name of it, `address` its address; empty: not known.
        process: Ray's ID of the trial's own process; None: it has not started.
        facts: reported by rank 0 before its first step; None: this start has not reported any.
        facts_before: the facts of the previous start.
        failures: of ranks, in this attempt.
        earlier_failures: the failures of each earlier attempt.
        outcome: how it ended; None: it has not ended.
    """

    forecast: dict[str, float] = field(default_factory=dict)
    forecast_words: dict[str, str] = field(default_factory=dict)
    nodes: list[dict[str, str]] = field(default_factory=list)
    process: str | None = None
    facts: dict[str, Any] | None = None
    facts_before: dict[str, Any] | None = None
    failures: list[RankFailure] = field(default_factory=list)
    earlier_failures: list[list[RankFailure]] = field(default_factory=list)
    outcome: Outcome | None = None

    @property
    def any_facts(self) -> dict[str, Any]:
        """The facts of the last start that reported some; empty if none did."""
        return self.facts or self.facts_before or {}

    @property
    def cause(self) -> RankFailure | None:
        """The earliest failure. A rank that lost its peers is not the cause."""
        return min(
            self.failures,
            key=lambda each: (each.reason.code is Code.peer_lost, each.time, each.rank),
            default=None,
        )


def read_trial(folder: Path) -> TrialJson:
    """Return the content of a trial's `trial.json`; all fields are empty without the file.

    Raises:
        UserError: the file cannot be read.
    """
    path = folder / "trial.json"
    try:
        trial = from_dict(TrialJson, json.loads(path.read_text(encoding="utf-8")))
        typed(list[str] | None, trial.any_facts.get("notes"), "facts.notes")
    except FileNotFoundError:
        return TrialJson()
    except (ValueError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise UserError(
            f"{path} cannot be read ({error}); {RESTORE}: a resume then ends the trial from its last checkpoint."
        ) from None
    return trial


@contextmanager
def changing(folder: Path, durable: bool = False) -> Iterator[TrialJson]:
    """Yield the content of a trial's `trial.json`, and write it if the block has changed it.

    Args:
        durable: see `files.whole`.

    Raises:
        OSError: the folder was removed, or cannot be written.
        UserError: the file cannot be read.
    """
    with exclusive(folder / ".trial.lock", _LIMIT_S, parents=False):
        trial = read_trial(folder)
        before = asdict(trial)
        yield trial
        if (content := asdict(trial)) != before:
            # a durable outcome must not be replaced by a file that is not durable
            write_json(folder / "trial.json", content, durable or trial.outcome is not None, parents=False)


def set_aside_failures(folder: Path) -> None:
    """Keep the failures of an attempt apart from those of the next one."""
    with changing(folder) as trial:
        if trial.failures:
            trial.earlier_failures.append(trial.failures)
            trial.failures = []


def write_outcome(folder: Path, outcome: Outcome) -> None:
    """Write how a trial ended. The first outcome stays: the trial's process and the driver may both write one."""
    with changing(folder, durable=True) as trial:
        if trial.outcome is None:
            if (folder / "metrics.jsonl").exists():  # before the outcome, which promises its epochs
                sync(folder / "metrics.jsonl")
            trial.outcome = outcome
