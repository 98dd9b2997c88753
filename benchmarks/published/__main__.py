"""Forecasts against steps that others have published; no GPU is needed.

make published
python -m benchmarks.published [folder of the rows]

Forecasts the time, the range and the memory of every published FSDP2 and FSDP1 row in `published_fsdp_speed.csv` and
`published_steps.csv` (`../shared/data`), FSDP1 as FSDP2. Each row is forecast by numbers that were not fitted to it.
Writes `experiments/published/results/` and exits with 1 where a target is missed, with 2 without the rows.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.published.fit import fit, without_each
from benchmarks.published.rows import MPT, STEPS, read_mpt, read_steps
from benchmarks.published.steps import Traced, trace
from benchmarks.published.summary import COLUMNS, Result, summary, table, write_rows
from fsdp_lab.forecast.capacity import GIB
from fsdp_lab.speed.device import Efficiency
from fsdp_lab.speed.pairs import pair_error

ROOT = Path(__file__).resolve().parents[2]
DATA, RESULTS = ROOT.parent / "shared" / "data", ROOT / "experiments" / "published" / "results"
UNKNOWN = """\
What the models do not know of the runs, which their sources do not state:
- FSDP1 is forecast as FSDP2: its units are flat parameters, and it records streams, so freed memory returns later.
- MPT: that the runs computed Composer's default metrics and clipped gradients; which kernel of attention they called.
- The loss of rows other than torchtitan's of March 2024: a cross entropy in float32 of logits that are kept in bf16.
- Compiled rows: whether the loss was compiled too. Rows g00 to g06: whether `selective` is by operator, as here."""


def main() -> int:
    """Print a line for each row and the summary, and return the exit status."""
    data, started = Path(sys.argv[1]) if len(sys.argv) > 1 else DATA, time.monotonic()
    if missing := [name for name in (MPT, STEPS) if not (data / name).is_file()]:
        print(f"{data} has no {' and no '.join(missing)}: without the published rows there is nothing to compare")
        return 2
    others, left_out = read_steps(data / STEPS)
    traced = trace([*read_mpt(data / MPT), *others], _progress)
    results = forecast(traced)
    lines = [result.cells() for result in results]
    print(f"\n{table(COLUMNS, lines)}\n")
    for name, reason in left_out.items():
        print(f"{name} is left out: {reason}")
    text, good = summary(results)
    print(f"\n{text}\n\n{UNKNOWN}\n\n{time.monotonic() - started:.0f} s")
    write_rows(RESULTS / "rows.csv", results)
    return 0 if good else 1


def _progress(done: int, total: int) -> None:
    if done % 20 == 0 or done == total:
        print(f"{done} of {total} rows traced", flush=True)


def forecast(traced: Sequence[Traced]) -> list[Result]:
    """Return the results, those of MPT by efficiencies that were fitted to other sizes of its models."""
    efficiencies: dict[str, Efficiency] = {}
    for gpu in dict.fromkeys(one.row.gpu for one in traced if one.row.fitted):
        mine = [one for one in traced if one.row.fitted and one.row.gpu == gpu and _network_known(one)]
        start = mine[0].row.device.efficiency
        efficiencies |= {one.row.name: each for one, each in zip(mine, without_each(mine, start), strict=True)}
        _print_fit(gpu, mine, fit(mine, start), efficiencies)
    return [_result(one, efficiencies.get(one.row.name, one.row.device.efficiency)) for one in traced]


def _network_known(one: Traced) -> bool:
    return one.row.device.network_known or not one.row.several_nodes


def _print_fit(gpu: str, rows: Sequence[Traced], whole: Efficiency, without: Mapping[str, Efficiency]) -> None:
    """Print what was fitted to which rows, and the errors of sizes that were left out: figures of the device's file."""
    print(f"\n{gpu}: fitted to {len(rows)} rows of MPT, each row forecast by a fit without its size of model")
    for what, efficiency in (("fitted to all", whole), ("in the file", rows[0].row.device.efficiency)):
        print(f"  {what}: {', '.join(f'{name} {value:.3f}' for name, value in vars(efficiency).items())}")
    groups: dict[str, list[float]] = {}
    for one in rows:
        seconds = one.seconds(replace(one.row.device, efficiency=without[one.row.name]))
        groups.setdefault(one.row.model, []).append(seconds / one.row.measured_s)
    ratios, pairs = sorted(abs(r - 1) for some in groups.values() for r in some), pair_error(groups.values())
    print(
        f"  error of sizes left out: median {ratios[len(ratios) // 2]:.1%}, 90 % {ratios[int(0.9 * len(ratios))]:.1%}"
    )
    if pairs is not None:
        print(f"  error of ratios: median {pairs.median:.1%}, 90 % {pairs.p90:.1%}")


def _result(one: Traced, efficiency: Efficiency) -> Result:
    device = replace(one.row.device, efficiency=efficiency)
    low, high = one.range(device)
    memory = one.memory
    fits = "yes" if memory.fits else "tight" if memory.tight else "no"
    share = memory.needed_bytes / (memory.capacity_bytes or 1)
    return Result(one.row, one.seconds(device), low, high, (memory.reserved_bytes or 0) / GIB, share, fits)


if __name__ == "__main__":
    sys.exit(main())
