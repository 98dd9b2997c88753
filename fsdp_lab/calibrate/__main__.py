"""Measure the time of training on this machine's CPU, for speed forecasts: about two minutes, best on a quiet machine.

python -m fsdp_lab.calibrate workers=2

Options: `workers` (2), `device=auto|cpu|cuda` (GPUs are refused: their speeds come from data sheets), `limit_s=120`
(how long to measure), `name` (of the file in outputs/devices; default: the device's name). Forecasts and sweeps on this
machine use the file automatically; on other machines use `forecast.device=<name>`.
"""

from __future__ import annotations

import fsdp_lab.installed  # noqa: F401

# isort: split
import json
import math
import re
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fsdp_lab.calibrate.reference import Reference, references
from fsdp_lab.calibrate.sure import better_before, how_sure, why_kept
from fsdp_lab.config import ConfigError, UserError, read_words
from fsdp_lab.config.conf import CALIBRATIONS, DEVICE_KINDS, data_sheets, known_devices, slug
from fsdp_lab.cpu_contention import Others
from fsdp_lab.hardware import num_cpus, num_gpus
from fsdp_lab.speed.device import NOT_IN_FILES, Device
from fsdp_lab.wording import count, short_time, significant

KEYS = ("workers", "device", "limit_s", "name")
_LIMIT_S = 120.0
_FORECASTS_S = 25.0  # of the limit: for forecasts of what is measured, and the fit


@dataclass(frozen=True)
class Options:
    """The options of the command.

    Attributes:
        workers: ranks that train side by side.
        limit_s: seconds of the whole calibration.
        name: of the file; None: the device's own.
    """

    workers: int
    limit_s: float
    name: str | None


def main() -> int:
    """Calibrate this machine, print and write the result, and return the exit status."""
    try:
        options = read_options(sys.argv[1:])
        _check_folder()
        device = calibrate(options, references(options.workers))
        file = CALIBRATIONS / f"{options.name or slug(device.name)}.yaml"
        before = None if options.name else better_before(device)
        if before is None:
            write_device(file, device)
    except UserError as error:
        print(f"fsdp_lab.calibrate: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("fsdp_lab.calibrate: interrupted; nothing was written", file=sys.stderr)
        return 130
    print("\n".join([*rates(device), *how_sure(device)]))
    print(f"written: {file}" if before is None else why_kept(before, device))
    return 0


def _check_folder() -> None:
    try:
        CALIBRATIONS.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=CALIBRATIONS):
            pass
    except OSError as error:
        raise UserError(f"{CALIBRATIONS} cannot be written ({error.strerror}); run this in another folder.") from error


def read_options(words: Sequence[str]) -> Options:
    """Return the options in the `key=value` arguments.

    Raises:
        ConfigError: an unknown key, or an invalid value.
    """
    given = read_words(words, KEYS, __doc__ or "")
    kind = given.get("device", "auto")
    if kind not in ("auto", "cpu", "cuda"):
        raise ConfigError(f"device={kind} is not an option. Choose one of: auto, cpu, cuda.")
    if kind == "cuda" and not num_gpus():
        raise ConfigError("device=cuda: this machine has no GPU; use device=cpu, or device=auto.")
    if kind != "cpu" and num_gpus():
        raise ConfigError(
            f"device={kind}: this machine has GPUs, and the steps that a calibration measures are too small for them: "
            "widths up to 384, and collectives up to 8 MiB, where launches take most of the time; use "
            f"forecast.device=<{'|'.join(known_devices())}> or the path of a data sheet, or device=cpu to calibrate "
            "the CPU."
        )
    workers = _whole(given, "workers", min(2, num_cpus()))
    if workers > num_cpus():
        raise ConfigError(f"workers={workers} is more than the {num_cpus()} cores of this machine; use fewer.")
    name = given.get("name")
    if name is not None and not re.fullmatch(r"[\w.-]+", name):
        raise ConfigError(f"name={name} becomes the name of a file; use letters, digits, _, - and points.")
    if name in (*DEVICE_KINDS, *(file.stem for file in data_sheets()), ".", ".."):
        raise ConfigError(f"name={name} has another meaning in forecast.device; use another name.")
    return Options(workers, float(_whole(given, "limit_s", int(_LIMIT_S))), name)


