"""Measure this machine for forecasts, in a minute and a half at most.

python -m fsdp_lab.probe --out conf_of_mine/device/mine.yaml
torchrun --nproc-per-node 8 -m fsdp_lab.probe --out conf_of_mine/device/mine.yaml    also measures collectives
python -m fsdp_lab.forecast --config-dir conf_of_mine forecast.device=mine           uses the file

Prints each figure next to its value before. Changes no clock, power limit or mode of the device. Options:
  --out FILE   where to write the device file; without it the figures are only printed
  --force      overwrite a file that is there
  --steps      also run eight steps of a ViT and a Llama, print forecast against measured, and use these errors for the
               ranges for this device; some minutes more
  nccl=FILE    read the table that a program of nccl-tests printed, such as all_gather_perf; may be given several times
  cluster.address=HOST:PORT   measure on all GPUs of a running Ray cluster, between its nodes, too
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fsdp_lab.config import ConfigError, UserError
from fsdp_lab.config.describe import docstring
from fsdp_lab.config.options import DEVICE_KINDS, data_sheets
from fsdp_lab.config.status import ExitCode
from fsdp_lab.forecast.devices import words_for
from fsdp_lab.forecast.speed.device import NOT_IN_FILES, Device
from fsdp_lab.machine.output import outlast_reader
from fsdp_lab.storage.files import write_text

if TYPE_CHECKING:
    from fsdp_lab.probe.collectives import Log
    from fsdp_lab.probe.figures import Measurement
    from fsdp_lab.probe.measure import Checked


def main() -> int:
    """Measure, print and write, and return the exit status: 0, 2 for bad input, or 130 if interrupted."""
    outlast_reader()
    try:
        if {"-h", "--help"} & set(sys.argv[1:]):
            print(docstring(sys.modules[__name__]))
            return ExitCode.finished
        run(read_arguments(sys.argv[1:]))
    except UserError as error:
        print(f"fsdp_lab.probe: {error}", file=sys.stderr)
        return ExitCode.refused
    except KeyboardInterrupt:
        print("fsdp_lab.probe: interrupted; nothing was written", file=sys.stderr)
        return ExitCode.interrupted
    return ExitCode.finished


@dataclass
class Asked:
    """What the arguments ask for."""

    out: Path | None = None
    force: bool = False
    steps: bool = False
    logs: list[Path] = field(default_factory=list)
    address: str | None = None


def read_arguments(words: Sequence[str]) -> Asked:
    """Return what the arguments ask for.

    Raises:
        ConfigError: an unknown argument; or a file that exists, does not end in .yaml, or has a reserved name.
    """
    parser = argparse.ArgumentParser("fsdp_lab.probe", add_help=False, allow_abbrev=False)
    parser.add_argument("--out", type=lambda word: Path(word).expanduser())
    parser.add_argument("--force", action="store_true")
    parser.add_argument("--steps", action="store_true")
    asked, rest = parser.parse_known_args(words, Asked())
    for word in rest:
        name, _, value = word.partition("=")
        if name == "nccl" and value:
            asked.logs.append(Path(value).expanduser().absolute())
        elif name == "cluster.address" and value:
            asked.address = value
        else:
            raise ConfigError(
                f"{word} is not an option; use --out FILE, --force, --steps, nccl=FILE or cluster.address=HOST:PORT."
            )
    if (out := asked.out) is None:
        return asked
    if out.suffix != ".yaml":
        raise ConfigError(f"--out={out} is not the name of a device file; use --out conf_of_mine/device/mine.yaml.")
    if out.stem in (*DEVICE_KINDS, *(sheet.stem for sheet in data_sheets())):
        raise ConfigError(f"--out={out} is not a name of your own, as forecast.device={out.stem} is another "
                          "device; use --out conf_of_mine/device/mine.yaml.")  # fmt: skip
    if out.exists() and not asked.force:
        raise ConfigError(f"--out={out} is there already; name another file, or overwrite it with --force.")
    return asked


def run(asked: Asked) -> None:
    """Measure on this rank, or on those of a cluster; the first one prints and writes.

    Raises:
        UserError: a log cannot be read, the cluster does not answer, or the file cannot be written.
    """
    logs: list[Log] = []
    if asked.logs:  # errors come before ranks wait for each other
        from fsdp_lab.probe.collectives import read_nccl_log

        logs = [read_nccl_log(file) for file in asked.logs]
    if asked.address is not None:
        from fsdp_lab.engine.everywhere import on_all_ranks

        shown, text = on_all_ranks(asked.address, partial(probed, asked, logs))
    else:
        shown, text = probed(asked, logs)
    if not text:
        return  # not the first rank
    print(*shown, sep="\n")
    if (out := asked.out) is not None:
        try:
            out.parent.mkdir(parents=True, exist_ok=True)
            write_text(out, text)
        except OSError as error:
            raise UserError(f"--out={out} cannot be written: {error.strerror}; name another file.") from error
        print(f"written: {out}; use it with {words_for(out)}")


def probed(asked: Asked, logs: Sequence[Log] = ()) -> tuple[list[str], str]:
    """Measure on this rank, and return the lines to print and the device file; empty except on the first rank."""
    from fsdp_lab.config.machine import check_gpus
    from fsdp_lab.forecast.devices import sheet_of
    from fsdp_lab.probe.measure import check_steps, device_here, measure
    from fsdp_lab.probe.steps import WAIT
    from fsdp_lab.training.distributed import setup_distributed

    check_gpus()
    began = time.monotonic()
    ranks = setup_distributed(timeout=WAIT)

    def say(what: str) -> None:
        if ranks.is_first:
            print(f"{time.monotonic() - began:4.0f} s  {what}", flush=True)

    measured = measure(ranks, *device_here(ranks, sheet_of), logs, say)
    checked = check_steps(measured, ranks, say) if asked.steps else []
    if not ranks.is_first:
        return [], ""
    if not measured.device.peak_flops:
        raise UserError(f"no product was measured, so there is no device file: {'; '.join(measured.left.values())}")
    text = device_text(measured.device, source(measured, ranks.world_size))
    return [*lines(measured), *step_lines(checked)], text


def lines(measured: Measurement) -> Iterator[str]:
    """Yield each figure and its value before, figures that were not measured, and whether the device was busy."""
    yield f"{'figure':<26}{'before':>11}{'measured':>11}"
    for name, before, value, spread in measured.figures:
        was = "-" if before is None else f"{before:.3g}"
        yield f"{name:<26}{was:>11}{value:>11.3g}" + (f"   spread {spread:.0%}" if spread > 0.05 else "")
    for name, why in measured.left.items():
        yield f"not measured: {name}: {why}; it stays as before"
    if busy := [figure.name for figure in measured.figures if figure.is_busy]:
        yield (
            f"The medians of {len(busy)} of {len(measured.figures)} figures are more than 5 % apart: something else "
            "uses the device or its host. Measure again when it is idle."
        )


def step_lines(checked: Sequence[Checked]) -> Iterator[str]:
    """Yield the steps, forecast and measured."""
    if checked:
        yield f"{'step':<46}{'forecast ms':>13}{'measured ms':>13}{'error':>8}"
    for one in checked:
        yield f"{one.name:<46}{one.forecast_s * 1e3:>13.2f}{one.measured_s * 1e3:>13.2f}{one.error:>+8.0%}"


def source(measured: Measurement, ranks: int) -> str:
    """Return the source of the figures: host, driver, versions, and what was not measured."""
    import torch

    parts = [f"python -m fsdp_lab.probe on {platform.node()}, {time.strftime('%Y-%m-%d')}, {ranks} rank(s)"]
    parts += [f"PyTorch {torch.__version__}, Python {platform.python_version()}, Linux {platform.release()}"]
    parts += [f"driver {file.read_text().strip()}" for file in Path("/sys/module/nvidia").glob("version")]
    if torch.version.cuda and torch.cuda.is_available():
        cudnn = torch.backends.cudnn.version()
        parts += [f"CUDA {torch.version.cuda}, cuDNN {cudnn}, NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}"]
    text = "; ".join(parts) + "." + "".join(f" Not measured: {name}." for name in measured.left)
    busy = [figure.name for figure in measured.figures if figure.is_busy]
    return text + (f" The device was busy: {', '.join(busy)}." if busy else "")


def device_text(device: Device, source: str) -> str:
    """Return a device file, as `load_device` reads it."""
    import yaml

    def given(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        return {name: value for name, value in pairs if value and name not in NOT_IN_FILES}

    figures = json.dumps(asdict(device, dict_factory=given) | {"source": source})
    rounded = json.loads(figures, parse_float=lambda digits: float(f"{float(digits):.4e}"))
    text: str = yaml.safe_dump(rounded, sort_keys=False, default_flow_style=None, width=120, allow_unicode=True)
    return text
