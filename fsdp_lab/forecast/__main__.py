"""Predict the memory and the speed of a configuration, before anything runs.

python -m fsdp_lab.forecast                                     one configuration, any overrides of fsdp_lab
python -m fsdp_lab.forecast model=vit_l_16 cluster.num_workers=8 forecast.device=cuda forecast.capacity_gib=80 -m

Needs no GPU, no Ray and no weights. -m forecasts every cell of a grid, the same one that a sweep would run.
The default is vit_tiny on digits with a global batch of 64 images; training.global_batch_size='${per_worker:16}'
gives each worker 16. `python -m fsdp_lab --help` lists the groups, `--cfg job` every key. Its own keys:
  forecast.device              auto (GPUs if this machine has any), cpu, cuda, or a device: a name in conf/device, such
                               as h100_sxm, or the path of such a file. A device adds its memory and the speed
  forecast.capacity_gib        memory of one device: adds whether a setting fits
  forecast.network_gbit        Gbit/s of a node, all its adapters together; null: the device file assumes it, and ranges
                               over several nodes cover half and twice of that
  forecast.largest_microbatch  true: adds the largest number of images that one worker can take at once
  forecast.folder              folder for the CSV and the timelines; null: outputs/forecast/<date>/<time>
  forecast.keep, forecast.prune, forecast.enabled   for sweeps: run the fastest; skip what cannot fit; make forecasts

The table shows the worker with the highest peak, at its peak. The smallest peak, or the fastest, comes first:
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
               run out of memory; no: not even then; upper bound: `needs` is more than the capacity, but an upper
               bound, so nobody knows. The recommendation uses `yes` and `upper bound`, the largest microbatch `yes`;
               forecast.prune skips `no`
  step ms      with a device: the predicted optimizer step, and tokens/s or samples/s per device
  MFU          the model's FLOPs divided by those that the device could do in that time
  bound        the resource that limits the step most: compute, gather, scatter, transfer (offload), launch
Memory columns that are zero in every row are left out; the CSV has all of them.
"""

from __future__ import annotations

import fsdp_lab.installed  # noqa: F401

# isort: split
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from fsdp_lab.compose import Trial
from fsdp_lab.config import UserError
from fsdp_lab.config.conf import DEVICE_KINDS
from fsdp_lab.config.parallel import Granularity
from fsdp_lab.explain import explain
from fsdp_lab.forecast.capacity import Forecast
from fsdp_lab.forecast.cells import arguments, plan_forecasts, workers
from fsdp_lab.forecast.chrome_trace import streams_file
from fsdp_lab.forecast.notes import allowances_note, bound_notes, request_notes, room_remedies
from fsdp_lab.forecast.run import SPEAK_S, Request, forecast_all, forecast_one
from fsdp_lab.forecast.table import Row
from fsdp_lab.status import ExitCode
from fsdp_lab.sweep.names import setting
from fsdp_lab.sweep.plan import Plan
from fsdp_lab.terminal import open_console
from fsdp_lab.wording import count, time_left


def main() -> int:
    """Forecast what the command line describes, and return the exit status.

    Returns:
        0: every configuration has a forecast; 1: one has none; 2: bad input; 130: interrupted.
    """
    words = sys.argv[1:]
    if {"-h", "--help"} & set(words):
        print(__doc__)
        return 0
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C
    multirun = bool({"-m", "--multirun"} & set(words))
    overrides = [word for word in words if word not in ("-m", "--multirun")]
    try:
        plan, swept = plan_forecasts(overrides, multirun)
        return run(plan, swept)
    except KeyboardInterrupt:
        print("fsdp_lab.forecast: interrupted before a forecast was made", file=sys.stderr)
        return 130
    except Exception as error:
        message = explain(error)
        if message is None:
            raise
        print(f"fsdp_lab.forecast: {message}", file=sys.stderr)
        return 2


def run(plan: Plan, swept: list[str]) -> int:
    """Forecast, print, write."""
    from fsdp_lab.forecast.answer import answers, sentences
    from fsdp_lab.forecast.plot import write_plot  # these import PyTorch: typos are reported before
    from fsdp_lab.forecast.table import forecast_table, in_order, write_csv

    console = open_console()
    for line in plan.notes():
        console.print(line, highlight=False, markup=False)
    first = plan.trials[0].config
    folder = Path(first.forecast.folder or f"outputs/forecast/{time.strftime('%Y-%m-%d/%H-%M-%S')}")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"forecast.folder={folder}: {error.strerror}; name a folder that can be written.") from error
    requests = [Request.of(t.config, workers(t.config), folder / f"timeline_{t.index}.html") for t in plan.trials]
    print_scope(console, plan.trials, requests, swept)
    forecasts = [forecast_one(requests[0])] if len(requests) == 1 else with_progress(console, requests)
    finished = [number for number, forecast in enumerate(forecasts) if not forecast.cancelled]
    missing = len(forecasts) - len(finished)
    trials, requests = [plan.trials[n] for n in finished], [requests[n] for n in finished]
    forecasts = [forecasts[n] for n in finished]

    reasons = sorted({reason for f in forecasts for reason in (f.error, f.no_speed) if reason})
    if all(forecast.error for forecast in forecasts):
        return _print_errors(reasons)
    every = _rows(trials, requests, forecasts, swept)
    rows = in_order(_shown(trials, every, swept))
    console.print(forecast_table(rows, swept))
    if held := allowances_note(forecasts):
        console.print(held, highlight=False)
    for note in bound_notes(forecasts):
        console.print(f"note: {note}", highlight=False, markup=False)
    write_csv(folder / "forecast.csv", in_order(every), swept)
    drawn = "forecast.png, " if swept and write_plot(folder / "forecast.png", rows, swept) else ""
    pages_written = len(list(folder.glob("timeline_*.html")))
    written = f"{drawn}{count(pages_written, 'timeline page')}"
    if streams := len(list(folder.glob("streams_*.json.gz"))):
        written += f", {count(streams, 'trace')} of streams"
    console.print(f"written: {folder}/forecast.csv, {written}", highlight=False)
    items = "images" if all(t.config.model.is_image_classifier for t in trials) else "items"
    tolerance = first.report.speed_tolerance
    answered = answers(rows, swept, tolerance, room_remedies(requests, swept))
    for line in sentences(rows, swept, items, answered, tolerance).split("\n"):
        console.print(Text(line, style="bold" if "Recommended: " in line else ""))
    _print_errors(reasons)
    if missing:
        made = f"{len(trials)} of {count(len(plan.trials), 'setting')}"
        print(f"fsdp_lab.forecast: interrupted after {made}; the others are missing above", file=sys.stderr)
        return ExitCode.interrupted
    asked = first.forecast.device not in DEVICE_KINDS  # else the speed comes with a calibration that is there
    return 1 if any(f.error or (f.no_speed and asked) for f in forecasts) else 0


