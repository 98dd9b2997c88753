"""`dry_run=true`: the trials of a command, and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

from fsdp_lab.config import SweepConfig
from fsdp_lab.sweep.multirun import axes_notes
from tests.conftest import run_cli

DEFAULTS = {"precision": "fp32,fp16", "offload": "none,cpu"}


@pytest.mark.ci
@pytest.mark.parametrize("words", [("-m", "sharding=root,ddp", "precision=fp32", "offload=none"), ()])
def test_it_lists_the_trials_and_leaves_nothing(tmp_path: Path, words: tuple[str, ...]):
    done = run_cli(tmp_path, *words, "dry_run=true")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    if words:
        assert lines[0] == "3 trials: sharding × reshard_after_forward", "DDP has one way to reshard"
        cells = (("root", "always"), ("root", "never"), ("ddp", "always"))
        assert lines[-3:] == [f"  {n}  sharding={s} reshard_after_forward={r}" for n, (s, r) in enumerate(cells)]
    else:
        assert len(lines) == 1 and lines[0].startswith("1 trial: sharding=per_block")
    assert not any(tmp_path.iterdir())


def test_axes_that_nobody_typed_are_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("fsdp_lab.sweep.multirun.num_gpus", lambda: 0)
    swept = ["precision", "offload"]
    first, second = axes_notes(DEFAULTS, ["offload=none,cpu"], swept, SweepConfig())
    assert "precision=fp32,fp16" in first and "offload=none,cpu" not in first
    assert "offload" in second and "repeats" in second
    assert axes_notes(DEFAULTS, ["precision=fp16,fp32"], ["precision"], SweepConfig()) == []
    there = SweepConfig()
    there.cluster.address = "head:6379"
    assert axes_notes(DEFAULTS, swept, swept, there) == [], "what devices are there is not known here"
