"""The one writer of MLflow: a sweep's driver tells a `Tracker`, and nothing else opens the store."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from fsdp_lab.config.schema import TrackingConfig, TrialConfig
from fsdp_lab.tracking.store import open_store
from fsdp_lab.tracking.tags import fact_tags, one_line, redact, sweep_tags, trial_params, trial_tags

if TYPE_CHECKING:
    from mlflow import MlflowClient

T = TypeVar("T")

# How a trial ended -> what MLflow calls it. Out of memory is a result for us and a failure there.
_RUN_STATUS = {
    "finished": "FINISHED",
    "failed": "FAILED",
    "oom": "FAILED",
    "diverged": "FAILED",
    "interrupted": "KILLED",
    "stopped": "KILLED",
    "skipped": "KILLED",
}
_RETRY_AFTER_S = 30.0
_PARAMS_PER_BATCH = 100  # MLflow's limit
_ERROR_LENGTH = 500
_TEXTS = (".yaml", ".csv", ".txt", ".jsonl")


def _to_stderr(message: str) -> None:
    print(f"warning: {message}", file=sys.stderr)


class Tracker:
    """Writes a sweep and its trials into MLflow.

    Only `open` raises. After it the sweep is worth more than its record: a write that fails is told to
    `on_problem`, once for each kind of problem, and skipped. While the store does not answer, a write is
    tried at most every 30 s and the others are left out; what was left out is missing in MLflow for good,
    and stands in the trial's own folder. A run that could not be started has the id "", and every write to
    it does nothing. Belongs to one thread: the driver's.
    """

    def __init__(self, tracking: TrackingConfig, on_problem: Callable[[str], None] = _to_stderr) -> None:
        self._tracking = tracking
        self._on_problem = on_problem
        self._client: MlflowClient | None = None
        self._experiment_id = ""
        self._silent_until = 0.0  # time.monotonic(): no attempt before it
        self._told: set[str] = set()
        self._epochs: set[tuple[str, int]] = set()
        self._finished: set[str] = set()

    def open(self) -> None:
        """Make the store's schema and the experiment, once, before any trial.

        Raises:
            TrackingError: the store is not there (told within about 10 s), cannot be written, or is of
                another version of MLflow.
        """
        self._client, self._experiment_id = open_store(self._tracking)

    def start_sweep(self, name: str, folder: Path, command: str, num_trials: int) -> str:
        """Start the parent run of a sweep and return its id.

        Args:
            folder: the sweep's own, kept as the tag `fsdp_lab.folder`.
            command: as it was typed; credentials in it are not shown.
        """
        return self._create_run(name, lambda: sweep_tags(folder, command, num_trials))

    def start_trial(
        self,
        name: str,
        config: TrialConfig,
        choices: Mapping[str, str],
        overrides: Sequence[str],
        folder: Path,
        parent: str | None,
    ) -> str:
        """Start the run of a trial, with its parameters, and return its id.

        Args:
            choices: group -> option, as Hydra chose them; they become the first parameters.
            overrides: what was typed for this trial.
            folder: the trial's own; what is in its `.hydra` is kept under `config/`, without credentials.
            parent: the id of the sweep's run, None for a trial alone.
        """
        run_id = self._create_run(name, lambda: trial_tags(folder, overrides, parent))
        self._write("parameters", run_id, lambda client: _log_params(client, run_id, config, choices))
        self._write("the config's files", run_id, lambda client: _log_config_files(client, run_id, folder))
        return run_id

    def log_facts(self, run_id: str, facts: Mapping[str, Any]) -> None:
        """What a trial told before its first step, as tags and as the data set with its digest.

        Args:
            facts: as `training.train` reports them, with `data`, the name of the data set.
        """

        def write(client: MlflowClient) -> None:
            from mlflow.entities import RunTag

            client.log_batch(run_id, tags=[RunTag(k, v) for k, v in fact_tags(facts).items()])
            if facts.get("data_digest"):
                _log_dataset(client, run_id, facts)

        self._write("facts", run_id, write)

    def log_epoch(self, run_id: str, metrics: Mapping[str, float]) -> None:
        """The metrics of a finished epoch, at step `metrics["epoch"]`; `step` is kept as `train/step`.

        A trial that was resumed tells its old epochs again: an epoch that is in MLflow already is left
        alone, one that was lost with the store away is filled in.
        """
        epoch = int(metrics["epoch"])
        if (run_id, epoch) in self._epochs:
            return
        names = {"train/step" if k == "step" else k: float(v) for k, v in metrics.items() if k != "epoch"}

        def write(client: MlflowClient) -> None:
            from mlflow.entities import Metric

            now = int(time.time() * 1000)
            client.log_batch(run_id, metrics=[Metric(k, v, now, epoch) for k, v in names.items()])
            self._epochs.add((run_id, epoch))

        self._write("metrics", run_id, write)

    def log_artifact(self, run_id: str, path: Path, folder: str = "") -> None:
        """Copy a file, or a folder with all in it, into the run's artifacts, below `folder`."""
        if not path.exists():
            self._tell("missing", f"{path} is not there, so MLflow has no copy of it.")
            return
        if path.suffix in _TEXTS:  # a config or a command in it may name a server with its password
            inside = "/".join(part for part in (folder, path.name) if part)
            self._write("files", run_id, lambda client: client.log_text(run_id, redact(path.read_text()), inside))
            return
        log = "log_artifacts" if path.is_dir() else "log_artifact"
        inside = "/".join(part for part in (folder, path.name if path.is_dir() else "") if part)
        self._write("files", run_id, lambda client: getattr(client, log)(run_id, str(path), inside or None))

    def finish(self, run_id: str, status: str, error: str | None = None, artifacts: Sequence[Path] = ()) -> None:
        """End a run; the first ending that reached the store stands, later calls do nothing.

        Args:
            status: finished, failed, oom, diverged, interrupted, stopped or skipped; kept as a tag.
            error: why it failed, kept as the tag `error`: one line of at most 500 characters.
            artifacts: files and folders to copy first.
        """
        assert status in _RUN_STATUS, f"{status} is none of {', '.join(_RUN_STATUS)}"
        if run_id in self._finished:
            return
        for path in artifacts:
            self.log_artifact(run_id, path)

        def write(client: MlflowClient) -> None:
            client.set_tag(run_id, "status", status)
            if error:
                client.set_tag(run_id, "error", one_line(error, _ERROR_LENGTH))
            client.set_terminated(run_id, _RUN_STATUS[status])
            self._finished.add(run_id)

        self._write("the end of a run", run_id, write)

    def _create_run(self, name: str, tags: Callable[[], dict[str, str]]) -> str:
        def write(client: MlflowClient) -> str:
            run = client.create_run(self._experiment_id, run_name=name, tags=tags())
            return str(run.info.run_id)

        return self._guard("a run", write) or ""

    def _write(self, what: str, run_id: str, write: Callable[[MlflowClient], None]) -> None:
        if run_id:
            self._guard(what, write)

    def _guard(self, what: str, write: Callable[[MlflowClient], T]) -> T | None:
        """Do a write, or tell why not. A store that is away is left alone for a while, a refusal is not."""
        assert self._client is not None, "open() comes before every write"
        if time.monotonic() < self._silent_until:
            return None
        try:
            return write(self._client)
        except Exception as error:  # noqa: BLE001 (no failure of the record may end the sweep)
            uri = redact(self._tracking.uri)
            # Of urllib3's chain of wrappers, only what stands last says something.
            reason = one_line(str(error).rpartition("Caused by ")[2], 300) or type(error).__name__
            if _is_away(error):
                self._silent_until = time.monotonic() + _RETRY_AFTER_S
                self._tell(
                    "away",
                    f"tracking.uri={uri}: the MLflow store does not answer any more ({reason}). The trials "
                    "go on and keep their results in their folders; what they report before it answers again "
                    "will be missing in MLflow.",
                )
            else:
                self._tell(what, f"tracking.uri={uri}: MLflow did not take {what} ({reason}).")
            return None

    def _tell(self, kind: str, message: str) -> None:
        if kind not in self._told:
            self._told.add(kind)
            self._on_problem(message)


