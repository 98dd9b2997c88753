"""What MLflow gets of a sweep. The trials train nothing."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
from mlflow.entities import Run

from fsdp_lab.config.status import TrialStatus
from fsdp_lab.forecast.capacity import Forecast
from fsdp_lab.record.hydra_folder import write_hydra_folder
from fsdp_lab.record.reasons import Code, Reason
from fsdp_lab.record.sweep_json import SweepStart
from fsdp_lab.record.trial_json import Outcome, changing, read_trial
from fsdp_lab.storage.files import append_line
from fsdp_lab.sweep.outputs.mlflow import MlflowRuns
from fsdp_lab.sweep.runner import run_sweep
from fsdp_lab.sweep.state import TrialState
from fsdp_lab.sweep.store.resume import resumed_states
from fsdp_lab.sweep.sweep import Sweep
from fsdp_lab.tracking import annotate_answer
from fsdp_lab.tracking.tags import FINDING_TAG, RECOMMENDED_TAG, RECORDED_TAG, SweepAnswer
from tests.folders import Store
from tests.servers import lay_store
from tests.sweep.conftest import runs
from tests.sweep.planted import Acts, Compose, Hears

FACTS = {
    "data": "digits", "data_digest": "0123456789abcdef", "data_num_train": 128, "device": "cpu", "world_size": 8,
    "num_params": 137546, "resumed_from": None,
    "notes": ["offload=cpu has no effect on a CPU.", "sharding=root makes one unit."],
}  # fmt: skip
FORECAST = Forecast(False, 2, {"device": {"total": 10}})
LAST = 3
REASON = Reason.of(Code.job_failed, text="broken")


class Trains(Acts):
    """Three trials of three epochs; the last one fails, and the second epoch alone measures `checkpoint/save_s`."""

    def act(self, sweep: Sweep, number: int) -> None:
        folder = sweep.folder_of(number)
        sweep.prepare(number)
        sweep.forecast(number, FORECAST)
        sweep.begin(number)
        with changing(folder) as trial:
            trial.facts = FACTS
        for epoch in range(1, LAST + 1):
            metrics = {"epoch": epoch, "step": 4 * epoch, "val/loss": 1.0 / epoch, "memory/peak_bytes": 9}
            metrics |= {"checkpoint/save_s": 0.5} if epoch == 2 else {}
            append_line(folder / "metrics.jsonl", json.dumps(metrics))
            sweep.epoch(number, metrics)
            sweep.epoch(number, metrics)  # a second report of the same epoch
        failed = number == 2
        if failed:
            (folder / "error.txt").write_text("broken")
        sweep.end(number, Outcome(TrialStatus.failed, REASON) if failed else Outcome(TrialStatus.finished))


@pytest.fixture
def planned(compose_trial: Compose, tmp_path: Path) -> Callable[[], Sweep]:
    """Of a sweep whose folder and store are `tmp_path`; of its resume, if trials of it have ended."""
    lay_store(tmp_path)
    records: list[SweepStart] = []

    def plan() -> Sweep:
        words = [f"tracking.uri=sqlite:///{tmp_path}/mlflow.db"]
        trials = [compose_trial([*words, f"training.seed={seed}"], seed) for seed in range(3)]
        for trial in trials:
            write_hydra_folder(trial)
        config = trials[0].config
        resumed = read_trial(tmp_path / "0").outcome is not None
        records.append(records[0] if records else SweepStart.of([], True, config))
        records[0].write(tmp_path)
        states = [TrialState(trial) for trial in trials]
        if resumed:
            states = resumed_states(trials, records[0], tmp_path, config)
        return Sweep(states, config, tmp_path, ["training.seed"], records[0], resumed=resumed)

    return plan


class ToMlflow(Hears):
    """Also sends what happens to MLflow."""

    def __init__(self, sweep: Sweep) -> None:
        super().__init__(sweep)
        self.mlflow = MlflowRuns(sweep)


def ran(plan: Sweep, executor: Acts | None = None) -> tuple[Run, list[Run]]:
    """The run of a sweep, and those of its trials."""
    run_sweep(plan, executor or Trains(), ToMlflow(plan))
    (parent,), children = runs(plan.folder)
    return parent, [Store(plan.folder).client.get_run(run.info.run_id) for run in children]


def steps(folder: Path, run: Run, key: str) -> list[int]:
    return [step for step, _ in Store(folder).history(run, key)]


def test_a_run_has_every_epoch_and_the_files_of_its_trial(planned: Callable[[], Sweep], tmp_path: Path):
    _, children = ran(planned())
    for run in children:
        assert steps(tmp_path, run, "val/loss") == [1, 2, 3] and steps(tmp_path, run, "forecast/peak_bytes")[0] == 0
        assert {"config/config.yaml", "config/overrides.yaml", "metrics.jsonl"} <= set(Store(tmp_path).artifacts(run))
        assert RECORDED_TAG in run.data.tags
    of_failed = set(Store(tmp_path).artifacts(children[2]))
    assert {"error.txt", "trial.json"} <= of_failed


def test_a_run_says_how_its_trial_ended(planned: Callable[[], Sweep]):
    parent, children = ran(planned())
    for number, run in enumerate(children):
        tags = run.data.tags
        assert tags["status"] == ("failed" if number == 2 else "finished")
        assert (tags.get("reason"), tags.get("error")) == (("job_failed", "broken") if number == 2 else (None, None))
        assert tags["note"] == "offload=cpu has no effect on a CPU. sharding=root makes one unit."
        assert (tags["device"], tags["world_size"], tags["num_params"]) == ("cpu", "8", "137546")
        assert tags["data_digest"] == "0123456789abcdef" and "resumed_from" not in tags
        assert (run.data.params["training.seed"], run.data.params["sharding"]) == (str(number), "per_block")
        assert run.data.params["cluster.num_workers"] == "8", "as resolved, on a node with more GPUs than the driver's"
        assert run.data.metrics["forecast/error"] == 10 / 9 - 1
    assert [run.info.status for run in children] == ["FINISHED", "FINISHED", "FAILED"]
    assert parent.info.status == "FAILED" and all(run.info.end_time for run in (parent, *children))


def test_a_run_that_the_store_lacks_is_sent_by_a_resume(planned: Callable[[], Sweep], tmp_path: Path):
    _, children = ran(planned())
    Store(tmp_path).client.delete_run(children[0].info.run_id)
    Store(tmp_path).client.delete_tag(children[1].info.run_id, RECORDED_TAG)
    _, children = ran(planned())
    for run in children:
        assert steps(tmp_path, run, "val/loss") == [1, 2, 3] and RECORDED_TAG in run.data.tags
        assert steps(tmp_path, run, "forecast/peak_bytes")[0] == 0 and run.data.tags["device"] == "cpu"


def test_a_trial_that_has_not_trained_has_no_number_of_workers(planned: Callable[[], Sweep]):
    """MLflow changes no parameter: one that was sent before the workers have started could be another."""

    class Skips(Acts):
        def act(self, sweep: Sweep, number: int) -> None:
            sweep.skip(number, REASON)

    _, children = ran(planned(), Skips())
    assert len(children) == 3 and all("cluster.num_workers" not in run.data.params for run in children)


@pytest.mark.parametrize("changed", [False, True])
def test_a_sweep_that_ends_again_sends_only_figures_that_have_changed(planned: Callable[[], Sweep], changed: bool):
    """Its answer may be another, such as after `resume_failed`, with as many results as before."""

    def end() -> Run:
        plan = planned()

        class Recommends(ToMlflow):
            def report(self) -> None:
                if plan.resumed and changed:
                    plan.trials[0].figures["val/loss"] = 0.25
                self.mlflow.describe(answer_of(plan, 0))

        run_sweep(plan, Trains(), Recommends(plan))
        return runs(plan.folder)[0][0]

    end()
    parent, folder = end(), planned().folder
    assert Store(folder).history(parent, "val/loss") == [*([(0, 0.25)] if changed else []), (0, 1 / LAST)]
    assert parent.data.metrics["val/loss"] == (0.25 if changed else 1 / LAST)


def answer_of(sweep: Sweep, number: int) -> SweepAnswer:
    setting = {"training.seed": str(number)}
    figures = sweep.trials[number].figures
    sentence, finding = f"Recommended: `training.seed={number}`", "This model differs."
    return SweepAnswer(sentence, finding, trial=number, setting=setting, figures=figures)


def test_the_answer_is_data_of_the_sweeps_run_until_another_one_replaces_it(planned: Callable[[], Sweep]):
    """After `resume_failed`, or the command with another tolerance, no setting may qualify any more."""
    plan = planned()
    outputs = ToMlflow(plan)
    runs_of = outputs.mlflow

    class Recommends(Trains):
        def run(self, sweep: Sweep) -> None:
            super().run(sweep)
            runs_of.describe(answer_of(sweep, 0))
            assert runs_of.projection.settle(60) == 0
            runs_of.describe(answer_of(sweep, 1))

    run_sweep(plan, Recommends(), outputs)
    (parent,), children = runs(plan.folder)
    assert parent.data.tags["recommended.training.seed"] == "1" and parent.data.metrics["val/loss"] == 1 / LAST
    assert (parent.data.tags[RECOMMENDED_TAG], parent.data.tags[FINDING_TAG]) == ("1", "This model differs.")
    assert [run.data.tags.get(RECOMMENDED_TAG) for run in children] == ["false", "true", None]
    assert parent.data.tags["mlflow.note.content"].startswith("Recommended: `training.seed=1`")

    tracking, sweep_id = plan.config.tracking, plan.started.id
    assert annotate_answer(tracking, sweep_id, SweepAnswer("No setting qualifies."), [])
    (parent,), children = runs(plan.folder)
    assert {parent.data.tags[key] for key in (RECOMMENDED_TAG, FINDING_TAG, "recommended.training.seed")} == {"none"}
    assert math.isnan(parent.data.metrics["val/loss"])
    assert [run.data.tags.get(RECOMMENDED_TAG) for run in children] == ["false", "false", None]
    assert parent.data.tags["mlflow.note.content"].startswith("No setting qualifies.")
    assert not annotate_answer(tracking, "another", SweepAnswer(), [])
