"""A predicted step as one HTML file: the operators on each stream over time. No library, no network."""

from __future__ import annotations

import html
import re
from collections.abc import Iterator, Mapping, Sequence
from importlib import resources
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from fsdp_lab.files import write_text
from fsdp_lab.speed.predict import BOUNDS, Speed, bound_of
from fsdp_lab.speed.program import Stream
from fsdp_lab.speed.streams import Schedule, Slot
from fsdp_lab.wording import four_digits

_COLOURS = dict(zip(BOUNDS, ("#4c78a8", "#f58518", "#e45756", "#72b7b2", "#9d9da1"), strict=True))
_LANE, _BAR = 44, 26  # pixels
_CLOSE = 5e-4  # of the step: bars that are nearer to each other than this are drawn as one
# As a reader calls them.
_LANES = {
    Stream.compute: "compute", Stream.copy_in: "copy-in of gathers", Stream.gather: "all-gather",
    Stream.scatter: "reduce-scatter", Stream.all_reduce: "all-reduce", Stream.host: "host",
}  # fmt: skip


class _Bar(NamedTuple):
    begin: float
    end: float
    bound: str
    label: str


def streams_page(page: Path) -> Path:
    """Return the path for the page of the streams, beside the timeline of the memory."""
    return page.with_name(page.name.replace("timeline", "streams"))


def write_streams(path: Path, speed: Speed, schedule: Schedule, title: str, facts: Mapping[str, str]) -> None:
    """Write the page of a step.

    Args:
        path: of the HTML file.
        speed: of the step.
        schedule: of the same step.
        title: of the page.
        facts: name -> value, for its head.
    """
    lanes = [(stream, list(_bars(schedule, stream))) for stream in _LANES]
    lanes = [(stream, bars) for stream, bars in lanes if bars]
    total = speed.step_s
    drawn = []
    for row, (_, bars) in enumerate(lanes):
        top = row * _LANE + (_LANE - _BAR) // 2
        drawn.append(f'<line x1="0" x2="1000" y1="{(row + 1) * _LANE}" y2="{(row + 1) * _LANE}"/>')
        drawn += [
            f'<rect x="{bar.begin / total * 1000:.3f}" width="{max(bar.end - bar.begin, 0) / total * 1000:.3f}" '
            f'y="{top}" height="{_BAR}" fill="{_COLOURS[bar.bound]}"><title>{html.escape(bar.label)}</title></rect>'
            for bar in bars
        ]
    busy = [
        (_LANES[stream], four_digits(speed.busy[stream] * 1e3), f"{speed.busy[stream] / total * 100:.0f} %")
        for stream, _ in lanes
    ]
    step, low, high = (four_digits(seconds * 1e3) for seconds in (speed.step_s, speed.low_s, speed.high_s))
    about = f"{step} ms ({low} to {high}), bound by {speed.bound}. "
    about += ", ".join(f"{name} {value}" for name, value in facts.items())
    parts = {
        "TITLE": html.escape(title),
        "ABOUT": html.escape(about),
        "HEIGHT": str(len(lanes) * _LANE),
        "KEYS": "".join(f'<span class="key" style="background: {_COLOURS[name]}"></span>{name}' for name in BOUNDS[:4]),
        "BARS": "".join(drawn),
        "LABELS": "".join(f'<div class="lane">{_LANES[stream]}</div>' for stream, _ in lanes),
        "LANE": str(_LANE),
        "MS": f"{total * 1e3:.9g}",
        "TABLE": _table(("stream", "busy ms", "of the step"), busy)
        + _table(("bound by", "share"), [(name, f"{share * 100:.1f} %") for name, share in speed.shares.items()]),
    }
    template = resources.files("fsdp_lab.forecast").joinpath("streams.html").read_text(encoding="utf-8")
    write_text(path, re.sub(r"@([A-Z]+)@", lambda m: parts.get(m[1], m[0]), template))


def _bars(schedule: Schedule, stream: Stream) -> Iterator[_Bar]:
    """Yield the bars of a stream: consecutive operators of one module with the same bound and no gap are one bar."""
    slots = [slot for slot in schedule.slots if slot.operator.stream is stream]
    for (phase, module, bound), alike in groupby(slots, _kind):
        together: list[Slot] = []
        for slot in alike:
            if together and slot.begin - together[-1].end > _CLOSE * schedule.seconds:
                yield _bar(together, phase, module, bound)
                together = []
            together.append(slot)
        yield _bar(together, phase, module, bound)


def _kind(slot: Slot) -> tuple[str, str, str]:
    return slot.operator.phase, slot.operator.module, bound_of(slot.operator)


def _bar(slots: Sequence[Slot], phase: str, module: str, bound: str) -> _Bar:
    names = list(dict.fromkeys(slot.operator.name for slot in slots))
    operators = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    took = sum(slot.end - slot.begin for slot in slots)
    where = f"{phase}, {module}" if module else phase
    return _Bar(
        slots[0].begin, slots[-1].end, bound, f"{where}: {operators}; {took * 1e3:.3g} ms at {slots[0].begin * 1e3:.4g}"
    )


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{name}</th>" for name in heads)
    body = "".join(
        f"<tr><td>{first}</td>{''.join(f'<td class=number>{c}</td>' for c in rest)}</tr>" for first, *rest in rows
    )
    return f"<table><tr>{head}</tr>{body}</table>"
