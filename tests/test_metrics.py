"""The declaration of metrics, and that everything which shows one reads it."""

from __future__ import annotations

import csv
import io
import math
import re
from pathlib import Path

import pandas as pd
import pytest
from omegaconf import DictConfig
from rich.console import Console as RichConsole

from fsdp_lab.config import ConfigError, SweepConfig, metrics, objectives
from fsdp_lab.config.compose import Trial
from fsdp_lab.config.metrics import METRICS, Column, Gate, Metric, declared
from fsdp_lab.config.nightly import ToleranceConfig
from fsdp_lab.config.status import TrialStatus
from fsdp_lab.nightly.gate import judge, judged_columns
from fsdp_lab.nightly.texts import row
from fsdp_lab.record.results_csv import write_results
from fsdp_lab.report.page import to_html
from fsdp_lab.sweep.outputs.console import Console
from fsdp_lab.sweep.outputs.results_csv import rows_of
from fsdp_lab.sweep.state import TrialState
from fsdp_lab.tracking.tags import how_to_read
from tests.conftest import ROOT
from tests.report.sweeps import ROWS, sweep, trial
from tests.sweep.planted import sweep_of

KEY = "perf/stalled_s"
ADDED = Metric(
    KEY, "stalled ms", "s", "the time in which nothing was computed", better="min", form="{:.1f}", scale=1e-3,
    csv=Column(), terminal=Column("stall"), report=Column(),
    gate=Gate("samples_per_s"),
)  # fmt: skip


def finished(number: int, figures: dict[str, float]) -> TrialState:
    one = Trial(number, SweepConfig(), {}, [], Path(), DictConfig({}))
    state = TrialState(one, TrialStatus.finished)
    state.record_epoch({"epoch": 1.0, **figures})
    return state


def test_a_metric_that_is_declared_is_shown_and_judged(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """As an objective, in results.csv, on the terminal, in the report, in the text that explains metrics, at night."""
    with pytest.raises(ConfigError, match=f"objective={KEY}:min is not a metric of a trial. .*train/loss"):
        objectives([f"{KEY}:min"])
    monkeypatch.setattr(metrics, "METRICS", (*METRICS, ADDED))
    assert objectives([f"{KEY}:min"]) == [(KEY, "min")]
    made = sweep_of([finished(0, {KEY: 0.0123, "perf/undeclared": 1.0}), finished(1, {KEY: math.nan})])
    write_results(tmp_path, [], rows_of(made, lambda number: ""))
    rows = [*csv.DictReader(io.StringIO((tmp_path / "results.csv").read_text()))]
    assert [row[KEY] for row in rows] == ["0.0123", "nan"] and "perf/undeclared" not in rows[0]
    shown = io.StringIO()
    Console(made, RichConsole(file=shown, width=160)).final()
    assert "stall" in shown.getvalue() and "*12.3" in shown.getvalue()
    made_by_hand = sweep([trial(i, ROWS[i], **{KEY: 0.01 * (i + 1)}) for i in (0, 2)])
    table = to_html(made_by_hand).partition('class="sortable"')[2].partition("</table>")[0]
    assert "stalled ms" in table and re.search(r'class="number best"[^>]*>10\.0<', table) and ">30.0<" in table
    assert f"| `{KEY}` | s | the time in which nothing was computed |" in how_to_read()
    before, now = (
        judged_columns(pd.DataFrame([{"setting": "a", "status": "finished", KEY: seconds}])) for seconds in (0.01, 0.02)
    )
    worse = [row(f) for f in judge(now, [("before", True, before)], ToleranceConfig(), 0.005) if f.is_regression]
    assert [(r.metric, r.before, r.tonight, r.change) for r in worse] == [("stalled ms", "10.0", "20.0", "+100.0 %")]


# A text of the code that is a key, but no f-string.
_KEY = re.compile(r"""(?<![\w"'])["']((?:train|val|perf|memory|forecast|checkpoint)/[a-z0-9_]+)["']""")


def test_every_key_in_the_code_is_declared():
    assert declared("memory/rank7/host_peak_bytes").key == "memory/rank<r>/<total>_bytes"
    with pytest.raises(KeyError, match="val/los"):
        declared("val/los")
    used = {key for file in (ROOT / "fsdp_lab").rglob("*.py") for key in _KEY.findall(file.read_text())}
    assert len(used) > 20
    for key in sorted(used - {metric.mib_key for metric in METRICS}):
        declared(key)
