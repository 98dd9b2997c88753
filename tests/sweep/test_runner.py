"""Which trials a sweep starts by their forecasts. The executor trains nothing; real ones are in test_forecasts.py."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from fsdp_lab.config.status import ExitCode, TrialStatus
from fsdp_lab.forecast.capacity import Forecast
from fsdp_lab.forecast.speed.device import Basis
from fsdp_lab.forecast.speed.predict import Speed
from fsdp_lab.record.trial_files import read_metrics
from fsdp_lab.record.trial_json import Outcome, read_trial
from fsdp_lab.storage.files import append_line
from fsdp_lab.sweep.forecasts import Forecasts
from fsdp_lab.sweep.outputs.console import Console
from fsdp_lab.sweep.runner import run_sweep
from fsdp_lab.sweep.search import OptunaSearch
from fsdp_lab.sweep.start import reach
from fsdp_lab.sweep.sweep import Sweep
from tests.sweep.planted import CPU, Acts, Compose, Hears, heard, plan_of

pytestmark = pytest.mark.usefixtures("no_gpus")


def plan_of_theirs(compose_trial: Compose, folder: Path, model: str, losses: Sequence[str]) -> Sweep:
    """A trial for each loss."""
    project = "tests.workloads.user.my_project.net"
    words = ["task=custom", "model=custom", "data=example", f"+model._target_={project}.{model}", "+model.width=8"]
    return plan_of(compose_trial, folder, [[f"task.loss={project}.{loss}"] for loss in losses], words, ["task.loss"])


@pytest.mark.ci
def test_why_trials_have_no_forecast_is_logged_once(compose_trial: Compose, tmp_path: Path):
    """Their model reads a value, as training may."""
    plan = plan_of_theirs(compose_trial, tmp_path, "Asks", ["loss"] * 3)
    hears = run(plan)
    assert len([text for text in hears.logged if text.startswith("no forecast: ")]) == 1


@pytest.mark.ci
def test_the_traceback_of_an_error_that_forecasts_find_is_kept(
    compose_trial: Compose, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    plan = plan_of_theirs(compose_trial, tmp_path, "Refuses", ["loss"] * 2)
    hears = Hears(plan, Forecasts(plan))
    hears.console = Console(plan)
    hears.log = hears.console.log  # type: ignore[method-assign]
    assert run_sweep(plan, Acts(), hears) is ExitCode.failed
    first, second = (state.trial.folder / "error.txt" for state in plan.trials)
    assert 'raise ValueError("these are too many")' in first.read_text()
    lines = [line for line in capsys.readouterr().out.splitlines() if " failed" in line and "too many" in line]
    assert len(lines) == 1 and lines[0].endswith("/0/error.txt]"), lines
    assert not second.exists()


@pytest.mark.ci
def test_trials_whose_model_cannot_be_trained_do_not_begin(compose_trial: Compose, tmp_path: Path):
    plan = plan_of_theirs(compose_trial, tmp_path, "Net", ["of_each_item", "loss", "of_each_item"])
    assert run(plan).begun == [1]


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
    peaks, gib = {"device": {"total": 2**30}}, 2**30
    full = Forecast(True, 1, peaks, {"all": 1}, capacity_bytes=gib, active_bytes=gib, reserved_bytes=gib)
    hears = begun_by(plan, [replace(full, active_bytes=gib - 1), full], monkeypatch)
    assert hears.begun == [0]
    (observed,) = (text for text in hears.logged if "tight" in text)
    assert "trial 0" in observed and "1024.00 MiB of 1024.00 MiB" in observed


def of_speed(step_s: float, peak: int = 10, workers: int = 2, group: str = "one") -> Forecast:
    """By hand, for a CPU: it is known to ±40 %, and ratios to ±5 %."""
    speed = Speed(
        step_s, {"compute": 1.0}, step_s / 1.4, step_s / 0.6, 0.4, Basis.data_sheet, "X", samples=64, relative=0.05,
        group=group,
    )  # fmt: skip
    return Forecast(False, workers, {"device": {"total": peak}}, data_sheet="X", speed=speed)


def of_speeds(*steps: float) -> list[Forecast]:
    return [of_speed(step_s) for step_s in steps]


@pytest.fixture
def keeping(compose_trial: Compose, tmp_path: Path) -> Callable[..., Sweep]:
    """The plan of a sweep: of three shardings with two learning rates each, or of other cells."""
    (tmp_path / "cpu.yaml").write_text(CPU)
    six = [[f"sharding={name}", f"optimizer.lr={lr}"] for name in ("root", "ddp", "per_block") for lr in (1, 2)]

    def plan(keep: str, *words: str, cells: Sequence[Sequence[str]] = six) -> Sweep:
        common = [f"forecast.device={tmp_path}/cpu.yaml", f"forecast.keep='{keep}'", "model=mlp", *words]
        return plan_of(compose_trial, tmp_path, cells, common, ["sharding"])

    return plan


@pytest.mark.parametrize(("keep", "begun"), [("2", [0, 1, 2, 3]), ("3", [0, 1, 2, 3, 4, 5])])
def test_keep_starts_the_most_promising_and_says_so(
    keeping: Callable[..., Sweep], monkeypatch: pytest.MonkeyPatch, keep: str, begun: list[int]
):
    """The speeds are made by hand; the rule is the sweep's."""
    plan = keeping(keep)
    hears = begun_by(plan, of_speeds(1.0, 1.0, 1.5, 1.5, 1.7, 1.7), monkeypatch)
    assert hears.begun == begun
    assert any(f"forecast.keep={keep}: {keep} settings to measure" in text for text in hears.logged)
    for number in {*range(6)} - {*begun}:
        recorded = read_trial(plan.trials[number].trial.folder)
        figures, words = recorded.forecast, recorded.forecast_words
        assert figures["forecast/ratio_error"] == 0.05, "for a resume"
        assert words == {"predicted_by": "data sheet", "ratio_group": "one"}


