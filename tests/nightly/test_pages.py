"""The page of thirty nights, of nights that are made up: months of real ones cannot be had in a test."""

from __future__ import annotations

from pathlib import Path

from fsdp_lab.metrics import FORECAST_ERROR, MEMORY, MIB, SPEED
from fsdp_lab.nightly.gate import LOSS, Result
from fsdp_lab.nightly.nights import ACCEPTED, GOOD, REGRESSION, Night, night_id, read_nights, write_night
from fsdp_lab.nightly.page import _chart, changes, write_page

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
    assert changes(nights[6], nights[7]) == ["commit commit1"]
    assert changes(nights[19], nights[20]) == ["torch 2.15.0 → 2.16.0"]


def test_a_line_has_its_band_and_marks_what_was_bad(tmp_path: Path):
    made_up_nights(tmp_path, 14)
    figure = _chart(SPEED, "samples/s", read_nights(tmp_path))
    assert figure is not None
    low, high, line = figure.data[:3]
    assert (low.y[0], high.y[0], line.y[0]) == (500.0, 520.0, 510.0)
    assert [i for i, symbol in enumerate(line.marker.symbol) if symbol == "x"] == [10]
    assert line.marker.symbol[11] == "diamond"
    assert len(figure.layout.shapes) == 1  # the commit of the second week
    assert _chart("nothing", "nothing", read_nights(tmp_path)) is None
