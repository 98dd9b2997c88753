"""Reading back from the store."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fsdp_lab.config.sweep import TrackingConfig
from fsdp_lab.tracking.store import TrackingError, check_place, open_store, refusals, runs_of, sqlite_path
from fsdp_lab.tracking.tags import TRIAL_TAG, SweepAnswer, one_line, shortened
from fsdp_lab.tracking.writes import log_epoch, set_answer, set_tags

if TYPE_CHECKING:
    from mlflow import MlflowClient

_PARENT = "mlflow.parentRunId"


def annotate(
    tracking: TrackingConfig,
    run_id: str,
    tags: Mapping[str, str],
    files: Sequence[Path] = (),
    name: str = "",
) -> None:
    """Add tags and artifacts to a run that has ended.

    Args:
        name: the new name; "": unchanged.

    Raises:
        TrackingError: there is no such store or run, or it refuses them.
    """
    client = _open_run(tracking, run_id)
    with refusals(tracking):
        set_tags(client, run_id, tags)
        if name:
            client.update_run(run_id, name=shortened(name))
        for file in files:
            client.log_artifact(run_id, str(file))


def annotate_answer(tracking: TrackingConfig, sweep_id: str, answer: SweepAnswer, files: Sequence[Path]) -> bool:
    """Replace the answer of a sweep in the runs of the sweep and its trials; return False if there is no run of it.

    Raises:
        TrackingError: the store cannot be used, or refuses something.
    """
    client, experiment = _open(tracking)
    with refusals(tracking):
        runs = runs_of(client, experiment, sweep_id) if experiment else []
        for run in runs:
            run_id, tags, number = run.info.run_id, run.data.tags, run.data.tags.get(TRIAL_TAG)
            if number is not None and _PARENT in tags:
                set_tags(client, run_id, answer.tags_of_trial(int(number), tags))
                continue
            if number is None:  # not a single trial
                set_tags(client, run_id, answer.tags(tags))
                log_epoch(client, run_id, answer.metrics(run.data.metrics), 0)
            set_answer(client, run_id, answer.sentence)
            for file in files:
                client.log_artifact(run_id, str(file))
    return bool(runs)


def find_sweep_run(tracking: TrackingConfig, sweep_id: str) -> str:
    """Return the id of the run of a sweep, or of a single trial; "" if the store has none.

    Raises:
        TrackingError: the store cannot be used.
    """
    client, experiment = _open(tracking)
    with refusals(tracking):
        runs = runs_of(client, experiment, sweep_id) if experiment else []
    return next((str(run.info.run_id) for run in runs if _PARENT not in run.data.tags), "")


def _open(tracking: TrackingConfig) -> tuple[MlflowClient, str]:
    """Open a store that exists; see `open_store`."""
    if tracking.uri.startswith("sqlite") and not sqlite_path(tracking.uri).exists():
        raise TrackingError(
            f"tracking.uri={tracking.uri}: this store does not exist yet; run a trial first, or name another store."
        )
    return open_store(tracking)


def _open_run(tracking: TrackingConfig, run_id: str) -> MlflowClient:
    client, _ = _open(tracking)
    from mlflow.exceptions import MlflowException

    try:
        run = client.get_run(run_id)
    except MlflowException as error:
        raise TrackingError(
            f"run={run_id} is not in tracking.uri={tracking.uri} ({one_line(str(error), 200)}); copy it from the "
            "MLflow UI, or from the column run_id of results.csv."
        ) from None
    check_place(tracking, run.info.artifact_uri)
    return client
