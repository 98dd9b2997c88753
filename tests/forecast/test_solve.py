"""`forecast.solve` and dollars, by round figures: each of n workers needs 160 / n GiB, and 2 for a sample."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fsdp_lab.config.compose import Trial
from fsdp_lab.forecast import solve
from fsdp_lab.forecast.capacity import GIB, Forecast, Host, Solved
from fsdp_lab.forecast.cost import cost_of
from fsdp_lab.forecast.request import Request
from fsdp_lab.forecast.sentences import sentences
from fsdp_lab.forecast.table import Row
from fsdp_lab.forecast.words import say
from fsdp_lab.sweep.trial import TrialState
from tests.forecast.command import forecast_here
from tests.forecast.planted import ROUND, speed_of
from tests.ranks import config

LANGUAGE = ("model=lm_tiny", "task=language", "data=pydoc")
KEPT = ("training.global_batch_size=32", True)  # four samples of each of eight workers
FIXED = ("training.global_batch_size=64", False)


def planted(asked: Any, num_workers: int, cuda: bool = False, *_: object, **__: object) -> Forecast:
    training, parts = asked.training, num_workers // asked.sharding.tp
    gib = 160 / num_workers + 2 * training.global_batch_size / parts / training.grad_accum_steps
    return Forecast(cuda, num_workers, {"device": {"total": int(gib * GIB)}})


def found(
    monkeypatch: pytest.MonkeyPatch, word: str, gib: float, batch: tuple[str, bool] = FIXED, *words: str,
    sheet: object = None,
) -> Solved:  # fmt: skip
    asked = config("model=mlp", f"forecast.solve={word}", batch[0], *words)
    monkeypatch.setattr(solve, "forecast", planted)
    monkeypatch.setattr(solve, "_sure_bytes", lambda one: planted(one.config, one.num_workers).needed_bytes)
    request = Request(asked, 8, False, int(gib * GIB), sheet=sheet, per_worker=batch[1])  # type: ignore[arg-type]
    made = solve.solved(request, planted(asked, 8))
    assert made is not None and made.forecast.fits is (made.value > 0), "forecast once more"
    return made


def test_the_largest_microbatch_of_a_round_device(monkeypatch: pytest.MonkeyPatch):
    assert found(monkeypatch, "batch", 24).value == 2, "20 + 2 × 2"
    accumulated = found(monkeypatch, "batch", 24, FIXED, "training.grad_accum_steps=4")
    assert (accumulated.value, accumulated.samples_per_worker) == (2, 8), "in each of four microbatches"
    none = found(monkeypatch, "batch", 21)
    assert none.value == 0 and none.forecast.sure_bytes == 22 * GIB, "that of one sample"


@pytest.mark.parametrize(
    ("gib", "batch", "words", "nodes", "fewest", "samples"),
    [
        (24, FIXED, (), None, 16, 4),  # of those that divide 64: 8 need 20 + 16, 16 need 10 + 8
        (30, FIXED, ("training.grad_accum_steps=2",), None, 8, 8),  # 20 + 8; 4 need 40 + 16
        (24, KEPT, (), None, 10, 4),  # 16 + 8
        (24, KEPT, (), 8, 16, 4),  # whole nodes
        (24, KEPT, (), 12, 10, 4),  # in one node
        (24, KEPT, ("sharding.dp_replicate=3", "sharding=per_block"), None, 12, 4),
        (24, KEPT, ("sharding.tp=2", "sharding=per_block", *LANGUAGE), None, 20, 8),  # 8 + 16
    ],
)  # fmt: skip
def test_the_fewest_workers_of_a_round_device(
    monkeypatch: pytest.MonkeyPatch, gib: float, batch: tuple[str, bool], words: tuple[str, ...], nodes: int | None,
    fewest: int, samples: int,
):  # fmt: skip
    sheet = None if nodes is None else replace(ROUND, node_size=nodes)
    made = found(monkeypatch, "gpus", gib, batch, *words, sheet=sheet)
    assert (made.value, made.samples_per_worker) == (fewest, samples) and made.forecast.num_workers == fewest


def test_where_no_number_of_workers_fits_what_lacks_is_said(monkeypatch: pytest.MonkeyPatch):
    """64 samples divide among 64 workers at most: 2.5 + 2."""
    none = found(monkeypatch, "gpus", 3)
    assert (none.value, none.forecast.num_workers, none.forecast.needed_bytes) == (0, 64, int(4.5 * GIB))
    request = Request(config("training.global_batch_size=64"), 8, False, 3 * GIB)
    one = Row([], replace(planted(request.config, 8), solved=none, capacity_bytes=3 * GIB), request=request)
    (line,) = say("solved", one, replace(one, forecast=none.forecast), "")
    assert line == (
        "No number of workers up to 64 fits, with 1 sample each (the global batch of 64 is kept); needs 4.500 GiB of "
        "3.000 GiB: it takes a device of 4.500 GiB."
    )


def test_the_least_memory_is_one_that_can_be_typed():
    asked = config("forecast.solve=capacity")
    for needed, active, gib in ((10, 5, 10.0), (10, 9.9, 11.0), (10 + 1e-9, 5, 10.01), (10, 9.01, 10.02)):
        made = Forecast(
            True, 2, {"device": {"total": int(needed * GIB) + (needed > 10)}}, active_bytes=int(active * GIB),
            reserved_bytes=int(needed * GIB) + (needed > 10),
        )  # fmt: skip
        answer = solve.solved(Request(asked, 2, True, None), made)
        assert answer is not None and answer.value == int(gib * GIB) and answer.forecast.fits
        less = Request(asked, 2, True, int((gib - 0.01) * GIB)).weigh(made)
        assert not less.fits, "a hundredth less does not suffice"


def test_no_device_makes_a_host_larger():
    made = Forecast(True, 2, {"device": {"total": GIB}, "host": {"total": 3 * GIB}})
    request = Request(config("forecast.solve=capacity", "export=false"), 2, True, None, host=Host(5 * GIB, 2))
    answer = solve.solved(request, made)
    assert answer is not None and answer.value == 0
    one = Row([], replace(made, solved=answer), request=request)
    (line,) = say("solved", one, replace(one, forecast=answer.forecast), "")
    assert line.startswith("No memory of a device suffices; needs 1.000 GiB of 1.120 GiB, ")
    assert line.endswith("its host has 5.000 GiB of 6.000 GiB.")


def test_the_best_answer_of_a_grid_is_named():
    request = Request(config(), 8, False, GIB)

    def row(name: str, word: str, value: int) -> Row:
        made = Forecast(False, 8, {"device": {"total": GIB}}, capacity_bytes=GIB)
        return Row([name], replace(made, solved=Solved(word, value, made, value)), request=request)

    for word, best, start in (("batch", 9, "Largest microbatch with sharding=b: 9 samples;"),
                              ("gpus", 3, "Fewest workers with sharding=b: 3, with 3 samples each")):  # fmt: skip
        rows = [row("a", word, 5), row("b", word, best), row("c", word, 0)]
        assert any(line.startswith(start) for line in sentences(rows, ["sharding"], "items", [], 0.03)), word


def test_dollars_of_a_million_and_of_a_run():
    """8 devices at $3.60 cost $0.008 a second, and pass 8,000 tokens in it."""
    speed = speed_of(1.0, samples=8, tokens=1000)
    made = Forecast(True, 8, {"device": {"total": 1}}, speed=speed)
    priced = config("forecast.usd_per_gpu_hour=3.6", "forecast.tokens=1e12")
    cost = cost_of(made, priced.forecast)
    assert cost is not None and cost.usd == pytest.approx((1.0, 1 / 1.1, 1 / 0.9))
    assert say("cost", Row([], made, request=Request(priced, 8, True, None))) == [
        "A million tokens costs $1.00 (0.909 to 1.11) at $3.60 an hour per device. 1e+12 tokens take 34,720 hours "
        "(31,570 to 38,580), 277,800 device-hours, and cost $1,000,000 (909,100 to 1,111,000)."
    ]
    unpriced = Request(config("forecast.tokens=1e12"), 8, True, None)
    assert say("cost", Row([], made, request=unpriced)) == [
        "1e+12 tokens take 34,720 hours (31,570 to 38,580), 277,800 device-hours."
    ]
    samples = cost_of(replace(made, speed=replace(speed, tokens=None)), priced.forecast)
    assert samples is not None and (samples.unit, samples.tokens) == ("samples", None)
    assert samples.usd[0] == pytest.approx(1000)
    assert cost_of(made, config().forecast) is None and cost_of(replace(made, speed=None), priced.forecast) is None


def test_a_sweep_has_dollars_of_measured_speeds():
    """Two workers at $3.60 cost $0.002 a second."""
    priced = config("forecast.usd_per_gpu_hour=3.6", "cluster.num_workers=2")
    state = TrialState(Trial(0, priced, {}, [], Path(), {}))
    samples, tokens = {"perf/samples_per_s": 500.0}, {"perf/tokens_per_s": 4000.0}
    assert state.figures_at(samples)["perf/usd_per_million"] == pytest.approx(4.0)
    assert state.figures_at(samples | tokens)["perf/usd_per_million"] == pytest.approx(0.5)
    free = TrialState(Trial(0, config(), {}, [], Path(), {}))
    assert free.figures_at(samples) == samples


@pytest.mark.parametrize(("batch", "kept"), [("64", "the global batch of 64 is kept"),
                                             ("${per_worker:16}", "kept by ${per_worker:N}")])  # fmt: skip
def test_the_command_solves_and_prices(tmp_path: Path, batch: str, kept: str):
    words = ("model=mlp", "model.hidden_dim=512", "sharding=per_block", "reshard_after_forward=always",
             f"training.global_batch_size='{batch}'", "forecast.device=cpu", "forecast.capacity_gib=0.009")  # fmt: skip
    done = forecast_here(tmp_path, *words, "forecast.solve=gpus", "forecast.folder=solved")
    assert done.returncode == 0, done.stderr
    (line,) = csv.DictReader((tmp_path / "solved" / "forecast.csv").open())
    fewest = int(line["fewest_workers"])
    said = " ".join(done.stdout.split())
    assert kept in said and f"Fewest workers: {fewest}, with " in said
    assert "Fewer may hold the same batch in several passes: training.grad_accum_steps=2,4,8 (-m)" in said
    assert "not compared: activation_checkpointing=none activation_offload=none compile=false" in said
    fits = {}
    for workers in (fewest // 2, fewest):
        forecast_here(tmp_path, *words, f"cluster.num_workers={workers}", f"forecast.folder={workers}")
        (line,) = csv.DictReader((tmp_path / str(workers) / "forecast.csv").open())
        fits[workers] = line["fits"]
    assert fits == {fewest // 2: "false", fewest: "true"}
