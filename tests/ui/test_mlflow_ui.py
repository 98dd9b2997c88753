"""What people see of a sweep in MLflow, asked of the page itself: `make test-all`."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from mlflow.entities import Run

from tests.conftest import run_cli
from tests.servers import mlflow_server
from tests.ui.conftest import INSTANT, Lab, row, unfold

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Error, Page, expect
else:
    _api = pytest.importorskip("playwright.sync_api", reason="no browser: playwright is not installed: make test-all")
    Error, expect = _api.Error, _api.expect
    expect.set_options(timeout=30_000)

pytestmark = [pytest.mark.ui, pytest.mark.timeout(1200)]  # the first waits for a sweep


def names(runs: list[Run]) -> list[str]:
    return [run.info.run_name for run in runs]


def compare(page: Page, count: int) -> None:
    page.get_by_role("button", name="Compare", exact=True).click()
    expect(page.get_by_role("heading", name=f"Comparing {count} Runs from 1 Experiment")).to_be_visible()


def parameters(page: Page) -> dict[str, list[str]]:
    """The table of the page that compares runs, as it shows just now."""
    table = page.get_by_role("switch", name="Parameters - Show diff only").locator("xpath=following::table[1]")
    return {cells[0]: cells[1:] for cells in (line.split("\t") for line in table.inner_text().splitlines())}


def test_the_way_to_the_sweep_from_the_front_page(page: Page, lab: Lab) -> None:
    page.goto(f"{lab.address}/#/experiments")
    page.get_by_text("Model training", exact=True).click()
    page.get_by_role("link", name="fsdp_lab", exact=True).first.click()
    expect(row(page, lab.parent.info.run_name)).to_be_visible()


def test_the_experiment_says_how_to_read_it(page: Page, lab: Lab) -> None:
    page.goto(lab.experiment)
    expect(page.locator("strong", has_text="How to read this experiment.")).to_be_visible()
    meaning = page.locator("td", has_text="the step axis of every metric is the epoch")
    expect(meaning).not_to_be_in_viewport()
    page.locator("button[data-component-id$='metadata_editor.expand_button']").click()
    expect(meaning).to_be_in_viewport()


def test_trials_fold_under_their_sweep(page: Page, lab: Lab, shoot: Callable[[str], None]) -> None:
    parent = row(page, lab.parent.info.run_name)
    page.goto(lab.experiment)
    expect(parent).to_be_visible()
    trials = page.locator(".ag-row", has=page.get_by_role("link", name=re.compile("^(root|per_block) ")))
    expect(trials).to_have_count(0)
    parent.get_by_role("button").first.click()
    expect(trials).to_have_count(4)
    shown = [trial.get_by_role("link").inner_text() for trial in trials.all()]
    assert shown == names(lab.trials)[::-1]
    shoot("experiment")
    parent.get_by_role("button").first.click()
    expect(trials).to_have_count(0)


def test_compare_has_the_axes_by_their_names_and_values(page: Page, lab: Lab, shoot: Callable[[str], None]) -> None:
    unfold(page, lab)
    for name in names(lab.trials):
        row(page, name).locator("input.ag-checkbox-input").click()
    compare(page, 4)
    axes = {
        "sharding": ["root", "root", "per_block", "per_block"],
        "reshard_after_forward": ["always", "never", "always", "never"],
    }
    shown = parameters(page)
    assert {key: shown[key] for key in axes} == axes
    assert shown["precision"] == ["fp32"] * 4
    expect(page.locator(".js-plotly-plot .axis-title", has_text="sharding").first).to_be_visible()
    expect(page.locator(".js-plotly-plot .axis-title", has_text="forecast/peak_mib").first).to_be_visible()
    shoot("compare")

    page.get_by_role("switch", name="Parameters - Show diff only").click()
    assert parameters(page) == axes


def test_a_chart_has_the_epochs_on_its_axis(page: Page, lab: Lab) -> None:
    trial = lab.trials[0]
    page.goto(lab.experiment.replace("/runs?", f"/runs/{trial.info.run_id}/model-metrics?"))
    page.get_by_placeholder("Search metric charts").fill("val/loss")
    charts = page.get_by_test_id("experiment-view-compare-runs-card")
    expect(charts).to_have_count(1)
    expect(charts.locator(".xtitle")).to_have_text("Step")
    expect(charts.locator(".xtick", has_text=re.compile("^1$"))).to_have_count(1)
    expect(charts.locator(".xtick", has_text=re.compile("^2$"))).to_have_count(1)
    drawn = charts.locator(".js-plotly-plot").evaluate("chart => chart.data.map(line => Array.from(line.x))")
    assert drawn and all(epochs == [1, 2] for epochs in drawn)


def test_the_viewer_draws_the_timeline(page: Page, lab: Lab, errors: list[str]) -> None:
    page.goto(lab.artifact(lab.trials[-1], "memory/memory_timeline_rank0.html"))
    inside = page.frame_locator("iframe")
    section = inside.locator("[data-peak-bytes]").first
    expect(section.locator("svg")).to_be_visible()
    peak = lab.trials[-1].data.metrics["memory/rank0/peak_bytes"]
    assert int(section.get_attribute("data-peak-bytes") or 0) == peak
    assert section.locator("polygon").count() > 3
    assert errors == []


def test_the_viewer_draws_the_report(page: Page, lab: Lab, errors: list[str]) -> None:
    page.goto(lab.artifact(lab.parent, "report.html"))
    inside = page.frame_locator("iframe")
    expect(inside.locator("#answer")).to_contain_text("samples/s")
    expect(inside.locator(".js-plotly-plot .main-svg").first).to_be_visible()
    inside.locator("#filter").fill("per_block never")
    expect(inside.locator("#shown")).to_have_text("1 of 4")
    assert errors == []


@pytest.fixture
def locked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The address of a server that asks who is there, with the right answer in the environment."""
    (tmp_path / "auth.ini").write_text(
        "[mlflow]\ndefault_permission = READ\nadmin_username = admin\n"
        f"database_uri = sqlite:///{tmp_path}/accounts.db\n"
        "authorization_function = mlflow.server.auth:authenticate_request_basic_auth\n"
    )
    environment = {
        "MLFLOW_AUTH_CONFIG_PATH": str(tmp_path / "auth.ini"),
        "MLFLOW_AUTH_ADMIN_PASSWORD": "of-the-test-alone",
        "MLFLOW_FLASK_SERVER_SECRET_KEY": "of-the-test-alone",
    }
    monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", "admin")
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "of-the-test-alone")
    options = ("--app-name", "basic-auth", "--artifacts-destination", str(tmp_path / "kept"))
    with mlflow_server(tmp_path, *options, environment=environment) as (address, _):
        yield address


