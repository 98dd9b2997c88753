"""MLflow as a projection of the record: one thread sends what the record has and the store lacks.

The driver names the runs that have changed. The thread asks what each should hold, compares that with what it knows of
the store, and sends the difference. After a failure it reads what the store has, so nothing is written twice. What
could not be sent stays wanted. Ctrl-C reaches the main thread only, so no write is cut short: an interrupted one would
leave SQLite locked.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fsdp_lab.config.status import TrialStatus
from fsdp_lab.config.sweep import TrackingConfig
from fsdp_lab.tracking import writes
from fsdp_lab.tracking.store import is_away, open_store, reason_of, refusals, runs_of, runs_url
from fsdp_lab.tracking.tags import RECORDED_TAG, SWEEP_TAG, TRIAL_TAG, fact_tags, one_line, shortened, stored_name

if TYPE_CHECKING:
    from mlflow import MlflowClient

_PAUSE_S = 3.0  # between two attempts while the store is away
_ERROR_LENGTH = 500
_END_TAGS = ("status", "error", "reason", RECORDED_TAG)  # removed from a run that continues


@dataclass
class WantedRun:
    """What the store should hold of the sweep, or of one trial.

    Attributes:
        first_tags: set when the run is created; people may change them later.
        tags: always set to these values.
        params: the parameters. MLflow changes none, so differences go to the tag `resumed_with`.
        epochs: step -> metrics, each sent once; step 0 is the forecast.
        figures: the latest values of other metrics, sent when one has changed.
        facts: of a trial; they become tags.
        files: path and the folder of the artifacts that it goes to.
        answer: the start of its description; "": none.
        status: how it ended; None: it runs.
        error: why it failed, kept as the tag `error`: one line of at most 500 characters.
        ended: when, in milliseconds since 1970; None: now.
    """

    name: str
    first_tags: Mapping[str, str] = field(default_factory=dict)
    tags: Mapping[str, str] = field(default_factory=dict)
    params: Mapping[str, str] = field(default_factory=dict)
    epochs: Mapping[int, Mapping[str, float]] = field(default_factory=dict)
    figures: Mapping[str, float] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)
    files: Sequence[tuple[Path, str]] = ()
    answer: str = ""
    status: TrialStatus | None = None
    error: str | None = None
    ended: int | None = None


@dataclass
class Stored:
    """What is known of a run in the store.

    Attributes:
        ended: when, in milliseconds since 1970; None: it runs.
        steps: of the metrics that it has; None: not known, so that the store has to be asked.
        figures: the latest values of its metrics, except of those sent as epochs since.
        sent: other items that this process has sent.
        refused: the store has refused an item, so it is not complete.
    """

    run_id: str
    name: str
    tags: dict[str, str]
    params: dict[str, str] = field(default_factory=dict)
    ended: int | None = None
    steps: set[int] | None = None
    figures: dict[str, float] = field(default_factory=dict)
    sent: set[object] = field(default_factory=set)
    refused: bool = False


class _StoreAway(Exception):
    """The store, or its disk or network, failed."""


class Projection:
    """Keeps the runs of a sweep in MLflow as the record has them.

    Only `open` raises: after it the sweep is worth more than its runs. What the store refuses is reported once for each
    kind, and dropped. While the store does not answer, everything stays wanted.

    Args:
        sweep_id: by which a later start finds the runs.
        wanted: returns what the run of a trial should hold, or with None that of the sweep; called from the thread.
    """

    _client: MlflowClient

    def __init__(
        self,
        tracking: TrackingConfig,
        sweep_id: str,
        wanted: Callable[[int | None], WantedRun],
        on_problem: Callable[[str], None],
    ) -> None:
        self._tracking, self._sweep_id, self._wanted = tracking, sweep_id, wanted
        self._uri, self._on_problem = tracking.uri, on_problem
        self._experiment_id = ""
        self._stored: dict[int | None, Stored] = {}
        self._unsure: set[int | None] = set()  # a write of these may have got through
        self._changed: dict[int | None, None] = {}  # in order
        self._new = threading.Condition()
        self._busy = self._away = self._stopped = False
        self._reported: set[str] = set()
        self._last_success = 0.0
        self._thread = threading.Thread(target=self._work, name="mlflow", daemon=True)

    def open(self, resumed: bool = False) -> None:
        """Make the store's schema and the experiment, find the runs of an earlier start, and start the thread.

        Args:
            resumed: an earlier start may have made runs.

        Raises:
            TrackingError: the store is missing, cannot be written, or is of another version of MLflow.
        """
        self._client, self._experiment_id = open_store(self._tracking, self._on_problem)
        if resumed:
            with refusals(self._tracking):
                self._stored = self._runs()
        self._last_success = time.monotonic()
        self._thread.start()

    def _runs(self) -> dict[int | None, Stored]:
        """Return the sweep's runs in the store, by the numbers of their trials, without their epochs and files."""
        stored: dict[int | None, Stored] = {}
        for run in runs_of(self._client, self._experiment_id, self._sweep_id):
            info, tags, number = run.info, dict(run.data.tags), run.data.tags.get(TRIAL_TAG)
            known = Stored(info.run_id, info.run_name, tags, dict(run.data.params), info.end_time)
            known.figures = dict(run.data.metrics)
            stored[int(number) if number else None] = known
        return stored

    @property
    def ui_url(self) -> str | None:
        """Where a UI lists the experiment's runs; None where no server is known."""
        if not self._experiment_id or (runs := runs_url(self._tracking)) is None:
            return None
        # without the end of the path MLflow opens a page of traces of language models
        return f"{runs.removesuffix('runs')}experiments/{self._experiment_id}/runs?workflowType=machine_learning"

    def run_id(self, number: int | None) -> str:
        """Return the id of a run; "" while it has none."""
        return self._stored[number].run_id if number in self._stored else ""

    def stored(self, number: int | None) -> Stored | None:
        """Return what is known of a run in the store; None while it has none."""
        return self._stored.get(number)

    def changed(self, *numbers: int | None) -> None:
        """Compare these runs with the store, soon."""
        with self._new:
            self._changed.update(dict.fromkeys(numbers))
            self._new.notify_all()

    def settle(self, patience_s: float, limit_s: float | None = None) -> int:
        """Wait until the store has everything, and return how many runs lack something.

        Args:
            patience_s: gives up when the store has been away for so long. A write ends, or fails, by its own limit.
            limit_s: gives up after so long in any case; None: never.
        """
        begun = time.monotonic()
        with self._new:
            self._last_success = begun
            if self._away and patience_s > 0 and limit_s is None:
                self._on_problem(f"waiting up to tracking.patience_s={patience_s:g} s for the MLflow store to answer")
            while (self._changed or self._busy) and self._thread.is_alive():
                now = time.monotonic()
                if self._away and now - self._last_success >= patience_s:
                    break
                if limit_s is not None and now - begun >= limit_s:
                    break
                self._new.wait(0.2)
            return len(self._changed) + self._busy

    def stop(self, limit_s: float | None = None) -> None:
        """End the thread once its current write is made; wait for it so long, and a second at most."""
        with self._new:
            self._stopped = True
            self._new.notify_all()
        if self._thread.is_alive():
            self._thread.join(1.0 if limit_s is None else min(1.0, limit_s))

    def _work(self) -> None:
        while True:
            with self._new:
                self._new.wait_for(lambda: self._stopped or bool(self._changed))
                if self._stopped:
                    return
                number = None if None in self._changed else next(iter(self._changed))  # the parent of the others first
                del self._changed[number]
                self._busy = True
            away = ""
            try:
                self._send(number)
            except _StoreAway as error:
                away = str(error)
            except Exception as error:  # noqa: BLE001 (what one run lacks must not end the thread)
                self._report("the run of a trial", error)
            with self._new:
                self._busy = False
                if away:
                    self._unsure.add(number)
                    self._changed.setdefault(number)  # behind the others
                else:
                    self._last_success = time.monotonic()
                self._note(away)
                self._new.notify_all()
                if away:
                    self._new.wait_for(lambda: self._stopped, _PAUSE_S)

    def _note(self, away: str) -> None:
        """Report that the store is away, by a reason, or that it is back and has everything."""
        if away and not self._away:
            self._away = True
            self._on_problem(
                f"tracking.uri={self._uri}: the MLflow store does not answer ({away}). Trials continue and keep "
                "their results in their folders. They are sent when the store answers again."
            )
        elif self._away and not away and not self._changed:
            self._away = False
            self._on_problem("the MLflow store answers again; what it lacked was sent")

    def _send(self, number: int | None) -> None:
        """Send the difference between what the record and the store have of a run."""
        wanted = self._wanted(number)
        if number in self._unsure:
            found = self._try("a search for runs", None, self._runs)
            self._stored |= {each: run for each, run in (found or {}).items() if each in self._unsure}
            self._unsure = self._unsure - {number} if found is None else set()  # one search finds all of them
        if number not in self._stored:
            created = self._try("a run", None, self._create, number, wanted)
            if created is None:
                return
            self._stored[number] = created
        self._update(number, self._stored[number], wanted)

    def _create(self, number: int | None, wanted: WantedRun) -> Stored:
        tags = {**wanted.first_tags, SWEEP_TAG: self._sweep_id, **wanted.tags}
        if number is not None:
            tags[TRIAL_TAG] = str(number)
            if parent := self.run_id(None):
                tags["mlflow.parentRunId"] = parent
        name, now = shortened(wanted.name), int(time.time() * 1000)
        run = self._client.create_run(self._experiment_id, now, tags=tags, run_name=name)
        return Stored(str(run.info.run_id), name, dict(tags), steps=set())

    def _update(self, number: int | None, stored: Stored, wanted: WantedRun) -> None:
        client, run_id = self._client, stored.run_id
        ended_as = stored.tags.get("status", str(wanted.status))
        if stored.ended is not None and (wanted.status is None or ended_as != str(wanted.status)):
            self._try("a run", stored, writes.reopen, client, run_id, [tag for tag in _END_TAGS if tag in stored.tags])
            stored.ended = None
            stored.tags = {key: value for key, value in stored.tags.items() if key not in _END_TAGS}
        if (name := shortened(wanted.name)) != stored.name:
            self._try("tags", stored, client.update_run, run_id, None, name)
            stored.name = name
        tags = {**wanted.tags, **fact_tags(wanted.facts)}
        if other := [f"{key}={v}" for key, v in wanted.params.items() if stored.params.get(key, v) != v]:
            tags["resumed_with"] = " ".join(other)
        if new := {key: value for key, value in wanted.params.items() if key not in stored.params}:
            self._try("parameters", stored, writes.log_params, client, run_id, new)
            stored.params |= new
        self._send_tags(stored, tags)
        for step in sorted(wanted.epochs):
            if stored.steps is None:
                stored.steps = self._try("metrics", stored, writes.steps_of, client, run_id) or set()
            if step not in stored.steps:
                self._try("metrics", stored, writes.log_epoch, client, run_id, wanted.epochs[step], step)
                stored.steps.add(step)
        figures = {stored_name(key): value for key, value in wanted.figures.items()}
        if figures.items() - stored.figures.items():
            self._try("metrics", stored, writes.log_epoch, client, run_id, figures, 0)
            stored.figures |= figures
        self._report_names({key for metrics in wanted.epochs.values() for key in metrics})
        if wanted.answer:
            self._once("tags", stored, ("answer", wanted.answer), writes.set_answer, client, run_id, wanted.answer)
        if wanted.status is not None:
            self._end(stored, wanted, wanted.status)
        for path, inside in wanted.files:
            with suppress(OSError):  # it is gone or unreadable: its reader reports that
                path.open("rb").close()
                status = path.stat()
                item = (str(path), inside, status.st_mtime_ns, status.st_size)
                self._once("files", stored, item, client.log_artifact, run_id, str(path), inside or None)
        if number is not None and wanted.status is not None and wanted.status.is_result and not stored.refused:
            self._send_tags(stored, {RECORDED_TAG: "true"})  # last of all

    def _end(self, stored: Stored, wanted: WantedRun, status: TrialStatus) -> None:
        """End a run before its files are sent: a file that the store refuses must not leave the run open."""
        if stored.ended is None:
            stored.ended = wanted.ended or int(time.time() * 1000)
            end = writes.RUN_STATUS[status], stored.ended
            self._try("the end of a run", stored, self._client.set_terminated, stored.run_id, *end)
        tags = {"status": str(status)} | ({"error": one_line(wanted.error, _ERROR_LENGTH)} if wanted.error else {})
        self._send_tags(stored, tags)

    def _send_tags(self, stored: Stored, tags: Mapping[str, str]) -> None:
        if new := {key: value for key, value in tags.items() if stored.tags.get(key) != value}:
            self._try("tags", stored, writes.set_tags, self._client, stored.run_id, new)
            stored.tags |= new

    def _once(self, what: str, stored: Stored, item: object, do: Callable[..., object], *arguments: Any) -> None:
        if item not in stored.sent:
            self._try(what, stored, do, *arguments)
            stored.sent.add(item)

    def _try(self, what: str, stored: Stored | None, do: Callable[..., Any], *arguments: Any) -> Any:
        """Make a request; None if the store refuses it, which is reported once for each kind.

        Raises:
            _StoreAway: it does not answer.
        """
        try:
            return do(*arguments)
        except Exception as error:
            if is_away(error):
                raise _StoreAway(reason_of(error)) from error
            if stored is not None:
                stored.refused = True
            self._report(what, error)
            return None

    def _report_names(self, metrics: set[str]) -> None:
        changed = {key: stored_name(key) for key in metrics if stored_name(key) != shortened(key)}
        for key in sorted(changed.keys() - self._reported):
            self._reported.add(key)
            self._on_problem(f"MLflow takes no metric {key}; it is there as {changed[key]}")

    def _report(self, what: str, error: Exception) -> None:
        if what not in self._reported:
            self._reported.add(what)
            self._on_problem(f"tracking.uri={self._uri}: MLflow refused {what} ({reason_of(error)}).")
