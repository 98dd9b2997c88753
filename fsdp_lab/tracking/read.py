"""Reading back from the store."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from fsdp_lab.config.sweep import TrackingConfig
from fsdp_lab.redact import redact, redacted_file
from fsdp_lab.tracking.store import TrackingError, open_store, refusal, search_runs, set_answer, sqlite_file
from fsdp_lab.tracking.tags import SWEEP_TAG, TRIAL_TAG, one_line, shortened

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run


def fetch_artifact(tracking: TrackingConfig, run_id: str, path: str, to: Path, absent: str = "") -> Path:
    """Copy an artifact of a run, a file or a folder, into the folder `to`, and return its path.

    Args:
        tracking: the store.
        run_id: of the run.
        path: of the artifact.
        to: the folder.
        absent: the message of a run without it.

    Raises:
        TrackingError: there is no such store, run or artifact.
    """
    client = _client_with_run(tracking, run_id)
    with _refusals(tracking):
        paths = [item.path for item in client.list_artifacts(run_id, path.rpartition("/")[0] or None)]
    if path not in paths:
        raise TrackingError(
            absent
            or f"run={run_id} has no {path}: the trial did not finish, had export=false, or is the parent of a sweep; "
            "give the id of a finished trial."
        )
    to.mkdir(parents=True, exist_ok=True)
    with _refusals(tracking):
        return Path(client.download_artifacts(run_id, path, str(to)))


def fetch_record(tracking: TrackingConfig, run_id: str, to: Path) -> Path:
    """Copy the `record.json` of a sweep's own run, or of a trial alone, into the folder `to`.

    Raises:
        TrackingError: there is no such store or run, it is one trial of a sweep, or it has no record.
    """
    tags = _client_with_run(tracking, run_id, "sweep").get_run(run_id).data.tags
    if (parent := tags.get("mlflow.parentRunId")) is not None:
        raise TrackingError(f"sweep={run_id} is one trial of a sweep; give its parent's id, {parent}.")
    return fetch_artifact(
        tracking,
        run_id,
        "record.json",
        to,
        f"sweep={run_id} has no record.json: its sweep has not ended yet, so report on its folder",
    )


def _is_set_aside(run: Run) -> bool:
    """Whether another run has taken the place of this one: see `Projection.open`."""
    return not run.data.tags.get(TRIAL_TAG, "0").isdigit()


def annotate(
    tracking: TrackingConfig,
    run_id: str,
    tags: Mapping[str, str],
    files: Sequence[Path] = (),
    answer: str = "",
    name: str = "",
) -> None:
    """Add tags and artifacts to a run that has ended.

    Args:
        tracking: the store.
        run_id: of the run.
        tags: to set.
        files: to add.
        answer: the new beginning of its description; "": unchanged.
        name: the new name; "": unchanged.

    Raises:
        TrackingError: there is no such store or run, or it refuses them.
    """
    client = _client_with_run(tracking, run_id)
    with _refusals(tracking):
        for key, value in tags.items():
            client.set_tag(run_id, key, redact(value))
        if name:
            client.update_run(run_id, name=shortened(redact(name)))
        if answer:
            set_answer(client, run_id, answer)
        for file in files:
            if file.suffix == ".html":  # a page was made by us, and may be large
                client.log_artifact(run_id, str(file))
            else:
                client.log_text(run_id, redacted_file(file), file.name)


def find_sweep_run(tracking: TrackingConfig, sweep_id: str) -> str:
    """Return the id of the run of a sweep, or of a trial alone; "" if the store has none.

    Raises:
        TrackingError: the store cannot be used.
    """
    _require_store(tracking)
    client, experiment = open_store(tracking, to_write=False)
    if not experiment:
        return ""
    with _refusals(tracking):
        runs = search_runs(client, experiment, f"tags.`{SWEEP_TAG}` = '{sweep_id}'")
    runs = [run for run in runs if not _is_set_aside(run) and "mlflow.parentRunId" not in run.data.tags]
    return str(runs[0].info.run_id) if runs else ""


def folder_of_run(tracking: TrackingConfig, run_id: str) -> Path:
    """Return the folder of the sweep, or of the trial alone, that a run belongs to.

    Raises:
        TrackingError: there is no such store or run, or its folder is not on this machine.
    """
    tags = _client_with_run(tracking, run_id).get_run(run_id).data.tags
    folder = Path(tags.get("fsdp_lab.folder", ""))
    if "mlflow.parentRunId" in tags:
        raise TrackingError(
            f"run={run_id} is one trial of a sweep; give its parent's id, {tags['mlflow.parentRunId']}."
        )
    if not tags.get("fsdp_lab.folder") or not folder.is_dir():
        raise TrackingError(
            f"run={run_id} belongs to {folder} on {tags.get('host', 'another machine')}, and that folder is not here; "
            "resume it there."
        )
    return folder


def folder_here(tracking: TrackingConfig, run_id: str) -> Path | None:
    """Return the folder of the sweep of a run, if it is on this machine; None for any other run.

    Raises:
        TrackingError: there is no such store or run.
    """
    tags = _client_with_run(tracking, run_id, "sweep").get_run(run_id).data.tags
    folder = Path(tags.get("fsdp_lab.folder", ""))
    is_here = "mlflow.parentRunId" not in tags and (folder / "sweep.json").is_file()
    return folder if is_here and folder.is_absolute() else None


@contextmanager
def _refusals(tracking: TrackingConfig) -> Iterator[None]:
    """Translate errors of the store into TrackingErrors."""
    try:
        yield
    except TrackingError:
        raise
    except Exception as error:  # noqa: BLE001 (whatever MLflow or a driver of its database raises)
        raise refusal(tracking.uri, error) from None


def _require_store(tracking: TrackingConfig) -> None:
    file = sqlite_file(tracking.uri)
    if file is not None and not file.exists():
        uri = redact(tracking.uri)
        raise TrackingError(
            f"tracking.uri={uri}: this store does not exist yet; run a trial first, or name another store."
        )


def _client_with_run(tracking: TrackingConfig, run_id: str, key: str = "run") -> MlflowClient:
    uri = redact(tracking.uri)
    _require_store(tracking)
    client, _ = open_store(tracking, to_write=False)
    from mlflow.exceptions import MlflowException

    try:
        client.get_run(run_id)
    except MlflowException as error:
        raise TrackingError(
            f"{key}={run_id} is not in tracking.uri={uri} ({one_line(str(error), 200)}); copy it from the MLflow UI, "
            "a sweep's from its last line or report.md, a trial's from the column run_id of results.csv."
        ) from None
    return client
