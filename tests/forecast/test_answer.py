"""What `fsdp_lab.forecast` shows of forecasts made by hand: answers, what more workers bring, its table and its CSV.

`python -m tests.forecast.test_answer` writes the golden files again. Read what changed: a person will.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from fsdp_lab.forecast.answer import answers
from fsdp_lab.forecast.capacity import Forecast, NoForecast, Solved
from fsdp_lab.forecast.request import Request
from fsdp_lab.forecast.scaling import series_of
from fsdp_lab.forecast.sentences import allowances_note, request_notes, room_remedies, sentences
from fsdp_lab.forecast.speed.device import Basis, Factors
from fsdp_lab.forecast.speed.predict import Network, Parts, Speed
from fsdp_lab.forecast.table import MOST_ROWS, Row, best_rows, forecast_table, in_order, write_csv
from fsdp_lab.forecast.words import say
from tests.ranks import config

GIB = 2**30
AXES = ["sharding", "precision", "activation_checkpointing"]
FOLDER = Path(__file__).parent / "golden"
FAILED = Forecast(True, 8, error=NoForecast("cancelled"))


def row(
    settings: Sequence[str], gib: float, most: int | None = None, capacity: float | None = 24, **more: object
) -> Row:
    parts = {"param": gib / 8, "optimizer": gib / 4, "grad": gib / 8, "activation": gib / 2, "total": gib}
    peaks = {"device": {name: int(size * GIB) for name, size in parts.items()}}
    forecast = Forecast(
        True, 8, peaks, {"CUDA context": GIB}, {}, int(capacity * GIB) if capacity else None, **more  # type: ignore[arg-type]
    )  # fmt: skip
    found = None if most is None else Solved("batch", most, forecast, most)
    forecast = replace(forecast, solved=found)
    return Row([*settings], forecast, None, 64)


ROWS = [
    row(("per_block", "bf16_mixed", "full"), 1.5, 1223),
    row(("per_block", "bf16_mixed", "none"), 9.9, 144),
    row(("per_block", "fp32", "full"), 3.1, 800),
    row(("per_block", "fp32", "none"), 18.4, 80),
    row(("ddp", "bf16_mixed", "full"), 6.6, 644),
    row(("ddp", "bf16_mixed", "none"), 15.7, 103),
    row(("ddp", "fp32", "full"), 22.9, 300),
    row(("ddp", "fp32", "none"), 27.3, 58),
]


def fast(row: Row, step_s: float, workers: int = 8, **changed: object) -> Row:
    """The setting with a predicted step, bound by compute; ratios of predictions are known to 8 %."""
    shares = {"compute": 0.9, "gather": 0.1}
    speed = Speed(step_s, shares, step_s / 1.1, step_s / 0.9, 0.1, Basis.fitted, "X", samples=8, tokens=1000, mfu=0.4)
    known = {"relative": 0.08, "group": "one", "kinds": ("eager",), "sources": 3}
    speed = replace(speed, **(known | changed))  # type: ignore[arg-type]
    sized = replace(
        row.forecast, speed=speed, num_workers=workers, num_params=(8_030_000_000, 8_030_000_000 // workers)
    )
    return replace(row, forecast=sized)


def corrected(settings: int, alike: bool, by: float = 1.15) -> dict[str, object]:
    """By so many settings; the error is that of ratios where these have corrected, of 0.1, unless by much."""
    factors = Factors(by, by, settings=settings, alike=alike)
    by_ratio = alike and by == 1.15 and settings < 8
    return {"basis": Basis.trials, "factors": factors, "parts": Parts(0.9, 0.1, 0.0, 0.0), "by_ratio": by_ratio}


def two(first: Row, second: Row) -> tuple[list[Row], list[str]]:
    return [replace(first, settings=["ddp"]), replace(second, settings=["root"])], ["sharding"]


def over_workers() -> list[Row]:
    """Of 4 workers only full checkpointing fits, of 16 all does."""
    sizes = {("full", 4): 20, ("none", 4): 40, ("full", 16): 9, ("none", 16): 16}
    return [
        fast(row((checkpointing, str(workers)), gib), 1.0 + 0.3 * (checkpointing == "full"), workers)
        for (checkpointing, workers), gib in sizes.items()
    ]


def some_of_few_workers() -> list[Row]:
    """Seven settings: four and one more fit 4 workers, one none, and one is unsure."""
    rows = [fast(row((f"s{n}", str(m)), 80 / m), 1.0, m) for n in range(7) for m in (2, 4)]
    rows[1] = fast(row(("s0", "4"), 99), 1.0, 4)
    rows[3] = fast(row(("s1", "4"), 27, **UNSURE), 1.0, 4)
    return rows


SLOWER = {8: 59_616, 16: 44_816, 32: 86_720}  # total tokens/s of GPUs on one, two and four nodes


def over_nodes(workers: int, total: float, gib: float = 9, **more: object) -> Row:
    shares = {"compute": 0.97} if workers == 8 else {"scatter": 0.63, "gather": 0.32, "compute": 0.05}
    network = Network(400, reached=0.348) if workers > 8 else None
    sized = {"samples": workers, "tokens": 8192, "shares": shares, "network": network}
    return fast(row((str(workers),), gib, **more), workers * 8192 / total, workers, **sized)


UNSURE = {"active_bytes": 20 * GIB, "reserved_bytes": 30 * GIB}
NETWORK = {400.0: 2.0, 800.0: 1.0, 1600.0: 0.5}
NOTHING_FITS = [row([name], gib) for name, gib in (("ddp", 30), ("root", 25))]
CASES: dict[str, tuple[list[Row], list[str]]] = {
    "memory_of_a_grid": (ROWS, AXES),
    "no_capacity": ([row([name], gib, capacity=None) for name, gib in (("ddp", 16), ("root", 9))], ["sharding"]),
    "one_setting": ([fast(row([], 9.9), 1.0)], []),
    "nothing_fits": (NOTHING_FITS, ["sharding"]),
    "nothing_fits_and_something_is_left_to_try": (NOTHING_FITS, ["sharding"]),
    "more_workers_are_slower": ([over_nodes(*each) for each in SLOWER.items()], ["cluster.num_workers"]),
    "a_step_that_waits_for_the_network": ([replace(over_nodes(16, SLOWER[16]), settings=[])], []),
    "one_has_no_forecast": ([row(["root"], 9), Row(["ddp"], FAILED, None, 64)], ["sharding"]),
    "fastest": two(fast(row([], 16), 1.0), fast(row([], 9), 1.27)),
    "may_be_as_fast": two(fast(row([], 16), 1.0), fast(row([], 9), 1.05)),
    "unsure_and_faster": two(fast(row([], 27, **UNSURE), 1.0), fast(row([], 9), 1.2)),
    "data_sheet": ([fast(row([], 9.9), 0.1, basis=Basis.data_sheet)], []),
    "corrected_by_a_trial": ([fast(row([], 9.9), 1.15, **corrected(1, True))], []),
    "corrected_by_a_trial_that_is_far_off": ([fast(row([], 9.9), 3.3, **corrected(1, True, 3.3))], []),
    "corrected_by_trials_of_another_model": ([fast(row([], 9.9), 1.15, **corrected(2, False))], []),
    "corrected_by_eight": ([fast(row([], 9.9), 1.0, unlike=("sharding=root",), **corrected(8, True))], []),
    "unlike_what_was_published": ([fast(row([], 9.9), 1.0, unlike=("sharding=root", "offload=cpu"))], []),
    "later_publishers": ([fast(row([], 9.9), 1.0, of_sources=0.04)], []),
    "few_sources": ([fast(row([], 9.9), 1.0, kinds=("float8", "several_nodes"), sources=2)], []),
    "workers": (over_workers(), ["activation_checkpointing", "cluster.num_workers"]),
    "more_than_linear": (
        [
            fast(row((str(n),), gib), step_s, n, samples=2 * n, tokens=8192 * n)
            for n, gib, step_s in ((8, 20, 1.261), (32, 16, 1.254))
        ],
        ["cluster.num_workers"],
    ),
    "of_some_settings_few_workers": (some_of_few_workers(), ["sharding", "cluster.num_workers"]),
    "each_of_many_numbers_of_workers": (
        [fast(row(("full", str(n)), 64 / n), 1.0, n) for n in (4, 8, 16, 32)],
        ["activation_checkpointing", "cluster.num_workers"],
    ),
    "smaller_batches_of_more_workers": (
        [replace(each, microbatch=512 if each.settings[1] == "16" else 2048) for each in over_workers()],
        ["activation_checkpointing", "cluster.num_workers"],
    ),
    "each_batch_size": (
        [
            fast(row((name, str(samples)), 9), step_s, samples=samples)
            for name, samples, step_s in (("root", 8, 1.0), ("ddp", 8, 1.5), ("root", 16, 1.9), ("ddp", 16, 1.6))
        ],
        ["sharding", "training.global_batch_size"],
    ),
    "nearly_full": two(fast(row([], 22, active_bytes=10 * GIB, reserved_bytes=22 * GIB), 1.0), fast(row([], 9), 1.5)),
    "over_90_percent": two(fast(row([], 22), 1.0), fast(row([], 9), 1.5)),
    "nothing_surely_fits": two(fast(row([], 22), 1.0), fast(row([], 22), 1.5)),
    "bound_by_launches": ([fast(row([], 9), 1.0, bound_unseen=True, shares={"launch": 0.7, "compute": 0.3})], []),
    "on_cpus": (  # one sample at once, and no capacity
        [replace(r, forecast=replace(r.forecast, cuda=False, capacity_bytes=None), microbatch=1) for r in ROWS[:2]],
        AXES,
    ),
    "network": two(*(fast(row([], 9), step_s, network=Network(800, NETWORK)) for step_s in (1.0, 1.1))),
}  # fmt: skip


ROOM = ["activation_checkpointing=full", "a smaller training.global_batch_size"]
REMEDIES = {"nothing_surely_fits": ROOM, "nothing_fits_and_something_is_left_to_try": ROOM}


def said(rows: Sequence[Row], swept: Sequence[str], name: str = "") -> str:
    made = answers(rows, swept, 0.03, REMEDIES.get(name, ()))
    return "\n".join(sentences(rows, swept, "images", made, 0.03))


@pytest.mark.parametrize("name", CASES)
def test_forecasts_answer_as_they_did(name: str):
    assert said(*CASES[name], name) + "\n" == (FOLDER / f"{name}.txt").read_text()


def test_each_batch_of_workers_has_its_own_answer():
    """`${per_worker:8}` makes 16 and 32 of it for two degrees of tensor parallelism."""
    requests = [Request(config(f"training.global_batch_size={size}"), 4, True, None) for size in (16, 32, 32)]
    rows = [replace(row([tp], 9), request=one) for tp, one in zip(("2", "1", "4"), requests, strict=True)]
    made = answers(rows, ["sharding.tp"], 0.03)
    assert [answer.where for answer in made] == [{"training.global_batch_size": size} for size in ("16", "32")]
    assert [len(answer.rows) for answer in made] == [1, 2]


def test_what_makes_room_is_what_was_not_varied():
    requests = [Request(config(), 8, True, None)]
    assert room_remedies(requests, []) == ROOM
    assert room_remedies(requests, ["activation_checkpointing"]) == ROOM[1:]


@pytest.mark.parametrize(
    ("totals", "enough"),
    [((60, 45, 59), 8), ((60, 61, 59), 8), ((60, 63, 59), 16), ((60, 70, 90), None), ((60, 60, 60), 8)],
)
def test_the_number_from_which_more_workers_do_not_pay(totals: Sequence[float], enough: int | None):
    """Of 8, 16 and 32 workers, by their tokens/s in total, in thousands; 3 % are no difference."""
    rows = [over_nodes(n, total * 1e3) for n, total in zip((8, 16, 32), totals, strict=True)]
    (series,) = series_of(answers(rows, ["cluster.num_workers"], 0.03), 0.03)
    assert series.enough == enough


@pytest.mark.parametrize(
    ("cells", "compared"),
    [
        # of each worker 8 samples, whatever the batch; 16 and 4 at once have no other number of workers
        (((8, 64), (16, 64), (8, 128), (16, 128)), [((8, 16), [8], {})]),
        (((8, 64), (16, 128), (8, 128), (16, 256)), [((8, 16), [8], {}), ((8, 16), [16], {})]),
        # none is equal, so steps of one batch are compared, though they are unequal
        (((8, 64), (16, 64)), [((8, 16), [8, 4], {"training.global_batch_size": "64"})]),
        (
            ((8, 64), (16, 64), (8, 192), (16, 192)),
            [
                ((8, 16), sizes, {"training.global_batch_size": batch})
                for sizes, batch in (([8, 4], "64"), ([24, 12], "192"))
            ],
        ),
        (((8, 64), (16, 192)), []),
    ],
)
def test_speeds_are_compared_of_equal_microbatches(cells: Sequence[tuple[int, int]], compared: list[object]):
    """Numbers of workers and batch sizes -> those that are compared, their microbatches, and what else they share."""
    rows = [replace(fast(row((str(n), str(size)), 9), 1.0, n, samples=size), microbatch=size // n) for n, size in cells]
    made = series_of(answers(rows, ["cluster.num_workers", "training.global_batch_size"], 0.03), 0.03)
    found = [
        (tuple(row.forecast.num_workers for row in series.rows), series.microbatches, series.others) for series in made
    ]
    assert found == compared


@pytest.mark.parametrize(
    ("words", "workers", "shares", "replicas"),
    [
        ("sharding=per_block", 16, {"compute": 0.42, "scatter": 0.35, "gather": 0.2}, 2),  # together most of it
        ("sharding=per_block", 16, {"compute": 0.9}, None),
        ("sharding=per_block", 8, {"scatter": 0.9}, None),  # one node
        ("sharding=ddp", 16, {"scatter": 0.9}, None),
        ("sharding=per_block sharding.dp_replicate=2", 16, {"scatter": 0.9}, None),
        ("sharding=per_block training.global_batch_size=12", 12, {"scatter": 0.9}, None),  # a group on two nodes
        ("sharding=per_block sharding.tp=4", 16, {"scatter": 0.9}, 2),
        ("sharding=per_block sharding.tp=8", 16, {"scatter": 0.9}, None),  # nothing is left to shard within a node
    ],
)
def test_where_a_step_waits_replicas_of_whole_nodes_are_named(
    words: str, workers: int, shares: dict[str, float], replicas: int | None
):
    request = Request.of(config("model=mlp", "forecast.device=h100_sxm", *words.split()), workers)
    network = Network(400) if workers > 8 else None
    one = replace(fast(row([], 9), 1.0, workers, shares=shares, network=network), request=request)
    (answer,) = answers([one], [], 0.03)
    assert answer.num_replicas == replicas


def test_tensor_parallel_workers_share_their_samples():
    asked = [
        Request.of(config(f"sharding.tp={tp}", "training.global_batch_size=8"), workers)
        for tp, workers in ((1, 8), (8, 8), (8, 16))
    ]
    assert [request.samples_per_worker for request in asked] == [1, 8, 4]
    assert "8 items with the lowest data-parallel degree and 1 with the highest" in " ".join(request_notes(asked[:2]))
    assert "8 items with the fewest workers and 4 with the most" in " ".join(request_notes(asked[1:]))
    assert [len(room_remedies([request], [])) for request in asked] == [1, 2, 2], "a single sample cannot be fewer"
    two, four = (replace(row([], 9), request=Request.of(config(f"sharding.tp={tp}"), 8)) for tp in (2, 4))
    told = [sentence for one in (two, four) for sentence in say("more_workers", [one])]
    assert [re.findall("num_workers=([0-9,]+)", sentence) for sentence in told] == [["2,4,8"], ["4,8"]]


def test_a_long_table_has_the_best_of_each_number_of_workers():
    rows = [fast(row((f"s{n}", str(m)), 9), 1.0 + n, m) for m in (8, 16) for n in range(MOST_ROWS)]
    kept = [each.settings for each in best_rows(rows)]
    assert kept == [[f"s{n}", m] for m in ("8", "16") for n in range(MOST_ROWS // 2)]
    assert [each.settings for each in best_rows(rows, most=4)] == [[f"s{n}", m] for m in ("8", "16") for n in range(3)]


@pytest.mark.parametrize("width", [80, 100, 120])
def test_the_table_at_this_width(width: int):
    """The row that is unsure has no largest microbatch: 28 GiB, or without what is cached 28 - 30 + 20."""
    unsure = row(("root", "fp32", "full"), 27, 0, **UNSURE)
    out = io.StringIO()
    Console(file=out, width=width).print(forecast_table([*ROWS, unsure, Row(["root", "fp32", "none"], FAILED)], AXES))
    lines = "".join(f"{line.rstrip()}\n" for line in out.getvalue().splitlines())
    assert lines == (Path(__file__).parent / "tables" / f"{width}.txt").read_text()


def test_the_csv_has_the_fastest_of_each_number_of_workers_first(tmp_path: Path):
    """8 samples in 1 s on 8 workers: 1 a second each, and 8 of all; and why there is no forecast or no speed."""
    rows = [fast(row([f"{n} {step_s}"], 9), step_s, n) for n, step_s in ((8, 1.0), (2, 1.5), (8, 0.5), (2, 10.0))]
    slow = replace(row([], 1).forecast, no_speed="no peak")
    none = Forecast(True, 8, error=NoForecast("not_followed", "asks for a value"))
    rows = in_order([fast(row(["large"], 99), 0.1), Row(["none"], none), Row(["slow"], slow), *rows])
    assert [each.settings[0] for each in rows] == ["slow", "2 1.5", "2 10.0", "8 0.5", "8 1.0", "large", "none"]
    rows[1] = replace(rows[1], forecast=replace(rows[1].forecast, expandable=True))
    assert "Its segments are expandable" in allowances_note([each.forecast for each in rows])
    assert "expandable" not in allowances_note([each.forecast for each in rows[2:]])
    write_csv(tmp_path / "f.csv", rows, ["x"])
    lines = [*csv.DictReader((tmp_path / "f.csv").open())]
    cells = lines[4]
    assert [line["expandable_segments"] for line in lines] == ["false", "true", *["false"] * 4, ""]
    assert (cells["device"], cells["data_sheet"], cells["basis"]) == ("cuda", "", "fitted")
    assert (float(cells["step_s"]), cells["error_p90"], cells["ratio_error_p90"]) == (1.0, "0.1", "0.08")
    assert (float(cells["samples_per_s_per_device"]), float(cells["samples_per_s_of_all"])) == (1.0, 8.0)
    assert float(cells["tokens_per_s_of_all"]) == 8000.0
    assert (lines[0]["no_speed"], lines[-1]["no_forecast"]) == ("no peak", "asks for a value")


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for case, planted in CASES.items():
        (FOLDER / f"{case}.txt").write_text(said(*planted, case) + "\n")


def test_a_network_that_no_step_uses_is_named():
    def notes(*words: str, workers: int = 8) -> str:
        return " ".join(request_notes([Request.of(config("forecast.network_gbit=400", *words), workers)]))

    on_h100 = "forecast.device=h100_sxm"
    assert "network_gbit=400 has no effect on 8 workers: its nodes have 8 devices" in notes(on_h100)
    assert "network_gbit=400 has no effect: no device is known" in notes("forecast.device=cuda")
    for several in (notes(on_h100, workers=16), notes(on_h100, "cluster.gpus_per_node=4")):
        assert "network_gbit" not in several