def _is_away(error: Exception) -> bool:
    """Whether the store, or its disk or network, failed; otherwise it answered and refused this one write."""
    from mlflow.exceptions import MlflowException

    if isinstance(error, MlflowException):
        return error.get_http_status_code() >= 500
    return isinstance(error, OSError)


def _log_params(client: MlflowClient, run_id: str, config: TrialConfig, choices: Mapping[str, str]) -> None:
    from mlflow.entities import Param

    params = [Param(key, value) for key, value in trial_params(config, choices).items()]
    for start in range(0, len(params), _PARAMS_PER_BATCH):
        client.log_batch(run_id, params=params[start : start + _PARAMS_PER_BATCH])


def _log_config_files(client: MlflowClient, run_id: str, folder: Path) -> None:
    for name in ("config.yaml", "overrides.yaml"):
        path = folder / ".hydra" / name
        if path.is_file():
            client.log_text(run_id, redact(path.read_text(encoding="utf-8")), f"config/{name}")


def _log_dataset(client: MlflowClient, run_id: str, facts: Mapping[str, Any]) -> None:
    from mlflow.entities import Dataset, DatasetInput, InputTag

    name = str(facts["data"])
    sizes = {key: facts[key] for key in ("data_num_train", "data_num_val") if key in facts}
    dataset = Dataset(
        name=name,
        digest=str(facts["data_digest"]),
        source_type="code",
        source=json.dumps({"tags": {"mlflow.source.name": f"fsdp_lab data={name}"}}),
        profile=json.dumps(sizes),
    )
    client.log_inputs(run_id, [DatasetInput(dataset, tags=[InputTag("mlflow.data.context", "training")])])
