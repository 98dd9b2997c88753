"""What the command prints in addition to the table: what fits, the answers, notes. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from fsdp_lab.config.axes import Where, notes
from fsdp_lab.config.axes.checkpointing import ActivationCheckpointing
from fsdp_lab.forecast.answer import BATCH, WORKERS, ForecastAnswer
from fsdp_lab.forecast.capacity import Forecast
from fsdp_lab.forecast.request import Request
from fsdp_lab.forecast.scaling import series_of
from fsdp_lab.forecast.table import Row, unit_of
from fsdp_lab.forecast.words import say
from fsdp_lab.record.trial import words
from fsdp_lab.report.answer import plain_text

_UNSURE = 1e12  # sorts after all numbers of workers, and before `inf`
_MOST_ANSWERS = 3  # with more, only the recommended setting of each is described


def sentences(
    rows: Sequence[Row], swept: Sequence[str], items: str, made: Sequence[ForecastAnswer], tolerance: float
) -> list[str]:
    """Return one line each for what fits, for the effect of more workers, and for the answers.

    Args:
        items: the noun for the samples of a batch.
        tolerance: `report.speed_tolerance`.
    """
    having = [row for row in rows if not row.forecast.error]
    lines = [*say("fits", rows, having, items), *say("series", series_of(made, tolerance))]
    lines += _solved(having, swept)
    lines += say("fewest", _fewest(having, swept), having)
    for answer in made:
        new = [note for note in answer.notes if note not in lines]
        shown = replace(answer, notes=new, lines=answer.lines if len(made) <= _MOST_ANSWERS else [])
        lines += plain_text(shown, "forecast.csv")
    speeds = [row.forecast.speed for row in rows if row.forecast.speed is not None and row.forecast.speed.network]
    lines += dict.fromkeys([*say("reached", speeds), *say("assumed", speeds)])
    lines += say("losses") if any(key.partition(".")[0] == "precision" for key in swept) else []
    solved = {row.forecast.solved.name for row in having if row.forecast.solved is not None}
    lines += say("more_workers", having) if WORKERS not in swept and "gpus" not in solved else []
    return [line.replace("`", "") for line in lines]


def _solved(rows: Sequence[Row], swept: Sequence[str]) -> list[str]:
    """Return the best answer to `forecast.solve`; if nothing fits, the one that lacks the least memory."""
    asked = [(row, row.forecast.solved) for row in rows if row.forecast.solved is not None]
    fitting = [(row, found) for row, found in asked if found.value]
    sign = -1 if asked and asked[0][1].name == "batch" else 1
    least = sorted(asked, key=lambda pair: pair[1].forecast.sure_bytes)
    for row, found in (sorted(fitting, key=lambda pair: sign * pair[1].value) or least)[:1]:
        name = words(dict(zip(swept, row.settings, strict=True))) if swept else ""
        return say("solved", row, replace(row, forecast=found.forecast), name)
    return []


def _fewest(rows: Sequence[Row], swept: Sequence[str]) -> dict[str, list[str]]:
    """Return the fewest workers -> the settings that need them; empty for one number of workers or no capacity."""
    if WORKERS not in swept or all(row.forecast.capacity_bytes is None for row in rows):
        return {}
    by_setting: dict[str, list[Forecast]] = {}
    for row in rows:
        name = words({key: value for key, value in zip(swept, row.settings, strict=True) if key != WORKERS})
        by_setting.setdefault(name, []).append(row.forecast)
    fewest: dict[float, list[str]] = {}
    for name, forecasts in by_setting.items():
        holding = [forecast.num_workers for forecast in forecasts if forecast.fits]
        unsure = any(forecast.unsure for forecast in forecasts)
        fewest.setdefault(min(holding, default=_UNSURE if unsure else math.inf), []).append(name)
    texts = {_UNSURE: "not sure, or not known", math.inf: "none of these"}
    return {texts.get(number, f"{number:.0f}"): names for number, names in sorted(fewest.items())}


def request_notes(requests: Sequence[Request]) -> list[str]:
    """Return notes about what these forecasts assume or do not include; each note once."""
    all_notes = [note for r in requests for note in _notes(r)]
    sizes = sorted({r.samples_per_worker for r in requests})
    if len({r.config.training.global_batch_size for r in requests}) == 1 and len(sizes) > 1:
        same_tp = len({r.config.sharding.tp for r in requests}) == 1
        fewest, most = ("fewest workers", "most") if same_tp else ("lowest data-parallel degree", "highest")
        all_notes.append(
            f"the global batch is the same, so a worker has {sizes[-1]:,} items with the {fewest} and {sizes[0]:,} "
            f"with the {most}; training.global_batch_size='${{per_worker:{sizes[-1]}}}' keeps {sizes[-1]:,}."
        )
    gbit, widest = requests[0].config.forecast.network_gbit, max(requests, key=lambda r: r.num_workers)
    if gbit is not None and widest.sheet is None:
        all_notes.append(
            f"forecast.network_gbit={gbit:g} has no effect: no device is known, so no speed is; use forecast.device."
        )
    elif gbit is not None and widest.sheet is not None and widest.num_workers <= widest.sheet.node_size:
        all_notes.append(
            f"forecast.network_gbit={gbit:g} has no effect on {widest.num_workers} workers: its nodes have "
            f"{widest.sheet.node_size} devices; use more workers, or cluster.gpus_per_node for smaller nodes."
        )
    return list(dict.fromkeys(all_notes))


def _notes(request: Request) -> Iterator[str]:
    if request.config.precision.float8 and not request.config.compile:
        yield (
            "precision=float8 without compile=true: one such step was published, and took a third less time and 1.6 "
            "times the memory of its forecast; what is known of float8 is known of compiled steps."
        )
    # a GPU without a data sheet has no predicted speed, but known products
    has_tf32 = True if request.sheet is not None and "tfloat32" in request.sheet.peak_flops else None
    yield from notes(request.config, Where(request.cuda, has_tf32))


def room_remedies(requests: Sequence[Request], swept: Sequence[str]) -> list[str]:
    """Return overrides that need less memory on a GPU, of keys that are not swept."""
    keeps_all = all(r.config.activation_checkpointing is ActivationCheckpointing.none for r in requests)
    has_several = any(r.samples_per_worker > 1 for r in requests)
    remedies = (
        ("activation_checkpointing", "activation_checkpointing=full", keeps_all),
        (BATCH, f"a smaller {BATCH}", has_several),
    )
    return [text for key, text, helps in remedies if helps and key not in swept]


def allowances_note(forecasts: Sequence[Forecast]) -> str:
    """Return what `needs` includes in addition to tensors, in the unit of the table; "" for nothing."""
    return " ".join(say("allowances", forecasts, *unit_of(forecasts)))
