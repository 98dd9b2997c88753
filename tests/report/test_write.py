"""The files of a report, read back. What a browser makes of the page is in tests/ui."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import re
from pathlib import Path

import pytest

from fsdp_lab.report.answer import answer
from fsdp_lab.report.plots import COLORS, figures
from fsdp_lab.report.write import to_html, to_markdown, write_report
from tests.report.sweeps import ROWS, sweep, trial


def test_every_chart_that_has_something_to_show_is_there():
    made = sweep(runs_url="http://127.0.0.1:5000/#/runs")
    charts = {name: figure for name, _, figure in figures(made, answer(made))}
    assert list(charts) == ["memory-speed", "breakdown", "losses", "parallel", "effects", "forecast"]
    memory = {trace.name: trace for trace in charts["memory-speed"].data}
    assert list(memory["sharding=ddp"].x) == [100.0, 80.0] and list(memory["sharding=ddp"].y) == [1000.0, 1500.0]
    assert list(memory["Pareto front"].x) == [40.0, 50.0]
    assert (memory["recommended"].x[0], memory["recommended"].y[0]) == (40.0, 1950.0)
    assert memory["sharding=root"].customdata[0][0] == "http://127.0.0.1:5000/#/runs/" + f"{2:032x}"
    assert "sharding=root" in memory["sharding=root"].text[0] and "60.00 MiB" in memory["sharding=root"].text[0]
    stacked = {bar.name: bar for bar in charts["breakdown"].data}
    assert set(stacked) == {"param", "activation"}
    assert [p + a for p, a in zip(stacked["param"].x, stacked["activation"].x, strict=True)] == [100, 80, 60, 50, 40]
    lines = charts["losses"].data
    assert len(lines) == 2 * 5 and [line.visible for line in lines] == [True] * 5 + [False] * 5
    assert list(lines[0].x) == [1.0, 2.0] and list(lines[0].y) == [2.0, 1.5]
    assert len(charts["parallel"].data) == 5
    assert len(charts["effects"].data) == 3 * 2  # three metrics, two axes


def test_a_sweep_without_results_has_no_charts_and_a_page_all_the_same():
    made = sweep([trial(0, ("ddp", "fp32", "oom", 0, 0, 0))])
    found = answer(made)
    assert figures(made, found) == []
    assert "Nothing qualifies" in to_html(made, found) and "Nothing qualifies" in to_markdown(made, found)


def test_the_page_needs_no_network_and_its_texts_are_no_html():
    hostile = dataclasses.replace(
        trial(0, ROWS[0]), setting={"sharding": "</script><img src=x onerror=alert(1)>", "precision": "a|b"}
    )
    made = sweep([hostile, *[trial(i, row) for i, row in enumerate(ROWS) if i]])
    page = to_html(made, answer(made))
    assert not re.search(r"<(script|img|link|iframe)[^>]*\b(src|href)=", page.replace("src=x", ""))
    assert "<img" not in page.partition("plotly.js v")[0]
    own = re.sub(r"plotly\.js v.*?</script>", "", page, flags=re.DOTALL)  # all but the library
    assert own.count("</script>") == 1 + len(figures(made, answer(made))) and "onerror=alert(1)>" not in own
    assert to_markdown(made, answer(made)).count("a\\|b") >= 1


def test_a_name_that_is_a_word_of_the_template_is_a_name(tmp_path: Path):
    """`@PLOTLY@` in a name put the library, 5 MB, in its place everywhere: 525 MB."""
    hostile = dataclasses.replace(trial(0, ROWS[0]), setting={"sharding": "@PLOTLY@", "precision": "@BODY@ \\1"})
    made = dataclasses.replace(sweep([hostile, *[trial(i, row) for i, row in enumerate(ROWS) if i]]), name="@PLOTLY@")
    page = to_html(made, answer(made))
    assert page.count("plotly.js v") == to_html(sweep(), answer(sweep())).count("plotly.js v") == 1
    assert "<title>@PLOTLY@" in page and "<td>@PLOTLY@</td><td>@BODY@ \\1</td>" in page


def test_names_bring_no_elements_into_the_markdown():
    evil = "<script>alert(1)</script>"
    hostile = dataclasses.replace(trial(2, ROWS[2]), setting={"sharding": evil, "precision": f"x\n```\n{evil}"})
    trials = [dataclasses.replace(hostile, number=number, error=evil) for number in range(2)]
    made = dataclasses.replace(sweep(trials), name=evil, command=evil, about=[(evil, evil)])
    found = dataclasses.replace(answer(made), command=f"python -m fsdp_lab a='```\n{evil}'", rules=[evil])
    text = to_markdown(made, found)
    outside = text.replace(f"````\n{found.command}\n````", "")
    assert outside != text, "the command as it is, in a fence that it cannot end"
    assert "<script" not in outside and "&lt;script>" in outside


def test_the_table_of_the_page_marks_the_best_and_the_recommended():
    page = to_html(sweep(), answer(sweep()))
    rows = re.findall(r"<tr(?: class=\"chosen\")? data-words=.*?</tr>", page)
    assert len(rows) == 6
    assert ['class="chosen"' in row for row in rows] == [False] * 5 + [True]
    assert [">1980.0<" in cell for cell in re.findall(r'<td class="number best"[^<]*<', page)].count(True) == 1


def test_markdown_and_csv_say_the_same(tmp_path: Path):
    found = write_report(sweep(), tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["report.csv", "report.html", "report.md"]
    text = (tmp_path / "report.md").read_text()
    assert found.sentence in text and found.command in text
    assert "| 4 | oom | ran out of &lt;memory> \\| `now` |" in text
    rows = list(csv.DictReader(io.StringIO((tmp_path / "report.csv").read_text())))
    assert [row["recommended"] for row in rows] == ["", "", "", "", "", "yes"]
    assert [row["pareto"] for row in rows] == ["", "", "", "yes", "", "yes"]
    assert float(rows[2]["memory/peak_bytes"]) == 60 * 2**20
    assert rows[4]["why_not"] == "ran out of memory"


def test_two_hundred_trials_make_a_page_of_no_more_than_six_megabytes():
    trials = []
    for number in range(200):
        lr = 10 ** (-4 + number / 100)
        one = trial(number, (*ROWS[number % 4][:3], 50 + number % 7, 500.0 + number, 1.0 + number / 1000))
        trials.append(dataclasses.replace(one, setting={**one.setting, "optimizer.lr": f"{lr:.6g}"}))
    made = sweep(trials, axes=["sharding", "precision", "optimizer.lr"])
    page = to_html(made, answer(made))
    assert len(page) < 6_000_000
    charts = {name: json.loads(figure.to_json()) for name, _, figure in figures(made, answer(made))}
    assert charts["breakdown"]["layout"]["height"] >= 200 * 15
    assert len(charts["parallel"]["data"]) == 200


@pytest.mark.parametrize("kind", ["protan", "deutan"])
def test_colours_can_be_told_apart_by_colour_blind_readers(kind: str):
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
