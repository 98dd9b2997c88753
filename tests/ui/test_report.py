"""The report's page in a browser, as a file, with the network off: its charts, its controls and a click."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from fsdp_lab.nightly.nights import read_nights
from fsdp_lab.nightly.page import write_page
from tests.conftest import ROOT
from tests.ui.conftest import Lab

if TYPE_CHECKING:
    from playwright.sync_api import Page, expect
else:
    _api = pytest.importorskip("playwright.sync_api", reason="no browser: playwright is not installed: make test-ui")
    expect = _api.expect

pytestmark = pytest.mark.ui


def written(lab: Lab) -> str:
    """The address of the report's file, written again with a server known."""
    command = [sys.executable, "-m", "fsdp_lab.report", "sweep=out", f"tracking.ui={lab.address}"]
    subprocess.run(command, cwd=lab.folder, check=True, capture_output=True, timeout=100)
    return (lab.folder / "out/report.html").as_uri()


def test_the_page_answers_first_and_its_controls_work(
    page: Page, lab: Lab, errors: list[str], shoot: Callable[[str], None]
) -> None:  # fmt: skip
    address = written(lab)
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.context.set_offline(True)
    page.goto(address)
    expect(page.locator("#answer")).to_be_in_viewport()
    expect(page.locator("#command")).to_contain_text("python -m fsdp_lab sharding=")
    expect(page.locator(".js-plotly-plot .main-svg").first).to_be_visible()
    charts = ["memory-speed", "breakdown", "losses", "parallel", "effects", "forecast"]
    for name in charts:
        expect(page.locator(f"#{name} .main-svg").first).to_be_attached()
    shoot("report")
    if shots := os.environ.get("FSDP_LAB_SCREENSHOTS"):  # the README has the figures of the sweep that it shows
        shutil.copy(lab.folder / "out/report.md", ROOT / shots)

    # a hover shows the trial
    box = page.locator("#memory-speed .scatterlayer .trace.scatter .point").first.bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    hover = page.locator("#memory-speed .hoverlayer")
    expect(hover).to_contain_text(re.compile("sharding=(root|per_block)"))
    expect(hover).to_contain_text("MiB at the peak")

    # the menu of the losses
    losses = page.locator("#losses")
    losses.scroll_into_view_if_needed()
    expect(losses.locator(".ytitle")).to_have_text("val loss")
    losses.locator(".updatemenu-header").first.click()
    losses.locator(".updatemenu-dropdown-button", has_text="train loss").click()
    expect(losses.locator(".ytitle")).to_have_text("train loss")
    assert losses.locator(".xtick").all_text_contents() == ["1", "2"]

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
    page.locator("#filter").fill("")

    assert page.evaluate("document.body.scrollWidth") <= 1280
    assert errors == [] and asked == [address]


def test_a_click_opens_the_trials_run(page: Page, lab: Lab) -> None:
    page.goto(written(lab))
    point = page.locator("#memory-speed .scatterlayer .trace.scatter .point").first
    box = point.bounding_box()
    assert box is not None
    with page.context.expect_page() as opened:
        page.mouse.click(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    run = opened.value
    expect(run.get_by_role("heading", name=re.compile("^(root|per_block) (always|never)$"))).to_be_visible()
    expect(page.locator("#clicked")).to_contain_text("/#/runs/")


def test_two_hundred_trials_still_read(page: Page, crowd: Lab, errors: list[str]) -> None:
    page.goto((crowd.folder / "out/report.html").as_uri())
    expect(page.locator("table.sortable tbody tr")).to_have_count(200)
    page.locator("#filter").fill("optimizer.lr=0.0003 ")
    expect(page.locator("#shown")).to_have_text("20 of 200")
    expect(page.locator("#answer")).to_contain_text("optimizer.lr=")
    assert page.evaluate("document.body.scrollWidth") <= 1280
    assert errors == []


def test_the_page_of_the_nights(page: Page, tmp_path: Path, errors: list[str]) -> None:
    from tests.nightly.test_pages import made_up_nights

    made_up_nights(tmp_path)
    write_page(tmp_path / "nights.html", "nightly", read_nights(tmp_path))
    page.goto((tmp_path / "nights.html").as_uri())
    expect(page.locator(".js-plotly-plot .main-svg").first).to_be_visible()
    expect(page.locator("#metric-1")).to_contain_text("torch 2.15.0 → 2.16.0")
    assert page.locator(".js-plotly-plot").count() == 4
    assert errors == []
