"""What a report takes from the words of a command line."""

from __future__ import annotations

from pathlib import Path

import pytest

from fsdp_lab.config import SweepConfig
from fsdp_lab.record.sweep_json import SweepStart
from fsdp_lab.sweep.state import TrialState
from fsdp_lab.sweep.sweep_data import log_axes, study_of, sweep_of


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


def test_the_workers_are_those_that_trained(compose_trial, tmp_path: Path):
    trials = [compose_trial(["cluster.num_workers=null", f"training.seed={i}"], i) for i in range(3)]
    states = [TrialState(trial) for trial in trials]
    record = SweepStart.of([], True, SweepConfig())
    assert "workers" not in dict(sweep_of(states, [], tmp_path, record, lambda number: "").about), "none has started"
    states[1].facts, states[2].facts = {"world_size": 8}, {"world_size": 4}
    assert dict(sweep_of(states, [], tmp_path, record, lambda number: "").about)["workers"] == "4, 8"


def test_the_study_is_the_preset():
    assert study_of(["sharding=root", "experiment=zero2_zero3"]) == "zero2_zero3"
    assert study_of(["sharding=root"]) == study_of(["experiment=zero2_zero3,nightly"]) == study_of([]) == ""
