"""What Ray Tune is told about a sweep. Planted answers stand in for a cluster of one core."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from ray import tune
from ray.tune.experiment.trial import Trial

from fsdp_lab.config import SweepConfig
from fsdp_lab.config.status import TrialStatus
from fsdp_lab.config.sweep import ClusterConfig
from fsdp_lab.engine.cluster import set_environment
from fsdp_lab.record.reasons import Code, Reason
from fsdp_lab.record.trial_json import Outcome, read_trial, write_outcome
from fsdp_lab.sweep import schedulers
from fsdp_lab.sweep.executors.tuner import ResourceCatalog, TuneCallback, _get_files, put_back
from tests.sweep.planted import Compose, heard, plan_of


@pytest.mark.parametrize(("workers", "each", "beside"), [(1, 0.25, 4), (2, 0.5, 1), (2, 0.25, 2)])
def test_as_many_trials_run_side_by_side_as_the_cluster_holds(
    workers: int, each: float, beside: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("ray.nodes", lambda: [{"Alive": True, "Resources": {"CPU": 1.0}}])
    monkeypatch.setattr("ray.cluster_resources", lambda: {"CPU": 1.0})
    config = replace(SweepConfig(), cluster=ClusterConfig(num_workers=workers, cpus_per_worker=each))
    catalog = ResourceCatalog()
    while catalog.has_room(config):
        catalog.taken[str(len(catalog.taken))] = catalog.of(config)
    assert len(catalog.taken) == beside


def test_tune_takes_our_callback_whatever_output_the_user_has_set(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("RAY_AIR_NEW_OUTPUT", "1")
    set_environment()
    from ray.tune.experimental.output import AirVerbosity, get_air_verbosity

    assert get_air_verbosity(AirVerbosity.SILENT) is None


def test_the_median_rule_pauses_no_trial_that_is_ahead_of_the_others():
    """The controller and its trials are planted: another trial waits, and there is nothing to compare with."""
    ahead, waits = Trial("planted", stub=True), Trial("planted", stub=True)
    ahead.status = Trial.RUNNING
    controller = cast("Any", SimpleNamespace(get_live_trials=lambda: [ahead, waits]))
    median = schedulers.median(SweepConfig(), {"time_attr": "epoch", "metric": "val/loss", "mode": "min"})
    for epoch in range(1, 6):
        assert median.on_trial_result(controller, ahead, {"epoch": epoch, "val/loss": 1.0}) == "CONTINUE"


def test_the_files_of_a_stopped_trial_come_from_storage_and_end_no_sweep_if_they_cannot(tmp_path: Path):
    """A local folder stands for the bucket."""
    there, trial = tmp_path / "there", tmp_path / "trial"
    (there / "logs").mkdir(parents=True)
    (there / "logs" / "rank0.log").write_text("step 1")
    trial.mkdir()
    _get_files(f"file://{there}", trial)
    assert (trial / "logs" / "rank0.log").read_text() == "step 1"
    _get_files(f"file://{there}", tmp_path / "removed")
    _get_files(f"file://{tmp_path}/nowhere", trial)
    assert not (tmp_path / "removed").exists()


def test_the_metrics_of_an_epoch_are_what_was_reported_without_what_tune_adds(compose_trial: Compose, tmp_path: Path):
    reported = {"epoch": 2, "step": 8, "val/loss": math.nan, "perf/samples_per_s": 3.5}

    class Reports(tune.Trainable):
        def step(self) -> dict[str, float]:
            return dict(reported)

    result = Reports(config={"number": 0, "job": "{}"}).train()
    assert {"config", "done", "pid", "time_total_s", "timestamp"} <= result.keys()
    sweep = plan_of(compose_trial, tmp_path, [[]])
    hears = heard(sweep)
    sweep.epoch(0, {**result, "trial_id": "one"})
    assert repr(hears.epochs) == repr([{**reported, "step": 8.0}])


@pytest.mark.parametrize("by_itself", [False, True])
def test_that_a_trial_is_stopped_is_written_before_its_workers_go_unless_it_has_ended_by_itself(
    compose_trial: Compose, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by_itself: bool
):
    """Tune is planted. The trial's own process takes that its workers are gone for a failure."""
    sweep = plan_of(compose_trial, tmp_path, [[]])
    hears = heard(sweep)
    folder, trial = sweep.folder_of(0), SimpleNamespace(config={"number": 0}, trial_id="one")
    callback = TuneCallback(sweep, cast("ResourceCatalog", SimpleNamespace(taken={})), Counter())
    sweep.prepare(0)
    callback.on_trial_start(0, [], trial)
    failed = Outcome(TrialStatus.failed, Reason.of(Code.job_failed, text="its workers are gone"))
    freed: list[Path] = []

    def release(of: Path) -> None:
        write_outcome(of, failed)
        freed.append(of)

    monkeypatch.setattr("fsdp_lab.engine.resources.release_placement_group", release)
    callback.on_trial_result(0, [], trial, {"epoch": 1, "step": 8, "done": False})
    assert freed == [] and read_trial(folder).outcome is None
    if by_itself:
        write_outcome(folder, Outcome(TrialStatus.finished))
    callback.on_trial_result(0, [], trial, {"epoch": 2, "step": 16, "done": True})
    callback.on_trial_complete(0, [], trial)
    outcome, state = read_trial(folder).outcome, sweep.trials[0]
    assert outcome is not None and outcome.status == state.status == ("finished" if by_itself else "stopped")
    assert freed == [folder] and state.reason is None and [epoch["epoch"] for epoch in hears.epochs] == [1, 2]


def test_trials_of_a_tune_that_a_memory_kill_ended_resume_unless_they_get_nowhere(
    compose_trial: Compose, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The limit is one death. Trial 0 has an epoch in between, trial 1 none; trial 2 ended by itself."""
    monkeypatch.setattr("fsdp_lab.sweep.executors.tuner._MOST_STARTS", 1)
    monkeypatch.setattr("fsdp_lab.engine.resources.release_placement_group", lambda folder: None)
    sweep = plan_of(compose_trial, tmp_path, [[f"training.seed={seed}"] for seed in range(3)], (), ["training.seed"])
    hears, deaths = heard(sweep), Counter[tuple[int, int]]()
    for _ in range(3):
        sweep.prepare(sweep.next() or 0)
    for number in (0, 1, 2):
        sweep.begin(number)

    def put_back_all() -> None:
        for number in sweep.running():
            put_back(sweep, number, deaths)

    metrics = sweep.folder_of(0) / "metrics.jsonl"
    metrics.write_text('{"epoch": 1, "train/loss": 2.0}\n')
    write_outcome(sweep.folder_of(2), Outcome(TrialStatus.finished))
    put_back_all()
    assert [state.status.name for state in sweep.trials] == ["waiting", "waiting", "finished"]
    for number in (0, 1):
        assert sweep.next() == number
        sweep.prepare(number)
        sweep.begin(number)
    assert hears.epochs == [{"epoch": 1, "train/loss": 2.0}], "its folder is as it was"
    put_back_all()
    assert [state.status.name for state in sweep.trials] == ["waiting", "failed", "finished"]
    assert sweep.trials[1].reason == Reason.of(Code.no_outcome)
