"""What got worse in a night: setting by setting and metric, beyond tolerance, noise and rounding. Pure.

Every metric has positions on a scale where larger is worse and equal distances count the same. Tolerance, noise and
rounding are distances there, so they can be compared, and are shown as changes of the metric.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import pairwise
from statistics import median, variance
from typing import TYPE_CHECKING, Any, Self

from fsdp_lab.config.nightly import ToleranceConfig
from fsdp_lab.metrics import LOSS_EPS, SPEED, Metric, gated
from fsdp_lab.report.settings import loss_metric
from fsdp_lab.status import TrialStatus

if TYPE_CHECKING:
    import pandas as pd

STATUS = "status"  # the column with how a trial ended, and the subject of such a finding
LOSS = "loss"  # the validation loss, or the training loss where there is none
EXCLUDED = "timing_excluded"
_ENOUGH_NIGHTS = 5  # from so many on, how much nights differ from one another is known
_LATEST = 10  # by so many, at most
_FEWEST_OF_SLOPE = 6  # in five nights the order of chance is too likely
_MEDIAN_OF_NORMAL = 0.6745  # the median of the absolute value, over the standard deviation


class Outcome(StrEnum):
    """What the gate found of a metric in a setting."""

    ok = "ok"
    better = "better"
    noise = "noise"  # worse by more than the tolerance, but not by more than noise explains
    rounding = "rounding"  # the same of the rounding of a loss
    slope = "slope"  # worse night by night, by less than the tolerance so far
    regression = "regression"  # worse than the last good night
    drift = "drift"  # not worse than the last good night, but than the best one
    unfinished = "unfinished"  # fewer trials finish
    lost = "lost"  # no longer measured
    new = "new"  # a setting that the last good night did not have
    excluded = "excluded"  # other processes used the cores in all of the setting's trials
    unmatched = "unmatched"  # no good night on this machine has measured it with its timing included


_REGRESSIONS = (Outcome.regression, Outcome.drift, Outcome.unfinished, Outcome.lost)


@dataclass(frozen=True)
class Finding:
    """What the gate found of a metric in a setting.

    Attributes:
        setting: by its values.
        metric: the key of the metric in the rows of a night, or `STATUS`.
        outcome: see `Outcome`.
        against: the night that it was compared with; "": none.
        before: that night's median.
        tonight: this night's median.
        change: from one to the other: a ratio minus 1, or in the metric's unit.
        tolerance: the largest change that is tolerated, as `change`.
        noise: the largest change that noise explains, as `change`; None: not known.
        slope: the change of a typical night, as `change`; for `drift` and `slope`.
        nights: over how many.
        ended: the status of each trial tonight, and of that night, for `unfinished` and `new`.
    """

    setting: str
    metric: str
    outcome: Outcome
    against: str = ""
    before: float | None = None
    tonight: float | None = None
    change: float | None = None
    tolerance: float | None = None
    noise: float | None = None
    slope: float | None = None
    nights: int = 0
    ended: list[list[str]] = field(default_factory=list)

    @property
    def is_regression(self) -> bool:
        """Whether it makes the night a bad one."""
        return self.outcome in _REGRESSIONS


@dataclass(frozen=True)
class Scale:
    """Positions of a metric; larger is worse.

    Attributes:
        kind: as in `metrics.Gate`; `share`: linear, in shares of `unit`.
        sign: of a ratio: -1 if a larger value is better.
        unit: of a share.
    """

    kind: str
    sign: int = 1
    unit: float = 1.0

    @classmethod
    def for_values(cls, metric: Metric, values: Sequence[float]) -> Self:
        """Return the scale of a metric for these values: logarithms for ratios, unless a value has none."""
        if metric.gate.kind != "ratio":
            return cls(metric.gate.kind)
        sign = -1 if metric.better == "max" else 1
        return cls("ratio", sign) if min(values) > 0 else cls("share", sign, abs(median(values)) or 1.0)

    def of(self, value: float) -> float:
        """Return the position of a value."""
        if self.kind == "ratio":
            return self.sign * math.log(value)
        return {"share": self.sign * value / self.unit, "distance": abs(value), "fall": -value}.get(self.kind, value)

    def distance(self, tolerance: float) -> float:
        """Return how far a tolerance reaches; a ratio of 1 or more never ends where larger is better."""
        if self.kind != "ratio":
            return tolerance
        if self.sign < 0 and tolerance >= 1:
            return math.inf
        return self.sign * math.log1p(self.sign * tolerance)

    def change(self, distance: float) -> float:
        """Return a distance as a change of the metric."""
        if self.kind == "ratio":
            return math.expm1(self.sign * distance)
        return -distance if self.kind == "fall" else self.sign * distance


def judged_columns(frame: pd.DataFrame) -> pd.DataFrame:
    """Return the columns of a sweep's frame by which its night is judged, with its loss under `LOSS`."""
    frame = frame.assign(**{LOSS: frame.get(loss_metric(frame))})
    return frame.reindex(columns=["setting", STATUS, EXCLUDED, LOSS_EPS, *(metric.key for metric in gated())])


