"""Rules by which sweeps and forecasts choose: what is simple, and what nothing beats. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from fsdp_lab.config.axes import AXES

# A tie goes to the setting with more of these values; the first counts most. So offloading that saves nothing loses.
PLAIN = {axis.keys[0]: axis.plain for axis in AXES if axis.plain}


def departures(values: Mapping[str, str]) -> list[bool]:
    """Return for each of `PLAIN` whether the values depart from it."""
    return [values.get(key, value) != value for key, value in PLAIN.items()]


def pareto_front(
    rows: Sequence[Mapping[str, float]],
    objectives: Sequence[tuple[str, str]],
    equal_within: Sequence[Mapping[str, float]] | None = None,
) -> list[int]:
    """Return the indices of rows that no other row beats in one objective without being worse in another.

    Rows that lack a value for an objective are ignored.

    Args:
        rows: metric -> value.
        objectives: `(metric, "min" or "max")` of each.
        equal_within: for each row, metric -> the difference to ignore; None: every difference counts.
    """
    import numpy as np

    signs = [1 if direction == "min" else -1 for _, direction in objectives]
    figures = [[row.get(metric, math.nan) for metric, _ in objectives] for row in rows]
    values = np.reshape(figures, (len(rows), len(signs))) * signs
    slack = np.array([[of.get(metric, 0.0) for metric, _ in objectives] for of in equal_within or [{}] * len(rows)])
    known, front = np.flatnonzero(np.isfinite(values).all(axis=1)), []
    for place in known.tolist():
        gains, equal = values[place] - values[known], np.maximum(slack[place], slack[known])
        if not ((gains >= -equal).all(axis=1) & (gains > equal).any(axis=1)).any():
            front.append(place)
    return front
