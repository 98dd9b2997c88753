"""Reading back from the store."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from fsdp_lab.config.schema import TrackingConfig
from fsdp_lab.tracking.store import TrackingError, open_store, sqlite_file
from fsdp_lab.tracking.tags import one_line, redact

if TYPE_CHECKING:
    from mlflow import MlflowClient


def fetch_artifact(tracking: TrackingConfig, run_id: str, path: str, to: Path) -> Path:
    """Copy an artifact of a run into the folder `to`, and say where it lies.

    Raises:
        TrackingError: there is no such store, run or artifact.
    """
    client = _client_with_run(tracking, run_id)
    if path not in [item.path for item in client.list_artifacts(run_id, str(Path(path).parent))]:
        raise TrackingError(
            f"run={run_id} has no {path}: the trial did not finish, had export=false, or is the parent of a sweep; "
            "give the id of a finished trial."
        )
    to.mkdir(parents=True, exist_ok=True)
    return Path(client.download_artifacts(run_id, path, str(to)))


def folder_of_run(tracking: TrackingConfig, run_id: str) -> Path:
    """The folder that a run's sweep, or trial alone, has written into.

    Raises:
        TrackingError: there is no such store or run, or its folder is not here.
    """
    tags = _client_with_run(tracking, run_id).get_run(run_id).data.tags
    folder = Path(tags.get("fsdp_lab.folder", ""))
    if "mlflow.parentRunId" in tags:
        raise TrackingError(
            f"run={run_id} is one trial of a sweep; give its parent's id, {tags['mlflow.parentRunId']}."
        )
    if not tags.get("fsdp_lab.folder") or not folder.is_dir():
        raise TrackingError(
            f"run={run_id} was written from {folder} on {tags.get('host', 'another machine')}, and that folder is not "
            "here; resume where it is."
        )
    return folder


def _client_with_run(tracking: TrackingConfig, run_id: str) -> MlflowClient:
    uri = redact(tracking.uri)
    file = sqlite_file(tracking.uri)
    if file is not None and not file.exists():
        raise TrackingError(f"tracking.uri={uri}: there is no store there yet; run a trial first, or name its store.")
    client, _ = open_store(tracking)
    from mlflow.exceptions import MlflowException

    try:
        client.get_run(run_id)
    except MlflowException as error:
        raise TrackingError(
            f"run={run_id} is not in tracking.uri={uri} ({one_line(str(error), 200)}); copy the id from the MLflow UI "
            "or from the column run_id of a results.csv."
        ) from None
    return client