def _print_errors(reasons: Sequence[str]) -> int:
    """Print why settings have no forecast, and return the exit status for that."""
    for reason in reasons:
        print(f"fsdp_lab.forecast: {reason}", file=sys.stderr)
    return 1


def _rows(
    trials: Sequence[Trial], requests: Sequence[Request], forecasts: Sequence[Forecast], swept: Sequence[str]
) -> list[Row]:
    """Return one row for each setting, in the order of the grid; settings that share a forecast share its pages."""
    pages: dict[str, Path | None] = {}
    for request in requests:
        pages.setdefault(request.key, request.page)
    rows = []
    for trial, request, forecast in zip(trials, requests, forecasts, strict=True):
        training = trial.config.training
        page = None if forecast.error else pages[request.key]
        streams = streams_file(page) if page is not None and forecast.speed is not None else None
        microbatch = training.global_batch_size // request.num_workers // training.grad_accum_steps
        rows.append(Row([_typed(setting(trial, key)) for key in swept], forecast, page, microbatch, streams))
    return rows


def _typed(value: object) -> str:
    """Return a value as it is typed on the command line."""
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    return str(value)


def _shown(trials: Sequence[Trial], rows: Sequence[Row], swept: Sequence[str]) -> list[Row]:
    """Return the rows without those that differ only in a key that has no effect on them.

    For example, DDP shards nothing, so it ignores how to gather parameters again.
    """
    by_settings: dict[tuple[str, ...], Row] = {}
    for trial, row in zip(trials, rows, strict=True):
        shown = _as_shown(trial, row, swept)
        by_settings.setdefault(tuple(shown.settings), shown)
    return list(by_settings.values())


def _as_shown(trial: Trial, row: Row, swept: Sequence[str]) -> Row:
    idle = trial.config.sharding.granularity is Granularity.ddp
    values = [
        "any" if idle and key.partition(".")[0] == "reshard_after_forward" else value
        for key, value in zip(swept, row.settings, strict=True)
    ]
    return replace(row, settings=values)


def with_progress(console: Console, requests: list[Request]) -> list[Forecast]:
    """Return the forecasts, and show how many distinct ones are done and how long the others will take."""
    left = TextColumn("{task.fields[left]}")
    columns = (TextColumn("forecasting"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), left)
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=len({request.key for request in requests}), left="")
        first = spoke = time.monotonic()

        def on_done(done: int, total: int) -> None:
            nonlocal first, spoke
            now = time.monotonic()
            if done == 1:  # much of its time was imports
                first = now
            left = time_left(done - 1, total - 1, now - first)
            progress.update(task, completed=done, left=left)
            if not console.is_terminal and now - spoke >= SPEAK_S:  # a pipe or a file shows no bar
                spoke = now
                console.print(f"forecasting: {done} of {total} done{', ' if left else ''}{left}", highlight=False)

        return forecast_all(requests, on_done)


def print_scope(console: Console, trials: list[Trial], requests: list[Request], swept: list[str]) -> None:
    """Print what the figures are about, and what in the configuration they do not include."""
    groups = ("model", "sharding", "precision", "offload", "reshard_after_forward", "optimizer")
    fixed = [f"{group}={trials[0].choices[group]}" for group in groups if group not in swept]
    fixed += [f"{key}={value}" for key, value in arguments(trials[0]).items() if key not in swept]
    sizes = sorted(
        {t.config.training.global_batch_size // r.num_workers for t, r in zip(trials, requests, strict=True)}
    )
    models = [t.config.model for t in trials]
    taken = [model.sizes() for model in models if model.is_image_classifier]
    images = sorted({(sizes["image_size"], sizes["num_channels"]) for sizes in taken})
    shapes = " or ".join(f"{size}x{size}x{channels}" for size, channels in images)
    plural = "" if sizes == [1] else "s"
    items = f"image{plural} of {shapes}" if images else f"item{plural}"
    fixed.append(f"{' or '.join(map(str, sizes))} {items} per worker and step")
    console.print(f"{count(len(trials), 'setting')}: {' '.join(fixed)}", highlight=False, markup=False)
    cuda = any(request.cuda for request in requests)
    kind = "GPUs" if cuda else "CPUs; forecast.device=cuda forecasts for GPUs"
    if cuda and not all(request.cuda for request in requests):
        kind = "GPUs and CPUs, by forecast.device"
    console.print(f"for {kind}; the second optimizer step, on the worker that needs most memory", highlight=False)
    for note in request_notes(requests):
        console.print(f"note: {note}", highlight=False, markup=False)


if __name__ == "__main__":
    sys.exit(main())
