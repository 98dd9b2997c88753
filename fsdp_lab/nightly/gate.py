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
LOSS = "loss"  # the validation loss, or the training loss where there is none
_FEWEST_NIGHTS = 4  # from so many on, how much nights differ from one another is known
_MEDIAN_OF_NORMAL = 0.6745  # the median of the absolute value, over the standard deviation


@dataclass(frozen=True)
class Result:
    """A setting's results of a night: how each repeat ended, and metric -> the values of those that finished."""

    statuses: list[TrialStatus]
    values: dict[str, list[float]]

    @property
    def finished(self) -> str:
        others = [status for status in self.statuses if status != TrialStatus.finished]
        words = f" ({', '.join(dict.fromkeys(others))})" if others else ""
        return f"{len(self.statuses) - len(others)} of {len(self.statuses)} finished{words}"

    @property
    def share(self) -> float:
        return self.statuses.count(TrialStatus.finished) / len(self.statuses)


@dataclass(frozen=True)
class Judged:
    """A metric as it is declared, and how the gate judges it."""

    metric: Metric
    gate: Gate

    @property
    def key(self) -> str:
        """Its key in a night's results."""
        return self.gate.key or self.metric.key

    @property
    def label(self) -> str:
        return self.gate.label or self.metric.label

    @property
    def word(self) -> str:
        """What it is about, in a sentence: `memory`."""
        return {
            "peak_memory": "memory",
            "samples_per_s": "speed",
            "forecast_error": "forecast",
            "speed_forecast_error": "speed forecast",
        }.get(self.gate.tolerance, self.gate.tolerance)

    @property
    def as_ratio(self) -> bool:
        return self.gate.kind == "ratio"

    def worse(self, a: float, b: float) -> float:
        """How much worse b is than a, as what the tolerance is given in."""
        if self.gate.kind == "fall":
            return a - b
        if not self.as_ratio:
            return abs(b) - abs(a)
        more = (b - a) / abs(a or 1)
        return -more if self.metric.better == "max" else more

    def tell_change(self, a: float, b: float) -> str:
        if not self.as_ratio:
            return self.metric.text(b - a if self.gate.kind == "fall" else abs(b) - abs(a))
        change = (b / a - 1) * 100 if a else 0.0
        if abs(change) < 0.05:  # it would read +0.0 %
            return "none" if change == 0 else "below 0.1 %"
        return f"{change:+.1f} %"


def speeds() -> list[str]:
    """Return the keys of what says how fast a setting trains, among what a night is judged by."""
    return [judged.key for judged in judged_metrics() if judged.metric.is_speed]


def judged_metrics() -> list[Judged]:
    """What a night is judged by, in the order of the tolerances."""
    return [
        Judged(metric, gate)
        for field in fields(ToleranceConfig)
        for metric, gate in gated()
        if gate.tolerance == field.name
    ]


@dataclass(frozen=True)
class Finding:
    """What became of a metric in a setting since the baseline.

    Attributes:
        metric: as people call it; `result` for whether the setting finished at all.
        regression: beyond the tolerance and beyond what the noise explains.
        note: why it is one, or is not one though it is beyond the tolerance.
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
    """Every setting of either night, every metric that both have.

    Args:
        no_speed: why speed is not judged, where a night has none that says something.
        earlier: good nights, the baseline too, in their order, for how much nights differ by themselves.
    """
    findings = []
    for setting, before in baseline.items():
        now = tonight.get(setting)
        if now is None or now.share < before.share:
            ended = now.finished if now else "not run"
            findings.append(
                Finding(setting, "result", before.finished, ended, "", True, "it does not finish as before")
            )
        if now is None:
            continue
        for judged in judged_metrics():
            if judged.metric.is_speed and (not before.values.get(judged.key) or judged.key not in now.values):
                if judged.key != SPEED:
                    continue  # said once
                findings.append(Finding(setting, judged.label, "", "", "", False, f"{NOT_JUDGED}{no_speed}"))
                continue
            if not before.values.get(judged.key) or judged.key not in now.values:
                continue
            if not now.values[judged.key]:
                if now.share:
                    gone = "nothing is measured any more"
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
        note = f"worse by more than {limit:g}" if regression else "better"
        # what noise does to a speed is a factor, so ratios are compared as differences of logarithms
        as_ratio = judged.as_ratio and min(*before, *now, *nights, a) > 0
        there, here, others = ([math.log(v) if as_ratio else v for v in values] for values in (before, now, nights))
        noise = _noise(there, here, others, significance)
        if noise is not None:
            told = f"{math.expm1(noise) * 100:.0f} %" if as_ratio else judged.metric.text(noise)
            if abs(median(here) - median(there)) <= noise:
                regression, note = False, f"within the noise: repeats and nights differ by up to {told}"
            elif regression:
                note += f", and by more than the noise ({told})"
    texts = judged.metric.text(a), judged.metric.text(b), judged.tell_change(a, b)
    return Finding(setting, judged.label, *texts, regression, note)


def _noise(before: Sequence[float], now: Sequence[float], nights: Sequence[float], significance: float) -> float | None:
    """The difference that noise alone exceeds with the given probability, by Welch's test, one-sided; None where
    nothing is known of the noise.

    Nights differ among themselves by more than repeats in one night do, so the variance of their medians counts for
    each of the two. It is taken from the differences of nights that follow one another, by their median, so that a
    change for good (faster code, a night that was accepted) is not taken for noise. Before enough nights are known
    they are taken to differ as repeats do.
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
    """Markdown; the regressions first."""
    shown = sorted((f for f in findings if f.regression or f.note or not only_moved), key=lambda f: not f.regression)
    lines = ["| setting | metric | baseline | tonight | change | verdict |", "| --- | --- | --- | --- | --- | --- |"]
    for f in shown:
        verdict = ("**regression**: " if f.regression else "") + f.note
        lines.append(f"| `{f.setting}` | {f.metric} | {f.baseline} | {f.tonight} | {f.change} | {verdict or 'ok'} |")
    return "\n".join(lines) + "\n"
