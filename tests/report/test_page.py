"""The page of a report: its pictures, table and links. Its words: test_golden.py; what a browser shows: tests/ui."""

from __future__ import annotations

import dataclasses
import math
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from fsdp_lab.config import SweepConfig
from fsdp_lab.config.status import TrialStatus
from fsdp_lab.record.trial import TrialRecord
from fsdp_lab.report import page as page_module
from fsdp_lab.report import plots
from fsdp_lab.report.answer import answer
from fsdp_lab.report.data import SweepData
from fsdp_lab.report.page import to_html, write_report
from fsdp_lab.report.plots import Chart, figures, main_chart, shown_trials
from tests.report.sweeps import ROWS, sweep, trial

RUNS = "http://127.0.0.1:5000/#/runs"


def plot_of(made: SweepData) -> Chart:
    plot = main_chart(made, answer(made))
    assert plot is not None
    return plot


def traces(made: SweepData) -> dict[str, Any]:
    return {trace.name: trace for trace in plot_of(made).figure.data}


def rows_with(first: TrialRecord) -> list[TrialRecord]:
    """The trials of `ROWS` with another first one."""
    return [first, *[trial(i, row) for i, row in enumerate(ROWS) if i]]


def repeated(speeds: dict[str, tuple[float, ...]]) -> SweepData:
    """Each sharding once a round, with these speeds; the peaks are 100, 90, 80 … MiB."""
    trials = [
        dataclasses.replace(
            trial(10 * place + number, (sharding, "fp32", "finished", 100 - 10 * place, speed, 1.0)),
            setting={"sharding": sharding, "repeat": str(number)},
        )
        for place, (sharding, of) in enumerate(speeds.items())
        for number, speed in enumerate(of)
    ]
    return sweep(trials, axes=["sharding", "repeat"])


def test_every_chart_that_has_something_to_show_is_there():
    made = sweep(runs_url=RUNS)
    charts = {chart.name: chart.figure for chart in figures(made, answer(made))}
    assert list(charts) == ["main", "losses", "breakdown"]
    memory = {trace.name: trace for trace in charts["main"].data}
    root = memory["sharding=root"]  # the first axis has the colours
    assert list(root.x) == [60.0, 50.0] and list(root.y) == pytest.approx([900.0, 1980.0])
    assert list(memory["Pareto front"].x) == [40.0, 50.0]
    assert (memory["recommended"].x[0], memory["recommended"].y[0]) == (50.0, pytest.approx(1980.0))
    assert root.customdata[0][0] == f"{RUNS}/{2:032x}" and "peak MiB 60.00" in root.customdata[0][1]
    lines = charts["losses"].data  # of five trials that have losses: loss + 1 / epoch
    assert len(lines) == 5 and list(lines[0].x) == [1.0, 2.0] and list(lines[0].y) == [2.0, 1.5]
    stacked = {bar.name: bar for bar in charts["breakdown"].data}
    assert set(stacked) == {"param", "activation"}
    assert [p + a for p, a in zip(stacked["param"].x, stacked["activation"].x, strict=True)] == [100, 80, 60, 50, 40]


def test_where_nothing_differs_or_finished_there_is_no_picture():
    one = sweep([trial(0)])
    assert main_chart(one, answer(one)) is None
    failed = sweep([trial(0, ("ddp", "fp32", "oom", 0, 0, 0))])
    assert figures(failed, answer(failed)) == []


def test_points_lie_at_the_estimates_and_bars_are_the_intervals():
    made = repeated({"ddp": (900.0, 1000.0), "root": (500.0, 520.0)})
    # Two settings of two runs leave two degrees of freedom, of which Student's t is 4.3027. A setting's squares are
    # half that of its runs' difference, and its mean has the variance of a run halved.
    squares = math.log(1000 / 900) ** 2 / 2 + math.log(520 / 500) ** 2 / 2
    half = 4.3027 * math.sqrt(squares / 2 / 2)
    drawn = traces(made)
    for name, middle in (("ddp", math.sqrt(900 * 1000)), ("root", math.sqrt(500 * 520))):
        trace = drawn[f"sharding={name}"]
        assert trace.y[0] == pytest.approx(middle)
        assert trace.y[0] + trace.error_y.array[0] == pytest.approx(middle * math.exp(half), rel=1e-4)
        assert trace.y[0] - trace.error_y.arrayminus[0] == pytest.approx(middle / math.exp(half), rel=1e-4)
    ring, point = drawn["recommended"], drawn["sharding=ddp"]
    assert (ring.x[0], ring.y[0]) == (point.x[0], point.y[0])
    assert traces(sweep())["sharding=root"].error_y.array is None, "one run each"


def test_a_searched_number_is_drawn_by_its_logarithm():
    """Rates from 1e-4 to 1e-2; every trial has the same memory. The last was stopped."""
    rates = ("0.0001", "0.001", "0.01", "0.003")
    made = sweep(
        [
            dataclasses.replace(trial(n, ("", "", "finished", 40, 1000.0, 1.0 + n)), setting={"optimizer.lr": rate})
            for n, rate in enumerate(rates)
        ],
        axes=["optimizer.lr"],
        objectives=[("val/loss", "min")],
    )
    made.trials[3].status = TrialStatus.stopped
    plot = plot_of(made)
    assert plot.heading == "Val loss against optimizer.lr"
    assert plot.figure.layout.xaxis.type == "log" and plot.figure.layout.yaxis.type != "log"
    points = plot.figure.data[0]
    assert list(points.x) == [1e-4, 1e-3, 1e-2] and list(points.y) == [1.0, 2.0, 3.0]


