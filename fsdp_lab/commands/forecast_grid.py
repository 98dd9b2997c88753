"""Forecasts of planned configurations, with what the command prints and writes."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text

from fsdp_lab.commands.forecast_cells import arguments, workers
from fsdp_lab.config import UserError
from fsdp_lab.config.compose import Trial
from fsdp_lab.config.convert import value_text
from fsdp_lab.config.wording import count, time_left
from fsdp_lab.forecast.capacity import Forecast, NoForecast
from fsdp_lab.forecast.run import SPEAK_S, Request, forecast_all, forecast_one
from fsdp_lab.forecast.table import Row, best_rows, forecast_table, in_order, write_csv
from fsdp_lab.forecast.words import say
from fsdp_lab.sweep.names import setting
from fsdp_lab.sweep.plan import Plan

if TYPE_CHECKING:
    from fsdp_lab.forecast.answer import ForecastResult


def forecast_grid(plan: Plan, swept: list[str], console: Console, here: bool = False) -> ForecastResult:
    """Forecast, write the files, and print all but why settings have no forecast.

    Args:
        here: forecast a single configuration in this process, which is faster, and leaves it unfit for another group of
            processes.

    Raises:
        UserError: the folder cannot be written, or the only configuration cannot be forecast here.
        KeyboardInterrupt: interrupted before the first forecast.
    """
    # what these import takes a second: refusals come before
    from fsdp_lab.forecast.answer import ForecastResult, answers
    from fsdp_lab.forecast.sentences import room_remedies

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
        items = "images" if all(t.config.model.is_image_classifier for t in trials) else "items"
        _print(console, result, items, tolerance)
    return result


def _print(console: Console, result: ForecastResult, items: str, tolerance: float) -> None:
    from fsdp_lab.forecast.sentences import allowances_note, sentences

    for line in sentences(result.shown, result.axes, items, result.answers, tolerance):
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


def _rows(
    trials: Sequence[Trial], requests: Sequence[Request], forecasts: Sequence[Forecast], swept: Sequence[str]
) -> list[Row]:
    """Return one row for each setting, in the order of the grid; settings that share a forecast share its pages."""
    pages: dict[str, Path | None] = {}
    rows = []
    for trial, request, forecast in zip(trials, requests, forecasts, strict=True):
        training, page = trial.config.training, pages.setdefault(request.key, request.page)
        microbatch = training.global_batch_size // request.num_workers // training.grad_accum_steps
        values = [value_text(setting(trial, key)) for key in swept]
        rows.append(Row(values, forecast, None if forecast.error else page, microbatch, request))
    return rows


def _shown(rows: Sequence[Row]) -> list[Row]:
    """Return the rows without those that differ only in keys that have no effect on them, whose values are `any`.

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
    """Return the forecasts, and show how many distinct ones are done and how long the others will take."""
    columns = (TextColumn("forecasting"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=len({request.key for request in requests}))
        first = spoke = time.monotonic()

        def on_done(done: int, total: int) -> None:
            nonlocal first, spoke
            now = time.monotonic()
            if done == 1:  # much of its time was imports
                first = now
            progress.update(task, completed=done)
            if not console.is_terminal and now - spoke >= SPEAK_S:  # a pipe or a file shows no bar
                spoke, left = now, time_left(done - 1, total - 1, now - first)
                console.print(f"forecasting: {done} of {total} done{', ' if left else ''}{left}", highlight=False)

        return forecast_all(requests, on_done)


def print_scope(console: Console, trials: list[Trial], requests: list[Request], swept: list[str]) -> None:
    """Print what the figures are about, and what in the configuration they do not include."""
    from fsdp_lab.forecast.sentences import request_notes

    groups = ("model", "sharding", "precision", "offload", "reshard_after_forward", "optimizer")
    fixed = [f"{group}={trials[0].choices[group]}" for group in groups if group not in swept]
    fixed += [f"{key}={value}" for key, value in arguments(trials[0]).items() if key not in swept]
    sizes = sorted({r.config.training.global_batch_size // r.num_workers for r in requests})
    item = "image" if all(r.config.model.is_image_classifier for r in requests) else "item"
    fixed.append(f"{' or '.join(map(str, sizes))} {item}{'' if sizes == [1] else 's'} per worker and step")
    console.print(f"{count(len(trials), 'setting')}: {' '.join(fixed)}", highlight=False, markup=False)
    cuda = any(request.cuda for request in requests)
    kind = "GPUs" if cuda else "CPUs (forecast.device=cuda forecasts for GPUs)"
    if cuda and not all(request.cuda for request in requests):
        kind = "GPUs and CPUs, by forecast.device"
    console.print(f"for {kind}: the second optimizer step of the worker that needs most memory", highlight=False)
    for note in request_notes(requests):
        console.print(f"note: {note}", highlight=False, markup=False)
