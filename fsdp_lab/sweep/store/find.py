"""The folder that a command names: by its path, or `last`."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from fsdp_lab.config import UserError
from fsdp_lab.storage.files import write_text

_LAST = Path("outputs/last_sweep")  # the folder that `resume=last` stands for, seen from where commands are typed


def remember_last(folder: Path) -> None:
    """Make a folder the one that `resume=last` stands for."""
    with suppress(OSError):
        _LAST.parent.mkdir(exist_ok=True)
        write_text(_LAST, str(folder.absolute()))


def _last_folder() -> Path | None:
    """Return the folder that `resume=last` stands for; None if there is none, or it is gone."""
    with suppress(OSError):
        last = Path(_LAST.read_text(errors="replace").strip())
        return last if last.is_absolute() and last.is_dir() else None
    return None


def find_folder(named: str, key: str = "resume") -> Path:
    """Return the folder that `resume=...` stands for.

    Args:
        named: a folder, or `last`.

    Raises:
        UserError: it stands for none.
    """
    if not named:
        raise UserError(f"{key}= is empty; give the sweep's folder, or {key}=last.")
    if named == "last":
        if (last := _last_folder()) is None:
            raise UserError(
                f"{key}=last: no sweep was started from this folder, or {_LAST} is damaged, or the sweep was moved; "
                "give the sweep's own folder."
            )
        return last
    folder = Path(named)
    if not folder.is_dir():
        raise UserError(f"{key}={named} is not a folder; give the sweep's folder, or {key}=last.")
    return folder.absolute()
