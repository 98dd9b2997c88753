"""What a configuration will hold in memory and how fast it should be, before anything runs.

python -m fsdp_lab.forecast                                     one configuration, any overrides of fsdp_lab
python -m fsdp_lab.forecast model=vit_l_16 cluster.num_workers=8 forecast.device=cuda forecast.capacity_gib=80 -m

Needs no GPU, no Ray and no weights. -m forecasts every cell of a grid, the same one that a sweep would run.
Not named, a configuration is vit_tiny on digits, 64 images in all; training.global_batch_size='${per_worker:16}'
gives each worker 16. `python -m fsdp_lab --help` lists the groups, `--cfg job` every key. Its own keys:
  forecast.device              auto (GPUs where this machine has any), cpu, cuda, or a device: a name in conf/device, as
                               h100_sxm, or the path of a file like those. A device adds its memory and the speed
  forecast.capacity_gib        memory of one device: adds whether it fits
  forecast.largest_microbatch  true: the most images that one worker could take at once
  forecast.folder              where the CSV and the timelines go; null: outputs/forecast/<date>/<time>
  forecast.keep                a number or a share: says which trials a sweep with this key would start, by the same
                               predictions, which finished trials do not correct
  forecast.prune, forecast.enabled   for sweeps: leave out what cannot fit; forecast at all

The table, for the worker that holds most, when it holds most; the smallest peak first, or the fastest:
  workers      how many train together, where that differs; else the title says it
  peak         all tensors at once: the sum of the columns that follow
  params       its shard of the parameters           optimizer    its shard of the optimizer's state
  grads        gradients, sharded or whole; under DDP the buckets that they are views of
  gathered     parameters put together for use, and what they come in
  activations  what the forward pass keeps, and the batch on a GPU
  rest         temporaries, reduce buffers, the batch
  needs        GPUs: what the allocator will reserve for these tensors, the CUDA context and NCCL's buffers
  host         what lies in host memory while a GPU computes
  fits         yes: `needs` is within the capacity; tight: only without what the allocator caches, so that it may run,
               slower, or run out of memory; no: not even then. The recommendation and the largest microbatch take
               `yes` alone; forecast.prune leaves out `no`
  step ms      a device: the predicted optimizer step; tokens/s or samples/s of a device follow from it
  MFU          the model's FLOPs over what the device could do in that time
  bound        what the step would be shortened by most: compute, gather, scatter, transfer (offload), launch
"""

from __future__ import annotations

import fsdp_lab.installed  # noqa: F401

# isort: split
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from fsdp_lab.compose import Trial, check_overrides, explain, group_choices, register_schema, search_path, typed_config
from fsdp_lab.config import (
    ConfigError,
    SweepConfig,
    UserError,
    check_forecast,
    check_pytorch,
    conf_dir,
    cpu_notes,
    default_num_workers,
    sharding_notes,
    split_config_dir,
    with_custom,
)
from fsdp_lab.config.conf import DEVICE_KINDS
from fsdp_lab.config.options import option_values
from fsdp_lab.config.parallel import Granularity
from fsdp_lab.config.workload import ModelConfig, UserData, UserModel
from fsdp_lab.forecast.devices import check_device, device_notes, refined
from fsdp_lab.forecast.fits import Forecast
from fsdp_lab.forecast.run import SPEAK_S, Request, forecast_all, forecast_one
from fsdp_lab.forecast.streams_page import streams_page
from fsdp_lab.forecast.table import Row
from fsdp_lab.sweep.grid import enumerate_grid, fixed_words, swept_keys
from fsdp_lab.sweep.names import setting
from fsdp_lab.sweep.plan import Plan, effect, plan_sweep
from fsdp_lab.terminal import open_console
from fsdp_lab.wording import count, time_left