def test_keep_chooses_for_each_number_of_workers(keeping: Callable[..., Sweep], monkeypatch: pytest.MonkeyPatch):
    """Of each number root is the fastest, and memory is not scarce; all of 4 workers are faster."""
    cells = [[f"sharding={name}", f"cluster.num_workers={n}"] for n in (2, 4) for name in ("root", "per_block", "ddp")]
    forecasts = [
        of_speed(share * step_s, peak, workers, group=str(workers))
        for workers, share in ((2, 1.0), (4, 0.1)) for step_s, peak in ((1.0, 30), (1.2, 10), (3.0, 30))
    ]  # fmt: skip
    assert begun_by(keeping("1", cells=cells), forecasts, monkeypatch).begun == [0, 3]


@pytest.mark.parametrize("ended", [TrialStatus.finished, TrialStatus.skipped])
def test_keep_chooses_once(keeping: Callable[..., Sweep], monkeypatch: pytest.MonkeyPatch, ended: TrialStatus):
    """A resume runs what is left of the choice; only a kill while it skipped leaves more to choose from."""
    plan = keeping("20%")
    plan.trials[0].status, plan.trials[1].status = TrialStatus.skipped, ended
    monkeypatch.setattr("fsdp_lab.forecast.run.forecast_all", lambda *_: of_speeds(1.5, 1.5, 1.7, 1.7))
    run(plan)
    skipped = [state.status for state in plan.trials].count(TrialStatus.skipped)
    assert skipped == 1 if ended is TrialStatus.finished else skipped > 2


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


def test_epochs_come_as_they_are_reported_and_from_the_folder_once_at_a_start_and_at_the_end(
    compose_trial: Compose, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The trial's own process is killed between the file and its report of the epochs 2 and 5."""
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
def test_a_trial_that_its_scheduler_stops_at_its_last_step_has_finished(
    epoch: int, step: int, status: str, compose_trial: Compose, tmp_path: Path
):
    words = ["training.epochs=10", "training.max_steps=20", "export=false"]
    sweep = plan_of(compose_trial, tmp_path, [words])
    sweep.prepare(0)
    sweep.write_stop(0, {"epoch": epoch, "step": step})
    outcome = read_trial(sweep.folder_of(0)).outcome
    assert outcome is not None and outcome.status == status
