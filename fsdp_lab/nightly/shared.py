"""The nights of a study, for every machine that runs them: with object storage in `cluster.storage_path`, there too.

| object below `<cluster.storage_path>/nights/<study>` | what |
| --- | --- |
| `<night>.json` | the night: put when it is over, and again when it is accepted |
| `<night>.pruned` | its checkpoints below `<cluster.storage_path>` were taken away |
| `nights.html` | the last thirty |

A night is put before its own folder records its end, so a kill leaves it in storage, or interrupted here. Only the same
machine resumes an interrupted night: another one cannot know whether its driver still runs.
"""

from __future__ import annotations

import dataclasses
import json
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from fsdp_lab.config import UserError
from fsdp_lab.nightly.nights import Night, night_of, read_nights, write_night
from fsdp_lab.nightly.study import Study
from fsdp_lab.storage import Storage, StorageAway, StorageRefused

_NIGHT = re.compile(r"([\w-]+)\.json")
_PATIENCE_S = 300.0  # for a store that is away when a night is over
_PAUSE_S = 2.0


def read_all(study: Study) -> list[Night]:
    """Return all nights that began here, and those of other machines that are over; the oldest first.

    If both have a night, storage's version counts.

    Raises:
        UserError: a night cannot be read, or the store refuses or does not answer.
    """
    nights = {night.id: night for night in read_nights(study.folder)}
    if study.shared is not None:
        with _translated_errors():
            nights |= {night.id: night for night in _stored(Storage(study.shared))}
    return sorted(nights.values(), key=lambda night: night.begun)


def write(study: Study, night: Night, log: Callable[[str], None], patience_s: float = _PATIENCE_S) -> None:
    """Keep a night; one that is over goes to storage first, and waits for a store that is away.

    Raises:
        UserError: storage has not got it, so it counts as interrupted.
    """
    if study.shared is not None and night.over:
        _patiently(lambda: _put(Storage(str(study.shared)), night), log, patience_s)
    write_night(study.folder, night)


def send_missing(study: Study) -> None:
    """Put nights that only this folder has, from before there was storage. Raises as `read_all`."""
    if study.shared is None:
        return
    with _translated_errors():
        storage = Storage(study.shared)
        there = storage.files()
        for night in read_nights(study.folder):
            if night.over and f"{night.id}.json" not in there:
                _put(storage, night)


def mark_pruned(study: Study, night: Night) -> None:
    """Record that a night's checkpoints were removed. Raises as `read_all`.

    In storage that is a separate object, because another machine may accept the night meanwhile. It does not concern
    folders, of which each machine has its own.
    """
    if study.shared is None:
        write_night(study.folder, dataclasses.replace(night, pruned=True))
        return
    with _translated_errors():
        Storage(study.shared).write(f"{night.id}.pruned", b"")


def put_page(study: Study, page: Path) -> None:
    """Put the page of nights. Raises as `read_all`."""
    if study.shared is not None:
        with _translated_errors():
            Storage(study.shared).put(page, page.name)


def _put(storage: Storage, night: Night) -> None:
    storage.write(f"{night.id}.json", json.dumps(dataclasses.asdict(night), indent=1).encode())


def _stored(storage: Storage) -> Iterator[Night]:
    there = storage.files()
    names = [name for name in there if _NIGHT.fullmatch(name)]
    for name, content in storage.read_all(names).items():
        night = night_of(content.decode(errors="replace"), f"{storage.address}/{name}")
        if name != f"{night.id}.json":  # the id becomes the name of a folder
            raise UserError(f"{storage.address}/{name} holds the record of night {night.id!r}; remove that object.")
        yield dataclasses.replace(night, pruned=night.pruned or f"{night.id}.pruned" in there)


def _patiently(put: Callable[[], None], log: Callable[[str], None], patience_s: float) -> None:
    until = time.monotonic() + patience_s
    while True:
        try:
            return put()
        except StorageRefused as error:
            raise UserError(
                f"cluster.storage_path={error} The night ends only when its verdict is stored there."
            ) from error
        except StorageAway as error:
            if time.monotonic() > until:
                raise UserError(
                    f"cluster.storage_path={error}; the night ends only when its verdict is stored there: start it "
                    "again when the store answers."
                ) from error
            log(f"cluster.storage_path={error}; waiting up to {patience_s:g} s to store the verdict")
            time.sleep(_PAUSE_S)


@contextmanager
def _translated_errors() -> Iterator[None]:
    try:
        yield
    except (StorageAway, StorageRefused) as error:
        raise UserError(f"cluster.storage_path={error}") from error
