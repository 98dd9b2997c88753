"""`forecast.lengths`: the peak at the lengths that rows have, and the share of steps that would not fit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from pathlib import Path

from fsdp_lab.config import ConfigError
from fsdp_lab.config.target import parameters
from fsdp_lab.config.workload import DataConfig
from fsdp_lab.forecast.table import Row

_SHARES = (0.5, 0.9, 0.99, 0.999, 1.0)  # the shares of rows that the forecast lengths cover
_KEYS = ("length", "seq_len")


def key_of_lengths(data: DataConfig) -> str:
    """Return the key of the length of a row.

    Raises:
        ConfigError: the data have no such key.
    """
    taken = parameters(data.function()) if data.function() is not None else {}
    for name in _KEYS:
        if name in (taken or {}):
            return f"data.{name}"
    raise ConfigError(
        f"forecast.lengths: {data.loader or data.target} has no argument length or seq_len; give it one, and "
        "data.example_batch, too."
    )


def read_lengths(path: str) -> dict[int, int]:
    """Return the number of rows of each length, in order, from a file with lines `length count`.

    Raises:
        ConfigError: it cannot be read, or has another form.
    """
    counts: dict[int, int] = {}
    try:
        lines = Path(path).read_text(encoding="utf-8").split("\n")
    except OSError as error:
        raise ConfigError(f"forecast.lengths={path} cannot be read: {error.strerror}.") from None
    for number, line in enumerate(lines, 1):
        words = line.split()
        if words and not (len(words) == 2 and all(word.isdecimal() and int(word) for word in words)):
            raise ConfigError(f"forecast.lengths={path}, line {number}: {line!r} is no length and count, as 512 1200.")
        if words:
            counts[int(words[0])] = counts.get(int(words[0]), 0) + int(words[1])
    if not counts:
        raise ConfigError(f"forecast.lengths={path} is empty; write a line of length and count, as 512 1200, for each.")
    return dict(sorted(counts.items()))


def chosen(counts: dict[int, int]) -> list[int]:
    """Return the lengths to forecast: those that half, 90, 99, 99.9 and 100 % of the rows do not exceed."""
    total, sums = sum(counts.values()), [*accumulate(counts.values())]
    places = (next(i for i, so_far in enumerate(sums) if so_far >= share * total) for share in _SHARES)
    return [[*counts][place] for place in dict.fromkeys(places)]


def sentences_of_lengths(rows: Sequence[Row], counts: dict[int, int], step_rows: int) -> Iterator[str]:
    """Yield what fits.

    Args:
        rows: one per forecast length; the length is the only setting of a row.
        counts: rows of each length.
        step_rows: the rows of a step over all workers.
    """
    total = sum(counts.values())

    def above(length: int) -> float:
        return sum(count for other, count in counts.items() if other > length) / total

    known = {int(row.settings[0]): row.forecast.fits for row in rows if not row.forecast.error}
    shares = ", ".join(f"{length:,} ({1 - above(length):.4g})" for length in sorted(known))
    yield f"Lengths, with the share of {total:,} rows that are no longer: {shares}."
    if not any(row.forecast.capacity_bytes for row in rows):
        return
    fitting = [length for length, fits in known.items() if fits]
    if not fitting:
        yield f"Not even {min(known):,} is sure to fit."
        return
    share = above(max(fitting))
    yield f"Longest that fits: {max(fitting):,}. Of all rows {share:.2%} are longer" + (
        f", and {1 - (1 - share) ** step_rows:.2%} of steps of {step_rows:,} rows have one." if share else "."
    )
