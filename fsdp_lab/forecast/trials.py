"""The finished trials of each device, on disk, by which later forecasts are corrected. Imports no torch."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from fsdp_lab.config.conf import CALIBRATIONS, slug
from fsdp_lab.files import read_json, write_json
from fsdp_lab.locks import exclusive
from fsdp_lab.speed.predict import Parts
from fsdp_lab.speed.refine import Trial

_MOST = 500  # trials that are kept of a device, the newest
_WAIT_S = 10.0  # for another sweep that writes


def trials_file(device: str) -> Path:
    """Where the trials of a device are kept."""
    return CALIBRATIONS / "trials" / f"{slug(device)}.json"


def record_trials(device: str, trials: dict[str, Trial]) -> None:
    """Add trials to those of a device.

    Args:
        trials: by a name that tells them apart from all others: one that is there already is replaced.

    Raises:
        OSError: the folder cannot be written.
        InUse: another sweep has written for ten seconds.
    """
    file = trials_file(device)
    with exclusive(file.with_suffix(".lock"), _WAIT_S):
        known = {name: one for name, one in _content(file).items() if name not in trials}
        known |= {name: asdict(trial) for name, trial in trials.items()}
        write_json(file, dict(list(known.items())[-_MOST:]))


def read_trials(device: str, torch: str) -> list[Trial]:
    """Return the trials of a device with this version of PyTorch."""
    found = []
    for one in _content(trials_file(device)).values():
        try:
            trial = Trial(Parts(**one["parts"]), float(one["measured_s"]), str(one["torch"]))
        except (KeyError, TypeError, ValueError):
            continue  # of another version of fsdp_lab
        if trial.torch == torch and trial.measured_s > 0:
            found.append(trial)
    return found


def _content(file: Path) -> dict[str, Any]:
    content = read_json(file)
    return content if isinstance(content, dict) else {}
