"""Which trials a sweep starts by their forecasts. The executor trains nothing; real ones are in test_forecasts.py."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from fsdp_lab.compose import Trial
from fsdp_lab.files import append_line, write_json
from fsdp_lab.forecast.capacity import Forecast
from fsdp_lab.record.failures import read_failures
from fsdp_lab.record.reasons import Code, Reason
from fsdp_lab.record.sweep_json import SweepStart
from fsdp_lab.record.trial_files import Outcome, read_forecast, read_outcome
from fsdp_lab.report.reason_texts import reason_text
from fsdp_lab.speed.device import Basis
from fsdp_lab.speed.predict import Speed
from fsdp_lab.status import ExitCode, TrialStatus
from fsdp_lab.sweep.executors.ray_tune import reach_cluster
from fsdp_lab.sweep.listeners.console import Console
from fsdp_lab.sweep.listeners.forecasts import Forecasts
from fsdp_lab.sweep.runner import Listener, SweepPlan, SweepRun, run_sweep
from fsdp_lab.sweep.search import OptunaSearch
from fsdp_lab.sweep.state import SweepState, TrialState
from tests.sweep.test_forecasts import CPU

Compose = Callable[[Sequence[str], int], Trial]
LOSS = [("val/loss", "min")]
# What each trial leaves in its folder in the order of the trials: epochs, and how it ends.
ENDS = [(2, TrialStatus.finished), (1, TrialStatus.oom), (0, TrialStatus.failed)]


class Acts:
    """Instead of training, writes what a trial's processes would."""

    interrupted_by: str | None = None

    def __init__(self, raises: BaseException | None = None) -> None:
        self.raises, self.stopped = raises, 0

    def start(self, sweep: SweepRun) -> None: ...

    def run(self, sweep: SweepRun) -> None:
        while (number := sweep.next()) is not None:
            sweep.prepare(number)
            sweep.begin(number)
            if self.raises is not None and number == 1:
                raise self.raises
            epochs, status = ENDS[number]
            write_json(sweep.folder_of(number) / "facts.json", {"notes": []})
            for epoch in range(1, epochs + 1):
                append_line(sweep.folder_of(number) / "metrics.jsonl", json.dumps({"epoch": epoch, "val/loss": 1.0}))
                sweep.look(number)
                sweep.look(number)  # a second report of the same epoch publishes nothing
            sweep.tick()
            why = Reason.of(Code.no_outcome) if status is TrialStatus.failed else None
            sweep.end(number, Outcome(status, why))

    def stop(self) -> None:
        self.stopped += 1


class Hears(Listener):
    """Records which trials begin, how they end, and what is logged."""

    def __init__(self) -> None:
        self.begun: list[int] = []
        self.ended_as: dict[int, str] = {}
        self.logged: list[str] = []

    def began(self, sweep: SweepRun, number: int) -> None:
        self.begun.append(number)

    def ended(self, sweep: SweepRun, number: int) -> None:
        self.ended_as[number] = str(sweep.states[number].status)

    def log(self, text: str) -> None:
        self.logged.append(text)


@pytest.fixture
def plan(compose_trial: Compose, tmp_path: Path) -> SweepPlan:
    trials = [compose_trial([f"training.seed={seed}"], seed) for seed in range(3)]
    config = trials[0].config
    record = SweepStart.of([], True, config)
    return SweepPlan(SweepState([TrialState(t) for t in trials], LOSS), config, tmp_path, ["training.seed"], record)


def plan_of_theirs(compose_trial: Compose, folder: Path, model: str, losses: Sequence[str]) -> SweepPlan:
    """A trial for each loss."""
    project = "tests.workloads.user.my_project.net"
    words = ["task=custom", "model=custom", "data=example", f"+model._target_={project}.{model}", "+model.width=8"]
    trials = [compose_trial([*words, f"task.loss={project}.{loss}"], i) for i, loss in enumerate(losses)]
    states = SweepState([TrialState(trial) for trial in trials], LOSS)
    return SweepPlan(states, trials[0].config, folder, ["task.loss"], SweepStart.of([], True, trials[0].config))


@pytest.fixture
def no_gpus(monkeypatch: pytest.MonkeyPatch):
    """The executor needs no Ray, which would count them."""
    monkeypatch.setattr("fsdp_lab.engine.resources.num_gpus", lambda: 0)


