"""What more workers bring, worked by hand, and which other settings a forecast tries."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from fsdp_lab.forecast.answer import answers
from fsdp_lab.forecast.capacity import Forecast, NoForecast
from fsdp_lab.forecast.run import Request
from fsdp_lab.forecast.scaling import Series, series_of
from fsdp_lab.forecast.speed.predict import Network, Speed
from fsdp_lab.forecast.table import Row
from fsdp_lab.forecast.tries import Try, try_others
from tests.forecast.test_answer import HYBRID, SLOWER, fast, hybrids, over_nodes, row
from tests.ranks import config

WORKERS = ["cluster.num_workers"]
HERE = ("forecast.device=h100_sxm", "forecast.largest_microbatch=true")


def compared(rows: Sequence[Row], swept: Sequence[str] = WORKERS, tried: Sequence[Try] = ()) -> list[Series]:
    return series_of(answers(rows, swept, 0.03), tried, 0.03)


def test_total_speeds_are_compared_in_their_order():
    """16 GPUs reach 44,816 of the 59,616 tokens/s of 8; 32 reach 86,720, so 2,710 each of 7,452."""
    (series,) = compared([over_nodes(*each) for each in SLOWER.items()])
    eight, sixteen, most = series.points
    assert (eight.slower_than, sixteen.slower_than, most.slower_than) == (None, 8, None)
    assert sixteen.lost == pytest.approx(1 - 2801 / 7452) and most.lost == pytest.approx(1 - 2710 / 2801)
    assert most.times == pytest.approx(86_720 / 59_616) and series.enough is None


@pytest.mark.parametrize(
    ("totals", "enough"),
    [((60, 45, 59), 8), ((60, 61, 59), 8), ((60, 63, 59), 16), ((60, 70, 90), None), ((60, 60, 60), 8)],
)
def test_the_number_from_which_more_workers_do_not_pay(totals: Sequence[float], enough: int | None):
    rows = [over_nodes(n, total * 1e3) for n, total in zip((8, 16, 32), totals, strict=True)]
    (series,) = compared(rows)
    assert series.enough == enough


def test_hybrid_sharding_counts_where_it_fits():
    rows = [over_nodes(8, 60e3), over_nodes(16, 45e3), over_nodes(32, 59e3)]
    (series,) = compared(rows, tried=hybrids(rows))
    assert [point.total for point in series.points] == pytest.approx([60e3 / 8192, HYBRID[16] / 8192, 59e3 / 8192])
    assert series.enough == 16 and series.points[2].hybrid is None, "which does not fit 32"


def test_equal_microbatches_are_compared_where_there_are_some():
    """Of `${per_worker:1},${per_worker:2}`; and of one global batch, whose steps are unequal."""

    def at(workers: int, batch: int) -> Row:
        planted = fast(row((str(batch), str(workers)), 9), 1.0, workers, samples=batch)
        return replace(planted, microbatch=batch // workers)

    keys = ["training.global_batch_size", *WORKERS]
    series = compared([at(w, w * each) for w in (8, 16) for each in (1, 2)], keys)
    assert [(one.microbatches, len(one.points), one.others) for one in series] == [([1], 2, {}), ([2], 2, {})]
    (unequal,) = compared([replace(at(w, 64), settings=[str(w)]) for w in (8, 16)])
    assert unequal.microbatches == [8, 4] and not compared([replace(at(8, 64), settings=["8"])])


def asked(answer_row: Row, swept: Sequence[str] = (), fits: bool = True) -> tuple[list[dict[str, str]], list[Try]]:
    """Return which keys are changed for this only setting, and what is made of forecasts that fit or do not."""
    requests: list[Request] = []

    def make(some: list[Request]) -> list[Forecast]:
        requests.extend(some)
        assert not any(request.page or request.config.forecast.largest_microbatch for request in some)
        return [row([], 9 if fits else 30 - n).forecast for n, _ in enumerate(some)]

    tried = try_others(answers([answer_row], swept, 0.03), swept, make)
    changed = [
        {
            "dp_replicate": str(r.config.sharding.dp_replicate),
            "checkpointing": r.config.activation_checkpointing.name,
            "batch": str(r.config.training.global_batch_size),
        }
        for r in requests
    ]
    return changed, tried


def planted(words: str, workers: int = 16, bound: str = "scatter", gib: float = 9) -> Row:
    request = Request.of(config("model=mlp", *HERE, *words.split()), workers, Path("page"))
    network = Network(400) if workers > 8 else None
    sized = fast(row([], gib), 1.0, workers, shares={bound: 0.9}, network=network)
    per_step = request.config.training.global_batch_size // workers
    return replace(sized, request=request, microbatch=per_step // request.config.training.grad_accum_steps)


def speed_of(planted: Row) -> Speed:
    assert planted.forecast.speed is not None
    return planted.forecast.speed


def test_a_step_that_waits_for_the_network_is_tried_with_shards_within_a_node():
    (one,), (made,) = asked(planted("sharding=per_block", workers=32))
    assert one["dp_replicate"] == "4" and made.words == {"sharding.dp_replicate": "4"} and made.fits
    small = planted("sharding=per_block reshard_after_forward=always", gib=3)
    two = [replace(planted("sharding=per_block"), settings=["never"]), replace(small, settings=["always"])]
    two[1] = replace(two[1], forecast=replace(two[1].forecast, speed=replace(speed_of(two[0]), step_s=9.0)))
    keys = ["reshard_after_forward"]
    (other,) = try_others(answers(two, keys, 0.03), keys, lambda _: [row([], 99).forecast, row([], 9).forecast])
    assert other.of is two[0] and other.name == "reshard_after_forward=always", "the first does not fit"
    for words in ("sharding=ddp", "sharding=per_block sharding.dp_replicate=2"):
        assert asked(planted(words)) == ([], [])
    assert asked(planted("sharding=per_block", bound="compute")) == ([], [])
    both = planted("sharding=per_block")
    shares = {"compute": 0.42, "scatter": 0.35, "gather": 0.2}
    (one,), _ = asked(replace(both, forecast=replace(both.forecast, speed=replace(speed_of(both), shares=shares))))
    assert one["dp_replicate"] == "2", "together they bound most of it"
    assert asked(planted("sharding=per_block", workers=8)) == ([], []), "it has one node"
    for uneven in (12, 20):
        batch = f"training.global_batch_size={uneven}"
        assert asked(planted(f"sharding=per_block {batch}", workers=uneven)) == ([], []), "a group on two nodes"
    swept = replace(planted("sharding=per_block"), settings=["1"])
    assert asked(swept, ["sharding.dp_replicate"]) == ([], [])


def test_where_nothing_fits_checkpointing_and_one_sample_are_tried():
    words = "sharding=per_block training.global_batch_size=64 training.grad_accum_steps=2"
    changed, (made,) = asked(planted(words, 8, gib=99))
    assert [(one["checkpointing"], one["batch"]) for one in changed] == [("full", "64"), ("none", "16"), ("full", "16")]
    assert made.words == {"activation_checkpointing": "full"} and made.row.microbatch == 4
    _, (made,) = asked(planted(words, 8, gib=99), fits=False)
    assert made.words["training.global_batch_size"] == "'${per_worker:2}'" and len(made.words) == 2, "it needs least"
    changed, _ = asked(replace(planted(words, 8, gib=99), settings=["none"]), ["activation_checkpointing"])
    assert [(one["checkpointing"], one["batch"]) for one in changed] == [("none", "16")]


def test_a_try_without_a_forecast_or_that_is_interrupted_changes_nothing():
    answer = answers([planted("sharding=per_block")], [], 0.03)
    assert try_others(answer, [], lambda some: [Forecast(True, 8, error=NoForecast("lost")) for _ in some]) == []

    def interrupted(_: list[Request]) -> list[Forecast]:
        raise KeyboardInterrupt

    assert try_others(answer, [], interrupted) == []
