"""Names of modules as patterns, and what is read of a trial's facts."""

from __future__ import annotations

from dataclasses import asdict

import pytest

from fsdp_lab.training.layout import Layout, matches, read_layout, shortened

NAMES = ["first", "blocks", *(f"blocks.{i}.{part}" for i in range(12) for part in ("mlp.0", "mlp.1", "mlp.2")), "ln_1"]


@pytest.mark.parametrize(
    ("chosen", "expected"),
    [
        (["first", "ln_1"], ["first", "ln_*"]),
        ([n for n in NAMES if "mlp" in n], ["blocks.*.mlp.*"]),
        ([n for n in NAMES if n.endswith(("mlp.0", "mlp.2"))], ["blocks.*.mlp.0", "blocks.*.mlp.2"]),
        (["blocks.3.mlp.0"], ["blocks.3.mlp.0"]),
        ([], []),
    ],
)
def test_patterns_match_the_chosen_names_and_no_others(chosen: list[str], expected: list[str]) -> None:
    assert shortened(chosen, NAMES) == expected
    assert [name for name in NAMES if expected and matches(expected, name)] == sorted(chosen, key=NAMES.index)


@pytest.mark.parametrize("values", [None, [], {"units": [], "of_a_later_version": 1}, "text"])
def test_facts_without_a_layout_have_none(values: object) -> None:
    assert read_layout(values) is None


def test_a_layout_is_read_as_it_was_written() -> None:
    layout = Layout(["blocks.*"], ["blocks.*"], True)
    assert read_layout(asdict(layout)) == layout
