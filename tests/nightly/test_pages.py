"""The page of thirty nights, of nights that are made up: months of real ones cannot be had in a test."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fsdp_lab.metrics import FORECAST_ERROR, MEMORY, MIB, SPEED, Gate
from fsdp_lab.nightly.gate import LOSS, Result, judged_metrics
from fsdp_lab.nightly.nights import ACCEPTED, GOOD, REGRESSION, Night, night_id, read_nights, write_night
from fsdp_lab.nightly.page import _chart, changes, write_page

JUDGED = {judged.key: judged for judged in judged_metrics()}
SETTINGS = ("sharding=ddp", "sharding=per_block")


def made_up_nights(folder: Path, count: int = 34) -> None:
    """One a day; the tenth is a regression, the eleventh accepted; a new commit every week, torch anew at the 20th."""
    for number in range(count):
        moment = 1.78e9 + number * 86400
        results = {
            setting: Result(
                ["finished"] * 3,
                {
                    SPEED: [500.0 + place, 510.0, 520.0],
                    MEMORY: [(4.0 + place) * MIB] * 3,
                    LOSS: [1.2] * 3,
                    FORECAST_ERROR: [0.0] * 3,
                },
            )
            for place, setting in enumerate(SETTINGS)
        }
        bad = {"setting": "sharding=ddp", "metric": "samples/s", "change": "-40.0 %", "regression": True}
        write_night(
            folder,
            Night(
                night_id(moment),
                moment,
                moment,
                verdict={10: REGRESSION, 11: ACCEPTED}.get(number, GOOD),
                results=results,
                findings=[bad] if number == 10 else [],
                accepted={"reason": "<new> model"} if number == 11 else None,
                commit=f"commit{number // 7}",
                libraries={"torch": "2.15.0" if number < 20 else "2.16.0"},
            ),
        )


def test_the_last_thirty_are_shown_with_what_changed(tmp_path: Path):
    made_up_nights(tmp_path)
    nights = read_nights(tmp_path)
    write_page(tmp_path / "nights.html", "nightly", nights)
    text = (tmp_path / "nights.html").read_text().partition("plotly.js v")[0]
    assert nights[4].id in text and nights[3].id not in text  # of 34
    assert "sharding=ddp: samples/s -40.0 %" in text and "&lt;new&gt; model" in text
    assert changes(nights[6], nights[7]) == ["commit commit0 → commit1"]
    assert changes(nights[19], nights[20]) == ["torch 2.15.0 → 2.16.0"]


def test_a_line_has_its_band_and_marks_what_was_bad(tmp_path: Path):
    made_up_nights(tmp_path, 14)
    figure = _chart(JUDGED[SPEED], read_nights(tmp_path), 0.15)
    assert figure is not None
    low, high, line = figure.data[:3]
    assert (low.y[0], high.y[0], line.y[0]) == (500.0, 520.0, 510.0)
    assert [i for i, symbol in enumerate(line.marker.symbol) if symbol == "x"] == [10]
    assert line.marker.symbol[11] == "diamond"
    assert len(figure.layout.shapes) == 1  # the commit of the second week
    nothing = replace(JUDGED[SPEED], gate=Gate("samples_per_s", key="nothing", label="nothing"))
    assert _chart(nothing, read_nights(tmp_path), 0.15) is None


def test_the_nights_come_first_and_their_charts_below(tmp_path: Path):
    made_up_nights(tmp_path, 4)
    write_page(tmp_path / "nights.html", "nightly", read_nights(tmp_path))
    text = (tmp_path / "nights.html").read_text()
    assert text.index("<h2>Nights</h2>") < text.index("peak MiB by night") < text.index("samples/s by night")


def test_a_speed_that_was_not_judged_is_hollow_and_what_was_judged_of_that_night_is_not(tmp_path: Path):
    made_up_nights(tmp_path, 14)
    nights = [replace(night, busy=place in (3, 11)) for place, night in enumerate(read_nights(tmp_path))]
    symbols = {key: chart(key, nights).data[2].marker.symbol for key in (SPEED, MEMORY)}
    assert [place for place, symbol in enumerate(symbols[SPEED]) if symbol.endswith("-open")] == [3, 11]
    assert symbols[SPEED][11] == "diamond-open" and symbols[SPEED][10] == "x"
    assert not any(symbol.endswith("-open") for symbol in symbols[MEMORY])


def test_an_axis_shows_at_least_what_is_tolerated(tmp_path: Path):
    made_up_nights(tmp_path, 4)
    limits = {LOSS: 0.02, FORECAST_ERROR: 0.01, MEMORY: 0.01, SPEED: 0.001}
    ranges = {key: chart(key, read_nights(tmp_path), limit).layout.yaxis.range for key, limit in limits.items()}
    assert ranges[LOSS] == pytest.approx((1.2 * 0.98, 1.2 * 1.02))
    assert ranges[FORECAST_ERROR] == pytest.approx((-0.01, 0.01))
    assert ranges[MEMORY] is None and ranges[SPEED] is None, "settings and repeats differ by more"


def chart(key: str, nights: Sequence[Night], limit: float = 0.1) -> Any:
    return _chart(JUDGED[key], nights, limit)
