"""Predict the memory and the speed of a configuration, before anything runs.

python -m fsdp_lab.forecast                                     one configuration, any overrides of fsdp_lab
python -m fsdp_lab.forecast model=vit_l_16 cluster.num_workers=8 forecast.device=cuda forecast.capacity_gib=80 -m

Needs no GPU, no Ray and no weights. -m forecasts every cell of a grid, the same one that a sweep would run.
The default is vit_tiny on digits with a global batch of 64 images; training.global_batch_size='${per_worker:16}'
gives each worker 16. `python -m fsdp_lab --help` lists the groups, `--keys` every key. Its own keys:
  forecast.device              auto (GPUs if this machine has any), cpu, cuda, or a device: a name in conf/device, such
                               as h100_sxm, or in that of --config-dir, or the path of such a file (python -m
                               fsdp_lab.probe makes one of this machine). A device adds its memory and the speed
  forecast.capacity_gib        memory of one device: adds whether a setting fits
  forecast.network_gbit        Gbit/s of a node, all its adapters together; null: the device file assumes it, and ranges
                               over several nodes cover half and twice of that
  forecast.solve               batch: adds the most samples that fit one worker at once; gpus: the fewest workers, with
                               the same global batch, or as ${per_worker:N} says; capacity: the least memory
  forecast.tokens              tokens to train on, as 1e12: adds the hours that they take
  forecast.usd_per_gpu_hour    adds the dollars of a million tokens or samples, and of forecast.tokens
  forecast.lengths             a file with a line `length count` for each length of a row: forecasts some of them
                               (data.length or data.seq_len), and prints the share of steps that would not fit
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
  needs        GPUs: what the allocator reserves for these tensors, the CUDA context and NCCL's buffers. If unsure to
               fit, a range: its lower end is without the allocator's cache. More samples may need less, if
               cached blocks fit them better
  host         host memory in use while a GPU computes
  fits         yes: `needs` is within the capacity, and of a GPU 10 % are left if the allocator returns its cache: more
               than forecasts err; unsure: it may fit, but may run slower or run out of memory; no: not even without
               the cache. The recommendation and the largest microbatch use `yes`; forecast.prune skips `no`
  step ms      with a device: the predicted optimizer step, and tokens/s or samples/s per device
  MFU          the model's FLOPs divided by those that the device could do in that time, in the type that the step
               computes in; causal attention counts whole, as is usual, though half of it is computed and takes time
  bound        the resource that limits the step most: compute, gather, scatter, tp (what tensor-parallel layers send),
               transfer (offload), launch
use=pytorch prints the recommended setting as a function of plain PyTorch instead.
Memory columns that are zero in every row are left out: gradients, where the peak is before they exist. So are settings
beyond the best 24; the CSV has all of them.
"""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text

from fsdp_lab.commands.forecast_cells import arguments, plan_forecasts
from fsdp_lab.commands.forecast_lengths import read_lengths, sentences_of_lengths
from fsdp_lab.commands.messages import explain
from fsdp_lab.config import UserError, workers_of
from fsdp_lab.config.compose import Trial
from fsdp_lab.config.describe import docstring
from fsdp_lab.config.launcher import leave_launcher
from fsdp_lab.config.options import DEVICE_KINDS
from fsdp_lab.config.serialize import value_text
from fsdp_lab.config.status import ExitCode
from fsdp_lab.config.wording import count, time_left
from fsdp_lab.config.words import key_of
from fsdp_lab.forecast.capacity import Forecast, NoForecast
from fsdp_lab.forecast.devices import torch_version
from fsdp_lab.forecast.request import Request
from fsdp_lab.forecast.run import SPEAK_S, forecast_all, forecast_one
from fsdp_lab.forecast.table import Row, best_rows, forecast_table, in_order, write_csv
from fsdp_lab.forecast.words import say
from fsdp_lab.machine.output import outlast_reader
from fsdp_lab.machine.signals import on_end
from fsdp_lab.report.pytorch import to_pytorch
from fsdp_lab.report.terminal import open_console
from fsdp_lab.storage.locks import unwritable
from fsdp_lab.sweep.names import setting
from fsdp_lab.sweep.plan import Plan

if TYPE_CHECKING:
    from fsdp_lab.forecast.answer import ForecastResult


# Keys that change memory or speed, and that people do not think of.
_NOT_TYPED = (
    "activation_checkpointing", "activation_offload", "compile", "sharding.dp_replicate", "sharding.tp",
    "training.grad_accum_steps",
)  # fmt: skip


