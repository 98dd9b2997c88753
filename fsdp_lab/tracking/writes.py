"""Single writes to MLflow, and what the store has of a run."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from fsdp_lab.config.metrics import TRAIN_LOSS, VAL_LOSS, mib_figures
from fsdp_lab.config.status import TrialStatus
from fsdp_lab.tracking.tags import answer_tags, stored_name

if TYPE_CHECKING:
    from mlflow import MlflowClient

# How a trial ended -> what MLflow calls it. Out of memory is a result for us and a failure there.
RUN_STATUS = {
    TrialStatus.finished: "FINISHED",
    TrialStatus.failed: "FAILED",
    TrialStatus.oom: "FAILED",
    TrialStatus.diverged: "FAILED",
    TrialStatus.interrupted: "KILLED",
    TrialStatus.stopped: "KILLED",
    TrialStatus.skipped: "KILLED",
}
# MLflow's page that compares runs opens on the metric that was written first.
_FIRST = (VAL_LOSS, TRAIN_LOSS, "forecast/peak_mib")


def steps_of(client: MlflowClient, run_id: str) -> set[int]:
    """Return the steps of the metrics that a run has; 0 is the forecast."""
    steps = {point.step for point in client.get_metric_history(run_id, "train/step")}
    return steps | {0} if "forecast/peak_bytes" in client.get_run(run_id).data.metrics else steps


def log_params(client: MlflowClient, run_id: str, params: Mapping[str, str]) -> None:
    """Log parameters, as `trial_params` returns them."""
    from mlflow.entities import Param

    client.log_batch(run_id, params=[Param(key, value) for key, value in params.items()])


def set_tags(client: MlflowClient, run_id: str, tags: Mapping[str, str]) -> None:
    from mlflow.entities import RunTag

    client.log_batch(run_id, tags=[RunTag(stored_name(key), value) for key, value in tags.items()])


def set_answer(client: MlflowClient, run_id: str, answer: str) -> None:
    """Replace the start of a run's description by its sweep's answer."""
    set_tags(client, run_id, answer_tags(client.get_run(run_id).data.tags, answer))


def reopen(client: MlflowClient, run_id: str, tags: Sequence[str]) -> None:
    """Continue a run that has ended, without the tags about its end."""
    client.update_run(run_id, "RUNNING")
    for tag in tags:
        client.delete_tag(run_id, tag)


def log_epoch(client: MlflowClient, run_id: str, metrics: Mapping[str, float], step: int) -> None:
    """Log the metrics of an epoch in one write. Some bytes are also logged in MiB, and `step` as `train/step`."""
    from mlflow.entities import Metric

    names = {"train/step" if k == "step" else k: float(v) for k, v in metrics.items() if k != "epoch"}
    names |= mib_figures(names)  # in the same batch, so that an epoch has both or neither
    now = int(time.time() * 1000)
    ordered = sorted(names, key=lambda key: key not in _FIRST)
    client.log_batch(run_id, metrics=[Metric(stored_name(key), names[key], now, step) for key in ordered])
