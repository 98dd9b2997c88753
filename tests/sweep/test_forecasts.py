"""A sweep that leaves out what cannot fit, and one whose forecasts fail."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest

from fsdp_lab.forecast.forecast import forecast_profile
from fsdp_lab.sweep.forecasts import MAX_OTHERS_CPU
from fsdp_lab.training.__main__ import read_config
from tests.conftest import TINY, run_cli
from tests.folders import Store, SweepFolder
from tests.sweep.conftest import results, runs
from tests.sweep.planted import CPU

pytestmark = [pytest.mark.full, pytest.mark.timeout(400)]

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


@pytest.mark.documents("python -m fsdp_lab -m ... forecast.prune=true forecast.capacity_gib=0.008")
def test_what_cannot_fit_is_recorded_and_never_started(pruned: Pruned):
    assert pruned.done.returncode == 0, pruned.done.stderr
    always, never = results(pruned.folder)
    assert (always["status"], never["status"]) == ("finished", "skipped")
    assert float(never["forecast/peak_bytes"]) == pruned.peaks["never"]
    assert "forecast.prune=true" in never["error"]
    assert f"{pruned.peaks['never'] / 2**20:.2f} MiB of {pruned.capacity * 1024:.2f} MiB" in never["error"]
    assert "trial 1 starts" not in pruned.done.stdout
    left = {path.name for path in (pruned.folder / "out" / "1").iterdir()}
    assert left == {".hydra", "trial.json", ".trial.lock"}, "nothing ran there"


def test_mlflow_has_its_figures(pruned: Pruned):
    (parent,), (always, never) = runs(pruned.folder)
    assert (parent.info.status, always.info.status, never.info.status) == ("FINISHED", "FINISHED", "KILLED")
    assert never.data.tags["status"] == "skipped"
    assert never.data.metrics["forecast/peak_bytes"] == pruned.peaks["never"]
    assert never.data.metrics["forecast/capacity_bytes"] == int(pruned.capacity * GIB)
    assert always.data.metrics["forecast/error"] == 0


def test_the_largest_microbatch_is_reported_for_each(pruned: Pruned):
    assert "trial 0: the largest microbatch that fits is 16" in pruned.done.stdout
    assert "trial 1: the largest microbatch that fits is 15" in pruned.done.stdout


def test_the_timelines_are_artifacts(pruned: Pruned):
    _, (always, _) = runs(pruned.folder)
    names = {f"memory/memory_{what}_rank{rank}.{kind}" for rank in (0, 1) for what, kind in
             (("peaks", "json"), ("timeline", "html"))}  # fmt: skip
    assert names <= set(Store(pruned.folder).artifacts(always))


@pytest.mark.full
def test_only_the_most_promising_settings_are_measured_and_the_prediction_stands_beside_them(tmp_path: Path):
    """Eight passes over 8 images each take several times as long as one over 64."""
    (tmp_path / "cpu.yaml").write_text(CPU)
    words = [word for word in TINY if not word.startswith(("training.global_batch_size", "data.num_train"))]
    sizes = ("data.num_train=512", "training.global_batch_size=64", "training.grad_accum_steps=1,8")
    keep = (
        "forecast.device=cpu.yaml",
        "forecast.keep=1",
        "reshard_after_forward=always",
        "model=mlp",
    )
    done = run_cli(tmp_path, *AXES[:-1], *words, *sizes, *keep, "-m", timeout=390)
    assert done.returncode == 0, done.stderr
    assert "forecast.keep=1: 1 setting to measure, 1 trial skipped" in done.stdout
    at_once, in_parts = results(tmp_path)
    assert (at_once["status"], in_parts["status"]) == ("finished", "skipped")
    assert "which is not among the most promising; forecast.keep=1 does not start it" in in_parts["error"]
    assert 0 < float(in_parts["forecast/samples_per_s"]) < float(at_once["forecast/samples_per_s"])
    error = float(at_once["perf/samples_per_s"]) / float(at_once["forecast/samples_per_s"]) - 1
    assert float(at_once["perf/forecast_error"]) == pytest.approx(error, rel=1e-3, abs=1e-3)
    assert SweepFolder(tmp_path / "out").trials[0].forecast["predicted_by"] == "data sheet"
    _, (run, _) = runs(tmp_path)
    assert run.data.metrics["perf/forecast_error"] == pytest.approx(error, rel=1e-3)
    assert run.data.tags["predicted_by"] == "data sheet"
    file = tmp_path / "outputs/devices/trials/two_cores.json"
    if run.data.metrics["perf/others_cpu"] > MAX_OTHERS_CPU:
        assert not file.exists(), "other tests ran beside it"
        return
    (kept,) = json.loads(file.read_text()).values()
    assert 0 < kept["measured_s"] <= 1.001 * 64 / float(at_once["perf/samples_per_s"])
    predicted_s = sum(seconds for part, seconds in kept["parts"].items() if part != "hidden")
    assert predicted_s == pytest.approx(64 / float(at_once["forecast/samples_per_s"]), rel=0.02)