def main() -> int:
    """0: every configuration has a forecast; 1: one has not; 2: bad input; 130: interrupted."""
    words = sys.argv[1:]
    if {"-h", "--help"} & set(words):
        print(__doc__)
        return 0
    multirun = bool({"-m", "--multirun"} & set(words))
    overrides = [word for word in words if word not in ("-m", "--multirun")]
    try:
        plan, swept = plan_forecasts(overrides, multirun)
        return run(plan, swept)
    except KeyboardInterrupt:
        print("fsdp_lab.forecast: interrupted; no table was written, only the pages of what was done", file=sys.stderr)
        return 130
    except Exception as error:
        message = explain(error)
        if message is None:
            raise
        print(f"fsdp_lab.forecast: {message}", file=sys.stderr)
        return 2


def plan_forecasts(overrides: list[str], multirun: bool) -> tuple[Plan, list[str]]:
    """The configurations to forecast, and the keys in which they differ.

    Raises:
        Exception: what Hydra or the checks say of the overrides.
    """
    config_dir, overrides = split_config_dir(overrides)
    if options := [word for word in overrides if word.startswith("-")]:
        raise ConfigError(
            f"{options[0]} is not an option here; the options are -m, --config-dir and --help, all else is key=value."
        )
    overrides, found_in = with_custom(overrides), search_path(config_dir)
    check_overrides(overrides)
    register_schema()
    with initialize_config_dir(str(conf_dir()), version_base="1.3"):

        def cell(values: Sequence[str], number: int) -> Trial:
            cfg = compose("config", [*values, *found_in], return_hydra_config=True)
            return Trial(number, typed_config(cfg), group_choices(cfg), list(values), Path(), cfg)

        if not multirun:
            trial = cell(overrides, 0)
            check(trial.config)
            return Plan([trial]), []
        parser = OverridesParser.create(config_loader=GlobalHydra.instance().config_loader())
        shared = [*fixed_words(parser, {}, overrides), *found_in]  # a preset among them brings axes of its own
        defaults = dict(compose("config", shared, return_hydra_config=True).hydra.sweeper.params)
        grid = enumerate_grid(parser, defaults, overrides)
        return plan_sweep(grid, cell, check, fold=False), swept_keys(grid)


def check(config: SweepConfig) -> None:
    """As for a trial, but for machines that are not this one. The shape of a batch is read here."""
    config.check(workers(config))
    check_pytorch(config)
    config.data.check_files()
    check_forecast(replace(config, forecast=replace(config.forecast, keep=None)))  # which needs no speeds to be ignored
    check_device(config, workers(config))


def workers(config: SweepConfig) -> int:
    return config.cluster.num_workers or default_num_workers()


def run(plan: Plan, swept: list[str]) -> int:
    """Forecast, print, write."""
    from fsdp_lab.forecast.kept import kept_sentences
    from fsdp_lab.forecast.plot import write_plot, write_scaling  # these import PyTorch: a typo is told before
    from fsdp_lab.forecast.recommend import speed_verdict
    from fsdp_lab.forecast.table import forecast_table, in_order, write_csv
    from fsdp_lab.forecast.verdict import blocks_against_root, verdict

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
    tell_what(console, plan.trials, requests, swept)
    found = [forecast_one(requests[0])] if len(requests) == 1 else with_progress(console, requests)

    every = _rows(plan.trials, requests, found, swept)
    rows = in_order(_shown(plan.trials, every, swept))
    console.print(forecast_table(rows, swept))
    tell_allowances(console, found)
    write_csv(folder / "forecast.csv", in_order(every), swept)
    drawn = "forecast.png, " if swept and write_plot(folder / "forecast.png", rows, swept) else ""
    drawn += "scaling.png, " if write_scaling(folder / "scaling.png", rows, swept) else ""
    pages_written = len(list(folder.glob("timeline_*.html")))
    written = f"{drawn}{count(pages_written, 'timeline page')}"
    if streams := len(list(folder.glob("streams_*.html"))):
        written += f", {count(streams, 'page')} of streams"
    console.print(f"written: {folder}/forecast.csv, {written}", highlight=False)
    items = "images" if all(isinstance(t.config.model, ModelConfig) for t in plan.trials) else "items"
    console.print(Text(verdict(rows, swept, items), style="bold"))
    for sentence in speed_verdict(rows, swept, first.report.speed_tolerance):
        console.print(Text(sentence, style="bold" if "Should be fastest" in sentence else ""))
    more = [blocks_against_root(rows, swept)]
    if first.forecast.keep is not None:
        cells = [_as_shown(t, row, swept) for t, row in zip(plan.trials, every, strict=True)]
        more += kept_sentences(cells, requests, swept, first.forecast.keep, effect)
    for sentence in filter(None, more):
        console.print(Text(sentence))
    for reason in sorted({reason for f in found for reason in (f.error, f.no_speed) if reason}):
        print(f"fsdp_lab.forecast: {reason}", file=sys.stderr)
    asked = first.forecast.device not in DEVICE_KINDS  # else the speed comes with a calibration that is there
    return 1 if any(f.error or (f.no_speed and asked) for f in found) else 0


