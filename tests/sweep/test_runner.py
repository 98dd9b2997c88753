"""Which trials a sweep starts, in which order, and how they and the sweep end; without Ray."""

from __future__ import annotations

import json
import math
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock, Mock

import pytest
from ray.tune.schedulers import TrialScheduler

from fsdp_lab.config import workers_of
from fsdp_lab.config.status import ExitCode, TrialStatus
from fsdp_lab.engine.inline import run_inline
from fsdp_lab.forecast.capacity import Forecast
from fsdp_lab.forecast.keep import ratio_group
from fsdp_lab.forecast.observations import record_observation
from fsdp_lab.forecast.request import Request
from fsdp_lab.forecast.speed.device import Basis, digest, load_device
from fsdp_lab.forecast.speed.predict import Parts, Speed, predict
from fsdp_lab.forecast.speed.program import Kind
from fsdp_lab.forecast.speed.refine import Observation
from fsdp_lab.record.reasons import Code, Reason
from fsdp_lab.record.trial_files import read_metrics
from fsdp_lab.record.trial_json import Outcome, changing, read_trial, write_outcome
from fsdp_lab.report.render import reason_text
from fsdp_lab.storage.files import append_line
from fsdp_lab.sweep.forecasts import Forecasts
from fsdp_lab.sweep.names import OF_A_NIGHT
from fsdp_lab.sweep.runner import run_sweep
from fsdp_lab.sweep.schedulers import build_scheduler
from fsdp_lab.sweep.shutdown import interruptible
from fsdp_lab.sweep.sweep import Sweep
from fsdp_lab.sweep.trial import TrialState
from fsdp_lab.sweep.tuner import Places, TuneCallback
from tests.forecast.planted import operator
from tests.sweep.planted import CPU, Acts, Compose, Hears, heard, plan_of, sweep_of, trial_by_hand

pytestmark = pytest.mark.usefixtures("no_gpus")
MIB, GIB = 2**20, 2**30
TRIAL = trial_by_hand([])


def in_status(*statuses: str) -> Sweep:
    return sweep_of([TrialState(TRIAL, TrialStatus(status)) for status in statuses])


@pytest.mark.parametrize(
    ("statuses", "interrupted", "error", "expected"),
    [
        ("", False, None, ExitCode.finished),
        ("finished oom diverged stopped skipped", False, None, ExitCode.finished),
        ("finished failed", False, None, ExitCode.failed),
        ("running", False, RuntimeError("a bug"), ExitCode.failed),
        ("failed running", False, None, ExitCode.interrupted),  # nobody ended it: the watch over the interrupt
        ("finished finished", True, None, ExitCode.interrupted),
    ],
)
def test_the_exit_code_says_how_a_sweep_ended(
    statuses: str, interrupted: bool, error: Exception | None, expected: ExitCode
):
    assert in_status(*statuses.split()).exit_code(interrupted, error) is expected


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_manager_and_a_terminal_that_closes_interrupt_a_sweep(number: int):
    def end() -> None:
        with interruptible(in_status("running")):
            signal.raise_signal(number)
            time.sleep(0.2)

    before = signal.signal(number, lambda *_: None)
    try:
        with pytest.raises(KeyboardInterrupt):
            end()
        signal.signal(number, signal.SIG_IGN)  # as nohup does
        end()
    except KeyboardInterrupt:
        pytest.fail("what is ignored interrupts")
    finally:
        signal.signal(number, before)


def test_an_interrupt_while_pytorch_is_imported_is_no_other_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """It is not to be imported then: half of it is there."""
    monkeypatch.setattr("fsdp_lab.engine.inline.train_rank", Mock(side_effect=KeyboardInterrupt))
    monkeypatch.setitem(sys.modules, "fsdp_lab.training.distributed", None)  # type: ignore[arg-type]
    with pytest.raises(KeyboardInterrupt):
        run_inline(TRIAL.config, tmp_path, print)


