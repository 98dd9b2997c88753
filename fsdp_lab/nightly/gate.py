"""A night, and what got worse in it, by setting and metric, beyond tolerance, noise and rounding. No side effects.

Each metric has a scale on which larger is worse and equal distances count the same. Tolerance, noise and rounding are
distances on it, so they can be compared. They are shown as changes of the metric.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import pairwise
from statistics import median, variance
from typing import TYPE_CHECKING, Any

from fsdp_lab.config.metrics import LOSS_EPS, SPEED, Metric, gated
from fsdp_lab.config.nightly import ToleranceConfig
from fsdp_lab.config.status import TrialStatus
from fsdp_lab.report.settings import loss_metric

if TYPE_CHECKING:
    import pandas as pd

STATUS = "status"  # the column of trial statuses; also the metric of a finding about them
LOSS = "loss"  # the validation loss, or the training loss where there is none
_USER_CODE, _TOOL = "user code ", "library fsdp_lab"  # keys of a night's origin
_USUAL = 0.2  # prior standard deviation of repeats, as a share of the tolerance ...
_WEIGHT = 20  # ... and its weight, in degrees of freedom of measured repeats
_ENOUGH_NIGHTS = 5  # nights from which their variance is known
_LATEST = 10  # the most nights that it uses
_TREND = 20  # nights in which a trend is looked for
_FEWEST = 10  # the fewest nights for a trend
_VISIBLE = 1 / 4  # of the tolerance: a smaller trend is not reported
_MEDIAN_OF_NORMAL = 0.6745  # the median of the absolute value, over the standard deviation


class Outcome(StrEnum):
    """What the gate found of a metric in a setting."""

    ok = "ok"
    better = "better"
    noise = "noise"  # worse by more than the tolerance, but not by more than noise explains
    rounding = "rounding"  # the same for the rounding of a loss
    regression = "regression"  # worse than the last good night
    slides = "slides"  # worse night by night, within the tolerance
    drift = "drift"  # not worse than the last good night, but worse than the best one
    unfinished = "unfinished"  # fewer trials finish
    lost = "lost"  # no longer measured
    new = "new"  # a setting that the last good night did not have
    unmatched = "unmatched"  # no good night on this machine has measured it


_REGRESSIONS = (Outcome.regression, Outcome.drift, Outcome.unfinished, Outcome.lost)


class Verdict(StrEnum):
    incomplete = "incomplete"  # it runs, or was interrupted
    good = "good"
    regression = "regression"
    accepted = "accepted"  # made the baseline by hand
    failed = "failed"  # nothing finished


@dataclass(frozen=True)
class Finding:
    """What the gate found of a metric in a setting.

    Attributes:
        setting: by its values.
        metric: the key of the metric in the rows of a night, or `STATUS`.
        against: the night to compare with; "": none.
        before: that night's median.
        tonight: this night's median.
        change: from one to the other: a ratio minus 1, or in the metric's unit.
        tolerance: the largest change that is tolerated, as `change`.
        noise: the largest change that noise explains, as `change`; 0: it is not known.
        slope: the change of a typical night, as `change`; for `drift` and `slides`.
        nights: the number of nights behind `slope`.
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
        return self.outcome in _REGRESSIONS


@dataclass(frozen=True)
class Night:
    """A night of a study.

    Attributes:
        id: when it started; the name of its document and of its folder.
        begun: seconds since 1970, by the clock of that night.
        study: the settings that all its trials share, which identify the study.
        origin: what it ran: `machine` (device and workers, which decide speeds), `commit` of the user's working folder,
            `code` (digest of fsdp_lab), `library <name>` (version), and `user code <name>` (digest of a package that
            targets name).
        trials: a row for each trial, with `judged_columns`.
        baseline: the last good night, which it was compared with; None: there was none.
        changed: what changed since the baseline: see `changes`.
        run_id: of its sweep's MLflow run; "": none.
        accepted: of a night that was made the baseline by hand: the reason, the user and the time.
        note: why the webhook did not get the verdict; "": it did, or there is no webhook.
        number: its place in the order in which nights ran, from 1.
        slow: one sentence per rank or node that others waited for.
    """

    id: str
    begun: float
    verdict: Verdict = Verdict.incomplete
    study: dict[str, Any] = field(default_factory=dict)
    origin: dict[str, str] = field(default_factory=dict)
    trials: list[dict[str, Any]] = field(default_factory=list)
    baseline: str | None = None
    changed: list[list[str]] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    run_id: str = ""
    accepted: dict[str, str] | None = None
    note: str = ""
    number: int = 0
    slow: list[str] = field(default_factory=list)

    @property
    def regressions(self) -> list[Finding]:
        return [finding for finding in self.findings if finding.is_regression]

    @property
    def frame(self) -> pd.DataFrame:
        import pandas as pd

        return pd.DataFrame(self.trials)


def since_accepted(nights: Sequence[Night]) -> list[Night]:
    """Return the good nights from the last accepted one on. A night is compared with these."""
    good = [night for night in nights if night.verdict in (Verdict.good, Verdict.accepted)]
    accepted = [place for place, night in enumerate(good) if night.verdict is Verdict.accepted]
    return good[accepted[-1] :] if accepted else good


