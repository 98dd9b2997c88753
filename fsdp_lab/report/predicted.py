"""Predicted speeds of settings, and the intervals of their ratios by the errors of predictions. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fsdp_lab.report.speed import Basis, Interval

EQUAL = 0.0005  # as a share of a speed: predictions that differ by less are the same


@dataclass(frozen=True)
class Predicted:
    """A predicted speed.

    Attributes:
        speed: samples/s.
        low: the lower end of the range that holds nine of ten such predictions.
        high: its upper end.
        relative: the error of the ratio of two predictions of one group, for nine of ten; None: not known.
        group: see `fsdp_lab.forecast.keep.ratio_group`; "": not known.
        samples: the global batch size.
    """

    speed: float
    low: float
    high: float
    relative: float | None = None
    group: str = ""
    samples: int = 0

    def ratio(self, other: Predicted) -> Interval:
        """Return the speed over another's: with the error of their ratio if it is known, else with both ranges."""
        ratio, error = self.speed / other.speed, self.ratio_error(other)
        if error is None:
            return Interval(ratio, self.low / other.high, self.high / other.low)
        return Interval(ratio, ratio / (1 + error), ratio * (1 + error))

    def may_reach(self, other: Predicted) -> bool:
        """Return whether it may be as fast as another."""
        return self.ratio(other).high >= 1

    def ratio_error(self, other: Predicted) -> float | None:
        """Return the error of the ratio of the two; None: not known.

        An error that is common to all predictions of a group need not be common to two groups.
        """
        if self.relative is None or other.relative is None or not self.group or self.group != other.group:
            return None
        return max(self.relative, other.relative)


class PredictedSpeeds:
    """The predicted speeds of groups of settings, for a choice as `speed.Speeds` are.

    Args:
        by_group: of each group that has one.
    """

    basis = Basis.predictions

    def __init__(self, by_group: Mapping[int, Predicted]) -> None:
        self._by_group = by_group

    def has(self, group: int) -> bool:
        return group in self._by_group

    def speed(self, group: int) -> Interval:
        one = self._by_group[group]
        return Interval(one.speed, one.low, one.high)

    def ratio(self, a: int, b: int) -> Interval:
        return self._by_group[a].ratio(self._by_group[b])
