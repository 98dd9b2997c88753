"""`forecast.keep`: selects the settings of a sweep to measure, by predicted speed. Imports no torch."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping
from fractions import Fraction
from hashlib import sha256

from fsdp_lab.config import TrialConfig, flatten, forecast_settings
from fsdp_lab.config.axes.activation_offload import ActivationOffload
from fsdp_lab.config.axes.offload import OffloadTarget
from fsdp_lab.config.axes.precision import Dtype
from fsdp_lab.config.axes.sharding import Granularity
from fsdp_lab.forecast.capacity import Forecast
from fsdp_lab.forecast.speed.device import Device, DeviceKind, digest
from fsdp_lab.forecast.speed.predict import Speed
from fsdp_lab.forecast.words import say
from fsdp_lab.record.reasons import Code, Reason
from fsdp_lab.report.speed import Interval, Predicted


def predicted(speed: Speed) -> Predicted:
    """Return a predicted speed in samples/s."""
    rates = Interval(speed.samples_per_s, speed.samples / speed.high_s, speed.samples / speed.low_s)
    return Predicted(rates, speed.relative, speed.group, speed.samples)


def ratio_group(config: TrialConfig, num_workers: int, device: Device) -> str:
    """Return an identifier of a group of steps: within it the error of ratios is known, see docs/forecast.md."""
    known = forecast_settings(config, num_workers).items()
    what = {name: value for name, value in known if name.partition(".")[0] in ("model", "data")}
    network = device.network_gbit if num_workers > device.node_size else None
    kind = [config.compile, config.precision.float8, unlike(config, device)]
    parts = [what, flatten(config.task), num_workers, kind, digest(device), network]
    return sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


def unlike(config: TrialConfig, sheet: Device) -> tuple[str, ...]:
    """Return text on how a step differs from the steps with a known error.

    Those are the steps of experiments/published, and on a CPU those of its probe.
    """
    known = Dtype.float32 if sheet.kind is DeviceKind.cpu else Dtype.bfloat16
    offload, moved = config.offload.target, config.activation_offload
    sharding, dtype = config.sharding.granularity, config.precision.param_dtype
    paged = " (pageable copies are assumed to be half as fast as pinned ones; the range covers as fast to a quarter)"
    paged = "" if sheet.pageable_bandwidth else paged
    differences = {
        "offload=cpu": sheet.kind is DeviceKind.cuda and offload is OffloadTarget.cpu,
        f"offload=cpu_unpinned{paged}": sheet.kind is DeviceKind.cuda and offload is OffloadTarget.cpu_unpinned,
        "activation_offload=cpu": sheet.kind is DeviceKind.cuda and moved is not ActivationOffload.none,
        f"sharding={sharding.value}": sharding is not Granularity.per_block,
        f"sharding.tp={config.sharding.tp}": config.sharding.tp > 1,
        f"parameters in {dtype.value}": dtype is not known,
    }
    return tuple(name for name, differs in differences.items() if differs)


def passed_over(
    forecasts: Mapping[int, Forecast], settings: Mapping[int, str], keep: str, recommended: Collection[str] = ()
) -> tuple[dict[int, Reason], str]:
    """Return the trials of one number of workers that `forecast.keep` skips, with reasons; or why it skips none.

    It keeps:

    - the requested number of settings with the fastest predictions
    - others that may be as fast as the last of them, by the errors of predictions
    - the fastest of each global batch size, because the batch size may change the loss
    - the setting that the forecast recommends, which may be slower but smaller
    - settings without a prediction

    A setting that is unsure to fit does not count towards the number if another fits; it is kept in addition if it may
    be as fast.

    Args:
        forecasts: by the number of a trial.
        settings: an identifier of the setting of each trial; repeats share it.
        keep: a number of settings, such as `5`, or a share of those that fit, such as `20%`.
        recommended: the identifiers that a forecast recommends.
    """
    able = {n: f for n, f in forecasts.items() if f.fits is not False or f.unsure}
    known = {n: predicted(f.speed) for n, f in able.items() if f.speed is not None}
    counted = {n: one for n, one in known.items() if forecasts[n].fits is not False} or known
    # one trial per setting, the fastest first; if nothing fits, those that are unsure
    ranked = sorted({settings[n]: one for n, one in counted.items()}.values(), key=lambda one: -one.interval.value)
    wanted = number_kept(keep, len(ranked))
    of_batch = {one.samples: one.interval.value for one in reversed(ranked)}
    reasons = {
        n: Reason.of(Code.does_not_fit, **forecast.shortage, keep=keep)
        for n, forecast in forecasts.items()
        if n not in able
    }
    for number, one in known.items():
        last, own = ranked[:wanted][-1], one.interval
        fastest = number in counted and own.value >= of_batch[one.samples]
        if one.ratio(last).high < 1 and settings[number] not in recommended and not fastest:
            values = {"speed": own.value, "low": own.low, "high": own.high, "share": own.value / last.interval.value}
            reasons[number] = Reason.of(Code.too_slow, **values, error=one.ratio_error(last), keep=keep)
    return dict(sorted(reasons.items())), " ".join(say("keeps_all", len(ranked), wanted))


def number_kept(keep: str, settings: int) -> int:
    """Return the number of settings that `forecast.keep` means; at least one.

    Args:
        keep: a number, or a share such as `20%`.
    """
    if keep.endswith("%"):
        return max(1, math.ceil(Fraction(keep[:-1]) / 100 * settings))
    return int(keep)