def test_a_damaged_file_of_a_trial_keeps_no_other_from_its_end(tmp_path: Path):
    states = [TrialState(replace(TRIAL, folder=tmp_path / str(number)), TrialStatus.running) for number in range(3)]
    for number, text in enumerate(("{}", "damaged", "{}")):
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / "trial.json").write_text(text)
    sweep = sweep_of(states, tmp_path)
    sweep._is_open = True
    assert sweep.close(interrupted=True) is ExitCode.interrupted
    assert [state.status for state in states] == [TrialStatus.interrupted] * 3
    (logged,) = heard(sweep).logged
    assert f"{tmp_path}/1/trial.json cannot be read" in logged
    heard(sweep).mlflow.finish.assert_called_once()


def test_the_front_is_of_finished_trials_in_several_objectives():
    """The second would beat all, and has no result; the third beats the fourth, and of equals both stay."""
    sweep = in_status("finished", "oom", "finished", "finished", "finished")
    sweep.objectives = [("a", "min"), ("b", "max")]
    points = [(1.0, 1.0), (0.0, 9.0), (2.0, 3.0), (3.0, 2.0), (2.0, 3.0)]
    for state, (a, b) in zip(sweep.trials, points, strict=True):
        state.figures = {"a": a, "b": b}
    assert sweep.front() == {0, 2, 4}


def test_workspaces_are_no_error_of_a_forecast():
    """A trial of 9 MiB, as a GPU holds it beside 64 MiB of workspaces, told apart or not; on a CPU there are none."""
    peak, reserved, workspaces = "memory/peak_bytes", "memory/reserved_bytes", "memory/workspace_bytes"
    of_a_gpu = {reserved: 80 * MIB}
    for cuda, metrics in (
        (False, {peak: 9 * MIB}),
        (True, {peak: 9 * MIB, workspaces: 32 * MIB, **of_a_gpu}),
        (True, {peak: 73 * MIB, **of_a_gpu}),
    ):
        state = TrialState(TRIAL)
        allowances = {"kernel workspaces": 64 * MIB} if cuda else {}
        state.take_forecast(Forecast(cuda, 1, {"device": {"total": 9 * MIB}}, allowances))
        assert state.figures_at(metrics)["forecast/error"] == 0, metrics


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


@pytest.fixture
def keeping(compose_trial: Compose, tmp_path: Path) -> Sweep:
    """The plan of a sweep of three shardings with two learning rates each, of which one sharding is to be kept."""
    common = ["forecast.device=h100_sxm", "forecast.keep='1'"]
    cells = [[f"sharding={name}", f"optimizer.lr={lr}"] for name in ("root", "ddp", "per_block") for lr in (1, 2)]
    return plan_of(compose_trial, tmp_path, cells, common, ["sharding"])


def run_with(forecasts: list[Forecast], plan: Sweep, monkeypatch: pytest.MonkeyPatch) -> Hears:
    """Run a sweep whose forecasts are made by hand."""
    monkeypatch.setattr("fsdp_lab.forecast.run.forecast_all", lambda *_: forecasts)
    hears = Hears(plan, Forecasts(plan))
    run_sweep(plan, Acts(), hears)
    return hears


