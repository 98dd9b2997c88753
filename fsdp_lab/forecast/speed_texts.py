"""Sentences about one predicted speed: its figures, their source, and their error. Imports no torch."""

from __future__ import annotations

from fsdp_lab.forecast.capacity import NEARLY_FULL, NEARLY_FULL_ERROR, Forecast
from fsdp_lab.forecast.verdict import size_text
from fsdp_lab.report.texts import figures_text
from fsdp_lab.speed.device import Basis
from fsdp_lab.speed.predict import Speed
from fsdp_lab.wording import count

_BASES = {
    Basis.data_sheet: "from its data sheet",
    Basis.fitted: "with efficiencies fitted to published steps",
    Basis.calibration: "by its calibration",
}
_ELSEWHERE = "nine of ten predictions for a device that was not fitted were"
# What `Device.error` was measured on, by its basis: experiments/published, and `with_fit` of a calibration.
_ERRORS_OF = {
    Basis.data_sheet: _ELSEWHERE,
    Basis.fitted: "nine of ten published steps that were not fitted were",
    Basis.calibration: "nine of ten predictions for models that the calibration had not seen were",
    Basis.trials: "nine of ten of these were",
}
_FITTED_TO = (
    "Those were GPT models (MPT) of 125M to 70B parameters, not compiled, with PyTorch 1.13 to 2.0; other models and "
    "versions may have larger errors."
)


def rate_text(forecast: Forecast) -> str:
    """Return text such as `5,854 tokens/s per device, MFU 34 %`."""
    speed = speed_of(forecast)
    per_s, what = (speed.samples_per_s, "samples") if speed.tokens_per_s is None else (speed.tokens_per_s, "tokens")
    rate = f"{figures_text(per_s / forecast.num_workers)} {what}/s per device"
    return rate if speed.mfu is None else f"{rate}, MFU {speed.mfu * 100:.0f} %"


def seconds_text(speed: Speed) -> str:
    """Return text such as `408 ms (310 to 1,600)`."""
    unit, times = ("ms", 1e3) if speed.step_s < 1 else ("s", 1.0)
    step, low, high = (figures_text(value * times) for value in (speed.step_s, speed.low_s, speed.high_s))
    return f"{step} {unit} ({low} to {high})"


def bounds_text(speed: Speed) -> str:
    """Return text such as `compute (83 %) and gather (15 %)`: the bounds with at least a tenth of the step."""
    shares = sorted(speed.shares.items(), key=lambda item: -item[1])
    bounds = [f"{name} ({share * 100:.0f} %)" for name, share in shares if share >= 0.1]
    return " and ".join(bounds) or speed.bound


def basis_text(speed: Speed) -> str:
    """Return the source of the figures, and the steps on which their error was measured."""
    by = _BASES.get(speed.basis) or f"with corrections from {count(speed.settings, 'setting')} that ran on it"
    head, most = f"Predicted for {speed.device} {by}", f"{speed.error * 100:.2g} %"
    if speed.bound_unseen:
        return (
            f"{head}: launches bound {speed.shares['launch'] * 100:.0f} % of this step, and almost none of the steps "
            f"on which the error was measured. Its error is not known; {_ELSEWHERE} within the range of {most}."
        )
    if speed.unlike and speed.basis is not Basis.calibration:
        return (
            f"{head}. The error was not measured on steps with {' and '.join(speed.unlike)}. Its error is not known; "
            f"{_ELSEWHERE} within the range of {most}."
        )
    sentence = f"{head}: {_ERRORS_OF[speed.basis]} within {most} of the measurement."
    if speed.unlike:
        return f"{sentence} The calibration had no step with {' and '.join(speed.unlike)}: that error is not known."
    return f"{sentence} {_FITTED_TO}" if speed.basis is Basis.fitted else sentence


def room_text(forecast: Forecast) -> str:
    """Return that a setting nearly fills its GPU, and the effect on its speed; "" if it does not."""
    if not forecast.nearly_full:
        return ""
    assert forecast.capacity_bytes is not None
    share = forecast.needed_bytes / forecast.capacity_bytes
    return (
        f"It needs {share:.0%} of the GPU's {size_text(forecast.capacity_bytes)}. With more than {NEARLY_FULL:.0%} the "
        "allocator may have to free memory and retry. Four of 39 published steps took 11 to 36% longer than predicted: "
        f"the range covers {1 / (1 - NEARLY_FULL_ERROR) - 1:.0%}, which nine of ten were within."
    )


def speed_of(forecast: Forecast) -> Speed:
    """Return the speed of a forecast that has one."""
    assert forecast.speed is not None
    return forecast.speed
