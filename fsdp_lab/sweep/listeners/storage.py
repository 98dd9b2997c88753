"""A copy of the driver's files in object storage, so that a driver on another machine can resume the sweep.

One thread puts objects in order, so no trial waits for a store that is slow or away.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable

from fsdp_lab.config import UserError
from fsdp_lab.record.paths import copy_of
from fsdp_lab.record.sweep import RECORD
from fsdp_lab.record.trial_folder import ENDED, TRIAL_FILES, contents
from fsdp_lab.report.write import FILES
from fsdp_lab.storage import Storage, StorageAway, StorageRefused
from fsdp_lab.sweep.names import resume_command, resume_from_storage
from fsdp_lab.sweep.runner import Ending, Listener, SweepRun
from fsdp_lab.wording import count

_SETTINGS = [".hydra/*.yaml"]  # of a trial
_PAUSE_S = 2.0
_LIMIT_S = 60.0  # for what waits when the sweep has ended
_EARLY_LIMIT_S = 3.0  # when it is interrupted: all of it ends within eight


class Outgoing:
    """Puts objects into storage in order, from a thread of its own.

    Args:
        storage: the store.
        log: logs a message for the user.
    """

    def __init__(self, storage: Storage, log: Callable[[str], None]) -> None:
        self._storage, self._log = storage, log
        self._waiting: deque[tuple[str, bytes | None]] = deque()
        self._new = threading.Condition()
        self._away_reported = False
        threading.Thread(target=self._work, name="storage", daemon=True).start()

    def put(self, name: str, content: bytes | None) -> None:
        """Queue an object.

        Args:
            name: of the object.
            content: None: remove the object.
        """
        with self._new:
            self._waiting.append((name, content))
            self._new.notify_all()

    def settle(self, limit_s: float) -> list[str]:
        """Wait at most so many seconds, and return the names of objects that still wait."""
        with self._new:
            self._new.wait_for(lambda: not self._waiting, limit_s)
            return list(dict.fromkeys(name for name, _ in self._waiting))

    def _work(self) -> None:
        while True:
            with self._new:
                self._new.wait_for(lambda: bool(self._waiting))
                name, content = self._waiting[0]
            if not self._sent(name, content):
                time.sleep(_PAUSE_S)
                continue
            with self._new:
                self._waiting.popleft()
                self._new.notify_all()

    def _sent(self, name: str, content: bytes | None) -> bool:
        """Whether it is done with."""
        try:
            if content is None:
                self._storage.delete([name])
            else:
                self._storage.write(name, content)
        except StorageAway as error:
            if not self._away_reported:
                self._log(f"cluster.storage_path={error}; the driver's files are sent when it answers")
            self._away_reported = True
            return False
        except StorageRefused as error:
            self._log(f"cluster.storage_path={error} {name} was not written there.")
        self._away_reported = False
        return True


class StorageCopy(Listener):
    """Keeps a copy of the sweep's folder in storage, except for checkpoints and large files: ranks put those there."""

    def __init__(self, log: Callable[[str], None]) -> None:
        self._log = log
        self._outgoing: Outgoing | None = None

    def opened(self, sweep: SweepRun) -> None:
        """Put what another driver needs to resume the sweep, and results that storage lacks.

        Raises:
            UserError: the store refuses, or does not answer.
        """
        address = sweep.address
        if address is None:
            return
        try:
            storage = Storage(address)
            there = storage.files() if sweep.plan.resumed else {}
            for number in range(len(sweep.states)):
                for name, content in contents(sweep.folder_of(number), _SETTINGS):
                    storage.write(self._below(sweep, number, name), content)
            for name, content in contents(sweep.folder, ("multirun.yaml", "trials.jsonl", "sweep.json")):
                storage.write(name, content)  # the last makes it a sweep
        except StorageAway as error:
            raise UserError(f"cluster.storage_path={error}.") from error
        self._outgoing = Outgoing(storage, self._log)
        if sweep.plan.resumed and copy_of(sweep.folder) is None:  # what a copy has and storage lacks is out of date
            for number, state in enumerate(sweep.states):
                if state.ended and self._below(sweep, number, "outcome.json") not in there:
                    self.ended(sweep, number)
        self._log(f"the sweep is stored in {address}; from any machine: {resume_from_storage(address)}")

    def added(self, sweep: SweepRun, number: int) -> None:
        """Put the settings of a suggested trial."""
        self._put_of_trial(sweep, number, _SETTINGS)
        self._put(contents(sweep.folder, ["trials.jsonl"]))

    def began(self, sweep: SweepRun, number: int) -> None:
        """Remove what storage has about the end of a resumed trial."""
        if self._outgoing and sweep.states[number].resuming:
            for name in ENDED:
                self._outgoing.put(self._below(sweep, number, name), None)

    def epoch(self, sweep: SweepRun, number: int, metrics: dict[str, float]) -> None:
        """Put the epochs of the trial."""
        self._put_of_trial(sweep, number, ("facts.json", "metrics.jsonl"))

    def ended(self, sweep: SweepRun, number: int) -> None:
        """Put the results of the trial."""
        self._put_of_trial(sweep, number, (kind.pattern for kind in TRIAL_FILES if kind.stored_by == "driver"))

    def finish(self, sweep: SweepRun, ending: Ending) -> None:
        """Put the sweep's tables and reports, wait for the store, and log how many files it lacks."""
        if self._outgoing is None or not sweep.has_folder:
            return
        self._put(contents(sweep.folder, ("results.csv", RECORD, *FILES)))
        if unsent := self._outgoing.settle(_EARLY_LIMIT_S if ending.early else _LIMIT_S):
            again = "to send them" if copy_of(sweep.folder) is None else "to end their trials again"
            sweep.log(
                f"{count(len(unsent), 'file')} did not reach object storage ({unsent[0]}); {again}: "
                f"{resume_command(sweep.folder)}"
            )

    def _put_of_trial(self, sweep: SweepRun, number: int, patterns: Iterable[str]) -> None:
        named = contents(sweep.folder_of(number), patterns)
        self._put((self._below(sweep, number, name), content) for name, content in named)

    def _put(self, files: Iterable[tuple[str, bytes]]) -> None:
        if self._outgoing:
            for name, content in files:
                self._outgoing.put(name, content)

    @staticmethod
    def _below(sweep: SweepRun, number: int, name: str) -> str:
        return str((sweep.folder_of(number) / name).relative_to(sweep.folder.absolute()))
