"""What people see of a sweep in MLflow, asked of the page itself: `make test-all`."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

from tests.conftest import ROOT
from tests.ui.conftest import Lab, row

if TYPE_CHECKING:
    from playwright.sync_api import Page, expect
else:
    _api = pytest.importorskip("playwright.sync_api", reason="no browser: playwright is not installed: make test-all")
    expect = _api.expect
    expect.set_options(timeout=30_000)

pytestmark = [pytest.mark.ui, pytest.mark.timeout(1200)]  # the first waits for a sweep


@pytest.fixture
def shoot(page: Page) -> Callable[[str], None]:
    """`shoot(name)` keeps a picture of the page where FSDP_LAB_SCREENSHOTS names a folder."""

    def shoot(name: str) -> None:
        if folder := os.environ.get("FSDP_LAB_SCREENSHOTS"):
            private = [page.get_by_text("Path: file:")]
            page.screenshot(path=ROOT / folder / f"{name}.png", mask=private, mask_color="white")

    return shoot


def parameters(page: Page) -> dict[str, list[str]]:
    """The table of the page that compares runs, as it shows just now."""
    table = page.get_by_role("switch", name="Parameters - Show diff only").locator("xpath=following::table[1]")
    return {cells[0]: cells[1:] for cells in (line.split("\t") for line in table.inner_text().splitlines())}


def test_trials_fold_under_their_sweep_and_compare_by_axes(page: Page, lab: Lab, shoot: Callable[[str], None]) -> None:
    page.goto(lab.experiment)
    parent = row(page, lab.parent.info.run_name)
    expect(parent).to_be_visible()
    trials = page.locator(".ag-row", has=page.get_by_role("link", name=re.compile("^(root|per_block) ")))
    expect(trials).to_have_count(0)
    parent.get_by_role("button").first.click()
    expect(trials).to_have_count(4)
    assert [trial.get_by_role("link").inner_text() for trial in trials.all()] == lab.names[::-1]
    shoot("experiment")
    for name in lab.names:
        row(page, name).locator("input.ag-checkbox-input").click()
    page.get_by_role("button", name="Compare", exact=True).click()
    expect(page.get_by_role("heading", name="Comparing 4 Runs from 1 Experiment")).to_be_visible()
    policies = ["always", "never", "always", "never"]
    axes = {"sharding": ["root", "root", "per_block", "per_block"], "reshard_after_forward": policies}
    assert parameters(page).items() >= {**axes, "precision": ["fp32"] * 4}.items()
    for title in ("sharding", "forecast/peak_mib"):
        expect(page.locator(".js-plotly-plot .axis-title", has_text=title).first).to_be_visible()
    shoot("compare")
    page.get_by_role("switch", name="Parameters - Show diff only").click()
    assert parameters(page) == axes


def test_the_viewer_draws_the_report_and_the_timeline(page: Page, lab: Lab, errors: list[str]) -> None:
    page.goto(lab.artifact(lab.parent, "report.html"))
    expect(page.frame_locator("iframe").locator(".js-plotly-plot .main-svg").first).to_be_visible()
    page.goto(lab.artifact(lab.trials[-1], "memory/memory_timeline_rank0.html"))
    expect(page.frame_locator("iframe").locator("[data-peak-bytes] svg").first).to_be_visible()
    assert errors == []
