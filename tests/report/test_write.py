"""The files of a report, read back. What a browser makes of the page is in tests/ui."""

from __future__ import annotations

import dataclasses
import json
import re
from dataclasses import asdict
from pathlib import Path

import pytest

from fsdp_lab.config import SweepConfig
from fsdp_lab.config.status import TrialStatus
from fsdp_lab.report.answer import answer, with_a_line
from fsdp_lab.report.data import SweepData
from fsdp_lab.report.page import to_html, write_report
from fsdp_lab.report.plots import COLORS, figures
from fsdp_lab.training.layout import Layout
from tests.report.sweeps import ROWS, sweep, trial


def test_every_chart_that_has_something_to_show_is_there():
    made = sweep(runs_url="http://127.0.0.1:5000/#/runs")
    charts = {chart.name: chart.figure for chart in figures(made, answer(made))}
    assert list(charts) == ["main", "losses", "breakdown"]
    memory = {trace.name: trace for trace in charts["main"].data}
    # the first axis has the colours
    assert list(memory["sharding=root"].x) == [60.0, 50.0]
    assert list(memory["sharding=root"].y) == pytest.approx([900.0, 1980.0])
    assert list(memory["Pareto front"].x) == [40.0, 50.0]
    assert (memory["recommended"].x[0], memory["recommended"].y[0]) == (50.0, pytest.approx(1980.0))
    assert memory["sharding=root"].customdata[0][0] == "http://127.0.0.1:5000/#/runs/" + f"{2:032x}"
    assert "precision=fp32<br>" in (text := memory["sharding=root"].customdata[0][1]) and "peak MiB 60.00" in text
    lines = charts["losses"].data
    assert len(lines) == 5
    assert list(lines[0].x) == [1.0, 2.0] and list(lines[0].y) == [2.0, 1.5]
    stacked = {bar.name: bar for bar in charts["breakdown"].data}
    assert set(stacked) == {"param", "activation"}
    assert [p + a for p, a in zip(stacked["param"].x, stacked["activation"].x, strict=True)] == [100, 80, 60, 50, 40]


def own_html(made: SweepData) -> str:
    """The page without the library, its data and its style."""
    return to_html(made).partition("<body>")[2].partition("<script>")[0]


@pytest.fixture(scope="module")
def whole_page() -> str:
    """The page of the sweep of `ROWS`."""
    return to_html(sweep())


def test_the_page_names_the_study_and_promises_a_click_where_there_is_a_run_to_open():
    page = to_html(sweep(study="zero2_<zero3>", runs_url="http://127.0.0.1:5000/#/runs"))
    assert "<title>zero2_&lt;zero3&gt;: sharding × precision, 6 trials</title>" in page
    assert "<h1>zero2_&lt;zero3&gt;: sharding × precision, 6 trials</h1>" in page
    assert "click on it to open its run" in page


@pytest.mark.parametrize(("factor", "share"), [(1.003, "0.3 %"), (0.9, "10 %")])
def test_the_page_says_how_far_forecasts_were_off(factor: float, share: str):
    trials = [trial(i, row) for i, row in enumerate(ROWS)]
    trials[3] = trial(3, ROWS[3], **{"forecast/peak_bytes": 50 * 2**20 * factor})
    assert f"The forecast of the peak is at most {share} off, in trial 3." in own_html(sweep(trials))


def test_a_setting_that_no_line_speaks_of_says_why_in_a_fold():
    values = [{"sharding": a, "precision": b} for a in ("ddp", "root", "per_block") for b in ("fp32", "bf16", "fp16")]
    losses = [1.0] * 8 + [2.0]
    trials = [
        dataclasses.replace(trial(i, ("", "", "finished", 10 + i, 100.0 - i, losses[i])), setting=value)
        for i, value in enumerate(values)
    ]
    made = sweep(trials)
    recommendation = answer(made)
    assert recommendation.setting is not None and recommendation.setting.name == "sharding=ddp precision=fp32"
    assert "<td>sharding=per_block precision=fp16</td>" in own_html(made).partition("do not qualify</summary>")[2]
    # the lines have those that differ from the recommended one in one value
    settings = recommendation.recommendation.settings.all
    assert [other.setting.name for other in with_a_line(recommendation.recommendation)] == [
        settings[i].name for i in (1, 2, 3, 6)
    ]
    assert "do not qualify" not in own_html(sweep(trials[:8]))
    some = [dataclasses.replace(t, status=TrialStatus.skipped) if t.number in (2, 5) else t for t in trials[:8]]
    listed = own_html(sweep(some)).partition("do not qualify</summary>")[2]
    assert "<td>sharding=ddp precision=fp16</td>" in listed, "with what a line tells: the list is of all"


def test_a_sweep_without_results_has_no_charts():
    made = sweep([trial(0, ("ddp", "fp32", "oom", 0, 0, 0))])
    assert figures(made, answer(made)) == []