def main() -> int:
    """Forecast what the command line describes, and return the exit status.

    Returns:
        0: every configuration has a forecast; 1: one has none; 2: bad input; 130: interrupted.
    """
    outlast_reader()
    words = sys.argv[1:]
    if {"-h", "--help"} & set(words):
        print(docstring(sys.modules[__name__]))
        return 0
    on_end(signal.default_int_handler)  # as Ctrl-C
    multirun = bool({"-m", "--multirun"} & set(words))
    if other := [word for word in words if word.startswith("use=") and word != "use=pytorch"]:
        raise UserError(f"{other[0]}: a forecast writes use=pytorch; the report of a sweep writes use=accelerate, too.")
    overrides = [word for word in words if word not in ("-m", "--multirun", "use=pytorch")]
    try:
        leave_launcher()
        plan, swept = plan_forecasts(overrides, multirun)
        return run(plan, swept, as_code="use=pytorch" in words)
    except KeyboardInterrupt:
        print("fsdp_lab.forecast: interrupted before a forecast was made", file=sys.stderr)
        return 130
    except Exception as error:
        message = explain(error, "forecast.folder")
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
    asked = plan.trials[0].config.forecast.device not in DEVICE_KINDS  # else it is this machine's GPU
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


def forecast_grid(plan: Plan, swept: list[str], console: Console, here: bool = False) -> ForecastResult:
    """Forecast, write the files, and print everything except why settings have no forecast.

    Args:
        here: forecast a single configuration in this process. That is faster, but the process cannot join a process
            group later.

    Raises:
        UserError: the folder cannot be written, or the only configuration cannot be forecast here.
        KeyboardInterrupt: interrupted before the first forecast.
    """
    # these imports take a second: errors come first
    from fsdp_lab.forecast.answer import ForecastResult, answers
    from fsdp_lab.forecast.sentences import room_remedies, sentences

    for line in plan.notes():
        console.print(line, highlight=False, markup=False)
    first = plan.trials[0].config
    folder = Path(first.forecast.folder or f"outputs/forecast/{time.strftime('%Y-%m-%d/%H-%M-%S')}")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise unwritable("forecast.folder", folder, error) from error
    requests = [_request(trial, folder / f"timeline_{trial.index}.html") for trial in plan.trials]
    print_scope(console, plan.trials, requests, swept)
    alone = here and len(requests) == 1
    forecasts = [forecast_one(requests[0])] if alone else _with_progress(console, requests)
    finished = [n for n, forecast in enumerate(forecasts) if forecast.error != NoForecast("cancelled")]
    trials, requests = [plan.trials[n] for n in finished], [requests[n] for n in finished]
    every = _rows(trials, requests, [forecasts[n] for n in finished], swept)
    shown, tolerance = in_order(_shown(every)), first.report.speed_tolerance
    made = answers(shown, swept, tolerance, room_remedies(requests, swept))
    result = ForecastResult(swept, in_order(every), shown, made, folder, len(plan.trials) - len(finished))
    if made:
        write_csv(folder / "forecast.csv", result.rows, swept)
        items = "images" if all(t.config.model.sizes() for t in trials) else "items"
        said: Iterable[str] = sentences(result.shown, result.axes, items, result.answers, tolerance)
        if first.forecast.lengths is not None:
            counts = read_lengths(first.forecast.lengths)
            said = sentences_of_lengths(result.rows, counts, first.training.global_batch_size)
        _print(console, result, said)
    return result


def _print(console: Console, result: ForecastResult, said: Iterable[str]) -> None:
    from fsdp_lab.forecast.sentences import allowances_note

    if result.missing:
        made = f"{len(result.rows)} of {count(len(result.rows) + result.missing, 'setting')}"
        console.print(f"Interrupted after {made}: what follows knows nothing of the others.", style="bold")
    for line in said:
        console.print(Text(line, style="bold" if "Recommended: " in line else ""))
    forecasts, best = [row.forecast for row in result.rows], best_rows(result.shown)
    console.print()
    console.print(forecast_table(best, result.axes))
    if len(best) < len(result.shown):
        each = " of each number of workers" if len({row.forecast.num_workers for row in best}) > 1 else ""
        console.print(f"The best {len(best)} of {len(result.shown)} settings{each}; the file below has all.")
    if held := allowances_note(forecasts):
        console.print(held, highlight=False)
    for note in say("host", forecasts):
        console.print(f"note: {note}", highlight=False, markup=False)
    written = count(len(list(result.folder.glob("timeline_*.html"))), "timeline page")
    console.print(f"written: {result.folder}/forecast.csv, {written}", highlight=False)


