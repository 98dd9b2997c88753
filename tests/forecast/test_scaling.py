"""What more workers bring, worked by hand, and where replicas of whole nodes may."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from fsdp_lab.forecast.answer import answers
from fsdp_lab.forecast.run import Request
from fsdp_lab.forecast.scaling import Series, series_of
from fsdp_lab.forecast.speed.predict import Network
from fsdp_lab.forecast.table import Row
from fsdp_lab.forecast.words import say
from tests.forecast.test_answer import SLOWER, fast, over_nodes, row
from tests.ranks import config

WORKERS = ["cluster.num_workers"]


def compared(rows: Sequence[Row], swept: Sequence[str] = WORKERS) -> list[Series]:
    return series_of(answers(rows, swept, 0.03), 0.03)


def test_total_speeds_are_compared_in_their_order():
    """16 GPUs reach 44,816 of the 59,616 tokens/s of 8; 32 reach 86,720, so 2,710 each of 7,452."""
    (series,) = compared([over_nodes(*each) for each in SLOWER.items()])
    _, eight, sixteen, most = (line.strip() for line in say("series", [series]))
    assert eight == "8: 59,620 tokens/s in total; 7,452 tokens/s per device"
    assert sixteen.startswith("16: 44,820 tokens/s in total, less than with 8; 2,801 tokens/s per device, 62 % less")
    assert most == "32: 86,720 tokens/s in total, 1.45 times that of 8; 2,710 tokens/s per device"
    assert series.enough is None


@pytest.mark.parametrize(
    ("totals", "enough"),
    [((60, 45, 59), 8), ((60, 61, 59), 8), ((60, 63, 59), 16), ((60, 70, 90), None), ((60, 60, 60), 8)],
)
def test_the_number_from_which_more_workers_do_not_pay(totals: Sequence[float], enough: int | None):
    rows = [over_nodes(n, total * 1e3) for n, total in zip((8, 16, 32), totals, strict=True)]
    (series,) = compared(rows)
    assert series.enough == enough


def test_equal_microbatches_are_compared_where_there_are_some():
    """Of `${per_worker:1},${per_worker:2}`; and of one global batch, whose steps are unequal."""

    def at(workers: int, batch: int) -> Row:
        planted = fast(row((str(batch), str(workers)), 9), 1.0, workers, samples=batch)
        return replace(planted, microbatch=batch // workers)

    keys = ["training.global_batch_size", *WORKERS]
    series = compared([at(w, w * each) for w in (8, 16) for each in (1, 2)], keys)
    assert [(one.microbatches, len(one.rows), one.others) for one in series] == [([1], 2, {}), ([2], 2, {})]
    (unequal,) = compared([replace(at(w, 64), settings=[str(w)]) for w in (8, 16)])
    assert unequal.microbatches == [8, 4] and not compared([replace(at(8, 64), settings=["8"])])


def planted(words: str, workers: int = 16, bound: str = "scatter") -> Row:
    request = Request.of(config("model=mlp", "forecast.device=h100_sxm", *words.split()), workers)
    network = Network(400) if workers > 8 else None
    return replace(fast(row([], 9), 1.0, workers, shares={bound: 0.9}, network=network), request=request)


def test_a_step_that_waits_for_the_network_names_the_replicas_that_shard_within_a_node():
    def named(one: Row) -> int | None:
        (answer,) = answers([one], [], 0.03)
        assert any("would shard within each node" in line for line in answer.details) is bool(answer.num_replicas)
        return answer.num_replicas

    assert named(planted("sharding=per_block", workers=32)) == 4
    for words in ("sharding=ddp", "sharding=per_block sharding.dp_replicate=2"):
        assert named(planted(words)) is None
    assert named(planted("sharding=per_block", bound="compute")) is None
    both = planted("sharding=per_block")
    assert both.forecast.speed is not None
    shares = {"compute": 0.42, "scatter": 0.35, "gather": 0.2}
    speed = replace(both.forecast.speed, shares=shares)
    assert named(replace(both, forecast=replace(both.forecast, speed=speed))) == 2, "together they bound most of it"
    assert named(planted("sharding=per_block", workers=8)) is None, "it has one node"
    for uneven in (12, 20):
        batch = f"training.global_batch_size={uneven}"
        assert named(planted(f"sharding=per_block {batch}", workers=uneven)) is None, "a group on two nodes"
