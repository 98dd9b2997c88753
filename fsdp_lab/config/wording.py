"""Numbers in sentences for people: counts, resources, times, three significant digits."""

from __future__ import annotations

import math
from collections.abc import Mapping


def count(number: int, what: str) -> str:
    """Return `1 trial`, `2 trials`, `1,254 trials`."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def resources_text(resources: Mapping[str, float]) -> str:
    """Return text such as `2 CPU and 1 GPU`; only resources that trials take."""
    return " and ".join(f"{resources[name]:g} {name}" for name in ("CPU", "GPU") if resources.get(name)) or "no cores"


def duration(seconds: float) -> str:
    """Return `8 s`, `2 min 5 s`, `3 h 10 min`."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def time_left(done: float, total: float, took_s: float) -> str:
    """Return `about 2 min 5 s left`, extrapolated from the time so far; "" while nothing is done, and at the end."""
    return f"about {duration(took_s * (total - done) / done)} left" if 0 < done < total else ""


def significant(value: float) -> str:
    """Return a number with three significant digits, and with all digits before the point.

    Such as `0.0123`, `8.80`, `14,523`.
    """
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    rounded = float(f"{value:.3g}")  # 9.996 is 10.0
    decimals = max(0, 2 - math.floor(math.log10(abs(rounded))))
    return f"{value:,.{decimals}f}"


def four_digits(value: float) -> str:
    """Return a number with at most four significant digits, and with all digits before the point.

    Such as `75.83`, `408`, `10,070`.
    """
    rounded = f"{value:.4g}"
    return f"{float(rounded):,.0f}" if abs(value) >= 999.95 else rounded