def test_a_server_with_passwords(
    page: Page, browser: Browser, locked: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sweep = (*INSTANT, f"tracking.uri={locked}", "training.seed=1,2", "-m")
    made = run_cli(tmp_path, *sweep)
    assert made.returncode == 0, made.stderr
    assert "warning" not in made.stderr
    with pytest.raises(Error, match="INVALID_AUTH_CREDENTIALS"):
        page.goto(locked)
    account = {"username": "admin", "password": "of-the-test-alone"}
    known = browser.new_context(http_credentials=account).new_page()  # type: ignore[arg-type]
    known.goto(f"{locked}/#/experiments/1/runs?workflowType=machine_learning")
    row(known, "seed (2 trials)").get_by_role("button").first.click()
    for seed in (1, 2):
        expect(row(known, f"seed={seed}")).to_be_visible()
    known.context.close()

    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "0f-n0body")
    refused = run_cli(tmp_path, *sweep, "hydra.sweep.dir=again")
    assert refused.returncode == 2
    assert f"tracking.uri={locked}: the server refuses" in refused.stderr
    assert "set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD" in refused.stderr
    assert "Traceback" not in refused.stderr and "0f-n0body" not in refused.stderr


def test_two_hundred_trials(page: Page, crowd: Lab) -> None:
    """The sweep itself is older than the hundred runs that MLflow asks for first, and is there all the same."""
    unfold(page, crowd)
    trials = page.locator(".ag-row", has=page.get_by_role("link", name=re.compile("seed=")))
    expect(trials).to_have_count(100)
    boxes = trials.locator("input.ag-checkbox-input")
    boxes.first.click()
    boxes.nth(19).click(modifiers=["Shift"])
    page.get_by_role("button", name="Load more").click()
    expect(page.get_by_text("201 matching runs")).to_be_visible()
    compare(page, 20)
    page.get_by_role("switch", name="Parameters - Show diff only").click()
    # the newest first; seeds are repeats, of which every second round runs backwards
    rates = [str(float(f"{i}e-4")) for i in range(1, 11)]
    assert parameters(page) == {
        "optimizer.lr": [*rates, *rates[::-1]],
        "training.seed": ["19"] * 10 + ["18"] * 10,
    }
