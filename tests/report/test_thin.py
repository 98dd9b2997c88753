"""The report of more trials than a page holds: what is left out is said."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from fsdp_lab.config.metrics import MIB
from fsdp_lab.config.status import TrialStatus
from fsdp_lab.record.reasons import Code, Reason
from fsdp_lab.record.trial import TrialRecord
from fsdp_lab.report.data import SweepData
from fsdp_lab.report.page import to_html, write_report
from fsdp_lab.report.plots import MOST, figures, shown_trials
from tests.report.sweeps import sweep

COUNT = 1200


def many(count: int = COUNT) -> SweepData:
    """Two axes of numbers; the larger the number of a trial, the faster and the larger it is, but for every seventh."""
    trials = []
    for n in range(count):
        figures = {
            "epoch": 1.0, "val/loss": 1.0, "train/loss": 1.0, "perf/samples_per_s": 1000.0 + n * (n % 7 > 0),
            "memory/peak_bytes": (100 + n) * MIB, "memory/param_bytes": MIB, "forecast/peak_bytes": MIB,
        }  # fmt: skip
        setting = {"optimizer.lr": f"{n // 40}e-4", "training.max_steps": str(n % 40 + 1)}
        status = TrialStatus.failed if n % 3 == 1 else TrialStatus.finished
        measured = figures if status is TrialStatus.finished else {}
        reason = None if measured else Reason.of(Code.job_failed, text="broken")
        words = [f"{key}={value}" for key, value in setting.items()]
        trials.append(
            TrialRecord(n, setting, status, measured, [measured] if measured else [], words, reason, f"{n:032x}")
        )
    return sweep(trials, axes=["optimizer.lr", "training.max_steps"])


@pytest.fixture(scope="module")
def large() -> SweepData:
    return many()


def test_a_page_has_every_trial_of_a_sweep_that_is_not_large():
    few = many(MOST)
    assert shown_trials(few, few.recommendation.recommendation) == few.trials
    assert "trials are shown" not in to_html(few)


def test_of_more_the_recommended_and_the_front_are_shown(large: SweepData):
    result = large.recommendation
    shown = shown_trials(large, large.recommendation.recommendation)
    assert len(shown) == MOST and [t.number for t in shown] == sorted({t.number for t in shown})
    assert result.setting is not None and result.setting.trials[0] in {t.number for t in shown}
    on_front = {number for s in result.recommendation.front[:100] for number in s.trials}
    assert on_front <= {trial.number for trial in shown}
    assert large.trials[0] in shown, "the smallest"


def test_the_page_states_what_it_leaves_out(large: SweepData, tmp_path: Path):
    write_report(large, tmp_path)
    page = (tmp_path / "report.html").read_text()
    body = page.partition('<table class="sortable">')[2].partition("</table>")[0]
    assert body.count("<tr") == 1 + MOST
    assert f"{MOST} of {COUNT:,} trials are shown" in page and "results.csv has all" in page
    assert len(re.findall(r"<tr><td>\d+<td>[^<]*<td>failed", page)) == COUNT / 3


def test_pictures_are_thinned_too(large: SweepData):
    charts = {chart.name: chart.figure for chart in figures(large, large.recommendation)}
    assert sum(len(trace.x) for trace in charts["main"].data) <= 2 * MOST + 10
    assert len(charts["losses"].data) <= MOST
    assert len(charts["breakdown"].data[0].x) <= MOST
