"""Which trials a sweep starts, in which order, and how they and the sweep end; without Ray."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from ray import tune
from ray.tune.experiment.trial import Trial

from fsdp_lab.config import SweepConfig
from fsdp_lab.config.status import ExitCode, TrialStatus
from fsdp_lab.config.sweep import ClusterConfig
from fsdp_lab.engine.cluster import set_environment
from fsdp_lab.forecast.capacity import Forecast
from fsdp_lab.forecast.speed.device import Basis
from fsdp_lab.forecast.speed.predict import Speed
from fsdp_lab.record.reasons import Code, Reason
from fsdp_lab.record.trial_files import read_metrics
from fsdp_lab.record.trial_json import Outcome, read_trial, write_outcome
from fsdp_lab.storage.files import append_line
from fsdp_lab.sweep import schedulers
from fsdp_lab.sweep.executors.tuner import ResourceCatalog, TuneCallback, _get_files, put_back
from fsdp_lab.sweep.forecasts import Forecasts
from fsdp_lab.sweep.outputs.console import Console
from fsdp_lab.sweep.runner import run_sweep
from fsdp_lab.sweep.search import OptunaSearch
from fsdp_lab.sweep.start import reach
from fsdp_lab.sweep.state import TrialState
from fsdp_lab.sweep.sweep import Sweep
from tests.sweep.planted import CPU, LOSS, Acts, Compose, Hears, heard, plan_of, sweep_of, trial_by_hand

pytestmark = pytest.mark.usefixtures("no_gpus")
MIB, GIB = 2**20, 2**30
TRIAL = trial_by_hand([])


def in_status(*statuses: str) -> Sweep:
    return sweep_of([TrialState(TRIAL, TrialStatus(status)) for status in statuses])


@pytest.mark.parametrize(
    ("statuses", "interrupted", "error", "expected"),
    [
        ("finished finished", False, None, ExitCode.finished),
        ("finished oom diverged stopped skipped", False, None, ExitCode.finished),
        ("finished failed", False, None, ExitCode.failed),
        ("finished running", False, None, ExitCode.interrupted),  # nobody ended it: the watch over the interrupt
        ("failed waiting", False, None, ExitCode.interrupted),
        ("finished running", True, None, ExitCode.interrupted),
        ("finished finished", True, None, ExitCode.interrupted),
        ("running", False, RuntimeError("a bug"), ExitCode.failed),
        ("", False, None, ExitCode.finished),
    ],
)
def test_the_exit_code_says_how_a_sweep_ended(
    statuses: str, interrupted: bool, error: Exception | None, expected: ExitCode
):
    assert in_status(*statuses.split()).exit_code(interrupted, error) is expected


def test_a_trial_is_timed_from_its_first_begin_to_its_end():
    state = TrialState(TRIAL, TrialStatus.starting)
    state.begin(100.0)
    state.begin(103.0)  # its process was killed
    state.end(Outcome(TrialStatus.finished), 110.5)
    assert state.seconds == 10.5


def test_the_front_is_of_finished_trials_in_several_objectives():
    """The second would beat all, and has no result; the third beats the fourth, and of equals both stay."""
    sweep = in_status("finished", "oom", "finished", "finished", "finished")
    sweep.objectives = [("a", "min"), ("b", "max")]
    points = [(1.0, 1.0), (0.0, 9.0), (2.0, 3.0), (3.0, 2.0), (2.0, 3.0)]
    for state, (a, b) in zip(sweep.trials, points, strict=True):
        state.figures = {"a": a, "b": b}
    assert sweep.front() == {0, 2, 4}
    sweep.objectives = LOSS
    assert sweep.front() == set()


PEAK, RESERVED, WORKSPACE = "memory/peak_bytes", "memory/reserved_bytes", "memory/workspace_bytes"


@pytest.mark.parametrize(
    ("cuda", "metrics"),
    [
        (False, {PEAK: 9 * MIB}),
        (True, {PEAK: 9 * MIB, RESERVED: 80 * MIB, WORKSPACE: 32 * MIB}),
        (True, {PEAK: 73 * MIB, RESERVED: 80 * MIB}),  # workspaces not told apart: 9 + 64 MiB
    ],
)
def test_workspaces_are_no_error_of_a_forecast(cuda: bool, metrics: dict[str, float]):
    """A trial of 9 MiB, as a GPU holds it beside 64 MiB of workspaces; on a CPU nothing is reserved."""
    allowances, reserved = ({"kernel workspaces": 64 * MIB}, 74 * MIB) if cuda else ({}, None)
    state = TrialState(TRIAL)
    state.take_forecast(Forecast(cuda, 1, {"device": {"total": 9 * MIB}}, allowances, reserved_bytes=reserved))
    figures = state.figures_at(metrics)
    assert figures["forecast/error"] == 0 and figures.get("forecast/reserved_bytes") == reserved


@pytest.mark.parametrize(("key", "values"), [("repeat", (0, 1, 2)), ("training.seed", (7, 8, 9))])
def test_repeats_run_round_by_round(key: str, values: Sequence[int]):
    """`optimizer.lr=1,2 repeat=0,1,2` as typed would run all of 1 before any of 2; seeds are repeats, too."""
    cells = [[f"optimizer.lr={lr}", f"{key}={value}"] for lr in (1, 2) for value in values]
    sweep = sweep_of([TrialState(trial_by_hand(words, number)) for number, words in enumerate(cells)])
    order = []
    while (number := sweep.next_waiting()) is not None:
        sweep.trials[number].status = TrialStatus.starting
        order.append(number)
    assert order == [0, 3, 4, 1, 2, 5], "one of each; then the other one first, so that a drift of the speed cancels"


@pytest.mark.ci
def test_the_traceback_of_an_error_that_forecasts_find_is_kept(
    compose_trial: Compose, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """Of two trials of a model that refuses, in the folder of the first."""
    project = "tests.workloads.user.my_project.net"
    words = ["task=custom", "model=custom", "data=example", f"+model._target_={project}.Refuses", "+model.width=8"]
    cells = [[f"optimizer.lr={lr}"] for lr in (1, 2)]
    plan = plan_of(compose_trial, tmp_path, cells, [*words, f"task.loss={project}.loss"], ["optimizer.lr"])
    hears = Hears(plan, Forecasts(plan))
    hears.console = Console(plan)
    hears.log = hears.console.log  # type: ignore[method-assign]
    assert run_sweep(plan, Acts(), hears) is ExitCode.failed
    first, second = (state.trial.folder / "error.txt" for state in plan.trials)
    assert 'raise ValueError("these are too many")' in first.read_text()
    lines = [line for line in capsys.readouterr().out.splitlines() if " failed" in line and "too many" in line]
    assert len(lines) == 1 and lines[0].endswith("/0/error.txt]"), lines
    assert not second.exists()


def run(plan: Sweep) -> Hears:
    hears = Hears(plan, Forecasts(plan))
    run_sweep(plan, Acts(), hears)
    return hears


def begun_by(plan: Sweep, forecasts: list[Forecast], monkeypatch: pytest.MonkeyPatch) -> Hears:
    """Run a sweep whose forecasts are made by hand; all that are not skipped begin."""
    monkeypatch.setattr("fsdp_lab.forecast.run.forecast_all", lambda *_: forecasts)
    hears = run(plan)
    begun = [number for number, state in enumerate(plan.trials) if state.status is TrialStatus.finished]
    assert hears.begun == begun, "the others are skipped"
    return hears


def test_prune_starts_what_is_tight_and_says_so(
    compose_trial: Compose, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Forecasts for CPUs, which are all that can be made here, are never tight."""
    plan = plan_of(compose_trial, tmp_path, [[], []], ["forecast.prune=true", "forecast.capacity_gib=1"])
    peaks = {"device": {"total": GIB}}
    full = Forecast(True, 1, peaks, {"all": 1}, capacity_bytes=GIB, active_bytes=GIB, reserved_bytes=GIB)
    hears = begun_by(plan, [replace(full, active_bytes=GIB - 1), full], monkeypatch)
    assert hears.begun == [0]
    (observed,) = (text for text in hears.logged if "tight" in text)
    assert "trial 0" in observed and "1024.00 MiB of 1024.00 MiB" in observed


