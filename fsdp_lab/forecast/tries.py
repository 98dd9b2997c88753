"""Settings outside the grid that are forecast as well: hybrid sharding between nodes, and what frees memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from fsdp_lab.config import ConfigError
from fsdp_lab.config.parallel import Granularity
from fsdp_lab.config.training import ActivationCheckpointing
from fsdp_lab.forecast.answer import ForecastAnswer, samples_per_s
from fsdp_lab.forecast.capacity import Forecast
from fsdp_lab.forecast.run import Request
from fsdp_lab.forecast.table import Row
from fsdp_lab.record.trial import words

HYBRID, BATCH, CHECKPOINTING = "sharding.dp_replicate", "training.global_batch_size", "activation_checkpointing"
_MOST = 12  # as many forecasts as a small grid
_WAITS = 0.5  # the share of a step that gathers and scatters bound, from which hybrid sharding is tried


@dataclass(frozen=True)
class Try:
    """A setting with other values of keys that the grid does not vary.

    Attributes:
        of: the recommended setting of the answer, or the one that needs least where nothing fits.
        words: the changed keys, with their values as typed.
        row: the forecast.
        name: of the setting that was changed, if that is another; the recommended one may not fit.
    """

    of: Row
    words: Mapping[str, str]
    row: Row
    name: str = ""

    @property
    def is_hybrid(self) -> bool:
        return HYBRID in self.words

    @property
    def fits(self) -> bool:
        return self.row.forecast.fits is not False

    @property
    def is_faster(self) -> bool:
        return self.is_hybrid and self.fits and samples_per_s(self.row) > samples_per_s(self.of)


def try_others(
    made: Sequence[ForecastAnswer], swept: Sequence[str], make: Callable[[list[Request]], list[Forecast]]
) -> list[Try]:
    """Return for each answer the first of its tries that fits, else the one that needs least; none where none is made.

    Args:
        make: returns the forecast of each request, in order.
    """
    tries = [one for answer in made for one in (*_hybrid(answer, swept), *_roomier(answer, swept))][:_MOST]
    forecasts: list[Forecast] = []
    with suppress(KeyboardInterrupt):  # the answer is known without them
        forecasts = make([request for _, _, _, request in tries]) if tries else []
    done: dict[int, list[Try]] = {}
    for (of, base, changed, request), forecast in zip(tries, forecasts, strict=False):
        if not forecast.error:
            size = request.config.training.global_batch_size // request.num_workers
            name = "" if base is of else words(dict(zip(swept, base.settings, strict=True)))
            row = Row(base.settings, forecast, None, size // request.config.training.grad_accum_steps, request)
            done.setdefault(id(of), []).append(Try(of, changed, row, name))
    return [
        next((one for one in some if one.fits), None) or min(some, key=lambda one: one.row.forecast.least_bytes)
        for some in done.values()
    ]


_Asked = tuple[Row, Row, dict[str, str], Request]


def _hybrid(answer: ForecastAnswer, swept: Sequence[str]) -> Iterator[_Asked]:
    """Yield shards within a node where a step waits for gathers or scatters between nodes.

    Of the recommended setting, and of the one that needs least.
    """
    best = answer.best
    speed = best.forecast.speed if best is not None else None
    if best is None or speed is None or speed.network is None:
        return
    if speed.shares.get("gather", 0.0) + speed.shares.get("scatter", 0.0) < _WAITS:
        return
    for base in [best] if answer.least is best else [best, answer.least]:
        request = base.request
        if request is None or request.sheet is None or HYBRID in swept:
            continue
        sharding = request.config.sharding
        if sharding.granularity is Granularity.ddp or sharding.dp_replicate > 1:
            continue
        nodes, left_over = divmod(request.num_workers, request.sheet.node_size)
        if left_over:  # a shard group would be on two nodes
            continue
        config = replace(request.config, sharding=replace(sharding, dp_replicate=nodes))
        yield from _asked(best, base, {HYBRID: str(nodes)}, replace(request, config=config))


def _roomier(answer: ForecastAnswer, swept: Sequence[str]) -> Iterator[_Asked]:
    """Yield full checkpointing, one sample at once, and both, where nothing fits."""
    least = answer.least
    request = least.request
    if answer.best is not None or request is None:
        return
    config, accum = request.config, request.config.training.grad_accum_steps
    smaller = replace(config.training, global_batch_size=request.num_workers * accum)
    full = replace(config, activation_checkpointing=ActivationCheckpointing.full)
    with_full, with_one = {CHECKPOINTING: "full"}, {BATCH: f"'${{per_worker:{accum}}}'"}
    may_be_full = CHECKPOINTING not in swept and config.activation_checkpointing is ActivationCheckpointing.none
    may_be_one = BATCH not in swept and least.microbatch > 1
    for typed, changed, may_be in (
        (with_full, full, may_be_full),
        (with_one, replace(config, training=smaller), may_be_one),
        ({**with_one, **with_full}, replace(full, training=smaller), may_be_full and may_be_one),
    ):
        if may_be:
            yield from _asked(least, least, typed, replace(request, config=changed))


def _asked(of: Row, base: Row, typed: dict[str, str], request: Request) -> Iterator[_Asked]:
    """Yield the try, if the setting has a meaning: without a page, and without a search for the largest microbatch."""
    try:
        request.config.check(request.num_workers)
    except ConfigError:
        return
    config = replace(request.config, forecast=replace(request.config.forecast, largest_microbatch=False))
    yield of, base, typed, replace(request, config=config, page=None)
