"""The finished trials of each device on disk; they correct later forecasts. Imports no torch."""

from __future__ import annotations

import math
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fsdp_lab.forecast.speed.predict import Parts
from fsdp_lab.forecast.speed.refine import Observation
from fsdp_lab.storage.files import read_object, write_json
from fsdp_lab.storage.locks import exclusive

_FOLDER = Path("outputs/devices/trials")
_MOST = 500  # newest trials that are kept per device
_WAIT_S = 10.0  # to wait for another sweep that writes


def observations_file(device: str) -> Path:
    slug = re.sub(r"[^a-z0-9]+", "_", device.lower()).strip("_")
    return _FOLDER / f"{slug}.json"


def record_observation(device: str, name: str, one: Observation) -> None:
    """Add a finished trial to those of a device.

    Args:
        name: an identifier of the trial; an earlier entry of the same name is replaced.

    Raises:
        OSError: the folder cannot be written.
        InUse: another sweep held the lock for ten seconds.
    """
    file = observations_file(device)
    with exclusive(file.with_suffix(".lock"), _WAIT_S):
        known = {other: row for other, row in _content(file).items() if other != name}
        write_json(file, dict(list({**known, name: asdict(one)}.items())[-_MOST:]))


def read_observations(device: str, torch: str, digest: str) -> list[Observation]:
    """Return the finished trials of a device with this version of PyTorch whose predictions used these figures."""
    observations = []
    for row in _content(observations_file(device)).values():
        try:
            one = Observation(**{**row, "parts": Parts(**row["parts"]), "measured_s": float(row["measured_s"])})
            hash(one)
            numbers = [
                one.measured_s,
                one.at,
                float(one.noise),
                one.parts.step_s(),
                *map(float, vars(one.parts).values()),
            ]
            valid = all(map(math.isfinite, numbers)) and min(one.measured_s, one.parts.step_s()) > 0
        except (KeyError, TypeError, ValueError, OverflowError):
            continue  # of another version of fsdp_lab
        if valid and (one.torch, one.device) == (torch, digest):
            observations.append(one)
    return observations


def _content(file: Path) -> dict[str, Any]:
    return read_object(file, "remove it: the next trial writes a new one") or {}