def _rows(
    trials: Sequence[Trial], requests: Sequence[Request], found: Sequence[Forecast], swept: Sequence[str]
) -> list[Row]:
    """One for each setting, in the order of the grid; those that share a forecast share its pages."""
    pages: dict[str, Path | None] = {}
    for request in requests:
        pages.setdefault(request.key, request.page)
    rows = []
    for trial, request, forecast in zip(trials, requests, found, strict=True):
        training = trial.config.training
        page = None if forecast.error else pages[request.key]
        streams = streams_page(page) if page is not None and forecast.speed is not None else None
        microbatch = training.global_batch_size // request.num_workers // training.grad_accum_steps
        rows.append(Row([str(setting(trial, key)) for key in swept], forecast, page, microbatch, streams))
    return rows


def _shown(trials: Sequence[Trial], rows: Sequence[Row], swept: Sequence[str]) -> list[Row]:
    """The rows without those that differ in a key that means nothing to them: how DDP, which shards nothing, is to
    gather again."""
    found: dict[tuple[str, ...], Row] = {}
    for trial, row in zip(trials, rows, strict=True):
        shown = _as_shown(trial, row, swept)
        found.setdefault(tuple(shown.settings), shown)
    return list(found.values())


def _as_shown(trial: Trial, row: Row, swept: Sequence[str]) -> Row:
    idle = trial.config.sharding.granularity is Granularity.ddp
    values = [
        "any" if idle and key.partition(".")[0] == "reshard_after_forward" else value
        for key, value in zip(swept, row.settings, strict=True)
    ]
    return replace(row, settings=values)


def with_progress(console: Console, requests: list[Request]) -> list[Forecast]:
    """Forecasts, and shows how many of the distinct ones are done and how long the others will take."""
    left = TextColumn("{task.fields[left]}")
    columns = (TextColumn("forecasting"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), left)
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=len({request.key for request in requests}), left="")
        began = spoke = time.monotonic()

        def on_done(done: int, total: int) -> None:
            nonlocal spoke
            now = time.monotonic()
            left = time_left(done, total, now - began)
            progress.update(task, completed=done, left=left)
            if not console.is_terminal and now - spoke >= SPEAK_S:  # a pipe or a file shows no bar
                spoke = now
                console.print(f"forecasting: {done} of {total} done{', ' if left else ''}{left}", highlight=False)

        return forecast_all(requests, on_done)


