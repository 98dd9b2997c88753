"""About how long a sweep will take: as long as the last one's trials, if they trained the same."""

from __future__ import annotations

from pathlib import Path
from statistics import median

from fsdp_lab.config import SweepConfig, UserError, workers_of
from fsdp_lab.record.sweep import RECORD, SweepRecord
from fsdp_lab.status import TrialStatus
from fsdp_lab.wording import duration


def how_long(config: SweepConfig, last: Path | None) -> str | None:
    """Return a note about the time of a trial; None if the last sweep trained something else, or cannot be read.

    Args:
        config: what all trials share.
        last: the folder of the last sweep; None: there was none.
    """
    try:
        trials = SweepRecord.read(last / RECORD).trials if last is not None else []
    except UserError:  # it was interrupted, or another version wrote it
        return None
    took = [
        trial.seconds
        for trial in trials
        if trial.status is TrialStatus.finished and trial.seconds and trial.config and _same(trial.config, config)
    ]
    return f"a trial of the last sweep, with this model and data, took about {duration(median(took))}" if took else None


def _same(one: SweepConfig, other: SweepConfig) -> bool:
    return workers_of(one) == workers_of(other) and all(
        getattr(one, group) == getattr(other, group) for group in ("model", "data", "task", "training", "engine")
    )
