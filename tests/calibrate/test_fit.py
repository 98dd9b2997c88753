"""A machine that was made up, and what a fit finds of it."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from fsdp_lab.calibrate.fit import Sample, Steps, fit, fit_lines, known_error
from fsdp_lab.speed.device import DeviceKind
from fsdp_lab.speed.measured import ANY, HostCosts, Line, Measured
from fsdp_lab.speed.predict import step_seconds
from fsdp_lab.speed.program import Kind, Operator, Stream
from tests.speed.test_costs import ROUND

TRUE = Measured(
    "made up", "2.15.0", 2, 2, 0.0,
    {
        "aten.mm": {"float32": Line(2e-5, 1e-11, 0.0)},
        "matmul": {"float32": Line(2e-5, 1e-11, 0.0)},
        "memory": {ANY: Line(1e-5, 0.0, 1e-10)},
        "gather": {ANY: Line(1e-3, 0.0, 1e-9)},
    },
    HostCosts(operator_s=3e-5, collective_s=1e-3, microbatch_s=2e-3, step_s=1e-3),
)  # fmt: skip
HERE = replace(ROUND, kind=DeviceKind.cpu, measured=TRUE)


def made_up(count: int, noise: float = 0.0) -> tuple[list[Steps], list[Sample]]:
    """Steps of two families, with what their operators and collectives take alone."""
    draw = random.Random(0)
    steps = []
    for number in range(count):
        program = []
        for _ in range(draw.randint(20, 60)):
            flops, num_bytes = draw.uniform(1e6, 1e9), draw.uniform(1e4, 1e7)
            program += [
                Operator("aten.mm", Kind.matmul, Stream.compute, "forward", "", flops, num_bytes, "float32"),
                Operator("aten.add", Kind.memory, Stream.compute, "backward", "", 0.0, num_bytes, "float32"),
            ]
        for _ in range(draw.randint(0, 6)):
            sent = draw.uniform(1e5, 1e7)
            program.append(Operator("x", Kind.gather, Stream.gather, "forward", "", 0.0, sent, "float32", group=(0, 1)))
        samples = [
            Sample(o.name, o.kind.value, o.dtype, o.flops, o.num_bytes, 0.0, TRUE.seconds(o))
            for o in program
            if not o.kind.is_collective
        ]
        seconds = step_seconds(program, HERE) * draw.uniform(1 - noise, 1 + noise)
        steps.append(Steps("ab"[number % 2], f"model {number % 4}", samples, program, seconds))
    sizes = (1e4, 1e6, 8e6)
    sent = [Sample("gather", "gather", "float32", 0.0, size, 0.0, 1e-3 + size * 1e-9) for size in sizes]
    return steps, sent


def test_steps_that_a_fit_has_not_seen_are_predicted():
    steps, collectives = made_up(24)
    fitted = fit(steps[:16], collectives, HERE)
    known = replace(HERE, measured=fitted.measured)
    errors = [step_seconds(one.program, known) / one.seconds - 1 for one in steps[16:]]
    assert max(map(abs, errors)) < 0.03
    assert fitted.measured.operators["aten.mm"]["float32"].s_per_flop == pytest.approx(1e-11, rel=0.1)


def test_the_errors_are_those_of_families_left_out():
    """With a fifth of noise they are of its size, whatever the fit makes of what it has seen."""
    steps, collectives = made_up(24, noise=0.2)
    fitted = fit(steps, collectives, HERE)
    assert len(fitted.errors) == 24
    assert 0.05 < float(np.median(np.abs(fitted.errors))) < 0.2


def test_what_is_common_to_all_steps_of_a_model_is_no_error_of_their_ratios():
    """Every step of one model takes half as long again as all that it does, and of another two thirds."""
    steps, collectives = made_up(24)
    levels = {"model 0": 1.5, "model 1": 1.0, "model 2": 0.67, "model 3": 1.0}
    fitted = fit([replace(one, seconds=one.seconds * levels[one.model]) for one in steps], collectives, HERE)
    assert known_error(fitted.errors).p90 > 0.3
    assert fitted.relative is not None and fitted.relative.p90 < 0.1


def test_one_family_alone_has_no_known_error():
    steps, collectives = made_up(8)
    fitted = fit([replace(one, family="a") for one in steps], collectives, HERE)
    assert fitted.errors == [] and fitted.relative is None
    assert known_error(fitted.errors).p90 == 0.5


def test_a_line_is_never_negative_and_has_its_kinds_slope_where_its_own_is_unknown():
    small = [Sample("aten.tiny", "memory", "float64", 0.0, 8.0, 0.0, 1e-5) for _ in range(50)]
    large = [Sample("aten.add", "memory", "float32", 0.0, size, 0.0, 1e-5 + size * 1e-10) for size in (1e4, 1e6, 1e7)]
    lines = fit_lines([*small, *large])
    assert lines["aten.tiny"]["float64"].seconds(0.0, 8.0) == pytest.approx(1e-5, rel=0.1)
    assert lines["aten.tiny"]["float64"].seconds(0.0, 1e7) == pytest.approx(1e-3, rel=0.3)
    assert all(value >= 0 for some in lines.values() for line in some.values() for value in vars(line).values())


def test_a_slow_operator_of_a_kind_stays_slow_at_sizes_that_were_not_measured():
    """As attention backwards in bfloat16, which takes ten times as long as forwards: for its kind the mean holds."""
    sizes = (16.0, 32.0, 64.0, 96.0, 128.0)
    fast = [Sample("aten.fast", "attention", "bfloat16", n * 1e5, n * 8e3, n, n * 6e-6) for n in sizes]
    slow = [Sample("aten.slow", "attention", "bfloat16", n * 1e5, n * 8e3, n, n * 6e-5) for n in sizes]
    line = fit_lines([*fast, *slow])["aten.slow"]["bfloat16"]
    assert line.seconds(192 * 1e5, 192 * 8e3, 192) == pytest.approx(192 * 6e-5, rel=0.02)
    assert line.seconds(16 * 1e5, 16 * 8e3, 16) == pytest.approx(16 * 6e-5, rel=0.02)


def test_arithmetic_in_one_dtype_says_nothing_of_another():
    fast = Sample("aten.mm", "matmul", "bfloat16", 1e9, 1e6, 0.0, 1e-3)
    lines = fit_lines([fast, replace(fast, dtype="float32", seconds=1e-1)])
    assert ANY not in lines["matmul"] and ANY not in lines["aten.mm"]
    assert lines["matmul"]["float32"].seconds(1e9, 1e6) == pytest.approx(0.1)


def test_known_errors_stay_within_what_a_file_may_state():
    assert known_error([0.0] * 10).p90 == 0.02
    assert known_error([5.0] * 10).p90 == 0.9
    assert known_error([-0.1, 0.2, -0.3, 0.4]).p90 == 0.4


def test_nine_of_ten_further_errors_are_within_the_known_one():
    """Drawn again and again: the 90th percentile of so few errors alone would hold for 87 % of them."""
    draw = random.Random(0)
    held = []
    for _ in range(2000):
        known = known_error([draw.expovariate(10.0) for _ in range(31)])
        held.append(draw.expovariate(10.0) <= known.p90)
    assert 0.89 < np.mean(held) < 0.93