def tell_what(console: Console, trials: list[Trial], requests: list[Request], swept: list[str]) -> None:
    """What the figures are about, and what in the configuration they do not see."""
    groups = ("model", "sharding", "precision", "offload", "reshard_after_forward", "optimizer")
    fixed = [f"{group}={trials[0].choices[group]}" for group in groups if group not in swept]
    fixed += [f"{key}={value}" for key, value in _arguments(trials[0]).items() if key not in swept]
    sizes = sorted(
        {t.config.training.global_batch_size // r.num_workers for t, r in zip(trials, requests, strict=True)}
    )
    models = [t.config.model for t in trials]
    images = sorted({(m.image_size, m.num_channels) for m in models if isinstance(m, ModelConfig)})
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
    notes = [note for r in requests for note in (*sharding_notes(r.config), *(() if r.cuda else cpu_notes(r.config)))]
    if any(request.config.compile for request in requests):
        notes.append(
            "the memory of compile=true is forecast as eager: what the compiler fuses is not held, so it is an upper "
            "bound."
        )
    if any(request.config.precision.float8 for request in requests):
        notes.append(
            "precision=float8 is forecast as bf16_mixed, memory and speed: neither the float8 copies of a product nor "
            "its faster kernels are counted."
        )
    if any(request.config.compile_memory_budget is not None for request in requests):
        notes.append("compile_memory_budget is not forecast: every budget has the figures of the eager step.")
    if (needed := len({request.key for request in requests})) < len(requests):
        shared = f"{count(len(requests), 'setting')} need {count(needed, 'forecast')}"
        notes.append(f"{shared}: those that cannot differ in memory share one.")
    if len({request.num_workers for request in requests}) > 1 and len(sizes) > 1:
        notes.append(
            f"the global batch stays as it is, so a worker has {sizes[-1]:,} items with the fewest workers and "
            f"{sizes[0]:,} with the most; training.global_batch_size='${{per_worker:{sizes[-1]}}}' keeps {sizes[-1]:,}."
        )
    notes += [note for request in requests for note in device_notes(request.config, request.num_workers)]
    if any(r.config.forecast.keep is not None and refined(r.sheet) != r.sheet for r in requests):
        notes.append("with forecast.keep finished trials correct no prediction, for they correct none of a sweep's.")
    if not cuda and any(request.capacity_bytes for request in requests):
        notes.append("the capacity is compared with a CPU worker's tensors; for GPUs add forecast.device=cuda.")
    for note in dict.fromkeys(notes):
        console.print(f"note: {note}", highlight=False, markup=False)


def _arguments(trial: Trial) -> dict[str, object]:
    """The arguments of a model and a data set that are named by `_target_`, by their keys; of the model's those alone
    that its option does not say by its name."""
    found: dict[str, object] = {}
    if isinstance(trial.config.model, UserModel):
        of_option = option_values("model", trial.choices["model"])
        theirs = {key: value for key, value in trial.values.items() if key.startswith("model.")}
        found |= {key: value for key, value in theirs.items() if of_option.get(key.partition(".")[2]) != value}
    if isinstance(trial.config.data, UserData):
        found |= {"data": trial.choices["data"]}
        found |= {f"data.{name}": value for name, value in trial.config.data.arguments.items() if value is not None}
    return found


def tell_allowances(console: Console, found: list[Forecast]) -> None:
    """What `needs` and `host` hold beside tensors."""
    on_device = _largest(forecast.allowances for forecast in found)
    if on_device:
        computed = on_device.pop("fragmentation")
        assumed = ", ".join(f"{name} {size / 2**20:,.0f} MiB" for name, size in on_device.items())
        line = f"needs = peak + {assumed} (assumed) + fragmentation, up to {computed / 2**20:,.0f} MiB (computed)"
        on_host = _largest(forecast.host_allowances for forecast in found)
        rounding = sum(on_host.values())
        line += f"; host includes up to {rounding / 2**20:,.0f} MiB for {', '.join(on_host)}" if rounding else ""
        console.print(f"{line}.", highlight=False)


def _largest(all_sizes: Iterable[dict[str, int]]) -> dict[str, int]:
    """The largest of each name."""
    largest: dict[str, int] = {}
    for sizes in all_sizes:
        for name, size in sizes.items():
            largest[name] = max(size, largest.get(name, 0))
    return largest


if __name__ == "__main__":
    sys.exit(main())