def of_speeds(*steps: float) -> list[Forecast]:
    """Made by hand, for a CPU: each is known to ±40 %, and ratios to ±5 %."""
    return [
        Forecast(
            False, 2, {"device": {"total": 10}}, data_sheet="X",
            speed=Speed(
                step_s, {"compute": 1.0}, step_s / 1.4, step_s / 0.6, 0.4, Basis.data_sheet, "X",
                samples=64, relative=0.05, group="one",
            ),
        )
        for step_s in steps
    ]  # fmt: skip


@pytest.fixture(scope="module")
def two_cores(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data sheet in one place, so that trials which name it are composed once."""
    path = tmp_path_factory.mktemp("sheet") / "cpu.yaml"
    path.write_text(CPU)
    return path


@pytest.fixture
def keeping(compose_trial: Compose, tmp_path: Path, two_cores: Path) -> Sweep:
    """The plan of a sweep of three shardings with two learning rates each, of which one sharding is to be kept."""
    cells = [[f"sharding={name}", f"optimizer.lr={lr}"] for name in ("root", "ddp", "per_block") for lr in (1, 2)]
    return plan_of(compose_trial, tmp_path, cells, [f"forecast.device={two_cores}", "forecast.keep='1'"], ["sharding"])


def test_keep_starts_the_most_promising_and_says_so(keeping: Sweep, monkeypatch: pytest.MonkeyPatch):
    """The speeds are made by hand; the rule is the sweep's."""
    hears = begun_by(keeping, of_speeds(1.0, 1.0, 1.5, 1.5, 1.7, 1.7), monkeypatch)
    assert hears.begun == [0, 1]
    assert any("forecast.keep=1: 1 setting to measure" in text for text in hears.logged)
    for state in keeping.trials[2:]:
        recorded = read_trial(state.trial.folder)
        assert recorded.forecast["forecast/ratio_error"] == 0.05, "for a resume"
        assert recorded.forecast_words == {"predicted_by": "data sheet", "ratio_group": "one"}


@pytest.mark.parametrize(("ended", "skipped"), [(TrialStatus.finished, [0]), (TrialStatus.skipped, [0, 1, 4, 5])])
def test_keep_chooses_once(keeping: Sweep, monkeypatch: pytest.MonkeyPatch, ended: TrialStatus, skipped: Sequence[int]):
    """A resume runs what is left of the choice; only a kill while it skipped leaves more to choose from."""
    keeping.trials[0].status, keeping.trials[1].status = TrialStatus.skipped, ended
    monkeypatch.setattr("fsdp_lab.forecast.run.forecast_all", lambda *_: of_speeds(1.5, 1.5, 1.7, 1.7))
    run(keeping)
    assert [n for n, state in enumerate(keeping.trials) if state.status is TrialStatus.skipped] == skipped


@pytest.mark.parametrize(
    ("status", "more", "reached"), [("finished", False, 0), ("finished", True, 1), ("waiting", False, 1)]
)
def test_a_cluster_is_reached_only_where_something_is_left_to_do(
    compose_trial: Compose, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: str, more: bool, reached: int
):
    """A search that has suggested all its trials is resumed where its cluster is gone."""
    calls: list[Any] = []
    monkeypatch.setattr("fsdp_lab.sweep.start.start_ray", lambda *asked: calls.append(asked))
    plan = plan_of(compose_trial, tmp_path, [[]], ["cluster.address=127.0.0.1:1", "cluster.num_workers=2"])
    plan.trials[0].status = TrialStatus(status)
    plan.search = cast(OptunaSearch, SimpleNamespace(has_more=lambda: more, code=list))
    reach(plan)
    assert len(calls) == reached


def test_an_epoch_that_was_not_reported_comes_from_the_folder(
    compose_trial: Compose, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The trial's own process is killed between the file and its report of the epochs 2 and 5.

    The folder is read once at each start and once at the end.
    """
    sweep, reads = plan_of(compose_trial, tmp_path, [[]]), []
    hears, folder = heard(sweep), sweep.folder_of(0)
    monkeypatch.setattr("fsdp_lab.sweep.sweep.read_metrics", lambda of: [reads.append(of), *read_metrics(of)][1:])

    def epoch(number: int, reported: bool = True) -> dict[str, float]:
        metrics = {"epoch": number, "step": 8 * number, "val/loss": math.nan}
        metrics |= {"checkpoint/save_s": 0.5} if number % 2 else {}
        append_line(folder / "metrics.jsonl", json.dumps(metrics))
        if reported:
            sweep.epoch(0, metrics)
        return metrics

    sweep.prepare(0)
    sweep.begin(0)
    said = [epoch(1), epoch(2, reported=False)]
    sweep.begin(0)
    said += [epoch(3), epoch(4), epoch(5, reported=False)]
    assert len(reads) == 2
    sweep.end(0, Outcome(TrialStatus.finished))
    assert repr(hears.epochs) == repr(
        [{name: float(v) if name != "epoch" else v for name, v in e.items()} for e in said]
    )
    assert repr(hears.epochs) == repr(list(read_metrics(folder))) and len(reads) == 3
    assert sweep.trials[0].epochs_before == 2 and sweep.trials[0].figures["checkpoint/save_s"] == 0.5


@pytest.mark.parametrize(("epoch", "step", "status"), [(3, 24, "finished"), (2, 16, "stopped"), (10, 16, "finished")])
def test_a_trial_that_is_stopped_at_its_last_step_has_finished(
    epoch: int, step: int, status: str, compose_trial: Compose, tmp_path: Path
):
    words = ["training.epochs=10", "training.max_steps=20", "export=false"]
    sweep = plan_of(compose_trial, tmp_path, [words])
    sweep.prepare(0)
    sweep.write_stop(0, {"epoch": epoch, "step": step})
    outcome = read_trial(sweep.folder_of(0)).outcome
    assert outcome is not None and outcome.status == status


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


def test_tune_takes_our_callback_whatever_its_output_is_set_to(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("RAY_AIR_NEW_OUTPUT", "1")
    set_environment()
    from ray.tune.experimental.output import AirVerbosity, get_air_verbosity

    assert get_air_verbosity(AirVerbosity.SILENT) is None


def test_the_median_rule_pauses_no_trial_that_is_ahead():
    """The controller and its trials are planted: another trial waits, and there is nothing to compare with."""
    ahead, waits = Trial("planted", stub=True), Trial("planted", stub=True)
    ahead.status = Trial.RUNNING
    controller = cast("Any", SimpleNamespace(get_live_trials=lambda: [ahead, waits]))
    median = schedulers.median(SweepConfig(), {"time_attr": "epoch", "metric": "val/loss", "mode": "min"})
    for epoch in range(1, 6):
        assert median.on_trial_result(controller, ahead, {"epoch": epoch, "val/loss": 1.0}) == "CONTINUE"


def test_the_files_of_a_stopped_trial_come_from_storage(tmp_path: Path):
    """A local folder stands for the bucket; files that are not there end no sweep."""
    there, trial = tmp_path / "there", tmp_path / "trial"
    (there / "logs").mkdir(parents=True)
    (there / "logs" / "rank0.log").write_text("step 1")
    trial.mkdir()
    _get_files(f"file://{there}", trial)
    assert (trial / "logs" / "rank0.log").read_text() == "step 1"
    _get_files(f"file://{there}", tmp_path / "removed")
    _get_files(f"file://{tmp_path}/nowhere", trial)
    assert not (tmp_path / "removed").exists()


def test_the_metrics_of_an_epoch_lack_what_tune_adds(compose_trial: Compose, tmp_path: Path):
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
def test_a_stop_is_written_before_the_workers_of_the_trial_go(
    compose_trial: Compose, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by_itself: bool
):
    """Unless it has ended by itself. Tune is planted; the trial's own process takes lost workers for a failure."""
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


def test_a_process_that_cannot_be_used_again_holds_no_places(
    compose_trial: Compose, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """That of trial 0, which has finished, was to run trial 1; Ray keeps the places of a dead actor."""
    freed: list[Path] = []
    monkeypatch.setattr("fsdp_lab.engine.resources.release_placement_group", freed.append)
    sweep = plan_of(compose_trial, tmp_path, [[f"training.seed={seed}"] for seed in range(3)], (), ["training.seed"])
    callback = TuneCallback(sweep, cast("ResourceCatalog", SimpleNamespace(taken={})), Counter())
    for _ in range(2):
        sweep.prepare(sweep.next() or 0)
    sweep.begin(0)
    write_outcome(sweep.folder_of(0), Outcome(TrialStatus.finished))
    callback.on_trial_complete(0, [], SimpleNamespace(config={"number": 0}, trial_id="zero"))
    callback.on_trial_complete(0, [], SimpleNamespace(config={"number": 1}, trial_id="one"))
    assert freed == [sweep.folder_of(0)]
    assert [state.status.name for state in sweep.trials] == ["finished", "waiting", "waiting"]


def test_trials_that_a_memory_kill_ended_resume_with_new_epochs(
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
