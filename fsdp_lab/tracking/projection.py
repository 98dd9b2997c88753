"""MLflow as a projection of the record: one thread sends what the record has and the store has not.

The driver says which runs have changed. The thread asks what each should hold, compares that with what it knows of the
store, and sends the difference. After a failure it looks again at what the store has, so nothing is written twice; what
could not be sent stays wanted. Ctrl-C reaches the main thread only, so no write is cut short: an interrupted one would
leave SQLite locked.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fsdp_lab.config.sweep import TrackingConfig
from fsdp_lab.redact import redact
from fsdp_lab.status import TrialStatus
from fsdp_lab.tracking import writes
from fsdp_lab.tracking.store import open_store, refusal, search_runs, set_answer, ui_url
from fsdp_lab.tracking.tags import (
    EXCLUDED,
    RECORDED_TAG,
    SWEEP_TAG,
    TRIAL_TAG,
    fact_tags,
    one_line,
    shortened,
)
from fsdp_lab.wording import count

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run

_SPEAK_S = 10.0  # then a wait says what it waits for
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 30.0  # between two attempts while the store is away
# An expired token or a proxy takes a person to fix, so the writes wait.
_AWAY = (401, 403, 408, 429)
_END_TAGS = ("status", "error", "reason", RECORDED_TAG)  # removed from a run that continues
_ERROR_LENGTH = 500


@dataclass
class WantedRun:
    """What the store should hold of the sweep, or of one trial.

    Attributes:
        name: of the run.
        first_tags: those that it is created with; people may change them later.
        tags: those that are kept as they are here.
        params: the parameters. MLflow changes none, so differences go to the tag `resumed_with`.
        epochs: step -> metrics; step 0 is the forecast.
        facts: of a trial; they become tags and the data set with its digest.
        files: path and the folder of the artifacts that it goes to.
        answer: the beginning of its description; "": none.
        status: how it ended; None: it runs.
        error: why it failed, kept as the tag `error`: one line of at most 500 characters.
        ended: when, in milliseconds since 1970; None: now.
    """

    name: str
    first_tags: Mapping[str, str] = field(default_factory=dict)
    tags: Mapping[str, str] = field(default_factory=dict)
    params: Mapping[str, str] = field(default_factory=dict)
    epochs: Mapping[int, Mapping[str, float]] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)
    files: Sequence[tuple[Path, str]] = ()
    answer: str = ""
    status: TrialStatus | None = None
    error: str | None = None
    ended: int | None = None


@dataclass
class _Stored:
    """What is known of a run in the store.

    Attributes:
        run_id: of the run.
        steps: of the metrics that it has; None: not known, so that the store has to be asked.
        name: that it has.
        tags: that it has.
        params: that it has.
        sent: other items that this process has sent.
        end: its status and its end in milliseconds; None: it runs.
        refused: the store has refused an item, so it is not complete.
    """

    run_id: str
    name: str
    tags: dict[str, str]
    params: dict[str, str]
    steps: set[int] | None
    end: tuple[str, int | None] | None = None
    sent: set[object] = field(default_factory=set)
    refused: bool = False

    @staticmethod
    def of(run: Run) -> _Stored:
        end = None if run.info.end_time is None else (run.data.tags.get("status", ""), run.info.end_time)
        return _Stored(run.info.run_id, run.info.run_name, dict(run.data.tags), dict(run.data.params), None, end)


class _StoreAway(Exception):
    """The store, or its disk or network, failed."""


class Projection:
    """Keeps the runs of a sweep in MLflow as the record has them.

    Only `open` raises: after it the sweep is worth more than its runs. What the store refuses is reported once for each
    kind, and dropped. While the store does not answer, everything stays wanted.

    Args:
        tracking: the store.
        sweep_id: by which a later start finds the runs.
        wanted: returns what the run of a trial should hold, or with None that of the sweep; called from the thread.
        on_problem: gets a message about a problem.
    """

    def __init__(
        self,
        tracking: TrackingConfig,
        sweep_id: str,
        wanted: Callable[[int | None], WantedRun],
        on_problem: Callable[[str], None],
    ) -> None:
        self._tracking, self._sweep_id, self._wanted = tracking, sweep_id, wanted
        self._uri, self._on_problem = redact(tracking.uri), on_problem
        self._client: MlflowClient | None = None
        self._experiment_id = ""
        self._stored: dict[int | None, _Stored] = {}
        self._unsure: set[int | None] = set()  # a write of these may have got through
        self._changed: dict[int | None, None] = {}  # in order
        self._new = threading.Condition()
        self._busy = self._away = self._stopped = self._hurry = False
        self._reported: set[str] = set()
        self._last_success = 0.0
        self._thread = threading.Thread(target=self._work, name="mlflow", daemon=True)

    def open(self, resumed: bool = False, again: Sequence[int] = ()) -> None:
        """Make the store's schema and the experiment, find the runs of an earlier start, and start the thread.

        Args:
            resumed: an earlier start may have made runs.
            again: trials that are measured again: their runs are kept, as none of the sweep's trials any more.

        Raises:
            TrackingError: the store is missing (reported within about 10 s), cannot be written, or is of another
                version of MLflow.
        """
        self._client, self._experiment_id = open_store(self._tracking)
        if resumed:
            try:
                for run in self._runs_of_sweep():
                    self._stored[_number(run)] = _Stored.of(run)
                for number in again:
                    if stored := self._stored.pop(number, None):
                        self._client.set_tag(stored.run_id, TRIAL_TAG, f"{number} {EXCLUDED}")
                        self._client.update_run(stored.run_id, name=shortened(f"{stored.name} ({EXCLUDED})"))
            except Exception as error:  # noqa: BLE001 (whatever MLflow or a driver of its database raises)
                raise refusal(self._tracking.uri, error) from None
        self._last_success = time.monotonic()
        self._thread.start()

    def _runs_of_sweep(self) -> list[Run]:
        assert self._client is not None
        runs = search_runs(self._client, self._experiment_id, f"tags.`{SWEEP_TAG}` = '{self._sweep_id}'")
        return [run for run in runs if run.data.tags.get(TRIAL_TAG, "0").isdigit()]

    @property
    def ui_url(self) -> str | None:
        """Where a UI lists the experiment's runs; None where no server is known."""
        return ui_url(self._tracking, self._experiment_id) if self._experiment_id else None

    def run_id(self, number: int | None) -> str:
        """Return the id of a run; "" while it has none."""
        stored = self._stored.get(number)
        return stored.run_id if stored else ""

    def is_recorded(self, number: int | None) -> bool:
        """Return whether the store has everything of a run that ended in an earlier start."""
        stored = self._stored.get(number)
        return stored is not None and RECORDED_TAG in stored.tags

    def ended(self, number: int | None) -> int | None:
        """Return when a run ended by the store, in milliseconds since 1970; None: it has not."""
        stored = self._stored.get(number)
        return stored.end[1] if stored and stored.end else None

    def has_tag(self, number: int | None, key: str, value: str) -> bool:
        """Return whether a run in the store has a tag with that value."""
        stored = self._stored.get(number)
        return stored is not None and stored.tags.get(key) == value

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
        begun, told = time.monotonic(), False
        with self._new:
            self._hurry = True
            self._last_success = begun
            self._new.notify_all()
            if self._away and patience_s > 0 and limit_s is None:
                self._on_problem(f"waiting up to tracking.patience_s={patience_s:g} s for the MLflow store to answer")
            while (self._changed or self._busy) and self._thread.is_alive():
                now = time.monotonic()
                if self._away and now - self._last_success >= patience_s:
                    break
                if limit_s is not None and now - begun >= limit_s:
                    break
                if not told and now - begun >= _SPEAK_S:
                    told = True
                    self._on_problem(f"{count(len(self._changed) + self._busy, 'run')} still to be sent to MLflow")
                self._new.wait(0.2)
            self._hurry = False
            return len(self._changed) + self._busy

    def stop(self) -> None:
        """End the thread once its current write is made; wait a second for it at most."""
        with self._new:
            self._stopped = True
            self._new.notify_all()
        if self._thread.is_alive():
            self._thread.join(1.0)

    def _work(self) -> None:
        pause_s = _FIRST_PAUSE_S
        while True:
            with self._new:
                self._new.wait_for(lambda: self._stopped or bool(self._changed))
                if self._stopped:
                    return
                number = None if None in self._changed else next(iter(self._changed))  # the parent of the others first
                del self._changed[number]
                self._busy = True
            try:
                self._send(number)
            except _StoreAway as error:
                self._note_away(str(error))
                with self._new:
                    self._changed.setdefault(number)  # behind the others
                    self._busy = False
                    self._new.notify_all()
                    self._new.wait_for(lambda: self._stopped or self._hurry, pause_s)
                    hurried = self._hurry
                if hurried:
                    time.sleep(min(_FIRST_PAUSE_S, pause_s))
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
                continue
            except Exception as error:  # noqa: BLE001 (what one run lacks must not end the thread)
                self._report("the run of a trial", error)
            pause_s = _FIRST_PAUSE_S
            with self._new:
                self._busy, self._last_success = False, time.monotonic()
                if self._away and not self._changed:
                    self._away = False
                    self._on_problem("the MLflow store answers again; what it lacked was sent")
                self._new.notify_all()

    def _note_away(self, reason: str) -> None:
        if not self._away:
            self._away = True
            self._on_problem(
                f"tracking.uri={self._uri}: the MLflow store does not answer ({reason}). Trials continue and keep "
                "their results in their folders. They are sent when the store answers again."
            )

    def _send(self, number: int | None) -> None:
        """Send the difference between what the record and the store have of a run."""
        client = self._client
        assert client is not None
        wanted = self._wanted(number)
        try:
            stored = self._stored.get(number) or self._find(number)
            if stored is None:
                stored = self._try("a run", None, lambda: self._create(number, wanted))
                if stored is None:
                    return
            self._stored[number] = stored
            self._update(client, number, stored, wanted)
        except _StoreAway:
            self._unsure.add(number)
            if number in self._stored:
                self._stored[number].steps = None  # what it has by now is for the store to say
            raise

    def _find(self, number: int | None) -> _Stored | None:
        """Return a run whose creation seemed to fail, and got through."""
        if number not in self._unsure:
            return None
        try:
            for run in self._runs_of_sweep():
                if _number(run) == number:
                    return _Stored.of(run)
        except Exception as error:
            if _is_away(error):
                raise _StoreAway(_reason(error)) from error
            self._report("a search for runs", error)
        return None

    def _create(self, number: int | None, wanted: WantedRun) -> _Stored:
        assert self._client is not None
        tags = {**wanted.first_tags, SWEEP_TAG: self._sweep_id, **wanted.tags}
        if number is not None:
            tags[TRIAL_TAG] = str(number)
            if parent := self.run_id(None):
                tags["mlflow.parentRunId"] = parent
        name, now = shortened(redact(wanted.name)), int(time.time() * 1000)
        run = self._client.create_run(self._experiment_id, now, tags=tags, run_name=name)
        return _Stored(str(run.info.run_id), name, dict(tags), {}, set())

    def _update(self, client: MlflowClient, number: int | None, stored: _Stored, wanted: WantedRun) -> None:
        run_id = stored.run_id

        def send(what: str, item: object, do: Callable[[], object]) -> None:
            if item not in stored.sent:
                self._try(what, stored, do)
                stored.sent.add(item)

        if (stored.end is not None and stored.end[0] not in ("", str(wanted.status))) or _goes_on(stored, wanted):
            self._try("a run", stored, lambda: _reopen(client, run_id))
            stored.end = None
            for tag in _END_TAGS:
                stored.tags.pop(tag, None)
        if (name := shortened(redact(wanted.name))) != stored.name:
            self._try("tags", stored, lambda: client.update_run(run_id, name=name))
            stored.name = name
        tags = {**wanted.tags, **fact_tags(wanted.facts)}
        new_params = {key: value for key, value in wanted.params.items() if key not in stored.params}
        if other := [f"{key}={v}" for key, v in wanted.params.items() if stored.params.get(key, v) != v]:
            tags["resumed_with"] = " ".join(other)
        if new_params:
            self._try("parameters", stored, lambda: writes.log_params(client, run_id, new_params))
            stored.params |= new_params
        self._send_tags(client, stored, tags)
        facts = wanted.facts
        send("facts", ("data", facts.get("data_digest")), partial(writes.log_dataset, client, run_id, facts))
        for step in sorted(wanted.epochs):
            if stored.steps is None:
                stored.steps = self._try("metrics", stored, partial(writes.steps_of, client, run_id)) or set()
            if step not in stored.steps:
                self._try("metrics", stored, partial(writes.log_epoch, client, run_id, wanted.epochs[step], step))
                stored.steps.add(step)
        if wanted.answer:
            send("tags", ("answer", wanted.answer), lambda: set_answer(client, run_id, wanted.answer))
        if wanted.status is not None:
            self._end(client, stored, wanted)
        for path, inside in wanted.files:
            with suppress(OSError):  # it is gone or unreadable: its reader reports that
                path.open("rb").close()
                status = path.stat()
                item = (str(path), inside, status.st_mtime_ns, status.st_size)
                send("files", item, partial(writes.log_file, client, run_id, path, inside))
        if number is not None and wanted.status is not None and wanted.status.is_result and not stored.refused:
            self._send_tags(client, stored, {RECORDED_TAG: "true"})  # last of all

    def _end(self, client: MlflowClient, stored: _Stored, wanted: WantedRun) -> None:
        """End a run, before its files: one that the store does not take must not leave the run open."""
        assert wanted.status is not None
        status, when = wanted.status, wanted.ended or int(time.time() * 1000)
        if stored.end is not None and not stored.end[0]:  # its end was cut short
            when = stored.end[1] or when
        if stored.end is None:
            do = lambda: client.set_terminated(stored.run_id, writes.RUN_STATUS[status], when)  # noqa: E731
            self._try("the end of a run", stored, do)
        stored.end = (str(status), when)
        tags = {"status": str(status)} | ({"error": one_line(wanted.error, _ERROR_LENGTH)} if wanted.error else {})
        self._send_tags(client, stored, tags)

    def _send_tags(self, client: MlflowClient, stored: _Stored, tags: Mapping[str, str]) -> None:
        if new := {key: value for key, value in tags.items() if stored.tags.get(key) != value}:
            self._try("tags", stored, lambda: writes.set_tags(client, stored.run_id, new))
            stored.tags |= new

    def _try(self, what: str, stored: _Stored | None, do: Callable[[], Any]) -> Any:
        """Make a write. What the store refuses is reported once for each kind, and None.

        Raises:
            _StoreAway: it does not answer.
        """
        try:
            return do()
        except Exception as error:
            if _is_away(error):
                raise _StoreAway(_reason(error)) from error
            if stored is not None:
                stored.refused = True
            self._report(what, error)
            return None

    def _report(self, what: str, error: Exception) -> None:
        if what not in self._reported:
            self._reported.add(what)
            self._on_problem(f"tracking.uri={self._uri}: MLflow refused {what} ({_reason(error)}).")


def _number(run: Run) -> int | None:
    tag = run.data.tags.get(TRIAL_TAG)
    return None if tag is None else int(tag)


def _goes_on(stored: _Stored, wanted: WantedRun) -> bool:
    return stored.end is not None and wanted.status is None


def _reopen(client: MlflowClient, run_id: str) -> None:
    client.update_run(run_id, "RUNNING")
    for tag in _END_TAGS:
        with suppress(Exception):  # there was none
            client.delete_tag(run_id, tag)


def _reason(error: Exception) -> str:
    """Return an error in one line. Of urllib3's chain of wrappers, only what stands last says something."""
    return one_line(str(error).rpartition("Caused by ")[2], 300) or type(error).__name__


def _is_away(error: Exception) -> bool:
    """Whether the store, or its disk or network, failed; otherwise it answered and refused this one write."""
    from mlflow.exceptions import MlflowException

    if isinstance(error, MlflowException):
        status = error.get_http_status_code()
        return status >= 500 or status in _AWAY or error.error_code == "ENDPOINT_NOT_FOUND"
    return isinstance(error, OSError)