def judge(
    tonight: pd.DataFrame, past: Sequence[tuple[str, bool, pd.DataFrame]], tolerance: ToleranceConfig, chance: float
) -> list[Finding]:
    """Return what the gate finds of every setting, in every metric.

    Args:
        tonight: a row for each trial, with `judged_columns`.
        past: the good nights since the last accepted one, the oldest first: the name of each, whether it ran on the
            same machine, so that its timings can be compared, and its rows.
        tolerance: how much worse a metric may be.
        chance: the probability of taking noise for a regression, for one setting and metric.
    """
    if not past:
        return []
    name, _, baseline = past[-1]
    ended, ended_before = (frame.groupby("setting", sort=False)[STATUS].agg(list) for frame in (tonight, baseline))
    findings = [
        Finding(setting, STATUS, Outcome.unfinished, name, ended=[now, before])
        for setting, before in ended_before.items()
        if _share(now := ended.get(setting, [])) < _share(before)
    ]
    excluded = set(tonight.loc[tonight[EXCLUDED].astype(bool), "setting"])
    values, nights = measured(tonight), [(night, same, measured(frame)) for night, same, frame in past]
    for setting, now in ended.items():
        if setting not in ended_before:
            findings.append(Finding(setting, STATUS, Outcome.new, ended=[now, []]))
            continue
        known = [values, *(of_night for *_, of_night in nights)]
        eps = max((one for of_night in known for one in of_night.get((setting, LOSS_EPS), [])), default=0.0)
        for metric in gated():
            at = (setting, metric.key)
            earlier = [(night, v[at]) for night, same, v in nights if at in v and (same or not metric.is_speed)]
            if at in values and earlier:
                limits = getattr(tolerance, metric.gate.tolerance), eps if metric.key == LOSS else 0.0, chance
                findings.append(_compare(setting, metric, values[at], earlier, limits))
            elif _share(now):
                findings += _uncompared(setting, metric, values.get(at), earlier, setting in excluded)
    return findings


def measured(frame: pd.DataFrame) -> dict[tuple[str, str], list[float]]:
    """Return setting and metric -> its values in finished trials, without excluded timings."""
    keys = [LOSS_EPS, *(metric.key for metric in gated())]
    finished = frame[frame[STATUS] == TrialStatus.finished].reindex(columns=["setting", EXCLUDED, *keys])
    finished = finished.astype(dict.fromkeys(keys, float)).replace([math.inf, -math.inf], math.nan)
    timings = [metric.key for metric in gated() if metric.is_speed]
    finished.loc[finished[EXCLUDED].astype(bool), timings] = math.nan
    values = finished.melt(["setting"], keys).dropna()
    return dict(values.groupby(["setting", "variable"])["value"].agg(list).items())


def _uncompared(
    setting: str,
    metric: Metric,
    now: Sequence[float] | None,
    earlier: Sequence[tuple[str, list[float]]],
    is_excluded: bool,
) -> list[Finding]:
    """Return what there is to say of a metric that was not measured in both nights; of timings, the speed speaks."""
    if now:
        return [Finding(setting, SPEED, Outcome.unmatched, tonight=median(now))] if metric.key == SPEED else []
    if is_excluded and metric.is_speed:
        return [Finding(setting, SPEED, Outcome.excluded)] if metric.key == SPEED else []
    return [Finding(setting, metric.key, Outcome.lost, night, median(before)) for night, before in earlier[-1:]]


