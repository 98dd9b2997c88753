"""The quality of a sweep's predicted speeds, in a sentence."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from fsdp_lab.metrics import PREDICTED_SPEED, SPEED
from fsdp_lab.report.data import Setting, SweepData, TrialRow
from fsdp_lab.status import TrialStatus
from fsdp_lab.wording import count

# The values of `fsdp_lab.speed.device.Basis`, which an older or newer version may have written otherwise.
_BY = {
    "data sheet": "by the device's data sheet",
    "fitted": "by efficiencies fitted to published steps on this device",
    "calibration": "by the calibration of this machine",
    "trials": "by earlier trials on this device",
}


def predictions_sentence(sweep: SweepData) -> str:
    """Return the basis of predicted speeds, their errors, and whether the predicted fastest was the fastest.

    "" without predictions. Speeds that do not count are not compared.
    """
    predicted = [trial for trial in sweep.trials if trial.figures.get(PREDICTED_SPEED)]
    if not predicted:
        return ""
    bases = {_BY.get(trial.predicted_by, "") for trial in predicted} - {""}
    by = f" {' and '.join(sorted(bases))}" if bases else ""
    head = f"Speeds were predicted{by}{_known(predicted)}"
    both = [t for t in predicted if _measured(sweep, t)]
    if not both:
        beside = any(sweep.shared(trial) and trial.figures.get(SPEED) for trial in predicted)
        how = f" ({sweep.report} report.others_cpu=1 compares them anyway)" if beside else ""
        return f"{head}; no measured speed counts{how}."
    errors = [abs(t.figures[SPEED] / t.figures[PREDICTED_SPEED] - 1) for t in both]
    if len(errors) == 1:
        return f"{head}: the prediction of the measured trial was off by {_percent(errors[0])}."
    return (
        f"{head}: for {count(len(errors), 'trial')}, the median prediction was off by {_percent(median(errors))} "
        f"(largest {_percent(max(errors))}){_fastest(sweep)}."
    )


def _measured(sweep: SweepData, trial: TrialRow) -> bool:
    return trial.status is TrialStatus.finished and bool(trial.figures.get(SPEED)) and not sweep.shared(trial)


def _known(predicted: Sequence[TrialRow]) -> str:
    """Return text such as ` (nine of ten such predictions are within 15 %)`: the error that was known before."""
    ends = [(t.figures[PREDICTED_SPEED], t.figures.get(f"{PREDICTED_SPEED}_low")) for t in predicted]
    errors = [1 - low / speed for speed, low in ends if low]
    return f" (nine of ten such predictions are within {_percent(max(errors))})" if errors else ""


def _fastest(sweep: SweepData) -> str:
    """Whether the setting that was predicted to be the fastest was; of those with equal predictions the best counts."""
    speeds = [(_predicted(s), speed) for s in sweep.settings if (speed := _speed(sweep, s)) and _predicted(s)]
    if len(speeds) < 2:
        return ""
    most = max(predicted for predicted, _ in speeds)
    chosen = max(measured for predicted, measured in speeds if predicted == most)
    best = max(measured for _, measured in speeds)
    measured = sum(any(t.figures.get(SPEED) for t in s.finished) and bool(_predicted(s)) for s in sweep.settings)
    of = f" of the {len(speeds)} whose speed counts" if len(speeds) < measured else ""
    if chosen == best:
        return f", and the predicted fastest{of} was the fastest measured"
    return f", and the predicted fastest{of} was {_percent(1 - chosen / best)} slower than the fastest measured"


def _predicted(setting: Setting) -> float:
    return median(setting.of(PREDICTED_SPEED) or [0.0])


def _speed(sweep: SweepData, setting: Setting) -> float:
    return median([t.figures[SPEED] for t in setting.trials if _measured(sweep, t)] or [0.0])


def _percent(share: float) -> str:
    return f"{share * 100:.2g} %" if share < 0.095 else f"{share * 100:.0f} %"
