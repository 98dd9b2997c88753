"""Whether a night is worse than the baseline: setting by setting and metric, beyond tolerance and noise. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from statistics import median, variance

from fsdp_lab.config.nightly import ToleranceConfig
from fsdp_lab.metrics import SPEED, Gate, Metric, gated
from fsdp_lab.status import TrialStatus

NOT_JUDGED = "not judged: "
DISTURBED = "other processes used the cores while it was timed"
LOSS = "loss"  # the validation loss, or the training loss where there is none
_FEWEST_NIGHTS = 4  # from so many on, how much nights differ from one another is known
_MEDIAN_OF_NORMAL = 0.6745  # the median of the absolute value, over the standard deviation


@dataclass(frozen=True)
class Result:
    """The results of a setting in a night: the status of each repeat, and metric -> its values in finished ones."""

    statuses: list[TrialStatus]
    values: dict[str, list[float]]

    @property
    def finished(self) -> str:
        """How many repeats finished, and how the others ended, in words."""
        others = [status for status in self.statuses if status != TrialStatus.finished]
        words = f" ({', '.join(dict.fromkeys(others))})" if others else ""
        return f"{len(self.statuses) - len(others)} of {len(self.statuses)} finished{words}"

    @property
    def share(self) -> float:
        """The share of repeats that finished."""
        return self.statuses.count(TrialStatus.finished) / len(self.statuses)


@dataclass(frozen=True)
class Judged:
    """A metric, and how the nightly gate judges it."""

    metric: Metric
    gate: Gate

    @property
    def key(self) -> str:
        """Its key in a night's results."""
        return self.gate.key or self.metric.key

    @property
    def label(self) -> str:
        """The metric's name in the table of a night."""
        return self.gate.label or self.metric.label

    @property
    def word(self) -> str:
        """The subject of the metric in a sentence, such as `memory`."""
        return {
            "peak_memory": "memory",
            "samples_per_s": "speed",
            "forecast_error": "forecast",
            "speed_forecast_error": "speed forecast",
        }.get(self.gate.tolerance, self.gate.tolerance)

    @property
    def as_ratio(self) -> bool:
        """Whether the tolerance is a ratio to the baseline's value."""
        return self.gate.kind == "ratio"

    def worse(self, a: float, b: float) -> float:
        """Return how much worse b is than a, in the unit of the tolerance."""
        if self.gate.kind == "fall":
            return a - b
        if not self.as_ratio:
            return abs(b) - abs(a)
        more = (b - a) / abs(a or 1)
        return -more if self.metric.better == "max" else more

    def describe_change(self, a: float, b: float) -> str:
        """Return the change from a to b as text."""
        if not self.as_ratio:
            return self.metric.text(b - a if self.gate.kind == "fall" else abs(b) - abs(a))
        change = (b / a - 1) * 100 if a else 0.0
        if abs(change) < 0.05:  # it would read +0.0 %
            return "none" if change == 0 else "below 0.1 %"
        return f"{change:+.1f} %"


def speeds() -> list[str]:
    """Return the keys of judged metrics that are speeds."""
    return [judged.key for judged in judged_metrics() if judged.metric.is_speed]


def judged_metrics() -> list[Judged]:
    """Return the metrics that a night is judged by, in the order of the tolerances."""
    return [
        Judged(metric, gate)
        for field in fields(ToleranceConfig)
        for metric, gate in gated()
        if gate.tolerance == field.name
    ]


@dataclass(frozen=True)
class Finding:
    """The change of a metric in a setting since the baseline.

    Attributes:
        setting: by its values.
        metric: its name for people; `result` for whether the setting finished at all.
        baseline: the baseline's value, as text.
        tonight: the night's value, as text.
        change: as text.
        regression: beyond the tolerance and beyond noise.
        note: why it is a regression, or why it is none although it exceeds the tolerance.
    """

    setting: str
    metric: str
    baseline: str
    tonight: str
    change: str
    regression: bool
    note: str = ""


