"""The nights of a study, for every machine that runs them: with object storage in `cluster.storage_path`, there too.

| object below `<cluster.storage_path>/nights/<study>` | what |
| --- | --- |
| `<night>.json` | the night: put when it is over, and again when it is accepted |
| `<night>.pruned` | its checkpoints below `<cluster.storage_path>` were taken away |
| `nights.html` | the last thirty |

A night is put before its own folder calls it over, so a kill leaves it in storage, or interrupted here. One that is
interrupted is nobody else's: whether its driver still runs cannot be told from another machine.
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
    """All nights that began here, and those of other machines that are over; the oldest first. Of one that is in both
    places, storage has the last word.

    Raises:
        UserError: a night cannot be read, or the store refuses or does not answer.
    """
    nights = {night.id: night for night in read_nights(study.folder)}
    if study.shared is not None:
        with _told():
            nights |= {night.id: night for night in _stored(Storage(study.shared))}
    return sorted(nights.values(), key=lambda night: night.begun)


def write(study: Study, night: Night, say: Callable[[str], None], patience_s: float = _PATIENCE_S) -> None:
    """Keep a night; one that is over goes to storage first, and waits for a store that is away.

    Raises:
        UserError: storage has not got it, so it counts as interrupted.
    """
    if study.shared is not None and night.over:
        _patiently(lambda: _put(Storage(str(study.shared)), night), say, patience_s)
    write_night(study.folder, night)


def send_missing(study: Study) -> None:
    """Put what this folder alone has: nights from before there was storage. Raises as `read_all`."""
    if study.shared is None:
        return
    with _told():
        storage = Storage(study.shared)
        there = storage.files()
        for night in read_nights(study.folder):
            if night.over and f"{night.id}.json" not in there:
                _put(storage, night)


def mark_pruned(study: Study, night: Night) -> None:
    """Write down that a night's checkpoints are gone. In storage by an object of its own, since another machine may
    accept the night meanwhile; it says nothing of folders, of which each machine has its own. Raises as `read_all`."""
    if study.shared is None:
        write_night(study.folder, dataclasses.replace(night, pruned=True))
        return
    with _told():
        Storage(study.shared).write(f"{night.id}.pruned", b"")


def put_page(study: Study, page: Path) -> None:
    """Raises as `read_all`."""
    if study.shared is not None:
        with _told():
            Storage(study.shared).put(page, page.name)


def _put(storage: Storage, night: Night) -> None:
    storage.write(f"{night.id}.json", json.dumps(dataclasses.asdict(night), indent=1).encode())


def _stored(storage: Storage) -> Iterator[Night]:
    there = storage.files()
    names = [name for name in there if _NIGHT.fullmatch(name)]
    for name, content in storage.read_all(names).items():
        night = night_of(content.decode(errors="replace"), f"{storage.address}/{name}")
        if name != f"{night.id}.json":  # the id becomes the name of a folder
            raise UserError(f"{storage.address}/{name} says that it is night {night.id!r}; remove that object.")
        yield dataclasses.replace(night, pruned=night.pruned or f"{night.id}.pruned" in there)


def _patiently(put: Callable[[], None], say: Callable[[str], None], patience_s: float) -> None:
    until = time.monotonic() + patience_s
    while True:
        try:
            return put()
        except StorageRefused as error:
            raise UserError(f"cluster.storage_path={error} The night is not over until it is there.") from error
        except StorageAway as error:
            if time.monotonic() > until:
                raise UserError(
                    f"cluster.storage_path={error}; the night is not over until it is there: start it again when the "
                    "store answers."
                ) from error
            say(f"cluster.storage_path={error}; the verdict waits up to {patience_s:g} s for it")
            time.sleep(_PAUSE_S)


@contextmanager
def _told() -> Iterator[None]:
    try:
        yield
    except (StorageAway, StorageRefused) as error:
        raise UserError(f"cluster.storage_path={error}") from error