def _compare(
    setting: str,
    metric: Metric,
    now: Sequence[float],
    earlier: Sequence[tuple[str, list[float]]],
    limits: tuple[float, float, float],
) -> Finding:
    """Compare with the last good night, then with the best one, then with the slope of all."""
    tolerance, eps, chance = limits
    scale = Scale.for_values(metric, [*now, *(value for _, values in earlier for value in values)])
    here, there = [scale.of(v) for v in now], [[scale.of(v) for v in values] for _, values in earlier]
    levels = [median(positions) for positions in there]
    level, limit, rounding = median(here), scale.distance(tolerance), math.log1p(eps)

    def finding(outcome: Outcome, place: int, noise: float | None, **slope: Any) -> Finding:
        return Finding(
            setting, metric.key, outcome, earlier[place][0], median(earlier[place][1]), median(now),
            scale.change(level - levels[place]), scale.change(limit), None if noise is None else scale.change(noise),
            **slope,
        )  # fmt: skip

    last, best = len(levels) - 1, levels.index(min(levels))
    for place, share in ((last, 1), (best, len(levels))):  # the best of many is the best by chance, too
        noise = _noise(there[place], here, levels, chance / share)
        if level - levels[place] > max(limit, noise or 0.0, rounding):
            if place == last:
                return finding(Outcome.regression, place, noise)
            since = [*levels[place:], level]
            return finding(Outcome.drift, place, noise, slope=scale.change(_slope(since)), nights=len(since) - 1)
    noise, change = _noise(there[last], here, levels, chance), level - levels[last]
    if _is_slope([*levels, level], limit, chance):
        slope = scale.change(_slope([*levels, level]))
        return finding(Outcome.slope, last, noise, slope=slope, nights=len(levels))
    if change > limit:
        return finding(Outcome.noise if change <= (noise or 0.0) else Outcome.rounding, last, noise)
    return finding(Outcome.better if -change > max(limit, noise or 0.0, rounding) else Outcome.ok, last, noise)


def _noise(before: Sequence[float], now: Sequence[float], levels: Sequence[float], chance: float) -> float | None:
    """Return the distance that noise alone exceeds with the given probability; None if the noise is not known.

    By Welch's one-sided test. Nights differ by more than repeats in one night, so the variance of their medians is
    added to each of the two. It is that of the differences of consecutive nights around their median, so that neither
    one lasting change nor a steady drift counts as noise. Before enough nights are known they are assumed to differ as
    repeats do.
    """
    within = [(variance(values), len(values)) for values in (before, now) if len(values) > 1]
    parts = [(var / count, count - 1) for var, count in within]
    if len(levels) >= _ENOUGH_NIGHTS:
        steps = [b - a for a, b in pairwise(levels[-_LATEST:])]
        spread = sorted(abs(step - median(steps)) for step in steps)
        spread = spread[len(steps) % 2 :]  # one of an odd number is the median itself
        parts += [((median(spread) / _MEDIAN_OF_NORMAL) ** 2, len(steps))]  # of a difference: of both nights
    elif within:
        freedom = sum(count - 1 for _, count in within)
        parts += [(2 * sum(var * (count - 1) for var, count in within) / freedom, freedom)]
    if not parts:
        return None
    error = sum(part for part, _ in parts)
    if error == 0:
        return 0.0
    from scipy.stats import t

    degrees = error**2 / sum(part**2 / freedom for part, freedom in parts)
    return float(t.ppf(1 - chance, degrees)) * math.sqrt(error)


def _is_slope(levels: Sequence[float], limit: float, chance: float) -> bool:
    """Return whether nights get worse one by one, by more than half the tolerance: Kendall's test of their order."""
    if len(levels) < _FEWEST_OF_SLOPE or _slope(levels) * (len(levels) - 1) <= limit / 2:
        return False
    from scipy.stats import kendalltau

    return bool(kendalltau(range(len(levels)), levels, alternative="greater").pvalue < chance)


def _slope(levels: Sequence[float]) -> float:
    """Return how much worse a night is than the one before: the median over all pairs of nights."""
    return median((b - a) / (j - i) for i, a in enumerate(levels) for j, b in enumerate(levels) if j > i)


def _share(ended: Sequence[str]) -> float:
    return ended.count(TrialStatus.finished) / len(ended) if ended else 0.0
