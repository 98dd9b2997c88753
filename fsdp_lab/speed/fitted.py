"""Data sheets whose efficiencies were fitted to published steps: ours, unless somebody has changed them."""

from __future__ import annotations

import json
from dataclasses import asdict, fields, replace
from hashlib import sha256

from fsdp_lab.speed.device import Basis, Device

# By the device's name, of the figures in its file. After a new fit the test of this file names the new ones.
DIGESTS = {
    "NVIDIA A100-SXM4-40GB": "f6643c13e18c82c4",
    "NVIDIA A100-SXM4-80GB": "921de116d024c0f5",
    "NVIDIA H100 80GB HBM3": "7e2b30e3b323eeff",
}

# Steps unlike those of the fits -> how many published ones on A100s and H100s were compared, and within how many %
# all were predicted. A test counts them in experiments/published/results/rows.csv.
COMPARED = {
    "compile=true": (8, 15),
    "float8": (2, 8),
    "several nodes": (16, 16),
    "hybrid sharding over several nodes": (2, 5),
}


def digest(device: Device) -> str:
    """Return a digest of the figures of a file, 16 digits. Comments and `source` do not count."""
    counted = [f.name for f in fields(Device) if f.compare and getattr(device, f.name) != f.default]
    figures = {name: value for name, value in asdict(device).items() if name in counted}
    return sha256(json.dumps(figures, sort_keys=True).encode()).hexdigest()[:16]


def believed(device: Device) -> Device:
    """Return the device with the basis and errors that its figures justify.

    A device whose figures were changed after the fit counts as a plain data sheet, with the error of steps that were
    never validated.
    """
    if device.basis is not Basis.fitted or DIGESTS.get(device.name) == digest(device):
        return device
    return replace(device, basis=Basis.data_sheet, error=device.error_elsewhere, relative=None)