def test_the_page_needs_no_network_and_its_texts_are_no_html():
    hostile = dataclasses.replace(
        trial(0, ROWS[0]), setting={"sharding": "</script><img src=x onerror=alert(1)>", "precision": "a|b"}
    )
    made = sweep([hostile, *[trial(i, row) for i, row in enumerate(ROWS) if i]])
    page = to_html(made)
    assert not re.search(r"<(script|img|link|iframe)[^>]*\b(src|href)=", page.replace("src=x", ""))
    assert "<img" not in page.partition("plotly.js v")[0]
    own = re.sub(r"plotly\.js v.*?</script>", "", page, flags=re.DOTALL)  # all but the library
    assert own.count("</script>") == 1 + len(figures(made, answer(made))) and "onerror=alert(1)>" not in own


def test_a_name_that_is_a_word_of_the_template_is_a_name(whole_page: str):
    """`@PLOTLY@` in a name put the library, 5 MB, in its place everywhere: 525 MB."""
    hostile = dataclasses.replace(trial(0, ROWS[0]), setting={"sharding": "@PLOTLY@", "precision": "@BODY@ \\1"})
    made = dataclasses.replace(sweep([hostile, *[trial(i, row) for i, row in enumerate(ROWS) if i]]), name="@PLOTLY@")
    page = to_html(made)
    assert page.count("plotly.js v") == whole_page.count("plotly.js v") == 1
    assert '<div id="about">@PLOTLY@ · ' in page and "<td>@PLOTLY@</td><td>@BODY@ \\1</td>" in page


def test_the_table_of_the_page_marks_the_best_and_the_recommended(whole_page: str):
    page = whole_page
    rows = re.findall(r"<tr(?: class=\"chosen\")? data-words=.*?</tr>", page)
    assert len(rows) == 6
    assert ['class="chosen"' in row for row in rows] == [False, False, False, True, False, False]
    assert [">1980.0<" in cell for cell in re.findall(r'<td class="number best"[^<]*<', page)].count(True) == 1


def test_the_setting_as_code_is_linked_where_its_layout_is_known(tmp_path: Path):
    facts = {"layout": asdict(Layout()), "world_size": 2, "torch": "2.15.0"}
    own = dataclasses.replace(trial(3, ROWS[3]), config=SweepConfig(), facts=facts)
    trials = [own if i == 3 else trial(i, row) for i, row in enumerate(ROWS)]
    write_report(sweep(trials), tmp_path)
    page = (tmp_path / "report.html").read_text()
    links = re.findall(r'href="([^"]*)"', page.partition('id="uses"')[2].partition("</p>")[0])
    there = {path.name for path in tmp_path.iterdir() if path.name.startswith("use_")}
    assert set(links) == there == {"use_pytorch.py"}
    assert "def parallelize(model):" in (tmp_path / "use_pytorch.py").read_text()
    write_report(sweep(), tmp_path)  # of whose trials nothing is known
    assert not (tmp_path / "use_pytorch.py").exists()
    assert 'id="uses"' not in (tmp_path / "report.html").read_text()


@pytest.mark.ci
def test_two_hundred_trials_make_a_page_of_no_more_than_six_megabytes():
    trials = []
    for number in range(200):
        lr = 10 ** (-4 + number / 100)
        one = trial(number, (*ROWS[number % 4][:3], 50 + number % 7, 500.0 + number, 1.0 + number / 1000))
        trials.append(dataclasses.replace(one, setting={**one.setting, "optimizer.lr": f"{lr:.6g}"}))
    made = sweep(trials, axes=["sharding", "precision", "optimizer.lr"])
    page = to_html(made)
    assert len(page) < 6_000_000
    charts = {chart.name: json.loads(chart.figure.to_json()) for chart in figures(made, answer(made))}
    assert charts["breakdown"]["layout"]["height"] >= 200 * 15


@pytest.mark.parametrize("kind", ["protan", "deutan"])
def test_colours_can_be_distinguished_by_colour_blind_readers(kind: str):
    """By Viénot, Brettel and Mollon's matrices (1999), on linear RGB: every two colours stay apart."""
    matrices = {
        "protan": ((0.11238, 0.88762, 0.0), (0.11238, 0.88762, 0.0), (0.00401, -0.00401, 1.0)),
        "deutan": ((0.29275, 0.70725, 0.0), (0.29275, 0.70725, 0.0), (-0.02234, 0.02234, 1.0)),
    }

    def seen(color: str) -> list[float]:
        rgb = [(int(color[i : i + 2], 16) / 255) ** 2.2 for i in (1, 3, 5)]
        return [max(sum(m * c for m, c in zip(row, rgb, strict=True)), 0) ** (1 / 2.2) for row in matrices[kind]]

    for i, one in enumerate(COLORS):
        for other in COLORS[:i]:
            apart = sum((a - b) ** 2 for a, b in zip(seen(one), seen(other), strict=True)) ** 0.5
            assert apart > 0.1, (one, other, apart)
