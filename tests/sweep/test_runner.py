"""`run_sweep` with an executor that trains nothing, and what a listener hears of it."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fsdp_lab.compose import Trial
from fsdp_lab.config import UserError
from fsdp_lab.engine.trial_files import append_line, read_failures, read_forecast, read_outcome
from fsdp_lab.files import write_json
from fsdp_lab.forecast.capacity import Forecast
from fsdp_lab.forecast.kept import kept_sentences
from fsdp_lab.forecast.run import Request
from fsdp_lab.forecast.table import Row
from fsdp_lab.speed.device import Basis
from fsdp_lab.speed.predict import Speed
from fsdp_lab.status import ExitCode, TrialStatus
from fsdp_lab.sweep.executors.ray_tune import reach_cluster
from fsdp_lab.sweep.listeners.console import Console
from fsdp_lab.sweep.listeners.forecasts import Forecasts
from fsdp_lab.sweep.plan import effect
from fsdp_lab.sweep.runner import Ending, Listener, SweepPlan, SweepRun, run_sweep
from fsdp_lab.sweep.state import SweepState, TrialState
from fsdp_lab.sweep.store.record import Record
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
            sweep.end(number, status, "why" if status is TrialStatus.failed else None)

    def stop(self) -> None:
        self.stopped += 1


class Hears(Listener):
    def __init__(self) -> None:
        self.heard: list[tuple[Any, ...]] = []
        self.ending: Ending | None = None

    def opened(self, sweep: SweepRun) -> None:
        self.heard.append(("opened",))

    def ready(self, sweep: SweepRun) -> None:
        self.heard.append(("ready",))

    def began(self, sweep: SweepRun, number: int) -> None:
        assert sweep.states[number].status is TrialStatus.running
        self.heard.append(("began", number))

    def facts(self, sweep: SweepRun, number: int, facts: dict[str, Any]) -> None:
        self.heard.append(("facts", number))

    def epoch(self, sweep: SweepRun, number: int, metrics: dict[str, float]) -> None:
        assert sweep.states[number].metrics["epoch"] == metrics["epoch"]
        self.heard.append(("epoch", number, metrics["epoch"]))

    def ended(self, sweep: SweepRun, number: int) -> None:
        status = sweep.states[number].status
        outcome = read_outcome(sweep.folder_of(number))
        assert (outcome is not None) is status.is_result, "the folder knows first"
        self.heard.append(("ended", number, status))

    def closing(self, sweep: SweepRun, ending: Ending) -> None:
        self.heard.append(("closing",))

    def closed(self, sweep: SweepRun, ending: Ending) -> None:
        self.ending = ending
        self.heard.append(("closed",))


@pytest.fixture
def plan(compose_trial: Compose, tmp_path: Path) -> SweepPlan:
    trials = [compose_trial([f"training.seed={seed}"], seed) for seed in range(3)]
    config = trials[0].config
    record = Record.of([], True, config)
    return SweepPlan(SweepState([TrialState(t) for t in trials], LOSS), config, tmp_path, ["training.seed"], record)


def test_a_listener_hears_what_becomes_of_each_trial(plan: SweepPlan):
    executor, listener = Acts(), Hears()
    assert run_sweep(plan, executor, [listener]) is ExitCode.failed
    assert listener.heard == [
        ("opened",), ("ready",),
        ("began", 0), ("facts", 0), ("epoch", 0, 1), ("epoch", 0, 2), ("ended", 0, "finished"),
        ("began", 1), ("facts", 1), ("epoch", 1, 1), ("ended", 1, "oom"),
        ("began", 2), ("facts", 2), ("ended", 2, "failed"),
        ("closing",), ("closed",),
    ]  # fmt: skip
    assert executor.stopped == 1 and plan.state.trials[2].error == "why"


@pytest.mark.parametrize(
    ("raised", "code"), [(KeyboardInterrupt(), ExitCode.interrupted), (RuntimeError("a bug"), ExitCode.failed)]
)
def test_whatever_ends_a_sweep_ends_the_trial_that_runs_and_no_other(
    plan: SweepPlan, raised: BaseException, code: ExitCode
):
    executor, listener = Acts(raised), Hears()
    if isinstance(raised, KeyboardInterrupt):
        assert run_sweep(plan, executor, [listener]) is code
    else:
        with pytest.raises(RuntimeError, match="a bug"):
            run_sweep(plan, executor, [listener])
    assert [state.status for state in plan.state.trials] == ["finished", "interrupted", "waiting"]
    assert listener.heard[-3:] == [("closing",), ("ended", 1, "interrupted"), ("closed",)]
    assert listener.ending is not None and listener.ending.code is code and listener.ending.early
    assert executor.stopped == 1


class Writes(Listener):
    def __init__(self) -> None:
        self.logged: list[str] = []

    def log(self, text: str) -> None:
        self.logged.append(text)


def plan_of_theirs(compose_trial: Compose, folder: Path, model: str, losses: Sequence[str]) -> SweepPlan:
    """A trial for each loss."""
    project = "tests.workloads.user.my_project.net"
    words = ["task=custom", "model=custom", "data=example", f"+model._target_={project}.{model}", "+model.width=8"]
    trials = [compose_trial([*words, f"task.loss={project}.{loss}"], i) for i, loss in enumerate(losses)]
    states = SweepState([TrialState(trial) for trial in trials], LOSS)
    return SweepPlan(states, trials[0].config, folder, ["task.loss"], Record.of([], True, trials[0].config))


@pytest.fixture
def no_gpus(monkeypatch: pytest.MonkeyPatch):
    """The executor needs no Ray, which would count them."""
    monkeypatch.setattr("fsdp_lab.engine.resources.num_gpus", lambda: 0)


@pytest.mark.usefixtures("no_gpus")
def test_what_a_failed_trial_says_is_not_reported_of_its_forecast_too(compose_trial: Compose, tmp_path: Path):
    """Its model reads a value. The others, which this executor lets train, are without a forecast for that reason."""
    plan = plan_of_theirs(compose_trial, tmp_path, "Asks", ["loss"] * 3)
    writes = Writes()
    run_sweep(plan, Acts(), [Forecasts(plan), writes])
    observed = [text.partition(": ") for text in writes.logged if "no forecast" in text]
    assert [name for name, _, _ in observed] == ["trial 0 has no forecast", "trial 1 has no forecast"]
    assert all("needs one in the forward pass" in reason for _, _, reason in observed)


@pytest.mark.usefixtures("no_gpus")
def test_the_traceback_of_an_error_that_forecasts_find_is_kept(
    compose_trial: Compose, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    plan = plan_of_theirs(compose_trial, tmp_path, "Refuses", ["loss"] * 2)
    assert run_sweep(plan, Acts(), [Forecasts(plan), Console(plan.state, plan.swept)]) is ExitCode.failed
    (failure,) = read_failures(plan.state.trials[0].trial.folder)
    assert 'raise ValueError("these are too many")' in failure["traceback"]
    lines = [line for line in capsys.readouterr().out.splitlines() if " failed" in line and "too many" in line]
    assert len(lines) == 1 and lines[0].endswith("/0/failures/rank0.json]"), lines
    assert not read_failures(plan.state.trials[1].trial.folder)


@pytest.mark.usefixtures("no_gpus")
def test_where_all_forecasts_fail_as_training_would_no_trial_begins(compose_trial: Compose, tmp_path: Path):
    plan = plan_of_theirs(compose_trial, tmp_path, "Net", ["of_each_item"] * 3)
    hears = Hears()
    assert run_sweep(plan, Acts(), [Forecasts(plan), hears]) is ExitCode.failed
    assert [event for event in hears.heard if event[0] in ("began", "ended")] == [
        ("ended", n, "failed") for n in range(3)
    ]
    first, *others = [state.error or "" for state in plan.state.trials]
    assert "of_each_item is a tensor of" in first and "to train anyway, use forecast.enabled=false" in first
    assert others == ["for the same reason as trial 0"] * 2
    outcomes = [read_outcome(state.trial.folder) for state in plan.state.trials]
    assert [outcome and outcome.status for outcome in outcomes] == [TrialStatus.failed] * 3, "a resume tries none again"


@pytest.mark.usefixtures("no_gpus")
def test_where_one_setting_can_be_forecast_all_begin(compose_trial: Compose, tmp_path: Path):
    plan = plan_of_theirs(compose_trial, tmp_path, "Net", ["of_each_item", "loss", "of_each_item"])
    hears = Hears()
    run_sweep(plan, Acts(), [Forecasts(plan), hears])
    assert [event[1] for event in hears.heard if event[0] == "began"] == [0, 1, 2]


@pytest.mark.usefixtures("no_gpus")
def test_prune_starts_what_is_tight_and_says_so(
    compose_trial: Compose, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The forecasts are made by hand: those for CPUs, which are all that can be made here, are never tight."""
    trials = [compose_trial(["forecast.prune=true", "forecast.capacity_gib=1"], number) for number in range(2)]
    states = SweepState([TrialState(trial) for trial in trials], LOSS)
    plan = SweepPlan(states, trials[0].config, tmp_path, [], Record.of([], True, trials[0].config))
    tight, too_large = (
        Forecast(
            True, 1, {"device": {"total": 2**30}}, {"all": 1}, capacity_bytes=2**30, active_bytes=a, reserved_bytes=r
        )
        for a, r in ((2**30 - 1, 2**30), (2**30, 2**30))
    )
    monkeypatch.setattr("fsdp_lab.forecast.run.forecast_all", lambda *_: [tight, too_large])
    hears, writes = Hears(), Writes()
    run_sweep(plan, Acts(), [Forecasts(plan), hears, writes])
    assert [event[1] for event in hears.heard if event[0] == "began"] == [0]
    (observed,) = (text for text in writes.logged if "tight" in text)
    assert observed.startswith("trial 0 starts, but memory is tight: needs 1024.00 MiB of 1024.00 MiB per device")
    assert ("ended", 1, "skipped") in hears.heard


