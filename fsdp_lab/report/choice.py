"""Rules by which sweeps and forecasts choose: what is simple, what is equally small, what nothing beats. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

# Of two settings that are as good, the one that has most of these is taken, the first weighing most: nobody should
# offload to save nothing.
PLAIN = {
    "sharding": "ddp",
    "precision": "fp32",
    "offload": "none",
    "reshard_after_forward": "always",
    "activation_checkpointing": "none",
}
SAME_MEMORY = 0.01  # of the smallest: what needs no more than this above it counts as equally small


def departures(values: Mapping[str, str]) -> list[bool]:
    """Return for each of `PLAIN` whether the values depart from it."""
    return [values.get(key, value) != value for key, value in PLAIN.items()]


def smallest(sizes: Sequence[float]) -> list[int]:
    """Return the indices of the smallest size, and of sizes that exceed it by at most the share `SAME_MEMORY`."""
    limit = min(sizes) * (1 + SAME_MEMORY)
    return [place for place, size in enumerate(sizes) if size <= limit]


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
        equal_within: for each row, metric -> a difference that means nothing; None: every difference counts.
    """
    points = {
        place: tuple(row[metric] * (1 if direction == "min" else -1) for metric, direction in objectives)
        for place, row in enumerate(rows)
        if all(math.isfinite(row.get(metric, math.nan)) for metric, _ in objectives)
    }
    if equal_within is not None and any(any(of.values()) for of in equal_within):
        slack = [[of.get(metric, 0.0) for metric, _ in objectives] for of in equal_within]
        return [i for i in points if not any(_beats(points, slack, j, i) for j in points if j != i)]
    front: dict[tuple[float, ...], list[int]] = {}
    for place, point in sorted(points.items(), key=lambda item: item[1]):
        if point in front:
            front[point].append(place)
        elif not any(all(a <= b for a, b in zip(other, point, strict=True)) for other in front):
            front[point] = [place]
    return sorted(place for places in front.values() for place in places)


def _beats(points: Mapping[int, Sequence[float]], slack: Sequence[Sequence[float]], one: int, other: int) -> bool:
    """Return whether a row beats another by more than the slack of the two, and is nowhere worse by more than it."""
    differences = [
        (b - a, max(first, second))
        for a, b, first, second in zip(points[one], points[other], slack[one], slack[other], strict=True)
    ]
    return all(gain >= -equal for gain, equal in differences) and any(gain > equal for gain, equal in differences)
