"""The one writer of MLflow: a sweep's driver calls a `Tracker`, and nothing else writes to the store."""

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
    DISTURBED,
    RECORDED_TAG,
    SWEEP_TAG,
    TRIAL_TAG,
    fact_tags,
    one_line,
    shortened,
    sweep_tags,
    thinned_tags,
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
_ERROR_LENGTH = 500
# MLflow's page that compares runs opens on the metric that was written first.
_FIRST = (VAL_LOSS, TRAIN_LOSS, "forecast/peak_mib")
_TEXTS = (".yaml", ".csv", ".txt", ".json", ".jsonl", ".log", ".md")


def _to_stderr(message: str) -> None:
    print(f"warning: {message}", file=sys.stderr)


@dataclass(frozen=True)
class RecordedRun:
    """A run of a sweep in the store.

    Attributes:
        handle: see `Tracker.run_id`.
        status: MLflow's tag; None: not known.
        recorded: it has everything that belongs to it.
        ended: milliseconds since 1970; None: it runs.
    """

    handle: str
    status: str | None
    recorded: bool
    ended: int | None


class Tracker:
    """Writes a sweep and its trials to MLflow, in order, each item once.

    Only `open` raises: after it the sweep is worth more than its record. A write that the store refuses is passed to
    `on_problem`, once for each kind of problem, and dropped. While the store does not answer, writes wait in memory,
    and are sent when it answers again; `settle` returns how many wait at the end. The next `resume` sends those:
    `find_runs` returns what the store has, and an item that is sent again is not written twice.

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
            TrackingError: the store is missing (reported within about 10 s), cannot be written, or is of another
                version of MLflow.
        """
        self._client, self._experiment_id = open_store(self._tracking)

    def find_runs(self, sweep_id: str) -> dict[str, RecordedRun]:
        """Return the runs of a sweep in the store: `""` -> its own run, `"<number>"` -> the run of that trial.

        Raises:
            TrackingError: the store does not answer.
        """
        assert self._client is not None, "open() comes first"
        try:
            runs = search_runs(self._client, self._experiment_id, f"tags.`{SWEEP_TAG}` = '{sweep_id}'")
        except Exception as error:  # noqa: BLE001 (whatever MLflow or a driver of its database raises)
            raise refusal(self._tracking.uri, error) from None
        recorded = {}
        for run in runs:
            handle = str(run.info.run_id)
            self._ids[handle] = handle
            recorded[run.data.tags.get(TRIAL_TAG, "")] = RecordedRun(
                handle, run.data.tags.get("status"), RECORDED_TAG in run.data.tags, run.info.end_time
            )
        return recorded

    def reopen(self, handle: str) -> None:
        """Reopen an ended run; epochs that it has are not written again."""
        self._finished.discard(handle)

        def write(client: MlflowClient, run_id: str, again: bool) -> None:
            client.update_run(run_id, "RUNNING")
            for tag in ("status", "error", RECORDED_TAG):
                with suppress(Exception):  # there was none
                    client.delete_tag(run_id, tag)

        self._write(_RUN, handle, write)
        self.check_epochs(handle)

    def set_aside(self, handle: str) -> None:
        """Keep a trial's run, but as none of the sweep's trials any more: another run takes its place."""

        def write(client: MlflowClient, run_id: str, again: bool) -> None:
            run = client.get_run(run_id)
            if (number := run.data.tags.get(TRIAL_TAG, "")).isdigit():
                client.set_tag(run_id, TRIAL_TAG, f"{number} {DISTURBED}")
                client.update_run(run_id, name=shortened(f"{run.info.run_name} ({DISTURBED})"))

        self._write(_RUN, handle, write)

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
        """Return the id of a run; "" while it has none."""
        return self._ids.get(handle or "", "")

    def start_sweep(
        self, name: str, folder: Path, command: str, num_trials: int, sweep_id: str = "", thinned: bool = False
    ) -> str:
        """Start the parent run of a sweep and return its handle.

        Args:
            name: of the run.
            folder: the sweep's own, kept as the tag `fsdp_lab.folder`.
            command: as it was typed; credentials in it are not shown.
            num_trials: the known ones; `name_sweep` counts those that a search adds.
            sweep_id: `find_runs` finds the run by it.
            thinned: mark it: the runs of its trials have the last epoch only.
        """
        return self._create_run(name, lambda: sweep_tags(folder, command, num_trials, sweep_id, thinned), sweep_id, "")

    def name_sweep(self, handle: str, name: str, num_trials: int, thinned: bool = False) -> None:
        """Give the run of a sweep another name and number of trials: a search adds trials as it goes."""

        def write(client: MlflowClient, id_: str, again: bool) -> None:
            client.update_run(id_, name=shortened(redact(name)))
            for tag, value in {"num_trials": str(num_trials), **thinned_tags(thinned)}.items():
                client.set_tag(id_, tag, value)

        self._write("tags", handle, write)

    def describe_sweep(self, handle: str, answer: str) -> None:
        """Replace the beginning of a sweep run's description by its answer."""

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
        thinned: bool = False,
    ) -> str:
        """Start the run of a trial and return its handle.

        Args:
            name: of the run.
            overrides: the command line of this trial.
            folder: the trial's own, kept as the tag `fsdp_lab.folder`.
            parent: the handle of the sweep's run; None: a trial alone.
            sweep_id: `find_runs` finds the run by it,
            number: and by the trial's number.
            thinned: mark it: it gets the last epoch only.
        """
        return self._create_run(
            name,
            lambda: trial_tags(folder, overrides, self.run_id(parent) or None, sweep_id, number, thinned),
            sweep_id,
            number,
        )

    def log_config(
        self,
        run_id: str,
        config: SweepConfig,
        choices: Mapping[str, str],
        folder: Path | None,
        resumed: bool = False,
        left_out: Mapping[str, str] | None = None,
    ) -> None:
        """Log the parameters of a trial and its config's files.

        Args:
            run_id: of the trial.
            config: of the trial.
            choices: group -> option, as Hydra chose them; they become the first parameters.
            folder: the trial's own; the files in its `.hydra` are kept under `config/`, without credentials. None: they
                are not kept.
            resumed: the run may have parameters. MLflow changes none, so differences go to the tag `resumed_with`.
            left_out: parameters with these values are not logged, because the sweep's run has them.
        """
        params, left_out = trial_params(config, choices), left_out or {}
        self.log_params(run_id, {k: v for k, v in params.items() if left_out.get(k) != v}, resumed)
        if folder is not None:
            self._write("the config's files", run_id, lambda client, id_, again: _log_config_files(client, id_, folder))

    def log_params(self, run_id: str, params: Mapping[str, str], resumed: bool = False) -> None:
        """Log parameters, as `trial_params` returns them; `resumed` as for `log_config`."""
        self._write("parameters", run_id, lambda client, id_, again: _log_params(client, id_, params, resumed))

    def log_facts(self, run_id: str, facts: Mapping[str, Any]) -> None:
        """Log the facts of a trial as tags and as the data set with its digest.

        Args:
            run_id: of the trial.
            facts: as `training.train` reports them, with `data`, the name of the data set.
        """

        def write(client: MlflowClient, run_id: str, again: bool) -> None:
            _set_tags(client, run_id, fact_tags(facts))
            _log_dataset(client, run_id, facts)

        self._write("facts", run_id, write)

    def log_epoch(self, run_id: str, *epochs: Mapping[str, float]) -> None:
        """Log the metrics of finished epochs in one write, each at the step that is its `epoch`; 0 is the forecast.

        Some bytes are also logged in MiB, and `step` as `train/step`. A trial that was resumed reports its old epochs
        again: an epoch that is in MLflow already is not changed, one that was lost is added.
        """
        named = {int(metrics["epoch"]): _named(metrics) for metrics in epochs}
        now = int(time.time() * 1000)

        def write(client: MlflowClient, id_: str, again: bool) -> None:
            from mlflow.entities import Metric

            new = {
                epoch: names
                for epoch, names in named.items()
                if (run_id, epoch) not in self._epochs
                and not (again and self._has_epoch(client, id_, next(iter(names)), epoch))
            }
            metrics = [Metric(name, v, now, epoch) for epoch, names in new.items() for name, v in names.items()]
            client.log_batch(id_, metrics=metrics)
            self._epochs |= {(run_id, epoch) for epoch in named}

        self._write("metrics", run_id, write)

    @staticmethod
    def _has_epoch(client: MlflowClient, run_id: str, key: str, epoch: int) -> bool:
        """Return whether MLflow has an epoch: an attempt that seemed to fail may have succeeded."""
        return any(point.step == epoch for point in client.get_metric_history(run_id, key))

    def log_artifact(self, run_id: str, path: Path, folder: str = "") -> None:
        """Copy a file, or a folder with all in it, into the run's artifacts, below `folder`."""
        if not path.exists():
            self._outbox.report_problem("missing", f"{path} is missing, so MLflow has no copy of it.")
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
        facts: Mapping[str, Any] | None = None,
        complete: bool = False,
    ) -> None:
        """End a run. The first end that reached the store stays; later calls do nothing.

        Args:
            run_id: of the run.
            status: one that ends a trial; kept as a tag.
            error: why it failed, kept as the tag `error`: one line of at most 500 characters.
            ended: when, in milliseconds since 1970; None: now.
            artifacts: files and folders to copy first.
            facts: of the trial, where `log_facts` has not logged them.
            complete: nothing comes after it, so that `recorded` is not to be called.
        """
        assert status in _RUN_STATUS, f"{status} is none of {', '.join(_RUN_STATUS)}"
        if run_id in self._finished:
            return
        self._finished.add(run_id)
        ended = ended or int(time.time() * 1000)
        for path in artifacts:
            self.log_artifact(run_id, path)

        if facts:
            self._write("facts", run_id, lambda client, id_, again: _log_dataset(client, id_, facts))

        def write(client: MlflowClient, id_: str, again: bool) -> None:
            client.set_terminated(id_, _RUN_STATUS[status], ended)
            tags = fact_tags(facts or {}) | {"status": str(status)}
            if error:
                tags["error"] = one_line(error, _ERROR_LENGTH)
            if complete and not self._outbox.refused(run_id):
                tags[RECORDED_TAG] = "true"  # last of all
            _set_tags(client, id_, tags)

        self._write("the end of a run", run_id, write)

    def recorded(self, run_id: str) -> None:
        """Mark a run as complete in the store, so that a resume has nothing to send.

        A run with a refused write does not get the mark.
        """

        def write(client: MlflowClient, id_: str, again: bool) -> None:
            if not self._outbox.refused(run_id):
                client.set_tag(id_, RECORDED_TAG, "true")

        self._write("the end of a run", run_id, write)

    def settle(self, limit_s: float) -> int:
        """Send waiting writes for at most so many seconds, and return how many still wait."""
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
        """Write as soon as all earlier writes are done.

        Args:
            what: the kind of write, for messages.
            run: the handle of the run.
            do: gets the client, the run's id, and whether it was tried before.
        """
        client = self._client
        assert client is not None, "open() comes before every write"

        def send(again: bool) -> None:
            if run in self._ids or what == _RUN:  # else its run was refused
                do(client, self._ids.get(run, ""), again)

        self._outbox.put(what, run, send)