def test_the_picture_and_its_front_follow_the_objectives():
    made = sweep(objectives=[("val/loss", "min"), ("perf/samples_per_s", "max")])
    assert plot_of(made).heading == "Samples/s against val loss"
    # by hand: 1.000/1000 and 1.010/1980; the others are beaten by one of these
    front = traces(made)["Pareto front"]
    assert list(front.x) == [1.0, 1.01] and list(front.y) == pytest.approx([1000.0, 1980.0])


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch) -> SweepData:
    """120 trials, of which 40 are shown. The larger its number, the faster and the larger a trial; a third failed."""
    for module in (plots, page_module):
        monkeypatch.setattr(module, "MOST", 40)
    trials = []
    for n in range(120):
        row = ("", "", "failed" if n % 3 == 1 else "finished", 100 + n, 1000.0 + n, 1.0)
        trials.append(dataclasses.replace(trial(n, row), setting={"optimizer.lr": f"{n}e-4"}))
    return sweep(trials, axes=["optimizer.lr"])


def test_of_many_trials_the_recommended_and_the_front_are_shown(large: SweepData, tmp_path: Path):
    result = large.recommendation
    shown = [t.number for t in shown_trials(large, result.recommendation)]
    assert len(shown) == 40 and shown == sorted(set(shown))
    assert result.setting is not None and result.setting.trials[0] in shown
    assert {number for setting in result.recommendation.front[:20] for number in setting.trials} <= set(shown)
    write_report(large, tmp_path)
    page = (tmp_path / "report.html").read_text()
    body = page.partition('<table class="sortable">')[2].partition("</table>")[0]
    assert body.count("<tr") == 1 + 40 and "40 of 120 trials are shown" in page
    assert len(re.findall(r"<tr><td>\d+<td>[^<]*<td>failed", page)) == 120 / 3, "but each that failed has its reason"
    charts = {chart.name: chart.figure for chart in figures(large, result)}
    assert len(charts["losses"].data) <= 40 and len(charts["breakdown"].data[0].x) <= 40


def test_the_page_needs_no_network_and_its_texts_are_no_html():
    """`@PLOTLY@` was a word of the template once: in a name it put the library, 5 MB, everywhere."""
    script = "</script><img src=x onerror=alert(1)>"
    hostile = dataclasses.replace(trial(0), setting={"sharding": script, "precision": "a|b @PLOTLY@ \\1"})
    made = sweep(rows_with(hostile))
    page = to_html(made)
    assert not re.search(r"<(script|img|link|iframe)[^>]*\b(src|href)=", page.replace("src=x", ""))
    assert "<img" not in page.partition("plotly.js v")[0] and page.count("plotly.js v") == 1
    own = re.sub(r"plotly\.js v.*?</script>", "", page, flags=re.DOTALL)  # all but the library
    assert own.count("</script>") == 1 + len(figures(made, answer(made))) and "onerror=alert(1)>" not in own
    assert "<td>a|b @PLOTLY@ \\1</td>" in page


def test_the_table_marks_the_best_and_the_recommended():
    page = to_html(sweep())
    rows = re.findall(r"<tr(?: class=\"chosen\")? data-words=.*?</tr>", page)
    assert ['class="chosen"' in row for row in rows] == [False, False, False, True, False, False]
    best = re.findall(r'<td class="number best"[^>]*>([^<]*)<', page)
    assert best.count("1980.0") == 1 and "1950.0" not in best, "the fastest, and not what ties with it"


def layout_known(first: str, units: Sequence[str] = ()) -> SweepData:
    """A sweep of which the layout of the models is known; all that a configuration names is in the module `first`."""
    config = SweepConfig()
    config.model.target, config.data.target, config.data.collate_fn = f"{first}.model", f"{first}.Data", f"{first}.fn"
    config.task.name, config.task.loss = "custom", f"{first}.loss"
    config.model.arguments["num_classes"] = {"_target_": f"{first}.Net"}
    facts = {"device": "cpu", "world_size": 2, "torch": "2.15.0", "layout": {"units": list(units)}}
    return sweep([dataclasses.replace(one, config=config, facts=facts) for one in sweep().trials])


def test_a_report_has_code_and_imports_none_of_a_trial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The folder may be another user's."""
    (tmp_path / "theirs.py").write_text("raise SystemExit('it was imported')")
    monkeypatch.syspath_prepend(str(tmp_path))
    write_report(layout_known("theirs", ["blocks.*"]), tmp_path)
    assert "theirs" not in sys.modules
    page = (tmp_path / "report.html").read_text()
    assert re.findall(r'href="([^"]*)"', page.partition('id="uses"')[2].partition("</p>")[0]) == ["use_pytorch.py"]
    assert "def parallelize(model):" in (tmp_path / "use_pytorch.py").read_text()
    write_report(sweep(), tmp_path)  # of whose trials nothing is known
    assert not (tmp_path / "use_pytorch.py").exists()
    assert 'id="uses"' not in (tmp_path / "report.html").read_text()