def changes(before: Night, night: Night) -> list[list[str]]:
    """Return `(what, before, now)` for each change since an earlier night; fsdp_lab's code only without its commit."""
    there, here = before.origin, night.origin
    keys = [key for key in sorted(there.keys() | here.keys()) if there.get(key) != here.get(key)]
    if _TOOL in keys and "code" in keys:
        keys.remove("code")
    if not all(any(key.startswith(_USER_CODE) for key in origin) for origin in (there, here)):
        keys = [key for key in keys if not key.startswith(_USER_CODE)]  # a night was interrupted before that was known
    return [[key, there.get(key, "none"), here.get(key, "none")] for key in keys]


class Scale:
    """Positions of a metric; larger is worse. They are logarithms for a ratio, unless a value has none.

    Args:
        metric: see `metrics.Gate` for its kinds.
        values: all values to compare.
    """

    def __init__(self, metric: Metric, values: Sequence[float]) -> None:
        is_ratio = metric.gate.kind == "ratio"
        self._is_log = is_ratio and min(values) > 0
        self._unit = abs(median(values)) or 1.0 if is_ratio and not self._is_log else 1.0
        self._is_distance = metric.gate.kind == "distance"
        self._sign = -1 if metric.better == "max" or metric.gate.kind == "fall" else 1

    def of(self, value: float) -> float:
        if self._is_log:
            return self._sign * math.log(value)
        return self._sign * (abs(value) if self._is_distance else value) / self._unit

    def distance(self, tolerance: float) -> float:
        """Return a tolerance as a distance; where larger is better, a ratio of 1 or more is infinite."""
        if not self._is_log:
            return tolerance
        return self._sign * math.log1p(self._sign * tolerance) if self._sign > 0 or tolerance < 1 else math.inf

    def change(self, distance: float) -> float:
        return math.expm1(self._sign * distance) if self._is_log else self._sign * distance


def judged_columns(frame: pd.DataFrame) -> pd.DataFrame:
    """Return the columns of a sweep's frame by which its night is judged, with its loss under `LOSS`."""
    frame = frame.assign(**{LOSS: frame.get(loss_metric(frame))})
    return frame.reindex(columns=["setting", STATUS, LOSS_EPS, *(metric.key for metric in gated())])


