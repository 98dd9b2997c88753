"""Figures in a report's sentences: with three or four digits, their unit, and their interval.

Every function here is a filter and a global of the templates, by its name.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from fsdp_lab.config.metrics import MIB, declared
from fsdp_lab.config.wording import significant
from fsdp_lab.report.speed import Interval


def times(ratio: Interval) -> str:
    """Return text such as `1.95× (1.80 to 2.11)`; without the interval if it is not known."""
    return f"{_ratio_text(ratio.value)}×{_spread(ratio, _ratio_text)}"


def _spread(interval: Interval, text: Callable[[float], str]) -> str:
    if not interval.known or text(interval.low) == text(interval.high):
        return ""
    if math.isinf(interval.high):
        return " (not known to within a factor of 100)"
    return f" ({text(interval.low)} to {text(interval.high)})"


def _ratio_text(number: float) -> str:
    if 0.995 <= number < 1.005 and number != 1:  # on which side of 1 it is matters
        return f"{number:.3f}"
    return f"{number:.2f}" if 0.1 <= number < 9.995 else significant(number)


def percent(share: float) -> str:
    """Return a share in per cent, below ten with two digits."""
    return f"{share * 100:.2g} %" if share < 0.095 else f"{share * 100:.0f} %"


def speed(interval: Interval) -> str:
    """Return text such as `1,950 samples/s (1,900 to 2,000)`."""
    return f"{figures(interval.value)} samples/s{_spread(interval, figures)}"


def memory(num_bytes: float) -> str:
    """Return bytes with four digits and their unit."""
    number, unit = (num_bytes / MIB, "MiB") if num_bytes < 999.95 * MIB else (num_bytes / MIB / 1024, "GiB")
    return f"{number:#.4g}".rstrip(".") + f" {unit}"


def figures(number: float) -> str:
    """Return a number with three digits, from a thousand on with four: `1,950`, `0.0123`."""
    return f"{float(f'{number:.4g}'):,.0f}" if number >= 999.5 else significant(number)


def change(value: float) -> str:
    """Return a change as a ratio, in per cent with its sign and two or three digits: `+2.7 %`."""
    percent = value * 100
    digits = 0 if abs(percent) >= 100 else 1 if abs(percent) >= 1 else 2 if abs(percent) >= 0.1 else None
    return f"{percent:+.{digits}f} %" if digits is not None else f"{percent:+.1g} %"


def apart(one: float, other: float) -> tuple[str, str]:
    """Return two numbers with four digits, or with as many as show their difference."""
    digits = next((n for n in range(4, 17) if f"{one:.{n}g}" != f"{other:.{n}g}"), 4)
    return f"{one:#.{digits}g}", f"{other:#.{digits}g}"


def closeness(ratio: float) -> str:
    """Return how close figures are by their largest difference, as a ratio: `to 2e-8`, `exactly`."""
    return f"to {ratio:.0e}".replace("e-0", "e-") if ratio else "exactly"


def short(number: int) -> str:
    """Return a large number as `8.03 B`, `86.6 M` or `12.3 K`."""
    unit, size = next(((u, s) for u, s in (("B", 1e9), ("M", 1e6), ("K", 1e3)) if number >= s), ("", 1))
    return f"{significant(number / size)} {unit}" if unit else str(number)


def gib(num_bytes: float) -> str:
    """Return GiB with four digits at most, without their unit."""
    return f"{num_bytes / MIB / 1024:.4g}"


def metric(value: float, key: str) -> str:
    """Return the figure of a metric as tables show it."""
    return declared(key).text(value)
