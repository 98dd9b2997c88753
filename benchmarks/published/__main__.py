"""Forecasts against steps that others have published; no GPU is needed.

make published

Forecasts the time, the range and the memory of every row in `data/` that has one. Each source is left out in turn: its
rows are forecast by efficiencies that were fitted to the others. Writes `experiments/published/results/`, and exits
with 1 where a target is missed. `python -m benchmarks.published t0` forecasts the rows whose names begin so by the
figures of the devices' files.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from benchmarks.published.fit import FAMILIES, Fit, families, fits, fits_without
from benchmarks.published.rows import Row, read_rows
from benchmarks.published.steps import ROOT, Traced, trace
from benchmarks.published.summary import (
    COLUMNS,
    Result,
    errors_of,
    named,
    summary,
    table,
    write_rows,
)
from fsdp_lab.config.options import device_file
from fsdp_lab.forecast.capacity import FULL_ERROR, GIB
from fsdp_lab.forecast.speed.device import Errors, load_device, on_network
from fsdp_lab.forecast.speed.predict import NETWORKS
from fsdp_lab.forecast.speed.refine import pair_error

RESULTS = ROOT / "experiments" / "published" / "results"


def main() -> int:
    """Print a line for each row and the summary, and return the exit status."""
    started = time.monotonic()
    rows, left_out = read_rows()
    if asked := sys.argv[1:]:
        return by_the_files([row for row in rows if row.name.startswith(tuple(asked))])
    traced = families(trace(rows, _progress))
    print(f"{time.monotonic() - started:.0f} s", flush=True)
    whole = fits(traced)
    results: dict[str, Result] = {}
    ratios: dict[tuple[str, ...], list[float]] = {}
    for source, scored in _sources(rows).items():
        without = fits_without(source, traced, whole) if scored else whole
        for family, one in _of_source(traced, source):
            alone = {each.row.source for each in traced[family]} == {source}
            results[one.row.name] = result = replace(_result(one, without[family]), alone=alone)
            if one.row.measured_s:
                ratios.setdefault(one.group, []).append(1 + result.error)
    errors = errors_of([one for one in results.values() if not one.row.unscored])
    ranged = [_ranged(one, results[one.row.name], whole[family], errors[family]) for family, one in _all(traced)]
    text, good = summary(ranged)
    found = [text, _figures(whole, errors, ratios.values()), "Not forecast:", *named(left_out), "Not scored:"]
    found += named({one.row.name: one.row.unscored for one in ranged if one.row.unscored})
    summed = "\n".join(found)
    print(f"\n{table(COLUMNS, [one.cells() for one in ranged])}\n\n{summed}\n\n{time.monotonic() - started:.0f} s")
    write_rows(RESULTS / "rows.csv", ranged)
    (RESULTS / "summary.md").write_text(f"{summed}\n")
    return 0 if good else 1


def by_the_files(rows: Sequence[Row]) -> int:
    """Print some rows as the devices' files forecast them: of rows that came after the fit."""
    files = {row.gpu: load_device(device_file(row.gpu) or Path()) for row in rows}
    traced = trace(rows, _progress)
    fitted = {gpu: Fit(device.efficiency, limited=1.0) for gpu, device in files.items()}
    results = [_ranged(one, _result(one, fit), fit, files[one.row.gpu].errors)
               for one in traced for fit in [fitted[one.row.gpu]]]  # fmt: skip
    print(f"\n{table(COLUMNS, [one.cells() for one in results])}\n\n{summary(results)[0]}")
    return 0


def _sources(rows: Sequence[Row]) -> dict[str, bool]:
    """Return the sources, and whether errors of their rows count."""
    return {row.source: any(not each.unscored for each in rows if each.source == row.source) for row in rows}


def _progress(done: int, total: int) -> None:
    if done % 20 == 0 or done == total:
        print(f"{done} of {total} steps traced", flush=True)


def _all(traced: Mapping[str, Sequence[Traced]]) -> Iterator[tuple[str, Traced]]:
    yield from ((family, one) for family, some in traced.items() for one in some)


def _of_source(traced: Mapping[str, Sequence[Traced]], source: str) -> Iterator[tuple[str, Traced]]:
    yield from ((family, one) for family, one in _all(traced) if one.row.source == source)


def _result(one: Traced, fitted: Fit) -> Result:
    step_s, memory = fitted.seconds(one), one.memory
    if memory is None:
        return Result(one.row, step_s, None, None, "yes")
    assert memory.reserved_bytes is not None and memory.capacity_bytes is not None
    fits = "yes" if memory.fits else "unsure" if memory.unsure else "no"
    published = memory.reserved_bytes if one.row.allocated_gib is None else memory.active_bytes
    return Result(one.row, step_s, published / GIB, memory.needed_bytes / memory.capacity_bytes, fits)


def _ranged(one: Traced, result: Result, fitted: Fit, errors: Errors) -> Result:
    """Return a result with its range, as a forecast has it: see `predict` and `on_capacity`."""
    device = replace(one.row.device, efficiency=fitted.of(one.row))
    steps, step_s = [result.step_s], result.step_s
    if not one.row.network_known:
        ends = [one.seconds(on_network(device, device.network_gbit * by)) for by in (NETWORKS[0], NETWORKS[-1])]
        steps += [end * step_s / one.seconds(device) for end in ends]
    most = errors.of([one.row.kind, *(["several_nodes"] * one.row.several_nodes)]).p90
    low, high = min(steps) / (1 + most), max(steps) / (1 - most)
    if one.memory is not None and one.memory.nearly_full:
        high = max(high, step_s / (1 - FULL_ERROR))
    return replace(result, low_s=low, high_s=high)


def _figures(fitted: Mapping[str, Fit], errors: Mapping[str, Errors], ratios: Iterable[Sequence[float]]) -> str:
    """Return what belongs in the files of the devices."""
    pairs, lines = pair_error(ratios), []
    assert pairs is not None
    relative = _flow({"median": round(pairs.median, 3), "p90": round(pairs.p90, 3)})
    for family, gpu in [(name, gpu) for name in fitted for gpu in FAMILIES[name]]:
        shares = {name: round(share, 3) for name, share in asdict(fitted[family].on(gpu)).items()}
        lines += [f"\n{gpu}:", "```yaml", f"efficiency: {_flow(shares)}", "errors:"]
        for kind, known in vars(errors[family]).items():
            lines += [f"  {kind}: {_flow({name: v for name, v in vars(known).items() if v})}"] if known else []
        lines += [f"relative: {relative}", "```"]
    return "\n".join([*lines, ""])


def _flow(values: Mapping[str, float]) -> str:
    return "{" + ", ".join(f"{name}: {value:g}" for name, value in values.items()) + "}"


if __name__ == "__main__":
    sys.exit(main())
