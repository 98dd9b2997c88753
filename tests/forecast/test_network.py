"""The network between nodes: given or assumed, and the range that follows."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path

import pytest

from fsdp_lab.forecast.devices import data_sheet
from fsdp_lab.forecast.speed.device import Factors, on_network
from fsdp_lab.forecast.speed.predict import predict
from fsdp_lab.forecast.speed.program import Kind, Operator, Stream
from tests.forecast.command import forecast_here
from tests.ranks import config
from tests.speed.test_costs import ROUND

NODES = 2 * ROUND.node_size  # 320 Gbit/s a node


def sends(num_bytes: float, ranks: int) -> list[Operator]:
    """A step that does nothing but gather."""
    group = tuple(range(ranks))
    return [Operator("gather", Kind.gather, Stream.gather, "forward", "", num_bytes=num_bytes, group=group)]


def test_a_range_covers_half_and_twice_of_a_network_that_is_assumed():
    """15 of 16 parts of 4e10 bytes cross at 4e10 bytes/s; twice of it is still below the links' 1e11."""
    device = replace(ROUND, error_elsewhere=replace(ROUND.error_elsewhere, p90=0.1))
    speed = predict(sends(4e10, NODES), device, looked_at=False)
    step_s = 15 / 16
    assert speed.step_s == pytest.approx(step_s)
    assert speed.low_s == pytest.approx(step_s / 2 / 1.1) and speed.high_s == pytest.approx(step_s * 2 / 0.9)
    assert speed.network is not None and speed.network.gbit == 320 and len(speed.network.steps) == 9
    assert min(speed.network.steps) == pytest.approx(160) and max(speed.network.steps) == pytest.approx(640)


@pytest.mark.parametrize("device", [on_network(ROUND, 320), replace(ROUND, factors=Factors(settings=8))])
def test_a_network_that_is_given_or_that_trials_ran_on_widens_no_range(device):
    speed = predict(sends(4e10, NODES), device)
    assert speed.network is not None and not speed.network.steps
    assert speed.high_s == pytest.approx(speed.step_s / (1 - device.error.p90))


def test_a_step_of_one_node_uses_no_network():
    speed = predict(sends(4e10, ROUND.node_size), ROUND)
    assert speed.network is None


def test_the_key_gives_the_network_of_a_node():
    assumed, given = (
        data_sheet(config("forecast.device=a100_80gb", *words)) for words in ([], ["forecast.network_gbit=400"])
    )
    assert assumed is not None and given is not None
    assert (assumed.network_gbit, assumed.network_known) == (800, False)
    assert (given.network_gbit, given.network_known) == (400, True)
    assert given.basis is assumed.basis, "the file's other figures are those that were fitted"


def test_the_command_names_the_network_that_it_assumed(tmp_path: Path):
    """Of two nodes, for whose network a step with gathers of 134 MB waits; with the key the range is narrower."""
    words = [
        "model=mlp",
        "model.hidden_dim=8192",
        "sharding=per_block",
        "precision=bf16_mixed",
        "cluster.num_workers=16",
        "forecast.device=a100_80gb",
    ]
    widths = {}
    for gbit in (None, 800):
        key = [] if gbit is None else [f"forecast.network_gbit={gbit}"]
        done = forecast_here(tmp_path, *words, *key, f"forecast.folder={gbit}")
        assert done.returncode == 0, done.stderr
        assert ("No network was given: " in done.stdout) is (gbit is None)
        assert (
            "scatters are assumed to reach 35 % of the 800 Gbit/s of a node, all its adapters together" in done.stdout
        )
        assert "sharding.dp_replicate=2 would shard within each node: " in done.stdout
        assert done.stdout.index("would shard within each node") < done.stdout.index("forecast peak of")
        with (tmp_path / f"{gbit}" / "forecast.csv").open() as file:
            (line,) = csv.DictReader(file)
        assert (line["network_gbit"], line["network_assumed"]) == ("800.0", str(gbit is None).lower())
        widths[gbit] = float(line["step_high_s"]) / float(line["step_low_s"])
    assert widths[None] > 2 * widths[800]
