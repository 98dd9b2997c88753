"""Losses that are computed in a narrow type: two that differ by no more than its rounding are the same."""

from __future__ import annotations

import math

from fsdp_lab.metrics import LOSS_EPS, TRAIN_LOSS, VAL_LOSS
from fsdp_lab.report.data import Setting, SweepData

LOSSES = (TRAIN_LOSS, VAL_LOSS)
_TYPES = {2.0**-7: "bfloat16", 2.0**-10: "float16"}


def rounding(one: Setting, other: Setting, metric: str) -> float:
    """Return the difference of two settings' losses that rounding explains; 0 for float32 and for other metrics."""
    return max(_spacing(one, metric), _spacing(other, metric))


def _spacing(setting: Setting, metric: str) -> float:
    """Return the distance of neighbouring values around a loss, at most: they are closest above a power of two."""
    share = abs(setting.median(metric)) * setting.median(LOSS_EPS) if metric in LOSSES else 0.0
    return share if math.isfinite(share) else 0.0


def rounding_note(sweep: SweepData) -> str:
    """Return in which types losses were rounded, and how far; "" without such."""
    spacings: dict[str, float] = {}
    for setting in sweep.settings:
        name = _TYPES.get(setting.median(LOSS_EPS), "a narrow type")
        if spacing := _spacing(setting, sweep.loss_key):
            spacings[name] = max(spacing, spacings.get(name, 0.0))
    return " ".join(
        f"Some losses are computed in {name}: differences up to {spacing:.2g} are rounding, and decide nothing. "
        "Compute the loss of outputs.float() to avoid that."
        for name, spacing in sorted(spacings.items())
    )