@pytest.mark.ci
@pytest.mark.usefixtures("no_gpus")
def test_why_trials_have_no_forecast_is_logged_once(compose_trial: Compose, tmp_path: Path):
    """Their model reads a value, as training may."""
    plan = plan_of_theirs(compose_trial, tmp_path, "Asks", ["loss"] * 3)
    hears = Hears()
    run_sweep(plan, Acts(), [Forecasts(plan), hears])
    (reason,) = [text for text in hears.logged if text.startswith("no forecast: ")]
    assert "needs one in the forward pass" in reason


@pytest.mark.ci
@pytest.mark.usefixtures("no_gpus")
def test_the_traceback_of_an_error_that_forecasts_find_is_kept(
    compose_trial: Compose, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    plan = plan_of_theirs(compose_trial, tmp_path, "Refuses", ["loss"] * 2)
    assert run_sweep(plan, Acts(), [Forecasts(plan), Console(plan.state, plan.swept)]) is ExitCode.failed
    (failure,) = read_failures(plan.state.trials[0].trial.folder)
    assert 'raise ValueError("these are too many")' in failure.traceback
    lines = [line for line in capsys.readouterr().out.splitlines() if " failed" in line and "too many" in line]
    assert len(lines) == 1 and lines[0].endswith("/0/failures/rank0.json]"), lines
    assert not read_failures(plan.state.trials[1].trial.folder)


@pytest.mark.usefixtures("no_gpus")
def test_where_all_forecasts_fail_as_training_would_no_trial_begins(compose_trial: Compose, tmp_path: Path):
    plan = plan_of_theirs(compose_trial, tmp_path, "Net", ["of_each_item"] * 3)
    hears = Hears()
    assert run_sweep(plan, Acts(), [Forecasts(plan), hears]) is ExitCode.failed
    assert hears.begun == [] and hears.ended_as == dict.fromkeys(range(3), "failed")
    first, *others = [reason_text(state.reason) for state in plan.state.trials]
    assert "of_each_item is a tensor of" in first and "to train anyway, use forecast.enabled=false" in first
    assert others == ["for the same reason as trial 0"] * 2
    outcomes = [read_outcome(state.trial.folder) for state in plan.state.trials]
    assert [outcome and outcome.status for outcome in outcomes] == [TrialStatus.failed] * 3, "a resume tries none again"


@pytest.mark.ci
@pytest.mark.usefixtures("no_gpus")
def test_where_one_setting_can_be_forecast_all_begin(compose_trial: Compose, tmp_path: Path):
    plan = plan_of_theirs(compose_trial, tmp_path, "Net", ["of_each_item", "loss", "of_each_item"])
    hears = Hears()
    run_sweep(plan, Acts(), [Forecasts(plan), hears])
    assert hears.begun == [0, 1, 2]


@pytest.mark.usefixtures("no_gpus")
def test_prune_starts_what_is_tight_and_says_so(
    compose_trial: Compose, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The forecasts are made by hand: those for CPUs, which are all that can be made here, are never tight."""
    trials = [compose_trial(["forecast.prune=true", "forecast.capacity_gib=1"], number) for number in range(2)]
    states = SweepState([TrialState(trial) for trial in trials], LOSS)
    plan = SweepPlan(states, trials[0].config, tmp_path, [], SweepStart.of([], True, trials[0].config))
    tight, too_large = (
        Forecast(
            True, 1, {"device": {"total": 2**30}}, {"all": 1}, capacity_bytes=2**30, active_bytes=a, reserved_bytes=r
        )
        for a, r in ((2**30 - 1, 2**30), (2**30, 2**30))
    )
    monkeypatch.setattr("fsdp_lab.forecast.run.forecast_all", lambda *_: [tight, too_large])
    hears = Hears()
    run_sweep(plan, Acts(), [Forecasts(plan), hears])
    assert hears.begun == [0]
    (observed,) = (text for text in hears.logged if "tight" in text)
    assert "trial 0" in observed and "1024.00 MiB of 1024.00 MiB" in observed
    assert hears.ended_as[1] == "skipped"


class Rests(Acts):
    def run(self, sweep: SweepRun) -> None: ...


def of_speeds(*steps: float, group: str = "one") -> list[Forecast]:
    """By hand, for a CPU: each is known to ±40 %, and ratios to ±5 %."""
    collected = []
    for step_s in steps:
        low, high = step_s / 1.4, step_s / 0.6
        speed = Speed(
            step_s, {"compute": 1.0}, low, high, 0.4, Basis.data_sheet, "X", samples=64, relative=0.05, group=group
        )
        collected.append(Forecast(False, 2, {"device": {"total": 10}}, data_sheet="X", speed=speed))
    return collected


@pytest.fixture
def keeping(compose_trial: Compose, tmp_path: Path) -> Callable[..., SweepPlan]:
    """The plan of a sweep of three shardings with two learning rates each."""
    (tmp_path / "cpu.yaml").write_text(CPU)

    def plan(keep: str) -> SweepPlan:
        common = [f"forecast.device={tmp_path}/cpu.yaml", f"forecast.keep='{keep}'", "model=mlp"]
        cells = [[f"sharding={name}", f"optimizer.lr={lr}"] for name in ("root", "ddp", "per_block") for lr in (1, 2)]
        trials = [compose_trial([*common, *cell], number) for number, cell in enumerate(cells)]
        states = SweepState([TrialState(trial) for trial in trials], LOSS)
        return SweepPlan(states, trials[0].config, tmp_path, ["sharding"], SweepStart.of([], True, trials[0].config))

    return plan


@pytest.mark.usefixtures("no_gpus")
@pytest.mark.parametrize(
    ("keep", "skipped", "sentence_part"),
    [
        ("2", [4, 5], "2 settings to measure, 2 trials skipped"),
        ("3", [], "3 settings to measure, nothing is skipped: 3 settings have"),
    ],
)
def test_keep_starts_the_most_promising_and_says_so(
    keeping: Callable[..., SweepPlan], monkeypatch: pytest.MonkeyPatch, keep: str, skipped: list[int],
    sentence_part: str,
):  # fmt: skip
    """The speeds are made by hand; the rule is the sweep's."""
    plan, forecasts = keeping(keep), of_speeds(1.0, 1.0, 1.5, 1.5, 1.7, 1.7)
    monkeypatch.setattr("fsdp_lab.forecast.run.forecast_all", lambda *_: forecasts)
    hears = Hears()
    run_sweep(plan, Rests(), [Forecasts(plan), hears])
    assert [n for n, state in enumerate(plan.state.trials) if state.status is TrialStatus.skipped] == skipped
    assert any(f"forecast.keep={keep}: {sentence_part}" in text for text in hears.logged)
    trials = [state.trial for state in plan.state.trials]
    for number in skipped:
        figures, words = read_forecast(trials[number].folder)
        assert figures["forecast/ratio_error"] == 0.05, "for a resume"
        assert words == {"predicted_by": "data sheet", "ratio_group": "one"}


@pytest.mark.usefixtures("no_gpus")
def test_keep_chooses_for_each_number_of_workers(
    compose_trial: Compose, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Of each number root is the fastest, and memory is not scarce; all of 4 workers are faster."""
    (tmp_path / "cpu.yaml").write_text(CPU)
    common = [f"forecast.device={tmp_path}/cpu.yaml", "forecast.keep='1'", "model=mlp"]
    cells = [[f"sharding={name}", f"cluster.num_workers={n}"] for n in (2, 4) for name in ("root", "per_block", "ddp")]
    trials = [compose_trial([*common, *cell], number) for number, cell in enumerate(cells)]
    states = SweepState([TrialState(trial) for trial in trials], LOSS)
    record = SweepStart.of([], True, trials[0].config)
    plan = SweepPlan(states, trials[0].config, tmp_path, ["sharding", "cluster.num_workers"], record)
    collected = []
    for number, (step_s, peak) in enumerate(((1.0, 30), (1.02, 10), (3.0, 30), (0.1, 30), (0.102, 10), (0.3, 30))):
        workers = 2 if number < 3 else 4
        speed = Speed(
            step_s,
            {"compute": 1.0},
            step_s,
            step_s,
            0.01,
            Basis.data_sheet,
            "X",
            samples=64,
            relative=0.01,
            group=str(workers),
        )
        collected.append(Forecast(False, workers, {"device": {"total": peak}}, data_sheet="X", speed=speed))
    monkeypatch.setattr("fsdp_lab.forecast.run.forecast_all", lambda *_: collected)
    hears = Hears()
    run_sweep(plan, Rests(), [Forecasts(plan), hears])
    assert [n for n, s in enumerate(plan.state.trials) if s.status is TrialStatus.skipped] == [1, 2, 4, 5], hears.logged


@pytest.mark.usefixtures("no_gpus")
def test_keep_and_prune_skip_what_is_slow_and_what_does_not_fit(
    keeping: Callable[..., SweepPlan], monkeypatch: pytest.MonkeyPatch
):
    """The forecasts are made by hand: by them the last two shardings are slower, and the last one does not fit."""
    plan, forecasts = keeping("1"), of_speeds(1.0, 1.0, 1.7, 1.7, 1.7, 1.7)
    for n, state in enumerate(plan.state.trials):
        state.trial.config.forecast.prune = True
        state.trial.folder.mkdir(exist_ok=True)
        if n in (4, 5):
            forecasts[n] = replace(forecasts[n], capacity_bytes=5)
    monkeypatch.setattr("fsdp_lab.forecast.run.forecast_all", lambda *_: forecasts)
    run_sweep(plan, Rests(), [Forecasts(plan)])
    assert [n for n, state in enumerate(plan.state.trials) if state.status is TrialStatus.skipped] == [2, 3, 4, 5]


@pytest.mark.usefixtures("no_gpus")
@pytest.mark.parametrize("ended", [TrialStatus.finished, TrialStatus.skipped])
def test_keep_chooses_once(keeping: Callable[..., SweepPlan], monkeypatch: pytest.MonkeyPatch, ended: TrialStatus):
    """A resume runs what is left of the choice; only a kill while it skipped leaves more to choose from."""
    plan = keeping("20%")
    plan.state.trials[0].status, plan.state.trials[1].status = TrialStatus.skipped, ended
    monkeypatch.setattr("fsdp_lab.forecast.run.forecast_all", lambda *_: of_speeds(1.5, 1.5, 1.7, 1.7))
    run_sweep(plan, Rests(), [Forecasts(plan)])
    skipped = [state.status for state in plan.state.trials].count(TrialStatus.skipped)
    assert skipped == 1 if ended is TrialStatus.finished else skipped > 2


@pytest.mark.usefixtures("no_gpus")
@pytest.mark.parametrize("upper_bound", ["", "compile=true"])
def test_keep_and_prune_skip_nothing_by_an_upper_bound(
    keeping: Callable[..., SweepPlan], monkeypatch: pytest.MonkeyPatch, upper_bound: str
):
    """By the forecasts, the last two are the fastest and do not fit."""
    plan, forecasts = keeping("1"), of_speeds(1.7, 1.7, 1.7, 1.7, 1.0, 1.0)
    forecasts[4:] = [replace(f, capacity_bytes=5, upper_bound=upper_bound) for f in forecasts[4:]]
    for state in plan.state.trials:
        state.trial.config.forecast.prune = True
        state.trial.folder.mkdir(exist_ok=True)
    monkeypatch.setattr("fsdp_lab.forecast.run.forecast_all", lambda *_: forecasts)
    hears = Hears()
    run_sweep(plan, Rests(), [Forecasts(plan), hears])
    states = plan.state.trials
    skipped = [n for n, state in enumerate(states) if state.status is TrialStatus.skipped]
    assert skipped == ([] if upper_bound else [4, 5])
    assert any("starts, and may run out of memory" in text for text in hears.logged) == bool(upper_bound)
    for state in states[4:]:
        assert ("forecast/needed_bytes" in state.forecast_figures) != bool(upper_bound)


@pytest.mark.parametrize(
    ("status", "more", "reached"), [("finished", False, 0), ("finished", True, 1), ("waiting", False, 1)]
)
def test_a_cluster_is_reached_only_where_something_is_left_to_do(
    plan: SweepPlan, monkeypatch: pytest.MonkeyPatch, status: str, more: bool, reached: int
):
    """A search that has suggested all its trials is resumed where its cluster is gone."""
    calls: list[Any] = []
    monkeypatch.setattr("fsdp_lab.engine.cluster.start_ray", lambda *asked: calls.append(asked))
    for state in plan.state.trials:
        state.status = TrialStatus(status)
    plan.config.cluster.address = "127.0.0.1:1"
    search = cast(OptunaSearch, SimpleNamespace(has_more=lambda: more, code=list))
    reach_cluster(replace(plan, search=search))
    assert len(calls) == reached


@pytest.mark.parametrize(("epoch", "step", "through"), [(3, 24, True), (2, 16, False), (10, 16, True)])
def test_a_trial_that_its_scheduler_stops_at_its_last_step_is_through(
    epoch: int, step: int, through: bool, compose_trial: Compose, tmp_path: Path
):
    trial = compose_trial(["training.epochs=10", "training.max_steps=20", "export=false"], 0)
    trial.folder.mkdir()
    append_line(trial.folder / "metrics.jsonl", json.dumps({"epoch": epoch, "step": step}))
    started = SweepStart.of([], True, trial.config)
    plan = SweepPlan(SweepState([TrialState(trial)], LOSS), trial.config, tmp_path, [], started)
    assert SweepRun(plan, []).is_through(0) is through