class Rests(Acts):
    def run(self, sweep: SweepRun) -> None: ...


def of_speeds(*steps: float, group: str = "one") -> list[Forecast]:
    """By hand, for a CPU: each is known to ±40 %, and ratios to ±5 %."""
    collected = []
    for step_s in steps:
        low, high = step_s / 1.4, step_s / 0.6
        speed = Speed(step_s, {}, low, high, 0.4, Basis.calibration, "X", samples=64, relative=0.05, group=group)
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
        return SweepPlan(states, trials[0].config, tmp_path, ["sharding"], Record.of([], True, trials[0].config))

    return plan


@pytest.mark.usefixtures("no_gpus")
@pytest.mark.parametrize(
    ("keep", "skipped", "sentence_part", "message"),
    [
        ("2", [4, 5], "2 settings to measure, 2 trials skipped", "would start 4 of 6 trials, "),
        ("3", [], "3 settings to measure, nothing is skipped: 3 settings have", "6 trials, nothing is skipped: 3 s"),
    ],
)
def test_keep_starts_what_the_command_for_forecasts_says(
    keeping: Callable[..., SweepPlan], monkeypatch: pytest.MonkeyPatch, keep: str, skipped: list[int],
    sentence_part: str, message: str,
):  # fmt: skip
    """The speeds are made by hand; the rule is the sweep's."""
    plan, forecasts = keeping(keep), of_speeds(1.0, 1.0, 1.5, 1.5, 1.7, 1.7)
    monkeypatch.setattr("fsdp_lab.forecast.run.forecast_all", lambda *_: forecasts)
    writes = Writes()
    run_sweep(plan, Rests(), [Forecasts(plan), writes])
    assert [n for n, state in enumerate(plan.state.trials) if state.status is TrialStatus.skipped] == skipped
    assert any(f"forecast.keep={keep}: {sentence_part}" in text for text in writes.logged)
    trials = [state.trial for state in plan.state.trials]
    rows = [Row([str(trial.index)], forecast) for trial, forecast in zip(trials, forecasts, strict=True)]
    (sentence,) = kept_sentences(rows, [Request.of(t.config, 2) for t in trials], ["trial"], keep, effect)
    assert message in sentence
    for number in skipped:
        assert f"trial={number}" not in sentence
        figures, words = read_forecast(trials[number].folder)
        assert figures["forecast/ratio_error"] == 0.05, "for a resume"
        assert words == {"predicted_by": "calibration", "ratio_group": "one"}


