"""A memory profile as one HTML file: a drawing and two tables, without scripts or network."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from importlib import resources
from itertools import groupby, islice, pairwise
from pathlib import Path
from typing import Any

from jinja2 import Environment

from fsdp_lab.memory.profile import CATEGORIES, PLACES, Peak, Profile
from fsdp_lab.storage.files import write_text

# Neighbours in the stack differ in lightness, for readers without colour vision.
COLOURS = {
    "param": "#3a359a", "optimizer": "#8fd0f0", "buffer": "#289a8e", "input": "#eadf6a", "grad": "#117733",
    "unsharded_param": "#f0a0b0", "all_gather": "#5a1238", "activation": "#e08a20", "unsharded_grad": "#2a62d8",
    "reduce_scatter": "#c090f0", "temp": "#50555b", "other": "#e0e4e8",
}  # fmt: skip
WIDTH, HEIGHT = 1000, 300  # of the drawing; it has one column per unit of width
_MAX_HOLDERS = 15


def write_timeline(profile: Profile, path: Path, title: str, facts: Mapping[str, str]) -> None:
    """Write a page that shows the memory of the step over time, and the tensors at the peak.

    Args:
        facts: name -> value, for its head.
    """
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters["size"] = _size
    template = resources.files("fsdp_lab.memory").joinpath("timeline.html").read_text(encoding="utf-8")
    charts = [_chart(profile, place, peak) for place in PLACES if (peak := profile.peak(place)) is not None]
    page = environment.from_string(template).render(
        title=title, facts=facts, charts=charts, colours=COLOURS, width=WIDTH, height=HEIGHT
    )
    write_text(path, page)


def _chart(profile: Profile, place: str, peak: Peak) -> dict[str, Any]:
    """Return the values of one drawing. Each column shows its highest state, so that no spike is lost."""
    states = [dict.fromkeys(CATEGORIES, 0)] if not profile.begun else []
    states += (dict(sums) for sums, _ in islice(profile.states(place), max(0, profile.begun - 1), None))
    columns: dict[int, dict[str, int]] = {}
    for number, sums in enumerate(states):
        column = number * WIDTH // len(states)
        columns[column] = max(columns.get(column, sums), sums, key=lambda held: sum(held.values()))
    event = peak.index + 1 - profile.begun
    holders = _holders(peak)
    return {
        "place": place,
        "peak": peak,
        "event": event,
        "num_events": len(states) - 1,
        "where": profile.events[peak.index],
        "x": (event + 0.5) * WIDTH / len(states),
        "areas": list(_areas(columns, peak.total)),
        "phases": _phases(profile, len(states)),
        "holders": holders[:_MAX_HOLDERS],
        "rest": holders[_MAX_HOLDERS:],
    }


def _holders(peak: Peak) -> list[tuple[str, str, int, int]]:
    """Return the category, module, bytes and number of the storages at a peak, the largest first."""
    sizes = defaultdict[tuple[str, str], list[int]](list)
    for held in peak.held:
        sizes[held.category, held.module].append(held.num_bytes)
    holders = [(category, module, sum(each), len(each)) for (category, module), each in sizes.items()]
    return sorted(holders, key=lambda holder: (-holder[2], *holder[:2]))


def _areas(columns: Mapping[int, Mapping[str, int]], most: int) -> Iterator[tuple[str, str]]:
    """Yield each category with memory, the topmost first, and the points of the area from zero to its top."""
    used = [category for category in CATEGORIES if any(held[category] for held in columns.values())]
    ends = [*list(columns)[1:], WIDTH]
    for height in range(len(used), 0, -1):
        points = []
        for (column, held), end in zip(columns.items(), ends, strict=True):
            y = f"{HEIGHT * (1 - sum(held[category] for category in used[:height]) / most):.1f}"
            points.append(f"{column},{y} {end},{y}")
        yield used[height - 1], " ".join([f"0,{HEIGHT}", *points, f"{WIDTH},{HEIGHT}"])


def _phases(profile: Profile, num_states: int) -> list[tuple[str, float, float]]:
    """Return each phase with its first and last unit of the drawing; phases that are narrower than one are left out."""
    runs = groupby(enumerate(profile.events[profile.begun :], 1), lambda numbered: numbered[1].phase)
    bounds = [(phase, next(run)[0] * WIDTH / num_states) for phase, run in runs]
    each = pairwise([*bounds, ("", WIDTH)])
    return [(phase, start, end) for (phase, start), (_, end) in each if end - start >= 1]


def _size(num_bytes: float) -> str:
    for unit in ("bytes", "KiB", "MiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.2f} {unit}".replace(".00 bytes", " bytes")
        num_bytes /= 1024
    return f"{num_bytes:.2f} GiB"
