"""Sentences about the network between nodes: which one was assumed, and where another answers differently."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

from fsdp_lab.forecast.speed.predict import Network, Speed
from fsdp_lab.forecast.table import Row
from fsdp_lab.record.trial import words


def network_sentences(rows: Sequence[Row], swept: Sequence[str], tolerance: float) -> list[str]:
    """Return sentences about the network between nodes, and more of one that was assumed; none if no step has several.

    Settings of one device, number of workers and global batch size are compared.

    Args:
        tolerance: `report.speed_tolerance`: the share by which the fastest setting of a network has to be faster.
    """
    groups: dict[tuple[str, int, int], list[Row]] = {}
    speeds = [row.forecast.speed for row in rows if row.forecast.speed is not None and row.forecast.speed.network]
    for row in rows:
        if (speed := row.forecast.speed) is not None and speed.network is not None and speed.network.steps:
            groups.setdefault((speed.device, row.forecast.num_workers, speed.samples), []).append(row)
    sentences = []
    for (device, workers, _), some in sorted(groups.items(), key=lambda item: item[0]):
        gbit = _network(some[0]).gbit
        assumed = (
            f"No network was given: {_gbit(gbit)} Gbit/s a node of {device} is an assumption, and ranges cover "
            f"{_gbit(gbit / 2)} to {_gbit(gbit * 2)}. Set forecast.network_gbit to yours."
        )
        where = f"With {workers:,} workers: " if len({key[1] for key in groups}) > 1 else ""
        sentences += [assumed, *(f"{where}{flip}" for flip in _flips(some, swept, tolerance))]
    return [line for line in dict.fromkeys([*map(_reached, speeds), *sentences]) if line]


def _reached(speed: Speed) -> str:
    network = speed.network
    if network is None or network.reached is None:
        return ""
    return (
        f"Between nodes of {speed.device}, gathers and scatters are assumed to reach {network.reached * 100:.0f} % of "
        f"the {_gbit(network.gbit)} Gbit/s of a node, all its adapters together (efficiency.network of its file)."
    )


def _flips(rows: Sequence[Row], swept: Sequence[str], tolerance: float) -> list[str]:
    """Return where another setting becomes the fastest, below the assumed network and above it."""
    fitting = [row for row in rows if row.forecast.fits is not False]
    if len(fitting) < 2:
        return []
    networks = sorted(_network(fitting[0]).steps)
    middle = len(networks) // 2
    winner = _fastest(fitting, networks[middle])
    sentences = []
    for word, ordered in (("Below", networks[middle::-1]), ("Above", networks[middle:])):
        end = ordered[-1]
        other = _fastest(fitting, end)
        mine, best = (_network(row).steps for row in (winner, other))
        if other is winner or mine[end] < best[end] * (1 + tolerance):
            continue
        faster, slower = (dict(zip(swept, row.settings, strict=True)) for row in (other, winner))
        differs = [key for key in swept if faster[key] != slower[key]]
        sentences.append(
            f"{word} {_gbit(_crossing(mine, best, ordered))} Gbit/s a node, {words({k: faster[k] for k in differs})} "
            f"is faster than {words({k: slower[k] for k in differs})}."
        )
    return sentences


def _fastest(rows: Sequence[Row], gbit: float) -> Row:
    return min(rows, key=lambda row: _network(row).steps[gbit])


def _crossing(mine: Mapping[float, float], other: Mapping[float, float], ordered: Sequence[float]) -> float:
    """Return the Gbit/s from which the other is faster for good, along `ordered`; straight lines in between."""
    last = max(place for place, gbit in enumerate(ordered) if mine[gbit] <= other[gbit])
    before, after = list(pairwise(ordered))[last]
    ahead, behind = other[before] - mine[before], mine[after] - other[after]
    return before + (after - before) * ahead / (ahead + behind)


def _network(row: Row) -> Network:
    assert row.forecast.speed is not None and row.forecast.speed.network is not None
    return row.forecast.speed.network


def _gbit(value: float) -> str:
    return f"{float(f'{value:.2g}'):,g}"