def judge(
    tonight: pd.DataFrame, past: Sequence[tuple[str, bool, pd.DataFrame]], tolerance: ToleranceConfig, chance: float
) -> list[Finding]:
    """Return what the gate finds of every setting, in every metric.

    Args:
        tonight: a row for each trial, with `judged_columns`.
        past: the good nights since the last accepted one, the oldest first: the name of each, whether it ran on the
            same machine, so that its timings can be compared, and its rows.
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
    values, nights = measured(tonight), [(night, measured(frame, same)) for night, same, frame in past]
    for setting, now in ended.items():
        if setting not in ended_before:
            findings.append(Finding(setting, STATUS, Outcome.new, ended=[now, []]))
            continue
        eps = [one for of_night in (values, *dict(nights).values()) for one in of_night.get((setting, LOSS_EPS), [])]
        for metric in gated():
            at = (setting, metric.key)
            earlier = [(night, of_night[at]) for night, of_night in nights if at in of_night]
            if at in values and earlier:
                rounding = math.log1p(max(eps, default=0.0)) if metric.key == LOSS else 0.0
                limit = getattr(tolerance, metric.gate.tolerance)
                findings.append(_compare(setting, metric, values[at], earlier, limit, rounding, chance))
            elif not _share(now):
                continue  # reported already, or not new
            elif metric.is_speed and at in values:
                if metric.key == SPEED:  # represents all timings
                    findings.append(Finding(setting, SPEED, Outcome.unmatched, tonight=median(values[at])))
            elif earlier:
                night, before = earlier[-1]
                findings.append(Finding(setting, metric.key, Outcome.lost, night, median(before)))
    return findings


def measured(frame: pd.DataFrame, same_machine: bool = True) -> dict[tuple[str, str], list[float]]:
    """Return setting and metric -> its values in finished trials, without timings of another machine."""
    keys = [LOSS_EPS, *(metric.key for metric in gated())]
    finished = frame[frame[STATUS] == TrialStatus.finished].reindex(columns=["setting", *keys])
    finished = finished.astype(dict.fromkeys(keys, float)).replace([math.inf, -math.inf], math.nan)
    if not same_machine:
        finished[[metric.key for metric in gated() if metric.is_speed]] = math.nan
    values = finished.melt(["setting"], keys).dropna()
    return dict(values.groupby(["setting", "variable"])["value"].agg(list).items())


def _compare(
    setting: str, metric: Metric, now: Sequence[float], earlier: Sequence[tuple[str, list[float]]],
    tolerance: float, rounding: float, chance: float,
) -> Finding:  # fmt: skip
    """Compare with the last good night, then with the best one, among `_confirmed` nights."""
    scale = Scale(metric, [*now, *(value for _, values in earlier for value in values)])
    here, there = [scale.of(v) for v in now], [[scale.of(v) for v in values] for _, values in earlier]
    level, levels = median(here), [median(positions) for positions in there]
    limit, since = scale.distance(tolerance), list[float]()
    usual = _USUAL * min(limit, 1.0)  # finite, even if every loss of speed is tolerated

    def noise_to(place: int, now: Sequence[float]) -> float:
        return _noise(there, place, now, levels, usual, chance)

    places = _confirmed(there, levels, limit, noise_to) if metric.is_speed else range(len(levels))
    place, best = places[-1], min(places, key=levels.__getitem__)
    change, noise, noise_of_best = level - levels[place], noise_to(place, here), noise_to(best, here)
    if change > max(limit, noise, rounding):
        outcome = Outcome.regression
    elif level - levels[best] > max(limit, noise_of_best, rounding):
        outcome, place, noise, since = Outcome.drift, best, noise_of_best, levels[best:]
    elif change > limit:
        outcome = Outcome.noise if change <= noise else Outcome.rounding
    elif -change > max(limit, noise, rounding):
        outcome = Outcome.better
    elif _slides(latest := [*levels, level][-_TREND:], limit, chance):
        outcome, since = Outcome.slides, latest[:-1]
    else:
        outcome = Outcome.ok
    name, before = earlier[place]
    slope = scale.change(_slope([*since, level])) if since else None
    return Finding(
        setting, metric.key, outcome, name, median(before), median(now), scale.change(level - levels[place]),
        scale.change(limit), scale.change(noise), slope, len(since),
    )  # fmt: skip


def _confirmed(
    there: Sequence[Sequence[float]], levels: Sequence[float], limit: float, noise_to: Callable[..., float]
) -> list[int]:
    """Return the nights to compare with: a better night counts when the next good night confirms it.

    Without this rule, all nights after a lucky one would be worse.
    """
    places = [0]
    for place, level in enumerate(levels[1:], 1):
        beyond = limit
        if levels[place - 1] - level > limit:
            beyond = max(limit, noise_to(place - 1, there[place]))
        is_last = place == len(levels) - 1
        if levels[place - 1] - level <= beyond or not (is_last or levels[place + 1] - level > beyond):
            places.append(place)
    return places


def _slides(levels: Sequence[float], limit: float, chance: float) -> bool:
    """Return whether nights get worse one by one, by Kendall's test, and by a visible share of the tolerance."""
    if len(levels) < _FEWEST or not _slope(levels) * len(levels) > _VISIBLE * limit:
        return False
    from scipy.stats import kendalltau

    return bool(kendalltau(range(len(levels)), levels, alternative="greater").pvalue < chance)


def _noise(
    nights: Sequence[Sequence[float]], place: int, now: Sequence[float], levels: Sequence[float],
    usual: float, chance: float,
) -> float:  # fmt: skip
    """Return the distance to a night that noise exceeds with the given probability; 0: not known.

    By Student's one-sided test. The variance of repeats is pooled over tonight, all nights and a prior, because two
    repeats have a single degree of freedom. A night with a larger variance of its own counts with that. Nights differ
    by more than repeats in one night, so the variance between nights is added. It comes from the differences of
    consecutive nights around their median, so that neither a lasting change nor a steady drift counts as noise. Before
    enough nights are known, they are assumed to differ as repeats do.
    """
    repeated = [values for values in (*nights, now) if len(values) > 1]
    measured = sum(len(values) - 1 for values in repeated)
    squares, freedom = sum(variance(values) * (len(values) - 1) for values in repeated), _WEIGHT + measured
    pooled = max((_WEIGHT * usual**2 + squares) / freedom, squares / measured) if squares else 0.0
    own = [max(pooled, variance(v) if len(v) > 1 else 0.0) / len(v) for v in (nights[place], now)]
    if len(levels) < _ENOUGH_NIGHTS:
        parts = [(sum(own) + 2 * pooled, freedom)]
    else:
        steps = [b - a for a, b in pairwise(levels[-_LATEST:])]
        spread = sorted(abs(step - median(steps)) for step in steps)
        spread = spread[len(steps) % 2 :]  # with an odd number, one is the median itself
        between = (median(spread) / _MEDIAN_OF_NORMAL) ** 2  # of a difference, so of both nights
        parts = [(sum(own), freedom), (between, len(steps))]
    error = sum(part for part, _ in parts)
    if error == 0:
        return 0.0
    from scipy.stats import t

    degrees = error**2 / sum(part**2 / freedom for part, freedom in parts)
    return float(t.ppf(1 - chance / len(nights), degrees)) * math.sqrt(error)


def _slope(levels: Sequence[float]) -> float:
    """Return how much worse a night is than the one before: the median over all pairs of nights."""
    from scipy.stats import theilslopes

    return float(theilslopes(levels).slope)


def _share(ended: Sequence[str]) -> float:
    return ended.count(TrialStatus.finished) / len(ended) if ended else 0.0
