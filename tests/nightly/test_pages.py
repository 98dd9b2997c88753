"""The page of thirty nights, of nights that are made up: months of real ones cannot be had in a test."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from fsdp_lab.config.metrics import FORECAST_ERROR, MEMORY, MIB, SPEED, gated
from fsdp_lab.config.nightly import ToleranceConfig
from fsdp_lab.nightly.gate import LOSS, STATUS, Finding, Night, Outcome, Verdict
from fsdp_lab.nightly.night import night_id
from fsdp_lab.nightly.texts import chart, frame_of_nights, nights_page

JUDGED = {metric.key: metric for metric in gated()}
SETTINGS = ("sharding=ddp", "sharding=per_block")


def made_up_nights(count: int = 34) -> list[Night]:
    """One a day; the tenth is a regression, the eleventh accepted; a new commit every week, torch anew at the 20th."""
    nights = []
    for number in range(count):
        moment = 1.78e9 + number * 86400
        trials = [
            {"setting": setting, STATUS: "finished", SPEED: speed + place,
             MEMORY: (4.0 + place) * MIB, LOSS: 1.2, FORECAST_ERROR: 0.0}
            for place, setting in enumerate(SETTINGS) for speed in (500.0, 510.0, 520.0)
        ]  # fmt: skip
        bad = Finding("sharding=ddp", SPEED, Outcome.regression, "x", 510.0, 306.0, -0.4)
        night = Night(
            night_id(moment), moment, {10: Verdict.regression, 11: Verdict.accepted}.get(number, Verdict.good),
            trials=trials,
            findings=[bad] if number == 10 else [], accepted={"reason": "<new> model"} if number == 11 else None,
            origin={"commit": f"commit{number // 7}", "library torch": "2.15.0" if number < 20 else "2.16.0"},
        )  # fmt: skip
        nights.append(night)
    return nights


def drawn(key: str, nights: list[Night], limit: float = 0.1) -> Any:
    return chart(JUDGED[key], nights, frame_of_nights(nights), limit)


def test_the_last_thirty_are_shown_with_what_changed_and_their_charts_below():
    nights = made_up_nights()
    text = nights_page("nightly", nights, ToleranceConfig()).partition("plotly.js v")[0]
    assert nights[4].id in text and nights[3].id not in text  # of 34
    assert "sharding=ddp: samples/s -40.0 %" in text and "&lt;new&gt; model" in text
    assert "commit0 → commit1" in text and "torch 2.15.0 → 2.16.0" in text
    places = [text.index(f"<h2>{name}</h2>") for name in ("Nights", "samples/s by night", "peak MiB by night")]
    assert places == sorted(places)


def test_a_line_has_the_range_of_its_repeats_and_marks_what_was_bad():
    nights = made_up_nights(14)
    figure = drawn(SPEED, nights)
    lines = {trace.name: trace for trace in figure.data}
    ddp = lines["sharding=ddp"]
    assert (ddp.y[0], ddp.error_y.array[0], ddp.error_y.arrayminus[0]) == (510.0, 10.0, 10.0)
    crosses, diamonds = (next(trace for trace in figure.data if trace.marker.symbol == s) for s in ("x", "diamond"))
    assert list(crosses.x) == [ddp.x[10]] and set(diamonds.x) == {ddp.x[11]}
    assert len(figure.layout.shapes) == 1  # the commit of the second week
    nothing = replace(JUDGED[SPEED], key="nothing")
    assert chart(nothing, nights, frame_of_nights(nights), 0.1) is None


def test_an_axis_shows_at_least_what_is_tolerated():
    limits = {LOSS: 0.02, FORECAST_ERROR: 0.01, MEMORY: 0.01, SPEED: 0.001}
    ranges = {key: drawn(key, made_up_nights(4), limit).layout.yaxis.range for key, limit in limits.items()}
    assert ranges[LOSS] == pytest.approx((1.2 * 0.98, 1.2 * 1.02))
    assert ranges[FORECAST_ERROR] == pytest.approx((-0.01, 0.01))
    assert ranges[MEMORY] is None and ranges[SPEED] is None, "settings and repeats differ by more"
