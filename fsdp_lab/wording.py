"""Numbers in sentences for people: counts, times, three significant digits."""

from __future__ import annotations

import math


def count(number: int, what: str) -> str:
    """Returns `1 trial`, `2 trials`, `1,254 trials`."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def duration(seconds: float) -> str:
    """Returns `8 s`, `2 min 5 s`, `3 h 10 min`."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def time_left(done: float, total: float, took_s: float) -> str:
    """Returns `about 2 min 5 s left`, from how long what is done has taken; "" while nothing is done."""
    return f"about {duration(took_s * (total - done) / done)} left" if done > 0 else ""


def significant(value: float) -> str:
    """Returns a number with three significant digits, and with all digits before the point: `0.0123`, `8.80`,
    `14,523`."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    rounded = float(f"{value:.3g}")  # 9.996 is 10.0
    decimals = max(0, 2 - math.floor(math.log10(abs(rounded))))
    return f"{value:,.{decimals}f}"