def _request(trial: Trial, page: Path) -> Request:
    per_worker = "per_worker:" in str(trial.composed["training"]["global_batch_size"])
    return Request.of(trial.config, workers_of(trial.config), page, per_worker)


def _rows(
    trials: Sequence[Trial], requests: Sequence[Request], forecasts: Sequence[Forecast], swept: Sequence[str]
) -> list[Row]:
    """Return one row per setting, in the order of the grid; settings with the same forecast share its pages."""
    pages: dict[str, Path | None] = {}
    rows = []
    for trial, request, forecast in zip(trials, requests, forecasts, strict=True):
        page = pages.setdefault(request.key, request.page)
        microbatch = request.samples_per_worker // trial.config.training.grad_accum_steps
        values = [value_text(setting(trial, key)) for key in swept]
        rows.append(Row(values, forecast, None if forecast.error else page, microbatch, request))
    return rows


def _shown(rows: Sequence[Row]) -> list[Row]:
    """Return the rows, without those that differ only in keys without effect on them; such values become `any`.

    For example, DDP shards nothing, so it ignores how to gather parameters again.
    """
    alike: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        assert row.request is not None
        alike.setdefault((row.request.key, row.request.capacity_bytes, row.request.host), []).append(row)
    shown = []
    for some in alike.values():
        values = [{*column} for column in zip(*(row.settings for row in some), strict=True)]
        shown.append(replace(some[0], settings=[value.pop() if len(value) == 1 else "any" for value in values]))
    return shown


def _with_progress(console: Console, requests: list[Request]) -> list[Forecast]:
    """Return the forecasts, and print how many distinct ones are done and the time left."""
    columns = (TextColumn("forecasting"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=len({request.key for request in requests}))
        first = spoke = time.monotonic()

        def on_done(done: int, total: int) -> None:
            nonlocal first, spoke
            now = time.monotonic()
            if done == 1:  # most of its time was imports
                first = now
            progress.update(task, completed=done)
            if not console.is_terminal and now - spoke >= SPEAK_S:  # a pipe or a file shows no bar
                spoke, left = now, time_left(done - 1, total - 1, now - first)
                console.print(f"forecasting: {done} of {total} done{', ' if left else ''}{left}", highlight=False)

        return forecast_all(requests, on_done)


def print_scope(console: Console, trials: list[Trial], requests: list[Request], swept: list[str]) -> None:
    """Print what the figures are for, and what they exclude."""
    from fsdp_lab.forecast.sentences import request_notes

    groups = ["model", "sharding", "precision", "offload", "reshard_after_forward"]
    groups += [] if requests[0].config.task.optimizers else ["optimizer"]
    fixed = [f"{group}={trials[0].choices[group]}" for group in groups if group not in swept]
    fixed += [f"{key}={value}" for key, value in arguments(trials[0]).items() if key not in swept]
    sizes = sorted({r.samples_per_worker for r in requests})
    item = "image" if all(r.config.model.sizes() for r in requests) else "item"
    size = f"{' or '.join(map(str, sizes))} {item}{'' if sizes == [1] else 's'} per worker and step"
    console.print(f"{count(len(trials), 'setting')}: {' '.join(fixed)}, {size}", highlight=False, markup=False)
    cuda = any(request.cuda for request in requests)
    kind = "GPUs" if cuda else "CPUs (forecast.device=cuda forecasts for GPUs)"
    if cuda and not all(request.cuda for request in requests):
        kind = "GPUs and CPUs, by forecast.device"
    console.print(f"for {kind}: the second optimizer step of the worker that needs most memory", highlight=False)
    typed = {key_of(word) for word in trials[0].overrides}
    if others := [key for key in _NOT_TYPED if key not in typed and key not in swept]:
        values = " ".join(f"{key}={value_text(setting(trials[0], key))}" for key in others)
        console.print(f"not compared: {values}", highlight=False, markup=False)
    if solve := trials[0].config.forecast.solve:
        console.print(f"forecast.solve={solve.name} takes some ten forecasts of each setting", highlight=False)
    for note in request_notes(requests):
        console.print(f"note: {note}", highlight=False, markup=False)
