"""The one writer of MLflow: a sweep's driver tells a `Tracker`, and nothing else opens the store."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

from fsdp_lab.config.sweep import SweepConfig, TrackingConfig
from fsdp_lab.files import whole
from fsdp_lab.metrics import TRAIN_LOSS, VAL_LOSS, mib_figures
from fsdp_lab.redact import redact, redacted_file
from fsdp_lab.status import TrialStatus
from fsdp_lab.tracking.outbox import Outbox
from fsdp_lab.tracking.store import open_store, refusal, runs_url, search_runs, set_answer, ui_url
from fsdp_lab.tracking.tags import (
    RECORDED_TAG,
    SWEEP_TAG,
    TRIAL_TAG,
    fact_tags,
    one_line,
    shortened,
    sweep_tags,
    trial_params,
    trial_tags,
)

if TYPE_CHECKING:
    from mlflow import MlflowClient

# How a trial ended -> what MLflow calls it. Out of memory is a result for us and a failure there.
_RUN_STATUS = {
    TrialStatus.finished: "FINISHED",
    TrialStatus.failed: "FAILED",
    TrialStatus.oom: "FAILED",
    TrialStatus.diverged: "FAILED",
    TrialStatus.interrupted: "KILLED",
    TrialStatus.stopped: "KILLED",
    TrialStatus.skipped: "KILLED",
}
_RUN = "a run"
_PARAMS_PER_BATCH = 100  # MLflow's limit
_ERROR_LENGTH = 500
# MLflow's page that compares runs opens on the metric that was written first.
_FIRST = (VAL_LOSS, TRAIN_LOSS, "forecast/peak_mib")
_TEXTS = (".yaml", ".csv", ".txt", ".json", ".jsonl", ".log", ".md")


def _to_stderr(message: str) -> None:
    print(f"warning: {message}", file=sys.stderr)


@dataclass(frozen=True)
class FoundRun:
    """A run of a sweep that is in the store. `recorded`: with everything that belongs to it; `ended`: when, in
    milliseconds since 1970, None while it runs."""

    handle: str
    status: str | None
    recorded: bool
    ended: int | None


class Tracker:
    """Writes a sweep and its trials into MLflow, in order, each thing once.

    Only `open` raises. After it the sweep is worth more than its record. A write that the store refuses is told to
    `on_problem`, once for each kind of problem, and left out. While the store does not answer, writes wait in
    memory, and are sent when it answers again; `settle` says how many still wait in the end. The next `resume`
    sends those: `find_runs` says what is there, and what is told again is not written twice.

    A run is named by a handle, which is its id as soon as it has one: see `run_id`.

    Belongs to the driver's thread. The thread that ends an interrupted sweep in time may call it too: see `Outbox`.
    """

    def __init__(self, tracking: TrackingConfig, on_problem: Callable[[str], None] = _to_stderr) -> None:
        self._tracking = tracking
        self._client: MlflowClient | None = None
        self._experiment_id = ""
        self._outbox = Outbox(redact(tracking.uri), on_problem)
        self._ids: dict[str, str] = {}  # handle -> run id
        self._epochs: set[tuple[str, int]] = set()  # by handle
        self._finished: set[str] = set()

    def open(self) -> None:
        """Make the store's schema and the experiment, once, before any trial.

        Raises:
            TrackingError: the store is not there (told within about 10 s), cannot be written, or is of
                another version of MLflow.
        """
        self._client, self._experiment_id = open_store(self._tracking)

    def find_runs(self, sweep_id: str) -> dict[str, FoundRun]:
        """What a sweep has in the store already: `""` -> its own run, `"<number>"` -> the run of that trial.

        Raises:
            TrackingError: the store does not answer.
        """
        assert self._client is not None, "open() comes first"
        try:
            runs = search_runs(self._client, self._experiment_id, f"tags.`{SWEEP_TAG}` = '{sweep_id}'")
        except Exception as error:  # noqa: BLE001 (whatever MLflow or a driver of its database raises)
            raise refusal(self._tracking.uri, error) from None
        found = {}
        for run in runs:
            handle = str(run.info.run_id)
            self._ids[handle] = handle
            found[run.data.tags.get(TRIAL_TAG, "")] = FoundRun(
                handle, run.data.tags.get("status"), RECORDED_TAG in run.data.tags, run.info.end_time
            )
        return found

    def reopen(self, handle: str) -> None:
        """Let a run that was ended go on: its epochs of before are not written again."""
        self._finished.discard(handle)

        def write(client: MlflowClient, run_id: str, again: bool) -> None:
            client.update_run(run_id, "RUNNING")
            for tag in ("status", "error", RECORDED_TAG):
                with suppress(Exception):  # there was none
                    client.delete_tag(run_id, tag)

        self._write(_RUN, handle, write)
        self.check_epochs(handle)

    def check_epochs(self, handle: str) -> None:
        """Ask the store which epochs of a run it has, before any is written again."""

        def write(client: MlflowClient, run_id: str, again: bool) -> None:
            steps = {m.step for m in client.get_metric_history(run_id, "train/step")}
            if "forecast/peak_bytes" in client.get_run(run_id).data.metrics:
                steps.add(0)
            self._epochs |= {(handle, step) for step in steps}

        self._write("metrics", handle, write)

    @property
    def runs_url(self) -> str | None:
        """Where a UI shows runs, `/<id>` to be added; None where no server is known."""
        return runs_url(self._tracking)

    @property
    def ui_url(self) -> str | None:
        """Where a UI lists the experiment's runs; None where no server is known."""
        return ui_url(self._tracking, self._experiment_id) if self._experiment_id else None

    def run_id(self, handle: str | None) -> str:
        """The id of a run; "" while it has none."""
        return self._ids.get(handle or "", "")

    def start_sweep(self, name: str, folder: Path, command: str, num_trials: int, sweep_id: str = "") -> str:
        """Start the parent run of a sweep and return its handle.

        Args:
            folder: the sweep's own, kept as the tag `fsdp_lab.folder`.
            command: as it was typed; credentials in it are not shown.
            num_trials: those that are known; `name_sweep` counts those that a search adds.
            sweep_id: what `find_runs` finds it by.
        """
        return self._create_run(name, lambda: sweep_tags(folder, command, num_trials, sweep_id), sweep_id, "")

    def name_sweep(self, handle: str, name: str, num_trials: int) -> None:
        """Give the run of a sweep another name and number of trials: a search adds trials as it goes."""

        def write(client: MlflowClient, id_: str, again: bool) -> None:
            client.update_run(id_, name=shortened(redact(name)))
            client.set_tag(id_, "num_trials", num_trials)

        self._write("tags", handle, write)

    def describe_sweep(self, handle: str, answer: str) -> None:
        """Begin the description of a sweep's run with what it says; a resume replaces it."""

        def write(client: MlflowClient, id_: str, again: bool) -> None:
            set_answer(client, id_, answer)

        self._write("tags", handle, write)

    def start_trial(
        self,
        name: str,
        overrides: Sequence[str],
        folder: Path,
        parent: str | None,
        sweep_id: str = "",
        number: str = "",
    ) -> str:
        """Start the run of a trial and return its handle.

        Args:
            overrides: what was typed for this trial.
            folder: the trial's own, kept as the tag `fsdp_lab.folder`.
            parent: the handle of the sweep's run, None for a trial alone.
            sweep_id, number: what `find_runs` finds it by.
        """
        return self._create_run(
            name,
            lambda: trial_tags(folder, overrides, self.run_id(parent) or None, sweep_id, number),
            sweep_id,
            number,
        )

    def log_config(
        self, run_id: str, config: SweepConfig, choices: Mapping[str, str], folder: Path, resumed: bool = False
    ) -> None:
        """The parameters of a trial and its config's files.

        Args:
            choices: group -> option, as Hydra chose them; they become the first parameters.
            resumed: the run may have parameters; MLflow changes none, so what is other now is the tag `resumed_with`.
            folder: the trial's own; what is in its `.hydra` is kept under `config/`, without credentials.
        """
        self._write("parameters", run_id, lambda client, id_, again: _log_params(client, id_, config, choices, resumed))
        self._write("the config's files", run_id, lambda client, id_, again: _log_config_files(client, id_, folder))

    def log_facts(self, run_id: str, facts: Mapping[str, Any]) -> None:
        """What a trial told before its first step, as tags and as the data set with its digest.

        Args:
            facts: as `training.train` reports them, with `data`, the name of the data set.
        """

        def write(client: MlflowClient, run_id: str, again: bool) -> None:
            from mlflow.entities import RunTag

            client.log_batch(run_id, tags=[RunTag(k, v) for k, v in fact_tags(facts).items()])
            if facts.get("data_digest"):
                _log_dataset(client, run_id, facts)

        self._write("facts", run_id, write)

    def log_epoch(self, run_id: str, metrics: Mapping[str, float]) -> None:
        """The metrics of a finished epoch, at step `metrics["epoch"]`, some bytes also in MiB; `step` is kept as
        `train/step`.

        A trial that was resumed tells its old epochs again: an epoch that is in MLflow already is left
        alone, one that was lost with the store away is filled in.
        """
        epoch = int(metrics["epoch"])
        names = {"train/step" if k == "step" else k: float(v) for k, v in metrics.items() if k != "epoch"}
        names |= mib_figures(names)  # in the same batch, so that an epoch has both or neither
        names = {key: names[key] for key in sorted(names, key=lambda key: key not in _FIRST)}
        now = int(time.time() * 1000)

        def write(client: MlflowClient, id_: str, again: bool) -> None:
            from mlflow.entities import Metric

            if (run_id, epoch) in self._epochs:
                return
            if not (again and self._has_epoch(client, id_, shortened(next(iter(names))), epoch)):
                client.log_batch(id_, metrics=[Metric(shortened(k), v, now, epoch) for k, v in names.items()])
            self._epochs.add((run_id, epoch))

        self._write("metrics", run_id, write)

    @staticmethod
    def _has_epoch(client: MlflowClient, run_id: str, key: str, epoch: int) -> bool:
        """An attempt that seemed to fail may have got through."""
        return any(point.step == epoch for point in client.get_metric_history(run_id, key))

    def log_artifact(self, run_id: str, path: Path, folder: str = "") -> None:
        """Copy a file, or a folder with all in it, into the run's artifacts, below `folder`."""
        if not path.exists():
            self._outbox.tell("missing", f"{path} is not there, so MLflow has no copy of it.")
            return
        if path.is_dir():
            for file in sorted(f for f in path.rglob("*") if f.is_file()):
                self.log_artifact(run_id, file, Path(folder, file.parent.relative_to(path.parent)).as_posix())
            return
        if path.suffix in _TEXTS:  # a config, a command or a traceback may name a server with its password
            inside = "/".join(part for part in (folder, path.name) if part)
            text = redacted_file(path)
            self._write("files", run_id, lambda client, id_, again: client.log_text(id_, text, inside))
            return

        def write(client: MlflowClient, id_: str, again: bool) -> None:
            if path.suffix not in (".pt", ".safetensors") or not _linked(client, id_, path, folder):
                client.log_artifact(id_, str(path), folder or None)

        self._write("files", run_id, write)

    def finish(
        self,
        run_id: str,
        status: TrialStatus,
        error: str | None = None,
        ended: int | None = None,
        artifacts: Sequence[Path] = (),
    ) -> None:
        """End a run; the first ending that reached the store stands, later calls do nothing.

        Args:
            status: one that ends a trial; kept as a tag.
            error: why it failed, kept as the tag `error`: one line of at most 500 characters.
            ended: when, in milliseconds since 1970; None: now.
            artifacts: files and folders to copy first.
        """
        assert status in _RUN_STATUS, f"{status} is none of {', '.join(_RUN_STATUS)}"
        if run_id in self._finished:
            return
        self._finished.add(run_id)
        ended = ended or int(time.time() * 1000)
        for path in artifacts:
            self.log_artifact(run_id, path)

        def write(client: MlflowClient, id_: str, again: bool) -> None:
            client.set_tag(id_, "status", str(status))
            if error:
                client.set_tag(id_, "error", one_line(error, _ERROR_LENGTH))
            client.set_terminated(id_, _RUN_STATUS[status], ended)

        self._write("the end of a run", run_id, write)

    def recorded(self, run_id: str) -> None:
        """Nothing more comes: with this mark in the store, a resume has nothing to send. A run of which a write was
        refused does not get it."""

        def write(client: MlflowClient, id_: str, again: bool) -> None:
            if not self._outbox.refused(run_id):
                client.set_tag(id_, RECORDED_TAG, "true")

        self._write("the end of a run", run_id, write)

    def settle(self, limit_s: float) -> int:
        """Send what waits, for at most so long; returns how many writes still wait."""
        return self._outbox.settle(limit_s)

    def _create_run(self, name: str, tags: Callable[[], dict[str, str]], sweep_id: str, number: str) -> str:
        handle = f"new-{len(self._ids)}-{time.monotonic_ns()}"
        begun = int(time.time() * 1000)

        def write(client: MlflowClient, id_: str, again: bool) -> None:
            if again and sweep_id:  # an attempt that seemed to fail may have got through
                for run in search_runs(client, self._experiment_id, f"tags.`{SWEEP_TAG}` = '{sweep_id}'"):
                    if run.data.tags.get(TRIAL_TAG, "") == number:
                        self._ids[handle] = str(run.info.run_id)
                        return
            run = client.create_run(self._experiment_id, begun, tags=tags(), run_name=shortened(redact(name)))
            self._ids[handle] = str(run.info.run_id)

        self._write(_RUN, handle, write)
        run_id = self._ids.get(handle)
        if run_id is None:
            return handle
        self._ids[run_id] = run_id
        return run_id

    def _write(self, what: str, run: str, do: Callable[[MlflowClient, str, bool], Any]) -> None:
        """Write as soon as what was asked for before is written.

        Args:
            do: gets the client, the run's id, and whether it was tried before.
        """
        client = self._client
        assert client is not None, "open() comes before every write"

        def send(again: bool) -> None:
            if run in self._ids or what == _RUN:  # else its run was refused
                do(client, self._ids.get(run, ""), again)

        self._outbox.put(what, run, send)


