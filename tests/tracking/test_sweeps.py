"""What MLflow gets of a sweep, whose trials train nothing."""

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
from fsdp_lab.sweep.store.resume import resumed_states
from fsdp_lab.sweep.sweep import Sweep
from fsdp_lab.sweep.trial import TrialState
from fsdp_lab.tracking import annotate_answer
from fsdp_lab.tracking.tags import FINDING_TAG, RECOMMENDED_TAG, RECORDED_TAG, SweepAnswer
from tests.folders import Store
from tests.servers import lay_store
from tests.sweep.planted import Acts, Compose, Hears

FACTS = {
    "data_num_train": 128, "device": "cpu", "world_size": 8, "num_params": 137546, "resumed_from": None,
    "notes": ["offload=cpu has no effect on a CPU.", "sharding=root makes one unit."],
}  # fmt: skip
NOTE = "mlflow.note.content"


class Trains(Acts):
    """Three trials of three epochs, each reported twice; the last one fails. 9 bytes were measured, 10 forecast."""

    def act(self, sweep: Sweep, number: int) -> None:
        folder = sweep.folder_of(number)
        sweep.prepare(number)
        sweep.forecast(number, Forecast(False, 2, {"device": {"total": 10}}))
        sweep.begin(number)
        with changing(folder) as trial:
            trial.facts = FACTS
        for epoch in range(1, 4):
            metrics = {"epoch": epoch, "step": 4 * epoch, "val/loss": 1.0 / epoch, "memory/peak_bytes": 9}
            append_line(folder / "metrics.jsonl", json.dumps(metrics))
            sweep.epoch(number, metrics)
            sweep.epoch(number, metrics)
        if number < 2:
            return sweep.end(number, Outcome(TrialStatus.finished))
        (folder / "error.txt").write_text("broken")
        sweep.end(number, Outcome(TrialStatus.failed, Reason.of(Code.job_failed, text="broken")))


class Answers(Hears):
    """Also sends what happens to MLflow, and at the end an answer: a trial is recommended."""

    def __init__(self, sweep: Sweep, recommended: int | None = None) -> None:
        super().__init__(sweep)
        self.mlflow, self.recommended = MlflowRuns(sweep), recommended

    def report(self) -> None:
        if (number := self.recommended) is not None:
            setting, figures = {"training.seed": str(number)}, self.sweep.trials[number].figures
            self.mlflow.describe(SweepAnswer(f"Recommended: {number}", "This model differs.", number, setting, figures))


@pytest.fixture
def planned(compose_trial: Compose, tmp_path: Path) -> Callable[[], Sweep]:
    """Of a sweep whose folder and store are `tmp_path`; of its resume, if trials of it have ended."""
    lay_store(tmp_path)
    words = [f"tracking.uri=sqlite:///{tmp_path}/mlflow.db"]
    trials = [compose_trial([*words, f"training.seed={seed}"], seed) for seed in range(3)]
    for trial in trials:
        write_hydra_folder(trial)
    config = trials[0].config
    start = SweepStart.of([], True, config)

    def plan() -> Sweep:
        start.write(tmp_path)
        resumed = read_trial(tmp_path / "0").outcome is not None
        states = resumed_states(trials, start, tmp_path, config) if resumed else [TrialState(trial) for trial in trials]
        return Sweep(states, config, tmp_path, ["training.seed"], start, resumed=resumed)

    return plan


def ran(plan: Sweep, recommended: int | None = None) -> tuple[Run, list[Run]]:
    """The run of a sweep, and those of its trials."""
    run_sweep(plan, Trains(), Answers(plan, recommended))
    (parent,) = Store(plan.folder).parents
    return parent, Store(plan.folder).trials


def test_a_run_has_every_epoch_and_file_and_how_its_trial_ended(planned: Callable[[], Sweep], tmp_path: Path):
    parent, children = ran(planned())
    store = Store(tmp_path)
    for number, run in enumerate(children):
        tags, params, failed = run.data.tags, run.data.params, number == 2
        assert store.history(run, "val/loss") == [(1, 1.0), (2, 1 / 2), (3, 1 / 3)]
        assert store.history(run, "forecast/peak_bytes")[0] == (0, 10)
        assert run.data.metrics["forecast/error"] == pytest.approx(1 / 9)
        assert {"config/config.yaml", "metrics.jsonl", "trial.json"} <= set(store.artifacts(run))
        assert ("error.txt" in store.artifacts(run)) is failed and RECORDED_TAG in tags
        assert tags["status"] == ("failed" if failed else "finished")
        assert (tags.get("reason"), tags.get("error")) == (("job_failed", "broken") if failed else (None, None))
        assert tags["note"] == "offload=cpu has no effect on a CPU. sharding=root makes one unit."
        assert (tags["device"], tags["world_size"], tags["num_params"]) == ("cpu", "8", "137546")
        assert "resumed_from" not in tags and params["training.seed"] == str(number)
        assert params["cluster.num_workers"] == "8", "as resolved, on a node with more GPUs than the driver's"
    assert [run.info.status for run in children] == ["FINISHED", "FINISHED", "FAILED"]
    assert parent.info.status == "FAILED" and all(run.info.end_time for run in (parent, *children))


def test_a_sweep_that_ends_again_sends_only_changed_figures(planned: Callable[[], Sweep]):
    """Its answer may be another, such as after `resume_failed`, with as many results as before."""
    ran(planned(), recommended=0)
    again, store = planned(), Store(planned().folder)
    parent, _ = ran(again, recommended=0)
    assert store.history(parent, "val/loss") == [(0, 1 / 3)]
    again = planned()
    again.trials[0].figures["val/loss"] = 0.25
    parent, _ = ran(again, recommended=0)
    assert store.history(parent, "val/loss") == [(0, 0.25), (0, 1 / 3)] and parent.data.metrics["val/loss"] == 0.25


def test_the_answer_is_data_of_the_run_until_another_replaces_it(planned: Callable[[], Sweep]):
    """After `resume_failed`, or the command with another tolerance, no setting may qualify any more."""
    parent, _ = ran(planned(), recommended=0)
    client = Store(planned().folder).client
    client.set_tag(parent.info.run_id, NOTE, parent.data.tags[NOTE] + "\nOf the new disk.")  # by hand
    plan = planned()
    parent, children = ran(plan, recommended=1)
    assert parent.data.tags["recommended.training.seed"] == "1" and parent.data.metrics["val/loss"] == 1 / 3
    assert (parent.data.tags[RECOMMENDED_TAG], parent.data.tags[FINDING_TAG]) == ("1", "This model differs.")
    assert [run.data.tags.get(RECOMMENDED_TAG) for run in children] == ["false", "true", None]
    note = parent.data.tags[NOTE]
    assert note.startswith("Recommended: 1\n\nStarted 20") and note.endswith("\nOf the new disk.")

    tracking, sweep_id = plan.config.tracking, plan.started.id
    assert annotate_answer(tracking, sweep_id, SweepAnswer("No setting qualifies."), [])
    (parent,), children = Store(plan.folder).parents, Store(plan.folder).trials
    assert {parent.data.tags[key] for key in (RECOMMENDED_TAG, FINDING_TAG, "recommended.training.seed")} == {"none"}
    assert math.isnan(parent.data.metrics["val/loss"])
    assert [run.data.tags.get(RECOMMENDED_TAG) for run in children] == ["false", "false", None]
    assert parent.data.tags[NOTE].startswith("No setting qualifies.")
    assert not annotate_answer(tracking, "another", SweepAnswer(), [])
