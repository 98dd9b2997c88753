"""Predict the memory and the speed of a configuration, before anything runs.

python -m fsdp_lab.forecast                                     one configuration, any overrides of fsdp_lab
python -m fsdp_lab.forecast model=vit_l_16 cluster.num_workers=8 forecast.device=cuda forecast.capacity_gib=80 -m

Needs no GPU, no Ray and no weights. -m forecasts every cell of a grid, the same one that a sweep would run.
The default is vit_tiny on digits with a global batch of 64 images; training.global_batch_size='${per_worker:16}'
gives each worker 16. `python -m fsdp_lab --help` lists the groups, `--keys` every key. Its own keys:
  forecast.device              auto (GPUs if this machine has any), cpu, cuda, or a device: a name in conf/device, such
                               as h100_sxm, or the path of such a file. A device adds its memory and the speed
  forecast.capacity_gib        memory of one device: adds whether a setting fits
  forecast.network_gbit        Gbit/s of a node, all its adapters together; null: the device file assumes it, and ranges
                               over several nodes cover half and twice of that
  forecast.largest_microbatch  true: adds the largest number of images that one worker can take at once
  forecast.folder              folder for the CSV and the timelines; null: outputs/forecast/<date>/<time>
  forecast.keep, forecast.prune, forecast.enabled   for sweeps: run the fastest; skip what cannot fit; make forecasts

The answer comes first, then a table of the worker with the highest peak, at its peak. In it the smallest peak, or the
fastest, comes first:
  workers      number of workers, if it differs; otherwise the title has it
  peak         all tensors: the sum of the columns that follow
  params       its shard of the parameters           optimizer    its shard of the optimizer's state
  grads        gradients, sharded or whole; with DDP the buckets that they are views of
  gathered     gathered parameters, and the buffers of their all-gather
  activations  what the forward pass keeps, and the batch on a GPU
  rest         temporaries, reduce buffers, the batch
  needs        GPUs: what the allocator reserves for these tensors, the CUDA context and NCCL's buffers. For a tight
               setting a range: its lower end is without the allocator's cache. More samples may need less, if
               cached blocks fit them better
  host         host memory in use while a GPU computes
  fits         yes: `needs` is within the capacity; tight: only without the allocator's cache, so it may run slower or
               run out of memory; no: not even then. The recommendation and the largest microbatch use `yes` (unsure:
               of one sample it is `tight`); forecast.prune skips `no`
  step ms      with a device: the predicted optimizer step, and tokens/s or samples/s per device
  MFU          the model's FLOPs divided by those that the device could do in that time
  bound        the resource that limits the step most: compute, gather, scatter, transfer (offload), launch
use=pytorch prints the recommended setting as a function of plain PyTorch instead.
Memory columns that are zero in every row are left out, and settings beyond the best 24; the CSV has all of them.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence

from fsdp_lab.commands.explain import explain
from fsdp_lab.commands.forecast_cells import plan_forecasts
from fsdp_lab.commands.forecast_grid import forecast_grid
from fsdp_lab.config import UserError
from fsdp_lab.config.conf import DEVICE_KINDS
from fsdp_lab.config.launcher import leave_launcher
from fsdp_lab.config.status import ExitCode
from fsdp_lab.config.wording import count
from fsdp_lab.forecast.devices import torch_version
from fsdp_lab.forecast.table import Row
from fsdp_lab.machine.output import outlast_reader
from fsdp_lab.report.pytorch import to_pytorch
from fsdp_lab.report.terminal import open_console
from fsdp_lab.sweep.plan import Plan


def main() -> int:
    """Forecast what the command line describes, and return the exit status.

    Returns:
        0: every configuration has a forecast; 1: one has none; 2: bad input; 130: interrupted.
    """
    outlast_reader()
    words = sys.argv[1:]
    if {"-h", "--help"} & set(words):
        print(__doc__)
        return 0
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C
    multirun = bool({"-m", "--multirun"} & set(words))
    overrides = [word for word in words if word not in ("-m", "--multirun", "use=pytorch")]
    try:
        leave_launcher()
        plan, swept = plan_forecasts(overrides, multirun)
        return run(plan, swept, as_code="use=pytorch" in words)
    except KeyboardInterrupt:
        print("fsdp_lab.forecast: interrupted before a forecast was made", file=sys.stderr)
        return 130
    except Exception as error:
        message = explain(error)
        if message is None:
            raise
        print(f"fsdp_lab.forecast: {message}", file=sys.stderr)
        return 2


def run(plan: Plan, swept: list[str], as_code: bool = False) -> int:
    console = open_console()
    console.quiet = as_code
    result = forecast_grid(plan, swept, console, here=True)
    for reason in result.reasons:
        print(f"fsdp_lab.forecast: {reason}", file=sys.stderr)
    if not result.answers:
        return ExitCode.failed
    if result.missing:
        made = f"{len(result.rows)} of {count(len(plan.trials), 'setting')}"
        print(f"fsdp_lab.forecast: interrupted after {made}; the others are missing above", file=sys.stderr)
        return ExitCode.interrupted
    if as_code:
        best = result.recommendation.best
        if best is None:
            raise UserError(f"use=pytorch: {result.recommendation.sentence}")
        print(setting_of_forecast(best, result.axes or plan.trials[0].overrides), end="")
        return ExitCode.finished
    asked = plan.trials[0].config.forecast.device not in DEVICE_KINDS  # else the speed comes with this machine's GPU
    return ExitCode.failed if any(r.forecast.error or (r.forecast.no_speed and asked) for r in result.rows) else 0


def setting_of_forecast(row: Row, keys: Sequence[str]) -> str:
    """Return the setting of a forecast as Python code.

    Args:
        keys: those of the row's settings; or without axes, the overrides.
    """
    assert row.forecast.layout is not None and row.request is not None
    request = row.request
    words = [f"{key}={value}" for key, value in zip(keys, row.settings, strict=True)] if row.settings else keys
    title = f"Forecast: {' '.join(words)}".rstrip(": ")
    return to_pytorch(title, request.config, row.forecast.layout, request.num_workers, torch_version())
