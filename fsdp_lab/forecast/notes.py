"""Notes below the forecast table: what figures leave out, and what they include besides tensors. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from fsdp_lab.config import cpu_notes, sharding_notes
from fsdp_lab.config.training import ActivationCheckpointing
from fsdp_lab.forecast.capacity import Forecast
from fsdp_lab.forecast.devices import device_notes
from fsdp_lab.forecast.run import Request
from fsdp_lab.forecast.table import unit_of
from fsdp_lab.wording import count


def request_notes(requests: Sequence[Request]) -> list[str]:
    """Return notes about what these forecasts assume or do not include; each note once."""
    notes = [note for r in requests for note in (*sharding_notes(r.config), *(() if r.cuda else cpu_notes(r.config)))]
    notes += _unseen(requests)
    if (needed := len({request.key for request in requests})) < len(requests):
        shared = f"{count(len(requests), 'setting')} need {count(needed, 'forecast')}"
        notes.append(f"{shared}: settings that cannot differ in memory share one.")
    sizes = sorted({r.config.training.global_batch_size // r.num_workers for r in requests})
    if len({r.config.training.global_batch_size for r in requests}) == 1 and len(sizes) > 1:
        notes.append(
            f"the global batch is the same, so a worker has {sizes[-1]:,} items with the fewest workers and "
            f"{sizes[0]:,} with the most; training.global_batch_size='${{per_worker:{sizes[-1]}}}' keeps {sizes[-1]:,}."
        )
    notes += [note for request in requests for note in device_notes(request.config, request.num_workers)]
    if not any(r.cuda for r in requests) and any(r.capacity_bytes for r in requests):
        notes.append("the capacity is compared with a CPU worker's tensors; for GPUs add forecast.device=cuda.")
    return list(dict.fromkeys(notes))


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


def _unseen(requests: Sequence[Request]) -> list[str]:
    """Return what the forecasts assume of kernels that no GPU has confirmed."""
    notes = []
    if any(request.config.compile and request.cuda for request in requests):
        notes.append(
            "compile=true: what blocks keep is what PyTorch's compiler decides; their kernels are planned as for a "
            "CPU, so a GPU's temporary tensors may differ."
        )
    if any(request.config.precision.float8 for request in requests):
        notes.append(
            "precision=float8: the operators are those of torchao's rowwise recipe, with the efficiency that matrix "
            "products in bfloat16 have."
        )
    return notes


def bound_notes(forecasts: Sequence[Forecast]) -> list[str]:
    """Return a note for each reason why memory is an upper bound."""
    reasons = dict.fromkeys(one.upper_bound for one in forecasts if one.upper_bound)
    return [f"{reason}: the memory is an upper bound, and the speed has no fused kernels." for reason in reasons]


def allowances_note(forecasts: Sequence[Forecast]) -> str:
    """Return what `needs` and `host` include besides tensors, in the unit of the table; "" for nothing."""
    on_device = _largest(forecast.allowances for forecast in forecasts)
    if not on_device:
        return ""
    unit, divisor = unit_of(forecasts)

    def size(num_bytes: int) -> str:
        return f"{num_bytes / divisor:,.{2 if unit == 'GiB' else 0}f}"

    computed = on_device.pop("fragmentation")
    assumed = " + ".join(f"{size(num_bytes)} {name}" for name, num_bytes in on_device.items())
    line = (
        f"needs, {unit} = peak + {assumed} (assumed) + up to {size(computed)} cached (computed): the allocator keeps "
        "freed blocks for the stream that used them, and returns them only when the device is full"
    )
    on_host = _largest(forecast.host_allowances for forecast in forecasts)
    rounding = size(sum(on_host.values()))
    return line + (f"; host includes up to {rounding} for {', '.join(on_host)}." if rounding != size(0) else ".")


def _largest(all_sizes: Iterable[dict[str, int]]) -> dict[str, int]:
    """Return the largest size of each name."""
    largest: dict[str, int] = {}
    for sizes in all_sizes:
        for name, size in sizes.items():
            largest[name] = max(size, largest.get(name, 0))
    return largest
