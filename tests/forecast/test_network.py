"""The network between nodes: given or assumed, the range that follows, and the network at which the answer changes."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path

import pytest

from fsdp_lab.forecast.capacity import Forecast
from fsdp_lab.forecast.devices import data_sheet
from fsdp_lab.forecast.network import network_sentences
from fsdp_lab.forecast.table import Row
from fsdp_lab.speed.device import Factors, on_network
from fsdp_lab.speed.predict import Network, Speed, predict
from fsdp_lab.speed.program import Kind, Operator, Stream
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
    assert speed.network is None and network_sentences([row("root", {})], ["sharding"], 0.03) == []


def test_the_key_gives_the_network_of_a_node():
    assumed, given = (
        data_sheet(config("forecast.device=a100_80gb", *words)) for words in ([], ["forecast.network_gbit=400"])
    )
    assert assumed is not None and given is not None
    assert (assumed.network_gbit, assumed.network_known) == (800, False)
    assert (given.network_gbit, given.network_known) == (400, True)
    assert given.basis is assumed.basis, "the file's other figures are those that were fitted"


def row(name: str, steps: dict[float, float], fits: bool = True) -> Row:
    """A setting with the seconds of its step on each network, the middle one of which is assumed."""
    network = Network(sorted(steps)[len(steps) // 2], steps) if steps else None
    speed = Speed(1.0, {}, 1.0, 1.0, 0.1, ROUND.basis, "X", samples=8, network=network)
    peaks = {"device": {"total": 1 if fits else 3}}
    return Row([name], Forecast(True, NODES, peaks, capacity_bytes=2, speed=speed))


FULL = {400.0: 2.0, 800.0: 1.0, 1600.0: 0.5}  # waits for the network
HYBRID = {400.0: 1.2, 800.0: 1.1, 1600.0: 1.1}


def test_the_network_at_which_another_setting_is_faster_is_named():
    """Full sharding is slower by 0.8 s at 400 Gbit/s and faster by 0.1 at 800: equal at 800 - 400 / 9 = 755.6."""
    sentences = network_sentences([row("1", FULL), row("4", HYBRID)], ["sharding.dp_replicate"], 0.03)
    assert sentences == [
        "No network was given: 800 Gbit/s a node of X is an assumption, and ranges cover 400 to 1,600. Set "
        "forecast.network_gbit to yours.",
        "Below 760 Gbit/s a node, sharding.dp_replicate=4 is faster than sharding.dp_replicate=1.",
    ]


def test_only_what_fits_is_compared_and_a_tie_changes_no_answer():
    axes = ["sharding.dp_replicate"]
    assert len(network_sentences([row("1", FULL), row("4", HYBRID, fits=False)], axes, 0.03)) == 1
    close = {400.0: 1.98, 800.0: 1.1, 1600.0: 1.1}
    assert len(network_sentences([row("1", FULL), row("4", close)], axes, 0.03)) == 1
    (_, above) = network_sentences([row("1", FULL), row("4", {400.0: 1.0, 800.0: 0.9, 1600.0: 0.9})], axes, 0.03)
    assert above == "Above 960 Gbit/s a node, sharding.dp_replicate=1 is faster than sharding.dp_replicate=4."


def test_the_command_names_the_network_that_it_assumed(tmp_path: Path):
    """Of two nodes; with the key it is not mentioned, and the range is narrower."""
    words = [
        "model=mlp",
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
        assert ("No network was given: 800 Gbit/s a node of NVIDIA A100-SXM4-80GB" in done.stdout) is (gbit is None)
        with (tmp_path / f"{gbit}" / "forecast.csv").open() as file:
            (line,) = csv.DictReader(file)
        assert (line["network_gbit"], line["network_assumed"]) == ("800.0", str(gbit is None).lower())
        widths[gbit] = float(line["step_high_s"]) / float(line["step_low_s"])
    assert widths[None] >= widths[800]
