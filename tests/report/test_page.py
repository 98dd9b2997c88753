"""The page of a report: its pictures, table and links. Its words: test_golden.py; what a browser shows: tests/ui."""

from __future__ import annotations

import dataclasses
import math
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from fsdp_lab.config import SweepConfig
from fsdp_lab.record.sweep import SweepRecord
from fsdp_lab.record.trial import TrialRecord
from fsdp_lab.report.answer import answer
from fsdp_lab.report.page import to_html, write_report
from fsdp_lab.report.plots import figures
from tests.report.sweeps import REPEATED, ROWS, rounds, sweep, trial

RUNS = "http://127.0.0.1:5000/#/runs"


def charts_of(made: SweepRecord) -> dict[str, dict[str, Any]]:
    """By the name of each chart: its traces by their names, of which the last one counts."""
    charts = figures(made, answer(made))
    return {chart.name: {trace.name: trace for trace in chart.figure.data} for chart in charts}


def test_every_chart_that_has_something_to_show_is_there():
    charts = charts_of(sweep(runs_url=RUNS))
    assert list(charts) == ["main", "losses", "breakdown"]
    root, front, chosen = (charts["main"][name] for name in ("sharding=root", "Pareto front", "recommended"))
    assert list(root.x) == [60.0, 50.0] and list(root.y) == pytest.approx([900.0, 1980.0])
    assert list(front.x) == [40.0, 50.0]
    assert (chosen.x[0], chosen.y[0]) == (50.0, pytest.approx(1980.0))
    assert root.customdata[0][0] == f"{RUNS}/{2:032x}" and "peak MiB 60.00" in root.customdata[0][1]
    line = charts["losses"]["sharding=ddp"]  # of the second trial: 1.1 + 1 / epoch
    assert list(line.x) == [1.0, 2.0] and list(line.y) == pytest.approx([2.1, 1.6])
    param, activation = charts["breakdown"].values()
    assert [p + a for p, a in zip(param.x, activation.x, strict=True)] == [100, 80, 60, 50, 40]
    assert "main" not in charts_of(sweep([trial(0)])), "nothing differs"
    assert charts_of(sweep([trial(0, ("ddp", "fp32", "oom", 0, 0, 0))])) == {}


def test_points_lie_at_the_estimates_and_bars_are_the_intervals():
    drawn = charts_of(sweep([*rounds(0, 900.0, 1000.0), *rounds(2, 500.0, 520.0)], axes=REPEATED))["main"]
    # Two settings of two runs leave two degrees of freedom, of which Student's t is 4.3027. A setting's squares are
    # half that of its runs' difference, and its mean has the variance of a run halved.
    squares = math.log(1000 / 900) ** 2 / 2 + math.log(520 / 500) ** 2 / 2
    half = 4.3027 * math.sqrt(squares / 2 / 2)
    for name, middle in (("ddp", math.sqrt(900 * 1000)), ("root", math.sqrt(500 * 520))):
        trace = drawn[f"sharding={name}"]
        assert trace.y[0] == pytest.approx(middle)
        assert trace.y[0] + trace.error_y.array[0] == pytest.approx(middle * math.exp(half), rel=1e-4)
        assert trace.y[0] - trace.error_y.arrayminus[0] == pytest.approx(middle / math.exp(half), rel=1e-4)
    ring, point = drawn["recommended"], drawn["sharding=ddp"]
    assert (ring.x[0], ring.y[0]) == (point.x[0], point.y[0])
    assert charts_of(sweep())["main"]["sharding=root"].error_y.array is None, "one run each"


def test_the_page_needs_no_network_and_its_texts_are_no_html():
    """`@PLOTLY@` was a word of the template once: in a name it put the library, 5 MB, everywhere."""
    script = "</script><img src=x onerror=alert(1)>"
    hostile = dataclasses.replace(trial(0), setting={"sharding": script, "precision": "a|b @PLOTLY@ \\1"})
    made = sweep([hostile, *[trial(i, row) for i, row in enumerate(ROWS) if i]])
    page = to_html(made, answer(made))
    assert not re.search(r"<(script|img|link|iframe)[^>]*\b(src|href)=", page.replace("src=x", ""))
    assert "<img" not in page.partition("plotly.js v")[0] and page.count("plotly.js v") == 1
    own = re.sub(r"plotly\.js v.*?</script>", "", page, flags=re.DOTALL)  # all but the library
    assert own.count("</script>") == 1 + len(figures(made, answer(made))) and "onerror=alert(1)>" not in own
    assert "<td>a|b @PLOTLY@ \\1</td>" in page


def test_a_report_has_code_and_imports_none_of_a_trial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The folder may be another user's, with all that a configuration names."""
    (tmp_path / "theirs.py").write_text("raise SystemExit('it was imported')")
    monkeypatch.syspath_prepend(str(tmp_path))
    config = SweepConfig()
    config.model.target, config.data.target, config.data.collate_fn = "theirs.model", "theirs.Data", "theirs.fn"
    config.task.name, config.task.loss = "custom", "theirs.loss"
    config.model.arguments["num_classes"] = {"_target_": "theirs.Net"}
    facts = {"device": "cpu", "world_size": 2, "torch": "2.15.0", "layout": {"units": ["blocks.*"]}}
    write_report(sweep([dataclasses.replace(one, config=config, facts=facts) for one in sweep().trials]), tmp_path)
    assert "theirs" not in sys.modules
    page = (tmp_path / "report.html").read_text()
    assert re.findall(r'href="([^"]*)"', page.partition('id="uses"')[2].partition("</p>")[0]) == ["use_pytorch.py"]
    assert "def parallelize(model):" in (tmp_path / "use_pytorch.py").read_text()


def test_a_rank_that_others_waited_for_is_named_once_of_all_trials():
    """By who it is and in which part, not by its figures."""

    def slow(number: int, who: str, part: str) -> TrialRecord:
        text = f"{who} is slower than the others: {part} takes {number}7 ms."
        return dataclasses.replace(trial(number, ROWS[number]), facts={
            "slow_rank": {"who": who, "part": part, "text": text}, "notes": [text],
        })  # fmt: skip

    made = sweep(
        [slow(0, "Rank 1", "data"), slow(1, "Rank 1", "data"), slow(2, "Node b", "compute"), trial(3, ROWS[3])]
    )
    assert made.slow_ranks() == {
        0: "Trial 0: Rank 1 is slower than the others: data takes 07 ms.",
        2: "Trial 2: Node b is slower than the others: compute takes 27 ms.",
    }
    said = answer(made)
    assert said.trial is not None and said.trial.number == 3
    assert [note for note in said.notes if "is slower than" in note] == [*made.slow_ranks().values()]
