"""What a report takes from the words of a command line."""

from __future__ import annotations

import pytest

from fsdp_lab.sweep.sweep_data import log_axes, study_of


@pytest.mark.parametrize(
    ("word", "is_log"),
    [
        ("optimizer.lr=tag(log,interval(1e-4,1e-2))", True),
        ("model.hidden_dim=tag(log,int(interval(16,64)))", True),
        ("optimizer.lr=interval(1e-4,1e-2)", False),
        ("optimizer.lr=1e-4,1e-3,1e-2", True),
        ("optimizer.lr=1e-3,3e-3", False),
        ("optimizer.weight_decay=0,1e-3,1", False),  # zero has no logarithm
        ("training.seed=range(20)", False),
        ("sharding=root,per_block", False),
        ("sharding=glob(*)", False),
        ("~optimizer.lr", False),
        ("optimizer.lr=[", False),  # a line that was cut
    ],
)
def test_an_axis_is_logarithmic_where_it_was_searched_so(word: str, is_log: bool):
    assert log_axes(["sharding=root", word]) == ([word.partition("=")[0]] if is_log else [])


def test_the_study_is_the_preset():
    assert study_of(["sharding=root", "experiment=zero2_zero3"]) == "zero2_zero3"
    assert study_of(["sharding=root"]) == study_of(["experiment=zero2_zero3,nightly"]) == study_of([]) == ""
