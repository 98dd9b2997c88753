"""The page, read back and replayed in Python, and opened in a browser where one is installed."""

from __future__ import annotations

import html
import json
import random
from html.parser import HTMLParser
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from fsdp_lab.profile import CATEGORIES, Event, Profile
from fsdp_lab.training import timeline
from fsdp_lab.training.timeline import write_timeline

if TYPE_CHECKING:
    from playwright.sync_api import Page

# Two storages from before the step; then one changes its category, one its size and place.
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
        Event(4, "host", "grad", 60, "b", "optimizer"),
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
    ({"param": 100}, {"optimizer": 80, "grad": 60}),
]


class Scripts(HTMLParser):
    """The script elements as a browser finds them, and every attribute that makes it fetch something."""

    def __init__(self) -> None:
        super().__init__()
        self.bodies: list[str] = []
        self.references: list[str] = []
        self._inside = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.references += [f"{tag} {name}" for name, _ in attrs if name in ("src", "href", "srcset", "action")]
        self._inside = tag == "script"
        if self._inside:
            self.bodies.append("")

    def handle_data(self, data: str) -> None:
        if self._inside:
            self.bodies[-1] += data

    def handle_endtag(self, tag: str) -> None:
        self._inside = False


def parse(page: Path) -> Scripts:
    scripts = Scripts()
    scripts.feed(page.read_text(encoding="utf-8"))
    return scripts


def written(profile: Profile, folder: Path, title: str = "a title", facts: dict[str, str] | None = None) -> Any:
    """The data of the page, written and read back."""
    write_timeline(profile, folder / "timeline.html", title, facts or {})
    assert [path.name for path in folder.iterdir()] == ["timeline.html"]
    return json.loads(parse(folder / "timeline.html").bodies[0])


def replay(data: Any) -> dict[int, tuple[dict[str, int], ...]]:
    """By ordinal, what each place holds: the page's own arithmetic, over again."""
    width = len(data["categories"])
    now = list(data["start"])

    def held() -> tuple[dict[str, int], ...]:
        slices = [now[p * width : (p + 1) * width] for p in range(len(data["places"]))]
        return tuple({c: n for c, n in zip(data["categories"], one, strict=True) if n} for one in slices)

    out, ordinal = {0: held()}, 0
    changes = iter(zip(data["series"], data["deltas"], strict=True))
    for steps, count in zip(data["steps"], data["counts"], strict=True):
        for _ in range(count):
            series, delta = next(changes)
            now[series] += delta
        ordinal += steps
        out[ordinal] = held()
    assert next(changes, None) is None
    return out


def test_page_holds_what_was_counted_by_hand(tmp_path: Path) -> None:
    data = written(SMALL, tmp_path, facts={"world_size": "2"})
    assert data["places"] == ["device", "host"]
    assert replay(data) == dict(enumerate(HELD))
    assert [data["modules"][m] for m in data["module"]] == ["a", "a.b", "a.b", "a", "b", "", "", "b"]
    assert data["phases"] == [["forward", 1], ["backward", 4], ["optimizer", 7]]
    assert (data["title"], data["facts"], data["num_events"]) == ("a title", [["world_size", "2"]], 8)


def test_peak_and_its_holders(tmp_path: Path) -> None:
    peak = written(SMALL, tmp_path)["peaks"][0]
    assert peak == {
        "ordinal": 5,
        "holders": [["param", "a", 100, 1], ["grad", "b", 70, 1], ["unsharded_grad", "a", 40, 1]],
        "rest": [0, 0, 0],
    }


def test_small_holders_are_summed_up(tmp_path: Path) -> None:
    """20 modules hold 1, 2, ... 20 bytes: the 15 largest have a row, and 1 + 2 + 3 + 4 + 5 are the rest."""
    events = [Event(i, "device", "param", i, f"m{i}", "forward") for i in range(1, 21)]
    data = written(Profile(events, begun=20), tmp_path)
    peak = data["peaks"][0]
    assert (peak["ordinal"], peak["rest"]) == (0, [5, 15, 5])
    assert [num_bytes for _, _, num_bytes, _ in peak["holders"]] == list(range(20, 5, -1))
    assert sum(data["start"]) == 210 and data["steps"] == []


