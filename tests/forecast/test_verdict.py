"""What `fsdp_lab.forecast` says of forecasts that are made by hand, and its table at three widths."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from fsdp_lab.forecast.capacity import Forecast
from fsdp_lab.forecast.table import Row, forecast_table
from fsdp_lab.forecast.verdict import blocks_against_root, root_again, verdict
from fsdp_lab.speed.device import Basis
from fsdp_lab.speed.predict import Speed

GIB = 2**30
AXES = ["sharding", "precision", "activation_checkpointing"]


def row(
    settings: Sequence[str], gib: float, most: int | None = None, capacity: float | None = 24, **more: object
) -> Row:
    parts = {"param": gib / 8, "optimizer": gib / 4, "grad": gib / 8, "activation": gib / 2, "total": gib}
    peaks = {"device": {name: int(size * GIB) for name, size in parts.items()}}
    forecast = Forecast(
        True, 8, peaks, {"CUDA context": GIB}, {}, int(capacity * GIB) if capacity else None, most, **more  # type: ignore[arg-type]
    )  # fmt: skip
    return Row([*settings], forecast, None, 64)


# The example of the issue in figures: only ddp fp32 without checkpointing is too large.
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


def test_what_does_not_fit_is_named_by_the_fewest_values_and_what_takes_most_follows():
    assert verdict(ROWS, AXES, "images") == (
        "8 × 24 GiB, 64 images per GPU: everything except ddp fp32 activation_checkpointing=none (58 at most) fits; "
        "per_block bf16_mixed takes up to 144, with activation_checkpointing=full 1,223."
    )
    offloaded = [
        row(("ddp", "none"), 15.7, 103),
        row(("per_block", "none"), 9.9, 149),
        row(("per_block", "cpu"), 9, 152),
    ]
    text = verdict(offloaded, ["sharding", "offload"])
    assert text.endswith(": everything fits; per_block offload=cpu takes up to 152.")
    both = [row(r.settings, 27, 58) if r.settings[:2] == ["ddp", "fp32"] else r for r in ROWS]
    assert "everything except ddp fp32 (58 at most) fits; per_block" in verdict(both, AXES)


def test_the_shorter_of_what_fits_and_what_does_not_is_reported():
    rows = [row(r.settings, 9 if r.settings[0] == "per_block" and r.settings[1] == "fp32" else 30, 0) for r in ROWS]
    assert ": only per_block fp32 fits." in verdict(rows, AXES)
    assert ": everything fits;" in verdict([row(r.settings, 9, 65) for r in ROWS], AXES)
    none = verdict([row(r.settings, 30.0 + i, 0) for i, r in enumerate(ROWS)], AXES)
    assert none.endswith(
        ": nothing fits; per_block bf16_mixed activation_checkpointing=full needs the least, 31.0 GiB."
    )
    same = verdict([row(r.settings, 30, 0) for r in ROWS], AXES)
    assert same.endswith(": nothing fits; every setting needs 31.0 GiB.")
    output = verdict([row([str(i)], 30 if i % 2 else 9) for i in range(20)], ["model.width"])
    assert "everything except model.width=1, model.width=3, model.width=5 and 7 more fits; forecast.largest_" in output


def test_without_a_capacity_each_setting_is_reported_with_what_it_needs_and_the_key_to_ask_by():
    rows = [row([name], gib, capacity=None) for name, gib in (("ddp", 15.721), ("per_block", 9.04), ("root", 9.0401))]
    assert verdict(rows, ["sharding"]) == (
        "8 GPUs, 64 samples per GPU; GPU memory needed: per_block and root 10.0 GiB, ddp 16.7 GiB; "
        "add forecast.capacity_gib=<GiB of your GPU> to see what fits."
    )
    many = [row([str(i)], max(i, 1) / 2 + 1, capacity=None) for i in range(9)]
    assert "model.width=0 and model.width=1 need the least, 2.50 GiB, " in verdict(many, ["model.width"])
    many = [row([str(i)], i / 2 + 1, capacity=None) for i in range(9)]
    assert "model.width=0 needs the least, 2.00 GiB, model.width=8 the most, 6.00 GiB; add fore" in verdict(
        many, ["model.width"]
    )
    assert "per GPU: it needs 2.00 GiB; add forecast.capacity_gib" in verdict([row([], 1, capacity=None)], [])


def test_on_a_cpu_the_capacity_that_is_suggested_is_a_gpus():
    on_cpu = [replace(each, forecast=replace(each.forecast, cuda=False, capacity_bytes=None)) for each in ROWS[:2]]
    assert verdict(on_cpu, AXES).endswith(
        "64 samples per worker; memory needed: activation_checkpointing=full 2.50 GiB, "
        "activation_checkpointing=none 10.9 GiB; "
        "add forecast.device=cuda forecast.capacity_gib=<GiB of your GPU> to see what fits."
    )


def test_one_sample_is_one():
    assert verdict([replace(ROWS[0], microbatch=1)], AXES, "images").startswith("8 × 24 GiB, 1 image per GPU: ")


def test_the_checkpointing_that_takes_most_is_named_where_every_setting_has_some():
    text = verdict([row(["selective"], 12, 1), row(["full"], 8, 3)], ["activation_checkpointing"])
    assert text.endswith(": everything fits; activation_checkpointing=full takes up to 3.")


def test_one_setting_and_failed_forecasts():
    assert ": it needs 10.9 GiB and fits; it takes up to 144." in verdict([row([], 9.9, 144)], [])
    assert ": it needs 31.0 GiB and does not fit (12 at most); it takes up to 12." in verdict([row([], 30, 12)], [])
    failed = Row(["ddp"], Forecast(True, 8, error="why"), None, 64)
    text = verdict([row(["root"], 9, 80), failed], ["sharding"])
    assert text.endswith(": everything fits; every setting takes up to 80; no forecast for ddp.")
    assert verdict([failed], ["sharding"]) == "Nothing could be forecast."


def fast(row: Row, step_s: float) -> Row:
    speed = Speed(step_s, {"compute": 1.0}, step_s, step_s, 0.1, Basis.fitted, "X", samples=8)
    return replace(row, forecast=replace(row.forecast, speed=speed))


def test_blocks_do_better_than_the_root_only_where_the_forecasts_state_so():
    axes = ["sharding", "precision"]
    rows = [row((s, p), gib) for p in ("bf16", "fp32") for s, gib in (("per_block", 2), ("root", 3), ("ddp", 1))]
    assert (
        blocks_against_root(rows, axes) == "sharding=per_block needs less memory than root, whatever the other values."
    )
    assert "and is predicted at least as fast" in blocks_against_root([fast(each, 1.0) for each in rows], axes)
    slow = [fast(each, 2.0 if each.settings == ["per_block", "fp32"] else 1.0) for each in rows]
    assert blocks_against_root(slow, axes) == ""
    assert blocks_against_root([*rows[:3], row(("per_block", "fp32"), 9), row(("root", "fp32"), 3)], axes) == ""
    assert blocks_against_root(rows[1:3], axes) == "" and blocks_against_root(rows, ["x", "precision"]) == ""


def test_a_root_that_gathers_again_and_so_needs_more_is_reported():
    axes = ["sharding", "reshard_after_forward"]
    more = [row(("root", "always"), 3), row(("root", "never"), 2), row(("per_block", "always"), 1)]
    assert root_again(more, axes).startswith("sharding=root peaks higher with reshard_after_forward=always than with")
    assert root_again([more[0], row(("root", "never"), 3)], axes) == ""
    assert root_again(more[:1], axes) == root_again(more, ["sharding", "precision"]) == ""


def test_a_table_has_the_unit_of_its_largest_value():
    def title(*rows: Row) -> str:
        out = io.StringIO()
        Console(file=out, width=120).print(forecast_table(rows, ["sharding"]))
        return out.getvalue().splitlines()[0].strip()

    assert title(row(["root"], 0.03, capacity=80), row(["ddp"], 0.02, capacity=80)).endswith("MiB")
    assert title(row(["root"], 0.03), row(["ddp"], 30)).endswith("GiB")


@pytest.mark.parametrize("width", [80, 100, 120])
def test_the_table_at_this_width(width: int):
    out = io.StringIO()
    rows = [*ROWS, Row(["root", "fp32", "none"], Forecast(True, 8, error="why"), None, 64)]
    Console(file=out, width=width).print(forecast_table(rows, AXES))
    text = "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"
    assert text == (Path(__file__).parent / "tables" / f"{width}.txt").read_text()
    assert all(f"{gib:.2f}" in text for gib in (27.3, 28.3)), "the peak and what is needed"
