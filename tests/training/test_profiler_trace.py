"""`profile_trace=true`: what rank 0 computes and sends in three steps, as a file for Perfetto."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import INLINE, run_cli
from tests.folders import Store
from tests.ranks import run_ranks, train_leaving

# eight steps, of which two are followed for memory
STEPS = (
    "model=mlp", "sharding=per_block", "data.num_train=256", "memory_profile=peaks", "training.timing_warmup_steps=0",
)  # fmt: skip
CASES = (
    ("profile_trace=false",),
    ("profile_trace=true",),
    ("profile_trace=true", "training.max_steps=4"),  # it ends while steps are recorded
)


def events_of(content: bytes) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = json.loads(gzip.decompress(content))["traceEvents"]
    return events


@pytest.fixture(scope="module")
def results() -> tuple[list[Any], list[Any]]:
    first, second = run_ranks(2, train_leaving, "*trace*", [[*STEPS, *case] for case in CASES])
    return first, second


def test_three_steps_of_rank_0_are_recorded(results: tuple[list[Any], list[Any]]) -> None:
    first, second = ([files for _, _, files in ranks] for ranks in results)
    assert [set(files) for files in first] == [set(), {"trace_rank0.json.gz"}, {"trace_rank0.json.gz"}]
    assert not any(second), "a trace of each rank would fill the disk"
    names = [event["name"] for event in events_of(first[1]["trace_rank0.json.gz"]) if event.get("ph") == "X"]
    assert len({name for name in names if name.startswith("ProfilerStep#")}) == 3
    assert "aten::addmm" in names and any(name.startswith("autograd::engine") for name in names)
    assert sum("_allgather_base_" in name for name in names) >= 3 * 3, "two blocks and the root gather in each step"
    assert any("adam" in name.lower() for name in names)
    short = [event["name"] for event in events_of(first[2]["trace_rank0.json.gz"]) if event.get("ph") == "X"]
    assert len({name for name in short if name.startswith("ProfilerStep#")}) in (1, 2)


def test_recorded_steps_change_no_loss_and_are_not_timed(results: tuple[list[Any], list[Any]]) -> None:
    (plain, (*_, timed), _), (recorded, (*_, less), _), *_ = results[0]
    assert plain == recorded
    assert (timed["perf/timed_steps"], less["perf/timed_steps"]) == (6, 2), "one more starts the profiler"
    assert timed["memory/peak_bytes"] == less["memory/peak_bytes"]


@pytest.mark.ci
def test_the_trace_is_an_artifact_of_the_run(tmp_path: Path) -> None:
    done = run_cli(tmp_path, *INLINE, "data.num_train=256", "training.max_steps=6", "profile_trace=true")
    assert done.returncode == 0, done.stdout + done.stderr
    store = Store(tmp_path)
    (run,) = store.parents
    assert "trace/trace_rank0.json.gz" in store.artifacts(run)
    assert events_of((tmp_path / "out" / "trace_rank0.json.gz").read_bytes())