def _named(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics of an epoch by their names in MLflow, in the order in which they are written."""
    names = {"train/step" if k == "step" else k: float(v) for k, v in metrics.items() if k != "epoch"}
    names |= mib_figures(names)  # in the same batch, so that an epoch has both or neither
    return {shortened(key): names[key] for key in sorted(names, key=lambda key: key not in _FIRST)}


def _linked(client: MlflowClient, run_id: str, path: Path, folder: str) -> bool:
    """Return whether a file became a run's artifact as a hard link, so that it is stored once.

    That needs artifacts in a folder on the same disk. Only for files that are replaced and never written into: a link
    is then as good as a copy.
    """
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


def _log_params(client: MlflowClient, run_id: str, wanted: Mapping[str, str], resumed: bool) -> None:
    from mlflow.entities import Param

    known = client.get_run(run_id).data.params if resumed else {}
    if other := [f"{key}={value}" for key, value in wanted.items() if known.get(key, value) != value]:
        client.set_tag(run_id, "resumed_with", " ".join(other))
    client.log_batch(run_id, params=[Param(key, value) for key, value in wanted.items() if key not in known])


def _log_config_files(client: MlflowClient, run_id: str, folder: Path) -> None:
    for name in ("config.yaml", "overrides.yaml"):
        path = folder / ".hydra" / name
        if path.is_file():
            client.log_text(run_id, redacted_file(path), f"config/{name}")


def _set_tags(client: MlflowClient, run_id: str, tags: Mapping[str, str]) -> None:
    from mlflow.entities import RunTag

    client.log_batch(run_id, tags=[RunTag(key, value) for key, value in tags.items()])


def _log_dataset(client: MlflowClient, run_id: str, facts: Mapping[str, Any]) -> None:
    from mlflow.entities import Dataset, DatasetInput, InputTag

    if not facts.get("data_digest"):
        return
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