def _whole(given: dict[str, str], key: str, default: int) -> int:
    value = given.get(key, str(default))
    if not re.fullmatch(r"[1-9]\d*", value):
        raise ConfigError(f"{key}={value} is not a whole number above 0; use for example {key}={default}.")
    return int(value)


def calibrate(options: Options, settings: Sequence[Reference]) -> Device:
    """Measure the settings and return this machine as a device.

    Args:
        options: of the command.
        settings: to measure.

    Raises:
        UserError: a rank failed.
    """
    from fsdp_lab.calibrate.fit import fit
    from fsdp_lab.calibrate.steps import as_steps, device_here, with_fit

    begun = time.time()
    print(f"training small models on {count(options.workers, 'worker')} for about {options.limit_s:.0f} s", flush=True)
    with tempfile.TemporaryDirectory() as folder, Others() as others:
        measured = _measure(options, settings, Path(folder), begun + max(options.limit_s - _FORECASTS_S, 0))
    print("forecasting the same steps, and fitting the predictions to the measurements", flush=True)
    steps, alone = as_steps(measured, settings, options.workers)
    here = device_here(options.workers, steps, alone, others.share)
    return with_fit(here, fit(steps, alone, here))


def _measure(options: Options, settings: Sequence[Reference], folder: Path, until: float) -> dict[str, list]:  # type: ignore[type-arg]
    import torch.multiprocessing as mp

    from fsdp_lab.calibrate.rank import run_rank

    arguments = (options.workers, str(folder), list(settings), until)
    try:
        mp.start_processes(run_rank, arguments, nprocs=options.workers, start_method="spawn")
    except (mp.ProcessRaisedException, mp.ProcessExitedException) as error:
        last = str(error).strip().splitlines()[-1]
        raise UserError(f"a worker of the calibration failed: {last}") from error
    content: dict[str, list] = json.loads((folder / "rank0.json").read_text())  # type: ignore[type-arg]
    return content


def write_device(file: Path, device: Device) -> None:
    """Write a file that `load_device` reads, whole or not at all."""
    from dataclasses import asdict

    import yaml

    from fsdp_lab.files import write_text
    from fsdp_lab.speed.measured import plain_measured

    assert device.measured is not None
    content = asdict(device) | {"kind": device.kind.value, "basis": device.basis.value}
    content["peak_flops"] = dict(device.peak_flops)
    content["measured"] = plain_measured(device.measured)
    for name in NOT_IN_FILES:
        del content[name]
    text = yaml.safe_dump(_floats(content), sort_keys=False, default_flow_style=None, width=120)
    write_text(file, f"# Written by python -m fsdp_lab.calibrate.\n{text}")


def _floats(value: object) -> object:
    """Return a value with four digits in each number, in the form that YAML reads as a number."""
    if isinstance(value, dict):
        return {key: _floats(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_floats(item) for item in value]
    if isinstance(value, float) and math.isfinite(value):
        return float(f"{value:.4g}")
    return value


def rates(device: Device) -> list[str]:
    """Return lines about what was calibrated, and how fast it is."""
    assert device.measured is not None
    peaks = ", ".join(f"{dtype} {significant(rate / 1e9)}" for dtype, rate in device.peak_flops.items())
    host = device.measured.host
    return [
        f"{device.name}, PyTorch {device.measured.torch}, {count(device.measured.workers, 'worker')}:",
        f"  matrix products, GFLOP/s per worker: {peaks}",
        *([f"  gathers {significant(device.link_bandwidth / 1e9)} GB/s"] if device.measured.workers > 1 else []),
        f"  Python: {short_time(host.operator_s)} per operator, {short_time(host.collective_s)} per collective",
    ]


if __name__ == "__main__":
    sys.exit(main())