def compare(
    tonight: Mapping[str, Result],
    baseline: Mapping[str, Result],
    earlier: Sequence[Mapping[str, Result]],
    tolerance: ToleranceConfig,
    significance: float,
    no_speed: str = "no speeds to compare with",
) -> list[Finding]:
    """Return the changes of every setting of either night, in every metric that both have.

    Args:
        tonight: setting -> its results.
        baseline: setting -> its results.
        earlier: the results of good nights in order, including the baseline, for the variation between nights.
        tolerance: how much worse a metric may be.
        significance: the probability of taking noise for a regression, for one setting and metric.
        no_speed: why speed is not judged, if a night has no reliable one.
    """
    findings = []
    for setting, before in baseline.items():
        now = tonight.get(setting)
        if now is None or now.share < before.share:
            ended = now.finished if now else "not run"
            findings.append(
                Finding(setting, "result", before.finished, ended, "", True, "it no longer finishes as before")
            )
        if now is None:
            continue
        for judged in judged_metrics():
            if judged.metric.is_speed and (not before.values.get(judged.key) or judged.key not in now.values):
                if judged.key != SPEED:
                    continue  # said once
                is_calm = any(result.values.get(judged.key) for result in tonight.values())
                why = DISTURBED if is_calm and judged.key not in now.values else no_speed
                findings.append(Finding(setting, judged.label, "", "", "", False, f"{NOT_JUDGED}{why}"))
                continue
            if not before.values.get(judged.key) or judged.key not in now.values:
                continue
            if not now.values[judged.key]:
                if now.share:
                    gone = "it is no longer measured"
                    there = judged.metric.text(median(before.values[judged.key]))
                    findings.append(Finding(setting, judged.label, there, "none", "", True, gone))
                continue
            nights = [
                median(v) for night in earlier if setting in night and (v := night[setting].values.get(judged.key))
            ]
            values = before.values[judged.key], now.values[judged.key]
            findings.append(_judge(setting, judged, *values, nights, tolerance, significance))
    new = [setting for setting in tonight if setting not in baseline]
    return [*findings, *(Finding(s, "result", "", tonight[s].finished, "", False, "new") for s in new)]


def _judge(
    setting: str,
    judged: Judged,
    before: Sequence[float],
    now: Sequence[float],
    nights: Sequence[float],
    tolerance: ToleranceConfig,
    significance: float,
) -> Finding:
    a, b = median(before), median(now)
    limit = getattr(tolerance, judged.gate.tolerance)
    worse = judged.worse(a, b)
    regression, note = worse > limit, ""
    if abs(worse) > limit:
        most = f"{limit * 100:g} %" if judged.as_ratio else f"{limit:g}"
        note = f"worse by more than {most}" if regression else "better"
        # what noise does to a speed is a factor, so ratios are compared as differences of logarithms
        as_ratio = judged.as_ratio and min(*before, *now, *nights, a) > 0
        there, here, others = ([math.log(v) if as_ratio else v for v in values] for values in (before, now, nights))
        noise = _noise(there, here, others, significance)
        if noise is not None:
            spread = f"{math.expm1(noise) * 100:.0f} %" if as_ratio else judged.metric.text(noise)
            if abs(median(here) - median(there)) <= noise:
                regression, note = False, f"within the noise: repeats and nights differ by up to {spread}"
            elif regression:
                note += f", and by more than the noise ({spread})"
    texts = judged.metric.text(a), judged.metric.text(b), judged.describe_change(a, b)
    return Finding(setting, judged.label, *texts, regression, note)


def _noise(before: Sequence[float], now: Sequence[float], nights: Sequence[float], significance: float) -> float | None:
    """Return the difference that noise alone exceeds with the given probability; None if the noise is not known.

    By Welch's one-sided test. Nights differ by more than repeats in one night, so the variance of their medians is
    added to each of the two. It is estimated from the differences of consecutive nights, by their median, so that a
    permanent change (faster code, an accepted night) does not count as noise. Before enough nights are known they are
    assumed to differ as repeats do.
    """
    within = [(variance(v), len(v)) for v in (before, now) if len(v) > 1]
    parts = [(var / count, count - 1) for var, count in within]
    if len(nights) >= _FEWEST_NIGHTS:
        between = median(abs(b - a) for a, b in pairwise(nights)) / _MEDIAN_OF_NORMAL
        parts += [(between**2, len(nights) - 1)]  # of a difference, so twice the variance of a night
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
    return float(t.ppf(1 - significance, degrees)) * math.sqrt(error)


def table(findings: Sequence[Finding], only_moved: bool = False) -> str:
    """Return the findings as Markdown, regressions first."""
    shown = sorted((f for f in findings if f.regression or f.note or not only_moved), key=lambda f: not f.regression)
    lines = ["| setting | metric | baseline | tonight | change | verdict |", "| --- | --- | --- | --- | --- | --- |"]
    for f in shown:
        verdict = ("**regression**: " if f.regression else "") + f.note
        lines.append(f"| `{f.setting}` | {f.metric} | {f.baseline} | {f.tonight} | {f.change} | {verdict or 'ok'} |")
    return "\n".join(lines) + "\n"
