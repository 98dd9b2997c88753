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

import numpy as np

from benchmarks.published.fit import fit, without_each
from benchmarks.published.rows import MPT, STEPS, read_mpt, read_steps
from benchmarks.published.steps import Traced, trace
from benchmarks.published.summary import COLUMNS, Result, summary, table, write_rows
from fsdp_lab.forecast.capacity import GIB
from fsdp_lab.forecast.speed.device import Efficiency, Reached
from fsdp_lab.forecast.speed.refine import pair_error

ROOT = Path(__file__).resolve().parents[2]
DATA, RESULTS = ROOT.parent / "shared" / "data", ROOT / "experiments" / "published" / "results"
UNKNOWN = """\
What the models do not know of the runs, which their sources do not state:
- FSDP1 is forecast as FSDP2: its units are flat parameters, and it records streams, so freed memory returns later.
- MPT: that the runs computed Composer's default metrics and clipped gradients; which kernel of attention they called.
- The loss of rows other than torchtitan's of March 2024: a cross entropy in float32 of logits that are kept in bf16.
- Rows g18 to g21: whether the loss was compiled, and whether the allocator had expandable segments: both as without.
- Rows g00 to g06: whether `selective` is by operator, as here. Rows of others than torchtitan: their model's code."""


def main() -> int:
    """Print a line for each row and the summary, and return the exit status."""
    data, started = Path(sys.argv[1]) if len(sys.argv) > 1 else DATA, time.monotonic()
    if missing := [name for name in (MPT, STEPS) if not (data / name).is_file()]:
        print(f"{data} has no {' and no '.join(missing)}: without the published rows there is nothing to compare")
        return 2
    others, left_out = read_steps(data / STEPS)
    results, fits = forecast(trace([*read_mpt(data / MPT), *others], _progress))
    text, good = summary(results)
    found = "\n\n".join([text, *fits, _left_out(left_out), UNKNOWN])
    print(
        f"\n{table(COLUMNS, [result.cells() for result in results])}\n\n{found}\n\n{time.monotonic() - started:.0f} s"
    )
    write_rows(RESULTS / "rows.csv", results)
    (RESULTS / "summary.md").write_text(f"{found}\n")
    return 0 if good else 1


def _left_out(reasons: Mapping[str, str]) -> str:
    """Return which rows are left out, by their reasons."""
    names: dict[str, list[str]] = {}
    for name, reason in reasons.items():
        names.setdefault(reason, []).append(name)
    return "\n".join(["Left out:", *(f"- {', '.join(some)}: {reason}." for reason, some in names.items())])


def _progress(done: int, total: int) -> None:
    if done % 20 == 0 or done == total:
        print(f"{done} of {total} rows traced", flush=True)


def forecast(traced: Sequence[Traced]) -> tuple[list[Result], list[str]]:
    """Return the results, and the fits as text.

    Rows of MPT are forecast by what was fitted to other sizes of its models; rows in no fit, by what was fitted to all.
    """
    efficiencies: dict[str, Efficiency] = {}
    fitted: dict[str, tuple[list[Traced], Efficiency]] = {}
    fits = []
    for gpu in dict.fromkeys(one.row.gpu for one in traced if one.row.fitted):
        mine = [one for one in traced if one.row.fitted and one.row.gpu == gpu and _network_known(one)]
        start = mine[0].row.device.efficiency
        efficiencies |= {one.row.name: each for one, each in zip(mine, without_each(mine, start), strict=True)}
        fitted[gpu] = mine, fit(mine, start)
        fits.append(_fit_text(gpu, *fitted[gpu], efficiencies))
    if {"a100_80gb", "h100_sxm"} <= fitted.keys():
        fits.append(_transfer_text(*fitted["a100_80gb"], fitted["h100_sxm"][0]))
    for one in traced:
        whole = fitted[one.row.gpu][1] if one.row.fitted else one.row.device.efficiency
        efficiencies.setdefault(one.row.name, whole)
    return [_result(one, efficiencies[one.row.name]) for one in traced], fits


def _network_known(one: Traced) -> bool:
    return one.row.device.network_known or not one.row.several_nodes


def _fit_text(gpu: str, rows: Sequence[Traced], whole: Efficiency, without: Mapping[str, Efficiency]) -> str:
    """Return what was fitted to which rows, and the errors of sizes left out: figures of the device's file."""
    groups: dict[str, list[float]] = {}
    for one in rows:
        seconds = one.seconds(replace(one.row.device, efficiency=without[one.row.name]))
        groups.setdefault(one.row.model, []).append(seconds / one.row.measured_s)
    errors, pairs = [abs(r - 1) for some in groups.values() for r in some], pair_error(groups.values())
    lines = [f"{gpu}: fitted to {len(rows)} rows of MPT; each is forecast by a fit without its size of model."]
    for what, efficiency in (("fitted to all", whole), ("in the file", rows[0].row.device.efficiency)):
        lines.append(f"- {what}: {', '.join(f'{name} {value:.3f}' for name, value in vars(efficiency).items())}")
    lines.append(f"- error of sizes left out: {_quantiles(errors)}")
    if pairs is not None:
        lines.append(f"- error of ratios: median {pairs.median:.1%}, 90 % {pairs.p90:.1%}")
    return "\n".join(lines)


def _transfer_text(known: Sequence[Traced], learned: Efficiency, rows: Sequence[Traced]) -> str:
    """Return the errors on a GPU of what was fitted to another: for devices without published steps."""
    reached = known[0].row.device.reached
    bare = replace(learned, matmul=learned.matmul * reached.matmul, attention=learned.attention * reached.attention)
    lines = ["A100 80 GB's efficiencies on the H100, as in the files of devices without a fit:"]
    for what, efficiency, reaches in (
        ("with what microbenchmarks reach", learned, rows[0].row.device.reached),
        ("by the data sheet alone", bare, Reached()),
    ):
        devices = [replace(one.row.device, efficiency=efficiency, reached=reaches) for one in rows]
        pairs = zip(rows, devices, strict=True)
        errors = [abs(one.seconds(device) / one.row.measured_s - 1) for one, device in pairs]
        lines.append(f"- {what}: {_quantiles(errors)}")
    return "\n".join(lines)


def _quantiles(errors: Sequence[float]) -> str:
    return f"median {np.median(errors):.1%}, 90 % {np.quantile(errors, 0.9):.1%}"


def _result(one: Traced, efficiency: Efficiency) -> Result:
    device = replace(one.row.device, efficiency=efficiency)
    low, high = one.range(device)
    memory, step_s = one.memory, one.seconds(device)
    if memory is None:
        return Result(one.row, step_s, low, high, None, None, "yes")
    assert memory.reserved_bytes is not None and memory.capacity_bytes is not None
    fits = "yes" if memory.fits else "tight" if memory.tight else "no"
    share = memory.needed_bytes / memory.capacity_bytes
    return Result(one.row, step_s, low, high, memory.reserved_bytes / GIB, share, fits)


if __name__ == "__main__":
    sys.exit(main())
