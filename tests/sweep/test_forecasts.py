"""A sweep that leaves out what cannot fit, and one whose forecasts fail."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest

from fsdp_lab.forecast.forecast import forecast_profile
from fsdp_lab.training.__main__ import read_config
from tests.conftest import run_cli
from tests.sweep.conftest import TINY, artifacts, results, runs

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(400)]

AXES = ("sharding=per_block", "precision=fp16", "offload=none", "training.epochs=1", "memory_profile=timeline")
GIB = 2**30


class Pruned(NamedTuple):
    folder: Path
    done: subprocess.CompletedProcess[str]
    capacity: float
    peaks: dict[str, int]


@pytest.fixture(scope="module")
def pruned(tmp_path_factory: pytest.TempPathFactory) -> Pruned:
    """Room for `always` and not for `never`."""
    folder = tmp_path_factory.mktemp("pruned")
    words = [word for word in (*AXES, *TINY) if not word.startswith(("hydra.", "tracking."))]
    peaks = {
        option: forecast_profile(read_config(None, [*words, f"reshard_after_forward={option}"]), 2, cuda=False)
        .peaks["device"]["total"]
        for option in ("always", "never")
    }  # fmt: skip
    capacity = sum(peaks.values()) / 2 / GIB
    prune = ("forecast.prune=true", f"forecast.capacity_gib={capacity}", "forecast.largest_microbatch=true")
    done = run_cli(folder, *AXES, *TINY, *prune, "-m", timeout=390)
    return Pruned(folder, done, capacity, peaks)


def test_what_cannot_fit_is_recorded_and_never_started(pruned: Pruned):
    assert pruned.done.returncode == 0, pruned.done.stderr
    always, never = results(pruned.folder)
    assert (always["status"], never["status"]) == ("finished", "skipped")
    assert float(never["forecast/peak_bytes"]) == pruned.peaks["never"]
    assert "forecast.prune=true" in never["error"]
    assert f"{pruned.peaks['never'] / 2**20:.2f} MiB of {pruned.capacity * 1024:.2f} MiB" in never["error"]
    assert "trial 1 starts" not in pruned.done.stdout
    left = {path.name for path in (pruned.folder / "out" / "1").iterdir()}
    assert left == {".hydra", "forecast.json", "outcome.json"}, "nothing ran there"


def test_mlflow_has_its_figures(pruned: Pruned):
    (parent,), (always, never) = runs(pruned.folder)
    assert (parent.info.status, always.info.status, never.info.status) == ("FINISHED", "FINISHED", "KILLED")
    assert never.data.tags["status"] == "skipped"
    assert never.data.metrics["forecast/peak_bytes"] == pruned.peaks["never"]
    assert never.data.metrics["forecast/capacity_bytes"] == int(pruned.capacity * GIB)
    assert always.data.metrics["forecast/error"] == 0


def test_the_largest_microbatch_is_told_for_each(pruned: Pruned):
    assert "trial 0: the largest microbatch that fits is 16" in pruned.done.stdout
    assert "trial 1: the largest microbatch that fits is 15" in pruned.done.stdout


def test_the_timelines_are_artifacts(pruned: Pruned):
    _, (always, _) = runs(pruned.folder)
    names = {f"memory/memory_{what}_rank{rank}.{kind}" for rank in (0, 1) for what, kind in
             (("peaks", "json"), ("timeline", "html"))}  # fmt: skip
    assert names <= set(artifacts(pruned.folder, always))
