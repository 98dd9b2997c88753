"""The errors of predictions by a calibration, who else used the cores, and whether an earlier one is better."""

from __future__ import annotations

from fsdp_lab.forecast.devices import calibrated
from fsdp_lab.speed.device import Device
from fsdp_lab.speed.measured import MAX_OTHERS_CPU

_UNSURE = 0.3  # an error of ratios that is worth a second try
_CLEARLY = 1.25  # times as large: errors of two quiet calibrations differ by less (experiments/cpu_speed: 17 and 20 %)
_AGAIN = "close other programs and run python -m fsdp_lab.calibrate again"


def how_sure(device: Device) -> list[str]:
    """Return lines: the errors of predictions, their effect on `forecast.keep`, and a warning if others computed."""
    assert device.measured is not None
    error, ratio, others = device.error.p90, device.relative, device.measured.others
    lines = [
        f"  predictions for models that were not measured: nine of ten within ±{error:.0%} "
        f"(median {device.error.median:.0%})"
    ]
    if ratio is not None:
        lines += [
            f"  ratios of two settings of such a model: nine of ten within ±{ratio.p90:.0%}",
            f"  so forecast.keep skips settings predicted to be slower than {1 / (1 + ratio.p90):.0%} of the last "
            "that it asks for",
        ]
    else:
        lines += ["  ratios of two settings: not known, so forecast.keep compares whole ranges and skips little"]
    lines += [f"  other processes used {others:.0%} of the cores during the calibration"]
    if others > MAX_OTHERS_CPU:
        lines += [f"warning: because of that its predictions may be too slow; {_AGAIN}"]
    elif ratio is None or max(error, ratio.p90) > _UNSURE:
        lines += [f"warning: with such errors forecast.keep skips almost nothing; {_AGAIN}"]
    return lines


def better_before(device: Device) -> Device | None:
    """Return the calibration that forecasts on this machine use so far, if it is better than the new one; else None.

    It must be of the same machine, cores, PyTorch and number of workers. It is better with clearly smaller errors, or
    if others used the cores only during the new one: its errors do not show that all its times are too long, by about
    the others' share.
    """
    before, now = calibrated(device.name), device.measured
    if before is None or before.measured is None or now is None:
        return None
    then = before.measured
    if (then.machine, then.cores, then.torch, then.workers) != (now.machine, now.cores, now.torch, now.workers):
        return None
    surer = before.error.p90 * _CLEARLY < device.error.p90
    quieter = now.others > MAX_OTHERS_CPU >= then.others and before.error.p90 <= device.error.p90 + now.others
    return before if surer or quieter else None


def why_kept(before: Device, device: Device) -> str:
    """Return a message that the earlier calibration stays, and how to write the new one anyway."""
    assert before.measured is not None and device.measured is not None
    return (
        f"not written: the earlier calibration is better. Its predictions are within ±{before.error.p90:.0%}, and "
        f"others used {before.measured.others:.0%} of the cores; the new one has ±{device.error.p90:.0%} and "
        f"{device.measured.others:.0%}. To write it anyway, add name=<a name>: forecasts use the newest file."
    )
