"""What the driver keeps of a sweep, in object storage too: a driver on another machine can take the sweep up.

Objects are put in order by one thread, so that a store that is slow or away keeps no trial waiting.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from fsdp_lab.config import UserError
from fsdp_lab.redact import redacted_file
from fsdp_lab.storage import Storage, StorageAway, StorageRefused
from fsdp_lab.sweep.runner import Ending, Listener, SweepRun
from fsdp_lab.sweep.store.paths import sweep_address

_OF_TRIALS = (
    "forecast.json",
    "turnaround.json",
    "error.txt",
    "outcome.json",
)  # the outcome says that the rest is there
_PAUSE_S = 2.0
_LIMIT_S = 60.0  # for what waits when the sweep has ended


class Outgoing:
    """Objects on their way to storage, in the order in which they were given."""

    def __init__(self, storage: Storage, say: Callable[[str], None]) -> None:
        self._storage, self._say = storage, say
        self._waiting: deque[tuple[str, bytes | None]] = deque()
        self._new = threading.Condition()
        self._told = False
        threading.Thread(target=self._work, name="storage", daemon=True).start()

    def put(self, name: str, content: bytes | None) -> None:
        """
        Args:
            content: None removes the object.
        """
        with self._new:
            self._waiting.append((name, content))
            self._new.notify_all()

    def settle(self, limit_s: float) -> list[str]:
        """Wait at most so long; returns the names of what still waits."""
        with self._new:
            self._new.wait_for(lambda: not self._waiting, limit_s)
            return [name for name, _ in self._waiting]

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
            if not self._told:
                self._say(f"cluster.storage_path={error}; the driver's files are sent when it does")
            self._told = True
            return False
        except StorageRefused as error:
            self._say(f"cluster.storage_path={error} {name} is not there.")
        self._told = False
        return True


class StorageCopy(Listener):
    """Keeps a copy of the sweep's folder in storage, but for what the trials' processes put there themselves."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._outgoing: Outgoing | None = None

    def opened(self, sweep: SweepRun) -> None:
        """
        Raises:
            UserError: the store refuses, or does not answer.
        """
        address = sweep_address(sweep.config.cluster.storage_path, sweep.folder)
        if address is None:
            return
        try:
            storage = Storage(address)
            for number in range(len(sweep.states)):
                for name, content in self._settings(sweep, number):
                    storage.write(name, content)
            for name in ("multirun.yaml", "trials.jsonl", "sweep.json"):  # the last makes it a sweep
                with suppress(FileNotFoundError):
                    storage.write(name, content_of(sweep.folder / name))
        except StorageAway as error:
            raise UserError(f"cluster.storage_path={error}.") from error
        self._outgoing = Outgoing(storage, self._say)
        self._say(f"the sweep is kept in {address}; from any machine: python -m fsdp_lab resume={address} trust=true")

    def added(self, sweep: SweepRun, number: int) -> None:
        if self._outgoing:
            for name, content in self._settings(sweep, number):
                self._outgoing.put(name, content)
            self._outgoing.put("trials.jsonl", content_of(sweep.folder / "trials.jsonl"))

    def began(self, sweep: SweepRun, number: int) -> None:
        if self._outgoing and sweep.states[number].goes_on:
            self._outgoing.put(self._below(sweep, number, "outcome.json"), None)

    def ended(self, sweep: SweepRun, number: int) -> None:
        if self._outgoing:
            folder = sweep.folder_of(number)
            for path in (*sorted(folder.glob("failures.*/*")), *(folder / name for name in _OF_TRIALS)):
                with suppress(FileNotFoundError):
                    self._outgoing.put(self._below(sweep, number, str(path.relative_to(folder))), content_of(path))

    def finish(self, sweep: SweepRun, ending: Ending) -> None:
        if self._outgoing is None:
            return
        for path in sorted(sweep.folder.iterdir()):
            if path.suffix in (".csv", ".html", ".md", ".json") and path.name not in ("sweep.json", *_OF_TRIALS):
                self._outgoing.put(path.name, content_of(path))
        if unsent := self._outgoing.settle(0.0 if ending.early else _LIMIT_S):
            sweep.say(f"object storage lacks {len(unsent)} files ({unsent[0]}): resume the sweep from {sweep.folder}")

    def _settings(self, sweep: SweepRun, number: int) -> list[tuple[str, bytes]]:
        files = sorted((sweep.states[number].trial.folder / ".hydra").glob("*.yaml"))
        return [(self._below(sweep, number, f".hydra/{path.name}"), content_of(path)) for path in files]

    @staticmethod
    def _below(sweep: SweepRun, number: int, name: str) -> str:
        return str((sweep.folder_of(number) / name).relative_to(sweep.folder.absolute()))


def content_of(path: Path) -> bytes:
    """Return what storage gets of a file of the driver's: no password, which `sweep.json` may hold."""
    return redacted_file(path).encode() if path.name == "sweep.json" else path.read_bytes()
