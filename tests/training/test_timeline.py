"""The page, read back, and opened in a browser where one is installed."""

from __future__ import annotations

import html
import re
from pathlib import Path

import pytest

from fsdp_lab.training.profile import Event, Profile
from fsdp_lab.training.timeline import COLOURS, HEIGHT, write_timeline

# Two storages from before the step; then one changes its category, one its size.
SMALL = Profile(
    events=[
        Event(9, "host", "optimizer", 50, "", "optimizer"),
        Event(1, "device", "param", 100, "a", "forward"),
        Event(2, "device", "activation", 40, "a", "forward"),
        Event(3, "device", "temp", 30, "a.b", "forward"),
        Event(3, "device", "temp", 0, "a.b", "forward"),
        Event(2, "device", "unsharded_grad", 40, "a", "backward"),
        Event(4, "device", "grad", 70, "b", "backward"),
        Event(2, "device", "unsharded_grad", 0, "", "backward"),
        Event(9, "host", "optimizer", 80, "", "optimizer"),
        Event(5, "host", "grad", 60, "b", "optimizer"),
    ],
    begun=2,
)
# What each place holds before the step and after each of its eight events, worked out by hand.
HELD = [
    ({"param": 100}, {"optimizer": 50}),
    ({"param": 100, "activation": 40}, {"optimizer": 50}),
    ({"param": 100, "activation": 40, "temp": 30}, {"optimizer": 50}),
    ({"param": 100, "activation": 40}, {"optimizer": 50}),
    ({"param": 100, "unsharded_grad": 40}, {"optimizer": 50}),
    ({"param": 100, "unsharded_grad": 40, "grad": 70}, {"optimizer": 50}),
    ({"param": 100, "grad": 70}, {"optimizer": 50}),
    ({"param": 100, "grad": 70}, {"optimizer": 80}),
    ({"param": 100, "grad": 70}, {"optimizer": 80, "grad": 60}),
]


def written(profile: Profile, folder: Path, title: str = "a title", facts: dict[str, str] | None = None) -> str:
    """The text of the page."""
    write_timeline(profile, folder / "timeline.html", title, facts or {})
    assert [path.name for path in folder.iterdir()] == ["timeline.html"]
    return (folder / "timeline.html").read_text(encoding="utf-8")


def tables(page: str) -> list[list[list[str]]]:
    """The cells of each table."""
    return [
        [
            re.findall(r"<t[hd][^>]*>(?:<span.*?</span>)?(.*?)</t[hd]>", row)
            for row in re.findall(r"<tr>.*?</tr>", table)
        ]
        for table in re.findall(r"<table>.*?</table>", page, re.DOTALL)
    ]


def tops(page: str, category: str) -> list[float]:
    """The heights that the top of a category's area has, from left to right, as shares of the drawing."""
    (points,) = re.findall(rf'<polygon points="([^"]+)" fill="{COLOURS[category]}"', page)
    return [1 - float(point.split(",")[1]) / HEIGHT for point in points.split()[1:-1:2]]


def test_what_is_held_is_what_was_counted_by_hand() -> None:
    states = [SMALL.states(place) for place in ("device", "host")]
    seen = [[{c: n for c, n in sums.items() if n} for sums, _ in each] for each in states]
    assert list(zip(*seen, strict=True))[SMALL.begun - 1 :] == HELD


def test_the_areas_are_stacked_to_what_is_held(tmp_path: Path) -> None:
    page = written(SMALL, tmp_path, facts={"world_size": "2"}).partition("<h2>host</h2>")[0]
    assert tops(page, "param") == pytest.approx([100 / 210] * 9, abs=1e-3)
    whole = [sum(device.values()) / 210 for device, _ in HELD]
    assert tops(page, "temp") == pytest.approx(whole, abs=1e-3)
    assert re.findall(r">(forward|backward|optimizer)</text>", page) == ["forward", "backward", "optimizer"]
    assert "world_size: 2" in page


def test_peak_and_its_holders(tmp_path: Path) -> None:
    page = written(SMALL, tmp_path)
    categories, holders, *_ = tables(page)
    assert re.findall('data-peak-bytes="(.*?)"', page) == ["210", "140"]
    assert "backward, b, event 5 of 8" in page
    assert categories[1:] == [
        ["temp", "0 bytes", "0.0 %"], ["unsharded_grad", "40 bytes", "19.0 %"], ["activation", "0 bytes", "0.0 %"],
        ["grad", "70 bytes", "33.3 %"], ["param", "100 bytes", "47.6 %"],
    ]  # fmt: skip
    assert holders[1:] == [
        ["param", "a", "100 bytes", "100", "1"], ["grad", "b", "70 bytes", "70", "1"],
        ["unsharded_grad", "a", "40 bytes", "40", "1"],
    ]  # fmt: skip


def test_names_cannot_break_out(tmp_path: Path) -> None:
    evil = "</title><!--<script>alert(1)</script><img src=x onerror=alert(2)>"
    page = written(Profile([Event(1, "device", "param", 8, evil, "forward")]), tmp_path, title=evil, facts={evil: evil})
    assert page.count(html.escape(evil)) == 6 and "<script" not in page and "<img" not in page


def test_page_needs_nothing_from_outside(tmp_path: Path) -> None:
    page = written(SMALL, tmp_path)
    assert [word for word in ("http:", "https:", "src=", "href=", "url(", "@import", "<script") if word in page] == []
