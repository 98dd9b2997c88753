"""The report's page in a browser, as a file, with the network off: its charts, its controls and a click."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from fsdp_lab.report.page import write_report
from tests.report.sweeps import sweep
from tests.ui.conftest import Lab

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page, expect
else:
    _api = pytest.importorskip("playwright.sync_api", reason="no browser: playwright is not installed: make test-all")
    expect = _api.expect

pytestmark = [pytest.mark.ui, pytest.mark.timeout(1200)]  # the first waits for a sweep

# A setting's or a run's own point; Plotly draws those above the Pareto front in a layer of another name.
POINT = "#main .trace.scatter .point"


def place(mark: Locator) -> tuple[float, float]:
    """The middle of a mark of a chart."""
    box = mark.bounding_box()
    assert box is not None
    return box["x"] + box["width"] / 2, box["y"] + box["height"] / 2


def written(lab: Lab) -> str:
    """The address of the report's file, written again with a server known."""
    words = ["sweep=out", f"tracking.ui={lab.address}"]
    command = [sys.executable, "-m", "fsdp_lab.report", *words]
    subprocess.run(command, cwd=lab.folder, check=True, capture_output=True, timeout=100)
    return (lab.folder / "out/report.html").as_uri()


def test_the_page_answers_first_and_its_controls_work(page: Page, lab: Lab, errors: list[str]) -> None:
    address, asked = written(lab), list[str]()
    page.on("request", lambda request: asked.append(request.url))
    page.context.set_offline(True)
    page.set_viewport_size({"width": 1280, "height": 800})
    page.goto(address)
    expect(page.locator("#answer")).to_be_in_viewport()
    expect(page.locator("#command")).to_contain_text("python -m fsdp_lab sharding=")
    expect(page.locator(".js-plotly-plot .main-svg").first).to_be_visible()
    assert page.evaluate("document.body.scrollHeight") <= 2 * 800, "four trials fill at most two screens"
    expect(page.locator("#also")).to_contain_text("equals the measurement, to the byte, in all 4 trials")

    # a hover shows the trial
    page.mouse.move(*place(page.locator(POINT).first))
    hover = page.locator("#main .hoverlayer")
    expect(hover).to_contain_text(re.compile("sharding=(root|per_block)"))
    expect(hover).to_contain_text("peak MiB")

    # what is folded is drawn when it opens
    expect(page.locator("#losses .main-svg")).to_have_count(0)
    page.locator("details", has=page.locator("#losses")).locator("summary").click()
    expect(page.locator("#losses .main-svg").first).to_be_visible()
    box = page.locator("#losses .main-svg").first.bounding_box()
    assert box is not None and box["width"] > 1000

    # the table: sorted by a click, filtered by words
    table = page.locator("table.sortable")
    column = table.locator("th").all_inner_texts().index("samples/s")
    head = table.locator("th button", has_text="samples/s")
    for up in (True, False):
        head.click()
        shown = [float(text) for text in table.locator(f"tbody tr td:nth-child({column + 1})").all_inner_texts()]
        assert shown == sorted(shown, reverse=not up) and len(shown) == 4
    page.locator("#filter").fill("root never")
    expect(table.locator("tbody tr:visible")).to_have_count(1)
    expect(page.locator("#shown")).to_have_text("1 of 4")
    assert page.evaluate("document.body.scrollWidth") <= 1280
    assert page.get_by_text("Share chart").count() == 0, "Plotly's own menu uploads the figure"
    assert errors == [] and asked == [address]


def test_the_page_fits_a_phone(page: Page, lab: Lab, errors: list[str]) -> None:
    page.set_viewport_size({"width": 420, "height": 900})
    page.goto(written(lab))
    expect(page.locator("#main .main-svg").first).to_be_visible()
    for fold in page.locator("summary").all():
        fold.click()
    page.wait_for_function("!document.querySelector('details[open] .plotly-graph-div:not(.js-plotly-plot)')")
    assert page.evaluate("document.documentElement.scrollWidth") <= 420, "what is folded does not scroll it, too"
    assert page.evaluate("(t => t.scrollWidth > t.clientWidth)(document.querySelector('.wide'))"), "the table scrolls"
    heads = {head.inner_text(): head.bounding_box() for head in page.locator("table.sortable th").all()}
    for name in ("sharding", "reshard_after_forward", "status", "samples/s", "peak MiB"):  # what decides is in view
        box = heads[name]
        assert box is not None and box["x"] >= 0 and box["x"] + box["width"] <= 420, name
    assert errors == []


def color(page: Page, selector: str, name: str) -> list[int]:
    result = page.evaluate(f"getComputedStyle(document.querySelector('{selector}'))['{name}']")
    return [int(part) for part in re.findall(r"\d+", result)]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_and_its_pictures_follow_the_browsers_colours(page: Page, tmp_path: Path, scheme: str) -> None:
    write_report(sweep(), tmp_path)
    page.goto((tmp_path / "report.html").as_uri())
    page.emulate_media(color_scheme=scheme)  # after it was drawn
    dark = scheme == "dark"
    assert (sum(color(page, "body", "backgroundColor")) < 150) == dark
    # the legend and the axes are as the page's text; what lies below them lets the page through
    for part in ("#main .xtick text", "#main .legendtext", "#main .ytitle"):
        assert color(page, part, "fill") == color(page, "body", "color"), part
    assert color(page, "#main .main-svg", "backgroundColor")[3:] == [0]
    assert (sum(color(page, "tr.chosen td", "backgroundColor")) < 300) == dark


def test_two_hundred_trials_still_read(page: Page, crowd: Lab, errors: list[str]) -> None:
    page.goto((crowd.folder / "out/report.html").as_uri())
    expect(page.locator("table.sortable tbody tr")).to_have_count(200)
    page.locator("#filter").fill("optimizer.lr=0.0003 ")
    expect(page.locator("#shown")).to_have_text("20 of 200")
    expect(page.locator("#answer")).to_contain_text("optimizer.lr=")
    assert page.evaluate("document.body.scrollWidth") <= 1280
    assert page.locator("#against > li").count() <= 8
    assert errors == []