def test_prune_starts_what_may_fit_and_says_so(compose_trial: Compose, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Of a GPU's 1024 MiB, which one trial fills except for a byte, and the other one all; with CPUs none is unsure."""
    plan = plan_of(compose_trial, tmp_path, [[], []], ["forecast.prune=true", "forecast.capacity_gib=1"])
    full = Forecast(
        True, 1, {"device": {"total": GIB}}, {"all": 1}, capacity_bytes=GIB, active_bytes=GIB, reserved_bytes=GIB
    )
    hears = run_with([replace(full, active_bytes=GIB - 1), full], plan, monkeypatch)
    assert hears.begun == [0]
    (told,) = (text for text in hears.logged if "not sure to fit" in text)
    assert told.startswith("trial 0 ") and "1024.00 MiB of 1024.00 MiB" in told


def run_with_speeds(plan: Sweep, monkeypatch: pytest.MonkeyPatch, *steps: float) -> Hears:
    """Each step is known to ±40 %, and ratios to ±5 %."""
    speeds = [
        Speed(s, {"compute": 1.0}, s / 1.4, s / 0.6, 0.4, Basis.data_sheet, "X", samples=64, relative=0.05, group="one")
        for s in steps
    ]
    forecasts = [Forecast(False, 2, {"device": {"total": 10}}, data_sheet="X", speed=speed) for speed in speeds]
    return run_with(forecasts, plan, monkeypatch)


def test_keep_starts_the_most_promising_and_says_so(keeping: Sweep, monkeypatch: pytest.MonkeyPatch):
    """The speeds are made by hand; the rule is the sweep's."""
    hears = run_with_speeds(keeping, monkeypatch, 1.0, 1.0, 1.5, 1.5, 1.7, 1.7)
    assert hears.begun == [0, 1]
    assert [state.status.name for state in keeping.trials] == ["finished"] * 2 + ["skipped"] * 4
    assert any("forecast.keep=1: 1 setting to measure" in text for text in hears.logged)
    for state in keeping.trials[2:]:
        recorded = read_trial(state.trial.folder)
        assert recorded.forecast["forecast/ratio_error"] == 0.05, "for a resume"
        assert recorded.forecast_words == {"predicted_by": "data sheet", "ratio_group": "one"}


def test_keep_chooses_once(keeping: Sweep, monkeypatch: pytest.MonkeyPatch):
    """A resume runs what is left of the choice, however slow."""
    keeping.trials[0].status, keeping.trials[1].status = TrialStatus.skipped, TrialStatus.finished
    assert run_with_speeds(keeping, monkeypatch, 1.5, 1.5, 1.7, 1.7).begun == [2, 3, 4, 5]


@pytest.mark.parametrize(("begun", "night", "kept"), [(20.0, False, [1]), (5.0, False, [0, 1]), (20.0, True, [0, 1])])
def test_keep_uses_the_trials_before_its_sweep(
    compose_trial: Compose, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, begun: float, night: bool, kept: list[int]
):
    """Steps of 1.0 and 1.3 s, known to 20 %, that took 1.45 and 1.3 s at 10 o'clock; their ratios are known to 5 %."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "cpu.yaml").write_text(f"{CPU}relative: {{median: 0.02, p90: 0.05}}\n")
    cells = [["compile=false"], ["compile=true"]]
    plan = plan_of(compose_trial, tmp_path, cells, [f"forecast.device={tmp_path}/cpu.yaml", "forecast.keep='1'"])
    plan.started = replace(plan.started, begun=begun)
    if night:
        monkeypatch.setenv(OF_A_NIGHT, "true")

    def forecasts(requests: Sequence[Request], *_: object) -> list[Forecast]:
        made = []
        for request, seconds in zip(requests, (1.0, 1.3), strict=True):
            assert request.sheet is not None
            product = operator(Kind.matmul, flops=seconds * 35e9, dtype="float32")  # of 50e9 a second 70 % are reached
            speed = replace(predict([product], request.sheet), samples=64)
            made.append(Forecast(False, 2, {"device": {"total": 10}}, data_sheet="X", speed=speed))
        return made

    for number, measured_s in enumerate((1.45, 1.3)):
        config, device = plan.config_of(number), load_device(tmp_path / "cpu.yaml")
        group, parts = ratio_group(config, workers_of(config), device), Parts((1.0, 1.3)[number], 0.0, 0.0, 0.0)
        one = Observation(group, parts, measured_s, version("torch"), digest(device), group, 10.0)
        record_observation(device.name, group, one)
    monkeypatch.setattr("fsdp_lab.forecast.run.forecast_all", forecasts)
    hears = Hears(plan, Forecasts(plan))
    run_sweep(plan, Acts(), hears)
    assert hears.begun == kept


@pytest.fixture
def three(compose_trial: Compose, tmp_path: Path) -> Sweep:
    """A sweep of three trials that Tune is to run."""
    return plan_of(compose_trial, tmp_path, [[f"training.seed={seed}"] for seed in range(3)], (), ["training.seed"])


@pytest.fixture
def freed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Path, bool]]:
    """The folder of each trial whose workers end, and whether it had an outcome by then."""
    freed: list[tuple[Path, bool]] = []
    monkeypatch.setattr(
        "fsdp_lab.engine.resources.release_placement_group",
        lambda folder: freed.append((folder, read_trial(folder).outcome is not None)),
    )
    return freed


def callback_of(sweep: Sweep) -> TuneCallback:
    return TuneCallback(Places(sweep))


def prepared(sweep: Sweep, count: int) -> None:
    for _ in range(count):
        sweep.prepare(sweep.next() or 0)


def of_tune(number: int) -> SimpleNamespace:
    """What Tune's callbacks get for a trial."""
    return SimpleNamespace(config={"number": number}, trial_id=str(number))


@pytest.mark.parametrize("name", ["asha", "median"])
def test_no_trial_is_stopped_before_its_grace_epochs(name: str):
    """Three trials, the later the worse: none is stopped after epoch 1 or 2, the last one at the latest after 3."""
    words = [f"scheduler.name={name}", "scheduler.grace_epochs=3", "training.epochs=9"]
    scheduler, trials = build_scheduler(trial_by_hand(words).config), [MagicMock(trial_id=str(n)) for n in range(3)]
    for trial in trials:
        scheduler.on_trial_add(MagicMock(), trial)
    results = [(trial, {"epoch": epoch, "val/loss": 1.0 + n}) for epoch in (1, 2, 3) for n, trial in enumerate(trials)]
    decisions = [scheduler.on_trial_result(MagicMock(), trial, result) for trial, result in results]
    assert set(decisions[:6]) == {TrialScheduler.CONTINUE} and decisions[-1] == TrialScheduler.STOP


def test_an_epoch_that_was_not_reported_comes_from_the_folder(three: Sweep):
    """The trial's own process is killed between the file and its report of the epochs 2 and 4."""
    hears, folder = heard(three), three.folder_of(0)

    def train(epoch: int, reported: bool = True) -> None:
        metrics = {"epoch": epoch, "step": 8.0 * epoch, "val/loss": 1 / epoch}
        metrics |= {"checkpoint/save_s": 0.5} if epoch == 1 else {}
        append_line(folder / "metrics.jsonl", json.dumps(metrics))
        if reported:
            three.epoch(0, metrics)

    prepared(three, 1)
    three.begin(0)
    train(1)
    train(2, reported=False)
    assert len(hears.epochs) == 1
    three.begin(0)
    assert three.trials[0].epochs_before == len(hears.epochs) == 2
    train(3)
    train(4, reported=False)
    assert len(hears.epochs) == 3, "as it is reported"
    three.end(0, Outcome(TrialStatus.finished))
    assert hears.epochs == list(read_metrics(folder)) and [e["epoch"] for e in hears.epochs] == [1, 2, 3, 4]
    assert three.trials[0].figures["checkpoint/save_s"] == 0.5, "what an epoch lacks keeps its value"


@pytest.mark.parametrize("by_itself", [False, True])
def test_a_stop_is_written_before_the_workers_of_the_trial_go(
    three: Sweep, freed: list[tuple[Path, bool]], by_itself: bool
):
    """Unless it has ended by itself. The trial's own process takes lost workers for a failure."""
    callback, folder = callback_of(three), three.folder_of(0)
    prepared(three, 1)
    callback.on_trial_start(0, [], of_tune(0))
    callback.on_trial_result(0, [], of_tune(0), {"epoch": 1, "step": 8, "done": False})
    assert freed == [] and read_trial(folder).outcome is None
    if by_itself:
        write_outcome(folder, Outcome(TrialStatus.finished))
    callback.on_trial_result(0, [], of_tune(0), {"epoch": 2, "step": 16, "done": True})
    assert freed == [(folder, True)]
    write_outcome(folder, Outcome(TrialStatus.failed, Reason.of(Code.job_failed, text="its workers are gone")))
    callback.on_trial_complete(0, [], of_tune(0))
    outcome, state = read_trial(folder).outcome, three.trials[0]
    assert outcome is not None and outcome.status == state.status == ("finished" if by_itself else "stopped")
    assert state.reason is None and [epoch["epoch"] for epoch in heard(three).epochs] == [1, 2]


def test_a_process_that_cannot_be_used_again_holds_no_places(three: Sweep, freed: list[tuple[Path, bool]]):
    """That of trial 0, which has finished, was to run trial 1; Ray keeps the places of a dead actor."""
    callback = callback_of(three)
    prepared(three, 2)
    three.begin(0)
    write_outcome(three.folder_of(0), Outcome(TrialStatus.finished))
    for number in (0, 1):
        callback.on_trial_complete(0, [], of_tune(number))
    assert freed == [(three.folder_of(0), True)]
    assert [state.status.name for state in three.trials] == ["finished", "waiting", "waiting"]


def test_only_the_victim_of_memory_kills_ends_and_the_others_resume(three: Sweep, freed: list[tuple[Path, bool]]):
    """Ray kills the processes of trials 0 and 1 together, twice, then that of 1, which has an epoch; 2 has ended."""
    places, epoch = Places(three), {"epoch": 1, "train/loss": 2.0}
    both = "Selected to kill: (Actor(f0): job ID=01, worker ID=p0)\nSelected to kill: (Actor(f1): worker ID=p1)\n"
    one = "Selected to kill: (Actor(f1): job ID=01, worker ID=p1)\n(Actor(f0): job ID=01, worker ID=p0)\n"

    def begin(*numbers: int) -> None:
        prepared(three, len(numbers))
        for number in numbers:
            three.begin(number)
            with changing(three.folder_of(number)) as trial:
                trial.process = f"p{number}"

    begin(0, 1, 2)
    append_line(three.folder_of(1) / "metrics.jsonl", json.dumps(epoch))
    write_outcome(three.folder_of(2), Outcome(TrialStatus.finished))
    places.died_for_memory(both)
    assert [state.status.name for state in three.trials] == ["waiting", "waiting", "finished"] and places.most == 1
    begin(0, 1)
    assert heard(three).epochs == [epoch], "its folder is as it was"
    places.died_for_memory(both)
    assert [state.status.name for state in three.trials] == ["waiting", "waiting", "finished"]
    begin(0, 1)
    places.died_for_memory(one)
    assert [state.status.name for state in three.trials] == ["waiting", "oom", "finished"]
    outcome = read_trial(three.folder_of(1)).outcome
    assert outcome is not None and outcome.reason == three.trials[1].reason == Reason.of(Code.host_out_of_memory)
    assert reason_text(outcome.reason) == "Ray killed its own process twice: the host is out of memory"
    begin(0)
    places.died_for_memory("a report of another form: the only trial that ran is meant")
    assert three.trials[0].status.name == "oom"


def test_a_first_memory_kill_ends_no_trial(three: Sweep, freed: list[tuple[Path, bool]]):
    prepared(three, 1)
    Places(three).died_for_memory("")
    assert three.trials[0].status.name == "waiting"


def test_fewer_trials_run_side_by_side_after_a_memory_kill(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("ray.cluster_resources", lambda: {"CPU": 8.0})
    for most, fits in (math.inf, True), (2, True), (1, False):
        places = Places(in_status())
        places.most = most
        monkeypatch.setattr(places, "needed", lambda config: {"CPU": 1.0})
        assert places.has_room(TRIAL.config), "the first always"
        places.taken["0"] = {"CPU": 1.0}
        assert places.has_room(TRIAL.config) is fits


def test_a_process_that_never_begins_its_trial_is_started_six_times(three: Sweep, freed: list[tuple[Path, bool]]):
    callback = callback_of(three)
    for _ in range(6):
        assert three.trials[0].status is TrialStatus.waiting
        prepared(three, 1)
        callback.on_trial_complete(0, [], of_tune(0))
    assert (three.trials[0].status.name, three.trials[0].reason) == ("failed", Reason.of(Code.no_outcome))
