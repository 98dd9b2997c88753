"""Notes below the forecast table: what figures leave out, and what they include besides tensors. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fsdp_lab.config import cpu_notes, gpu_notes, sharding_notes
from fsdp_lab.config.training import ActivationCheckpointing
from fsdp_lab.forecast.capacity import Forecast
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
    keeps_all = all(r.config.activation_checkpointing is ActivationCheckpointing.none for r in requests)
    has_several = any(r.config.training.global_batch_size > r.num_workers for r in requests)
    remedies = (
        ("activation_checkpointing", "activation_checkpointing=full", keeps_all),
        ("training.global_batch_size", "a smaller training.global_batch_size", has_several),
    )
    return [text for key, text, helps in remedies if helps and key not in swept]


def allowances_note(forecasts: Sequence[Forecast]) -> str:
    """Return what `needs` includes besides tensors, in the unit of the table; "" for nothing."""
    return " ".join(say("allowances", forecasts, *unit_of(forecasts)))
