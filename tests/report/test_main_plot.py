"""The report's main picture, against sweeps of which the places can be worked out on paper."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest

from fsdp_lab.config.status import TrialStatus
from fsdp_lab.record.trial import TrialRecord
from fsdp_lab.report.answer import answer
from fsdp_lab.report.data import SweepData
from fsdp_lab.report.plots import GREY, Chart, figures, main_chart
from tests.report.sweeps import ROWS, sweep, trial


def plot_of(made: SweepData) -> Chart:
    plot = main_chart(made, answer(made))
    assert plot is not None
    return plot


def traces(made: SweepData) -> dict[str, Any]:
    return {trace.name: trace for trace in plot_of(made).figure.data}


def repeated(speeds: dict[str, tuple[float, ...]], **figures: float) -> list[TrialRecord]:
    """Each sharding once a round, with these speeds; the peaks are 100, 90, 80 … MiB."""
    return [
        dataclasses.replace(
            trial(10 * place + number, (sharding, "fp32", "finished", 100 - 10 * place, speed, 1.0), **figures),
            setting={"sharding": sharding, "repeat": str(number)},
        )
        for place, (sharding, of) in enumerate(speeds.items())
        for number, speed in enumerate(of)
    ]


def test_the_ring_lies_on_its_point_and_the_point_at_the_estimate():
    made = sweep(repeated({"ddp": (900.0, 1000.0), "root": (400.0, 440.0)}), axes=["sharding", "repeat"])
    drawn = traces(made)
    ring, point = drawn["recommended"], drawn["sharding=ddp"]
    assert (ring.x[0], ring.y[0]) == (point.x[0], point.y[0])
    assert point.y[0] == pytest.approx(math.sqrt(900 * 1000))  # of two rounds that both settings ran in
    assert drawn["sharding=root"].y[0] == pytest.approx(math.sqrt(400 * 440))


def test_the_bars_are_the_intervals():
    made = sweep(repeated({"ddp": (900.0, 1000.0), "root": (500.0, 520.0)}), axes=["sharding", "repeat"])
    # Two settings of two runs leave two degrees of freedom, of which Student's t is 4.3027. A setting's squares are
    # half that of its runs' difference, and its mean has the variance of a run halved.
    squares = math.log(1000 / 900) ** 2 / 2 + math.log(520 / 500) ** 2 / 2
    half = 4.3027 * math.sqrt(squares / 2 / 2)
    for name, middle in (("ddp", math.sqrt(900 * 1000)), ("root", math.sqrt(500 * 520))):
        trace = traces(made)[f"sharding={name}"]
        assert trace.y[0] + trace.error_y.array[0] == pytest.approx(middle * math.exp(half), rel=1e-4)
        assert trace.y[0] - trace.error_y.arrayminus[0] == pytest.approx(middle / math.exp(half), rel=1e-4)
    assert "Bars are 95 % intervals" in plot_of(made).note
    assert traces(sweep())["sharding=root"].error_y.array is None
    assert "Bars" not in plot_of(sweep()).note


def test_an_interval_of_any_width_leaves_the_picture_readable():
    made = sweep(repeated({"ddp": (1000.0, 1010.0), "root": (100.0, 800.0)}), axes=["sharding", "repeat"])
    trace = traces(made)["sharding=ddp"]
    assert trace.y[0] + trace.error_y.array[0] > 5000
    low, high = plot_of(made).figure.layout.yaxis.range
    assert low >= 0 and high < 4000  # at most the root of ten times the value, and a margin


def search(count: int = 20, axes: tuple[str, ...] = ("optimizer.lr",), **changed: object) -> SweepData:
    """Rates from 1e-4 to 1e-2, evenly by their logarithms; the loss is least in the middle. The last two of each ten
    were stopped."""
    trials = []
    for i in range(count):
        at = i / (count - 1)
        one = trial(i, ("", "", "finished", 40, 1000.0, 1 + (at - 0.5) ** 2))
        setting = {"optimizer.lr": f"{10 ** (-4 + 2 * at):.6g}", "sharding": ("root", "per_block")[i % 2]}
        status = TrialStatus.stopped if i % 10 > 7 else TrialStatus.finished
        trials.append(dataclasses.replace(one, setting={axis: setting[axis] for axis in axes}, status=status))
    given = {"objectives": [("val/loss", "min")], **changed}
    return sweep(trials, axes=list(axes), **given)


def test_an_axis_of_numbers_is_drawn_as_numbers_with_equal_steps_for_equal_factors():
    plot = plot_of(search())
    layout = plot.figure.layout
    assert plot.heading == "Val loss against optimizer.lr"  # every trial has the same memory
    assert layout.xaxis.type == "log" and layout.yaxis.type != "log"
    points = plot.figure.data[0]
    assert points.x[0] == 1e-4 and points.y[0] == pytest.approx(1.25) and len(points.x) == 16


def test_a_searched_number_is_drawn_though_a_word_comes_first():
    made = search(5, ("sharding", "optimizer.lr"))
    for one in made.trials:
        one.figures["val/loss"] = 1.0 if one.setting["sharding"] == "root" else 2.0
    assert plot_of(made).heading == "Val loss against optimizer.lr"
    assert plot_of(made).figure.layout.xaxis.type == "log"


def test_pictures_of_many_points_need_no_webgl():
    """The page colours what is SVG, and a printout has no WebGL."""
    made = search()
    trials = [
        dataclasses.replace(one, epochs=[{"epoch": float(e), "val/loss": 1 / e} for e in range(1, 101)])
        for one in made.trials
    ]
    charts = figures(dataclasses.replace(made, trials=trials), answer(made))
    assert {trace.type for chart in charts for trace in chart.figure.data} == {"scatter", "bar"}


def test_an_axis_of_many_numbers_has_no_colours_and_few_values_have():
    many = search(axes=("optimizer.lr", "sharding"), objectives=[("val/loss", "min"), ("memory/peak_bytes", "min")])
    for one in many.trials:
        one.figures["memory/peak_bytes"] = one.number * 2.0**20
    assert {name for name in traces(many) if "=" in name} == {"sharding=root", "sharding=per_block"}
    for made in (sweep(), many):
        shapes = {str(trace.marker.symbol) for trace in plot_of(made).figure.data if trace.mode != "lines"}
        assert shapes <= {"circle", "circle-open"}


def test_the_picture_and_its_front_follow_the_objectives():
    made = sweep(objectives=[("val/loss", "min"), ("perf/samples_per_s", "max")])
    plot = plot_of(made)
    assert plot.heading == "Samples/s against val loss" and plot.note.startswith("Up and to the left is better.")
    # by hand: 1.000/1000 and 1.010/1980; the others are beaten by one of these
    front = traces(made)["Pareto front"]
    assert list(front.x) == [1.0, 1.01] and list(front.y) == pytest.approx([1000.0, 1980.0])
    least = dataclasses.replace(made, objectives=[("val/loss", "min"), ("memory/peak_bytes", "min")])
    assert plot_of(least).note.startswith("Down and to the left is better.")


def test_a_hover_has_four_digits_and_the_interval():
    speeds = {"ddp": (12345.678, 13345.678), "root": (400.0, 676.0)}
    trials = repeated(
        speeds, **{"memory/peak_bytes": 12345.6789 * 2**20, "val/accuracy": 0.5, "perf/tokens_per_s": 123456.7}
    )
    made = sweep(trials, axes=["sharding", "repeat"])
    text = traces(made)["settings"].customdata[0][1].split("<br>")
    assert text[:2] == ["sharding=ddp", "trials 0, 1"]
    assert text[2].startswith("12,840 samples/s (")  # the root of the product
    assert "peak MiB 12345.68" in text and "tokens/s 123457" in text
    assert "val loss 1.0000" in text and any(line.startswith("val acc 0.5") for line in text)


def test_where_nothing_differs_there_is_no_picture():
    one = sweep([trial(0, ROWS[0])])
    assert main_chart(one, answer(one)) is None


def test_the_losses_of_what_was_stopped_are_grey():
    made = search()
    lines = {chart.name: chart.figure for chart in figures(made, answer(made))}["losses"].data
    assert len(lines) == 20
    assert [line.name for line in lines if line.line.color == GREY] == ["stopped early"] * 4


@pytest.mark.parametrize("missing", [0, 1])
def test_a_value_has_one_colour_in_all_pictures(missing: int):
    """Also if the first value of the axis ran out of memory in its only trials, after an epoch."""
    made, colours = sweep(), dict[str, list[str]]()
    first = made.trials[0].setting["sharding"]
    for one in made.trials if missing else ():
        if one.setting["sharding"] == first:
            one.status, one.figures = TrialStatus.oom, {}
    for chart in figures(made, answer(made)):
        traces = [trace for trace in chart.figure.data if "=" in (trace.name or "")]
        for name, colour in {trace.name: trace.line.color or trace.marker.color for trace in traces}.items():
            colours.setdefault(name, []).append(colour)
    assert colours and all(len(each) >= 2 - missing and len(set(each)) == 1 for each in colours.values()), colours
