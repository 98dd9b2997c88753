"""A memory profile as one HTML file that draws itself: no library, no network, any browser or MLflow's viewer."""

from __future__ import annotations

import json
from collections import Counter
from importlib import resources
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

from fsdp_lab.files import write_text
from fsdp_lab.profile import CATEGORIES, PLACES, Profile

_PLACEHOLDER = "TIMELINE_DATA"
# Rows of the chart; a step of more events than this is thinned out.
_MAX_ROWS = 40_000
# Of the JSON, which is ASCII: the page has two million bytes at most, template included.
_MAX_CHARS = 1_900_000
_MAX_HOLDERS = 15


def write_timeline(profile: Profile, path: Path, title: str, facts: dict[str, str]) -> None:
    """Write a page that shows what the step held, event by event, and what held the peak.

    A step of more than about 40,000 events is thinned out, and the page states that. Its peaks stay exact.

    Args:
        profile: of the step.
        path: of the HTML file.
        title: of the page.
        facts: name -> value, for its head.
    """
    template = resources.files("fsdp_lab.training").joinpath("timeline.html").read_text(encoding="utf-8")
    before, after = template.split(_PLACEHOLDER)
    write_text(path, before + _json(profile, title, facts) + after)


def _json(profile: Profile, title: str, facts: dict[str, str]) -> str:
    places = [place for place in PLACES if any(event.place == place for event in profile.events)]
    changes = _changes(profile, places)
    head = {
        "title": title,
        "facts": list(facts.items()),
        "places": places,
        "categories": CATEGORIES,
        "num_events": len(profile.events) - profile.begun,
        "start": _sum(changes[: profile.begun], len(places)),
        "peaks": [_peak(profile, place) for place in places],
    }
    # Merged rows hold more changes each, so that the number of rows alone does not bound the size.
    limit = _MAX_ROWS
    while True:
        rows = _rows(profile, changes, _shown(profile, changes, len(places), limit))
        # "<" only ever stands in texts; escaped, none of them can end the script element or open a comment.
        text = json.dumps(head | rows, separators=(",", ":")).replace("<", "\\u003c")
        if len(text) <= _MAX_CHARS or limit < 100:
            return text
        limit //= 2


def _changes(profile: Profile, places: list[str]) -> list[dict[int, int]]:
    """Return the bytes that each event adds to each series; place p's category c is series p * len(CATEGORIES) + c.

    A storage that moves to another category or place leaves one series and enters the other.
    """
    series_of = {
        (place, category): p * len(CATEGORIES) + c
        for p, place in enumerate(places)
        for c, category in enumerate(CATEGORIES)
    }
    held: dict[int, tuple[int, int]] = {}
    out = []
    for event in profile.events:
        series = series_of[event.place, event.category]
        old_series, old_bytes = held.get(event.storage, (series, 0))
        change = {old_series: -old_bytes}
        change[series] = change.get(series, 0) + event.num_bytes
        held[event.storage] = (series, event.num_bytes)
        out.append({key: delta for key, delta in change.items() if delta})
    return out


def _sum(changes: list[dict[int, int]], num_places: int) -> list[int]:
    sums = [0] * (num_places * len(CATEGORIES))
    for change in changes:
        for series, delta in change.items():
            sums[series] += delta
    return sums


def _shown(profile: Profile, changes: list[dict[int, int]], num_places: int, limit: int) -> list[int]:
    """Return the indices of the step's events after which the page knows the state: all of them, or about `limit`.

    It keeps the peaks, the borders of the phases and, of each run of neighbours, the last and the highest, so that
    short spikes stay visible.
    """
    begun, end = profile.begun, len(profile.events)
    if end - begun <= limit:
        return list(range(begun, end))
    shown = {profile.peak_index(place) for place in PLACES}
    borders = [i for i in range(begun + 1, end) if profile.events[i].phase != profile.events[i - 1].phase]
    if len(borders) <= limit // 4:
        shown.update(i - 1 for i in borders)
        shown.update(borders)
    totals = [
        list(accumulate(sum(d for s, d in change.items() if s // len(CATEGORIES) == p) for change in changes))
        for p in range(num_places)
    ]
    num_runs = limit // (num_places + 1)
    cuts = [begun + (end - begun) * run // num_runs for run in range(num_runs + 1)]
    for first, stop in pairwise(cuts):
        shown.add(stop - 1)
        shown.update(max(range(first, stop), key=total.__getitem__) for total in totals)
    return sorted(i for i in shown if i >= begun)


def _rows(profile: Profile, changes: list[dict[int, int]], shown: list[int]) -> dict[str, list[Any]]:
    """Return one column per field. Row r stands for the `steps[r]` events that end with the one it is named after.

    It has `counts[r]` entries of `series` and `deltas`. `phases` are the first ordinals of each phase's runs.
    """
    modules: dict[str, int] = {}
    out: dict[str, list[Any]] = {
        name: [] for name in ("modules", "module", "steps", "counts", "series", "deltas", "phases")
    }
    done = profile.begun
    for index in shown:
        event = profile.events[index]
        merged: Counter[int] = Counter()
        for change in changes[done : index + 1]:
            for series, delta in change.items():
                merged[series] += delta
        change = {series: delta for series, delta in merged.items() if delta}
        out["module"].append(modules.setdefault(event.module, len(modules)))
        out["steps"].append(index + 1 - done)
        out["counts"].append(len(change))
        out["series"].extend(change.keys())
        out["deltas"].extend(change.values())
        if not out["phases"] or out["phases"][-1][0] != event.phase:
            out["phases"].append([event.phase, done + 1 - profile.begun])
        done = index + 1
    out["modules"].extend(modules)
    return out


def _peak(profile: Profile, place: str) -> dict[str, Any] | None:
    """Return where the peak is and its largest holders; ordinal 0 is the state before the step's first event."""
    index = profile.peak_index(place)
    if index < 0:
        return None
    holders = profile.holders(place)
    rest = holders[_MAX_HOLDERS:]
    return {
        "ordinal": max(index + 1 - profile.begun, 0),
        "holders": [[h.category, h.module, h.num_bytes, h.count] for h in holders[:_MAX_HOLDERS]],
        "rest": [len(rest), sum(h.num_bytes for h in rest), sum(h.count for h in rest)],
    }
