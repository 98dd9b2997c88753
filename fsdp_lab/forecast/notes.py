"""Notes below the forecast table: what figures leave out, and what they include besides tensors. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fsdp_lab.config import cpu_notes, gpu_notes, sharding_notes
from fsdp_lab.config.training import ActivationCheckpointing
from fsdp_lab.config.wording import count
from fsdp_lab.forecast.capacity import GIB, Forecast
from fsdp_lab.forecast.run import Request
from fsdp_lab.forecast.table import unit_of
from fsdp_lab.forecast.words import say


def request_notes(requests: Sequence[Request]) -> list[str]:
    """Return notes about what these forecasts assume or do not include; each note once."""
    notes = [note for r in requests for note in (*sharding_notes(r.config), *_device_notes(r))]
    sizes = sorted({r.config.training.global_batch_size // r.num_workers for r in requests})
    if len({r.config.training.global_batch_size for r in requests}) == 1 and len(sizes) > 1:
        notes.append(
            f"the global batch is the same, so a worker has {sizes[-1]:,} items with the fewest workers and "
            f"{sizes[0]:,} with the most; training.global_batch_size='${{per_worker:{sizes[-1]}}}' keeps {sizes[-1]:,}."
        )
    return list(dict.fromkeys(notes))


def _device_notes(request: Request) -> Iterator[str]:
    """Yield notes that depend on the device; of a GPU without a data sheet no speed is known, and its products are."""
    if not request.cuda:
        yield from cpu_notes(request.config)
    elif request.sheet is not None and "tfloat32" in request.sheet.peak_flops:
        yield from gpu_notes(request.config, has_tf32=True)


def room_remedies(requests: Sequence[Request], swept: Sequence[str]) -> list[str]:
    """Return overrides that leave more room on a GPU, of keys that are not swept."""
    configs = [request.config for request in requests]
    remedies = []
    if "activation_checkpointing" not in swept and all(
        config.activation_checkpointing is ActivationCheckpointing.none for config in configs
    ):
        remedies.append("activation_checkpointing=full")
    smaller = any(r.config.training.global_batch_size > r.num_workers for r in requests)
    if "training.global_batch_size" not in swept and smaller:
        remedies.append("a smaller training.global_batch_size")
    return remedies


def host_notes(forecasts: Sequence[Forecast]) -> list[str]:
    """Return what offloaded settings need of their host, if that is more than it has, or its memory is not known."""
    offloaded = [one for one in forecasts if not one.error and one.peaks.get("host", {}).get("param")]
    short = [one for one in offloaded if one.host_is_short]
    unknown = [one for one in offloaded if one.host.memory_bytes is None]
    notes = []
    for some, what in ((short, "that fit no host"), (unknown, "not checked")):
        if some:
            most = max(some, key=lambda one: one.host_needed_bytes)
            has, workers = most.host.memory_bytes, count(most.host.num_workers, "worker")
            notes.append(
                f"host memory: {count(len(some), 'offloaded setting')} {what}: {workers} of a host need up to "
                f"{_gib(most.host_needed_bytes)}, and it has {'an unknown size' if has is None else _gib(has)}."
            )
    return notes


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:,.3g} GiB"


def allowances_note(forecasts: Sequence[Forecast]) -> str:
    """Return what `needs` includes besides tensors, in the unit of the table; "" for nothing."""
    held: dict[str, list[int]] = {}
    on_gpus = [forecast.allowances for forecast in forecasts if forecast.allowances]
    for name in dict.fromkeys(name for each in on_gpus for name in each):
        held[name] = [each.get(name, 0) for each in on_gpus]
    unit, divisor = unit_of(forecasts)
    digits = 2 if unit == "GiB" else 0
    sizes = {name: [f"{size / divisor:,.{digits}f}" for size in (min(all_), max(all_))] for name, all_ in held.items()}
    return " ".join(say("allowances", unit, sizes)) if sizes else ""