@pytest.mark.usefixtures("no_gpus")
def test_keep_chooses_for_each_number_of_workers_and_starts_what_is_recommended(
    compose_trial: Compose, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Of each number root is faster, and per_block within the tolerance the smaller; all of 4 workers are faster."""
    (tmp_path / "cpu.yaml").write_text(CPU)
    common = [f"forecast.device={tmp_path}/cpu.yaml", "forecast.keep='1'", "model=mlp"]
    cells = [[f"sharding={name}", f"cluster.num_workers={n}"] for n in (2, 4) for name in ("root", "per_block", "ddp")]
    trials = [compose_trial([*common, *cell], number) for number, cell in enumerate(cells)]
    states = SweepState([TrialState(trial) for trial in trials], LOSS)
    record = Record.of([], True, trials[0].config)
    plan = SweepPlan(states, trials[0].config, tmp_path, ["sharding", "cluster.num_workers"], record)
    collected = []
    for number, (step_s, peak) in enumerate(((1.0, 30), (1.02, 10), (3.0, 30), (0.1, 30), (0.102, 10), (0.3, 30))):
        workers = 2 if number < 3 else 4
        speed = Speed(
            step_s, {}, step_s, step_s, 0.01, Basis.calibration, "X", samples=64, relative=0.01, group=str(workers)
        )
        collected.append(Forecast(False, workers, {"device": {"total": peak}}, data_sheet="X", speed=speed))
    monkeypatch.setattr("fsdp_lab.forecast.run.forecast_all", lambda *_: collected)
    writes = Writes()
    run_sweep(plan, Rests(), [Forecasts(plan), writes])
    assert [n for n, s in enumerate(plan.state.trials) if s.status is TrialStatus.skipped] == [2, 5], writes.logged


@pytest.mark.usefixtures("no_gpus")
@pytest.mark.parametrize(("group", "skipped"), [("one", [2, 3, 4, 5]), ("of another calibration", [])])
def test_what_another_calibration_predicted_is_compared_by_both_ranges(
    keeping: Callable[..., SweepPlan], monkeypatch: pytest.MonkeyPatch, group: str, skipped: list[int]
):
    plan = keeping("1")
    for state, before in zip(plan.state.trials[:2], of_speeds(1.0, 1.0, group=group), strict=True):
        state.forecast = before
        state.forecast_before, state.words_before = state.forecast_figures, state.forecast_words
        state.status, state.forecast = TrialStatus.finished, None
    monkeypatch.setattr("fsdp_lab.forecast.run.forecast_all", lambda *_: of_speeds(1.5, 1.5, 1.7, 1.7))
    run_sweep(plan, Rests(), [Forecasts(plan)])
    assert [n for n, state in enumerate(plan.state.trials) if state.status is TrialStatus.skipped] == skipped


@pytest.mark.usefixtures("no_gpus")
@pytest.mark.parametrize("again", [False, True])
def test_keep_and_prune_skip_nothing_that_is_measured_again(
    keeping: Callable[..., SweepPlan], monkeypatch: pytest.MonkeyPatch, again: bool
):
    """The forecasts are made by hand: by them the last two shardings are slower, and the last one does not fit."""
    plan, forecasts = keeping("1"), of_speeds(1.0, 1.0, 1.7, 1.7, 1.7, 1.7)
    for n, state in enumerate(plan.state.trials):
        state.trial.config.forecast.prune = True
        state.again = again and n in (2, 4)
        state.trial.folder.mkdir(exist_ok=True)
        if n in (4, 5):
            forecasts[n] = replace(forecasts[n], capacity_bytes=5)
    monkeypatch.setattr("fsdp_lab.forecast.run.forecast_all", lambda *_: forecasts)
    run_sweep(plan, Rests(), [Forecasts(plan)])
    skipped = [n for n, state in enumerate(plan.state.trials) if state.status is TrialStatus.skipped]
    assert skipped == ([3, 5] if again else [2, 3, 4, 5])


def test_a_trial_that_is_skipped_never_begins(plan: SweepPlan):
    class Skips(Hears):
        def ready(self, sweep: SweepRun) -> None:
            sweep.skip(1, "too large")

    listener = Skips()
    run_sweep(plan, Acts(), [listener])
    assert ("ended", 1, "skipped") in listener.heard and ("began", 1) not in listener.heard
    outcome = read_outcome(plan.state.trials[1].trial.folder)
    assert outcome is not None and (outcome.status, outcome.error) == ("skipped", "too large")


@pytest.mark.parametrize("raised", [KeyboardInterrupt(), RuntimeError("a bug")])
def test_what_ends_a_sweep_while_it_opens_closes_what_is_open(plan: SweepPlan, raised: BaseException):
    class Opens(Hears):
        def opened(self, sweep: SweepRun) -> None:
            super().opened(sweep)
            raise raised

    listener = Opens()
    with suppress(RuntimeError):
        assert run_sweep(plan, Acts(), [listener]) is ExitCode.interrupted
    assert listener.heard == [("opened",), ("closing",), ("closed",)]


def test_a_store_that_cannot_be_reached_leaves_nothing_to_close(plan: SweepPlan):
    class Refuses(Hears):
        def opened(self, sweep: SweepRun) -> None:
            raise UserError("no store")

    listener, executor = Refuses(), Acts()
    with pytest.raises(UserError, match="no store"):
        run_sweep(plan, executor, [listener])
    assert listener.heard == [] and executor.stopped == 1


def test_a_sweep_closes_once_whoever_comes_first(plan: SweepPlan):
    """The thread that ends an interrupted sweep in time, and the driver that gets there after all."""
    listener = Hears()
    sweep = SweepRun(plan, [listener])
    sweep.open()
    number = sweep.next()
    assert number == 0
    sweep.begin(number)
    assert sweep.close(interrupted=True) is ExitCode.interrupted
    assert sweep.close(interrupted=True) is ExitCode.interrupted
    sweep.end(number, TrialStatus.finished)  # the driver wakes: the trial has ended already
    assert plan.state.trials[0].status is TrialStatus.interrupted
    assert listener.heard == [("opened",), ("began", 0), ("closing",), ("ended", 0, "interrupted"), ("closed",)]


class Suggests:
    """A search with one trial to give, and something to say about another."""

    def __init__(self, trial: Trial) -> None:
        self.left, self.logged = [trial], ["not tried: b"]

    def has_more(self) -> bool:
        return bool(self.left)

    def next(self) -> Trial | None:
        return self.left.pop() if self.left else None

    def code(self) -> list[str]:
        return []

    def notes(self) -> list[str]:
        notes, self.logged = self.logged, []
        return notes

    def report_result(self, trial: Trial, status: TrialStatus, metrics: Any) -> None:
        self.reported = (trial, status)


def test_a_search_gets_results_and_its_notes_are_logged(plan: SweepPlan, compose_trial: Compose):
    class Notes(Hears):
        def added(self, sweep: SweepRun, number: int) -> None:
            self.heard.append(("added", number))

        def log(self, text: str) -> None:
            self.heard.append(("say", text))

    trial = compose_trial(["training.seed=9"], 0)
    search, listener = Suggests(trial), Notes()
    searched = replace(plan, state=SweepState([], LOSS), search=search)
    assert run_sweep(searched, Acts(), [listener]) is ExitCode.finished
    assert listener.heard[2:5] == [("say", "not tried: b"), ("added", 0), ("began", 0)]
    assert search.reported == (trial, TrialStatus.finished)


@pytest.mark.parametrize(
    ("status", "more", "reached"), [("finished", False, 0), ("finished", True, 1), ("waiting", False, 1)]
)
def test_a_cluster_is_reached_only_where_something_is_left_to_do(
    plan: SweepPlan, compose_trial: Compose, monkeypatch: pytest.MonkeyPatch, status: str, more: bool, reached: int
):
    """A search that has suggested all its trials is resumed where its cluster is gone."""
    calls: list[Any] = []
    monkeypatch.setattr("fsdp_lab.sweep.executors.ray_tune._start_ray", lambda *asked: calls.append(asked))
    for state in plan.state.trials:
        state.status = TrialStatus(status)
    plan.config.cluster.address = "127.0.0.1:1"
    search = Suggests(compose_trial([], 3))
    search.left = search.left if more else []
    reach_cluster(replace(plan, search=search))
    assert len(calls) == reached