def _linked(client: MlflowClient, run_id: str, path: Path, folder: str) -> bool:
    """Whether a file is a run's artifact by a second name, and so stored once: where artifacts lie in a folder on the
    same disk. Only for files that are replaced and never written into; a name is as good as a copy of one."""
    place = urlsplit(client.get_run(run_id).info.artifact_uri)
    if place.scheme != "file" or path.is_symlink():
        return False
    artifact = Path(unquote(place.path), folder, path.name)
    try:
        with whole(artifact) as making:
            os.link(path, making)
    except OSError:  # another disk, or one that knows no links
        return False
    return True


def _log_params(
    client: MlflowClient, run_id: str, config: SweepConfig, choices: Mapping[str, str], resumed: bool
) -> None:
    from mlflow.entities import Param

    wanted = trial_params(config, choices)
    known = client.get_run(run_id).data.params if resumed else {}
    if other := [f"{key}={value}" for key, value in wanted.items() if known.get(key, value) != value]:
        client.set_tag(run_id, "resumed_with", " ".join(other))
    params = [Param(key, value) for key, value in wanted.items() if key not in known]
    for start in range(0, len(params), _PARAMS_PER_BATCH):
        client.log_batch(run_id, params=params[start : start + _PARAMS_PER_BATCH])


def _log_config_files(client: MlflowClient, run_id: str, folder: Path) -> None:
    for name in ("config.yaml", "overrides.yaml"):
        path = folder / ".hydra" / name
        if path.is_file():
            client.log_text(run_id, redacted_file(path), f"config/{name}")


def _log_dataset(client: MlflowClient, run_id: str, facts: Mapping[str, Any]) -> None:
    from mlflow.entities import Dataset, DatasetInput, InputTag

    name = str(facts["data"])
    sizes = {key: facts[key] for key in ("data_num_train", "data_num_val") if key in facts}
    dataset = Dataset(
        name=shortened(name, 500),
        digest=str(facts["data_digest"]),
        source_type="code",
        source=json.dumps({"tags": {"mlflow.source.name": f"fsdp_lab data={name}"}}),
        profile=json.dumps(sizes),
    )
    client.log_inputs(run_id, [DatasetInput(dataset, tags=[InputTag("mlflow.data.context", "training")])])