def test_thinned_out_page_keeps_spikes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 1,000 short-lived storages the 10th is the largest, the 773rd the second: both are seen, to the byte."""
    events = []
    for i in range(1_000):
        num_bytes = {10: 900, 773: 800}.get(i, 5)
        events += [Event(i, "device", "temp", num_bytes, "", "forward"), Event(i, "device", "temp", 0, "", "forward")]
    monkeypatch.setattr(timeline, "_MAX_ROWS", 100)
    kept = replay(written(Profile(events), tmp_path))
    assert len(kept) <= 102
    assert (kept[2 * 10 + 1], kept[2 * 773 + 1]) == (({"temp": 900},), ({"temp": 800},))


def test_page_stays_under_two_megabytes(tmp_path: Path) -> None:
    """100,000 events, all categories, each in a module of its own, with a phase that never lasts."""
    rng = random.Random(1)
    events = [
        Event(
            rng.randrange(500),
            "device",
            rng.choice(CATEGORIES),
            rng.randrange(2**38),
            f"encoder.layers.encoder_layer_{i}.self_attention.out_proj",
            ("forward", "backward")[i % 2],
        )
        for i in range(100_000)
    ]
    profile = Profile(events)
    data = written(profile, tmp_path)
    assert (tmp_path / "timeline.html").stat().st_size < 2_000_000
    assert 3_000 < len(data["steps"]) < 41_000
    index = profile.peak_index()
    held = {event.storage: (event.category, event.num_bytes) for event in events[: index + 1]}
    expected = {c: sum(n for category, n in held.values() if category == c) for c in CATEGORIES}
    assert replay(data)[index + 1][0] == {c: n for c, n in expected.items() if n}


def test_names_cannot_break_out(tmp_path: Path) -> None:
    evil = "</script><!--<script>alert(1)</script><img src=x onerror=alert(2)>TIMELINE_DATA"
    profile = Profile([Event(1, "device", "param", 8, evil, "forward")])
    data = written(profile, tmp_path, title=evil, facts={evil: evil})
    assert data["title"] == data["modules"][0] == data["peaks"][0]["holders"][0][1] == evil
    assert data["facts"] == [[evil, evil]]
    page = parse(tmp_path / "timeline.html")
    assert len(page.bodies) == 2 and page.references == []
    assert "innerHTML" not in page.bodies[1]


def test_page_needs_nothing_from_outside(tmp_path: Path) -> None:
    write_timeline(SMALL, tmp_path / "timeline.html", "a title", {})
    assert parse(tmp_path / "timeline.html").references == []
    text = (tmp_path / "timeline.html").read_text(encoding="utf-8")
    assert [word for word in ("http:", "https:", "src=", "url(", "@import", "fetch(") if word in text] == []


def test_every_category_has_a_colour(tmp_path: Path) -> None:
    write_timeline(SMALL, tmp_path / "timeline.html", "a title", {})
    text = (tmp_path / "timeline.html").read_text(encoding="utf-8")
    assert [category for category in CATEGORIES if f'{category}: "#' not in text] == []


# Moves, presses and drags, and says what stood where.
PROBE = """() => {
  const section = document.querySelector("[data-peak-bytes]"), canvas = section.querySelector("canvas");
  const tooltip = section.querySelector(".tooltip"), box = canvas.getBoundingClientRect();
  const point = (type, x) => canvas.dispatchEvent(new MouseEvent(type, {
    clientX: box.left + 70 + (box.width - 84) * x, clientY: box.top + 80, bubbles: true }));
  const press = (key) => canvas.dispatchEvent(new KeyboardEvent("keydown", { key }));
  const seen = { peakBytes: section.dataset.peakBytes, heading: document.querySelector("h1").textContent };
  seen.rows = [...section.querySelectorAll("tr")].map((row) => [...row.cells].map((cell) => cell.textContent));
  seen.hiddenBefore = tooltip.hidden;
  point("mousemove", 5.5 / 9);
  seen.hover = tooltip.textContent;
  press("ArrowLeft");
  seen.left = tooltip.textContent;
  press("Escape");
  seen.hiddenAfter = tooltip.hidden;
  const before = canvas.toDataURL();
  section.querySelector(".legend button").click();
  seen.legendRedraws = canvas.toDataURL() !== before;
  point("mousedown", 0.5); point("mouseup", 0.9); point("mousemove", 0.01);
  seen.zoomed = tooltip.textContent;
  point("dblclick", 0.5); point("mousemove", 0.01);
  seen.whole = tooltip.textContent;
  return seen;
}"""


@pytest.mark.ui
def test_page_in_a_browser(tmp_path: Path, page: Page) -> None:
    """In a frame like the one of MLflow's artifact viewer."""
    write_timeline(SMALL, tmp_path / "timeline.html", "<b>a</b> title", {"key": "value"})
    errors: list[str] = []
    page.on("console", lambda message: errors.append(message.text) if message.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: errors.append(str(error)))
    inner = html.escape((tmp_path / "timeline.html").read_text(encoding="utf-8"))
    frame = tmp_path / "frame.html"
    frame.write_text(f'<iframe sandbox="allow-scripts" width="860" height="860" srcdoc="{inner}"></iframe>')
    page.goto(frame.as_uri())
    page.frame_locator("iframe").locator("canvas").first.wait_for()
    seen = page.frames[1].evaluate(PROBE)
    assert errors == []
    assert (seen["peakBytes"], seen["heading"]) == ("210", "<b>a</b> title")
    assert seen["rows"] == [
        ["category", "module", "size", "bytes", "tensors", "share"],
        ["param", "a", "100 bytes", "100", "1", "47.6 %"],
        ["grad", "b", "70 bytes", "70", "1", "33.3 %"],
        ["unsharded_grad", "a", "40 bytes", "40", "1", "19.0 %"],
        ["sum", "", "210 bytes", "210", "3", "100.0 %"],
    ]
    assert seen["hiddenBefore"] and seen["hiddenAfter"]
    assert seen["hover"].startswith("bbackward, event 5, the peaktotal 210 bytesunsharded_grad40 bytes40grad70 bytes70")
    assert seen["left"].startswith("abackward, event 4total 140 bytes")
    assert seen["legendRedraws"]
    # Of the nine states, a drag from the middle of the fifth to the ninth's leaves the last five.
    assert "event 4" in seen["zoomed"] and "before the step" in seen["whole"]
