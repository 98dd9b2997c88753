"""The sweep of a night, in a process of its own: started, or resumed."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path

from fsdp_lab.config import UserError
from fsdp_lab.locks import InUse, exclusive, holder
from fsdp_lab.report.data import SweepData
from fsdp_lab.status import ExitCode

_LIBC = ctypes.CDLL(None)  # now: between fork and exec nothing may be loaded
_END_LIMIT_S = 60.0  # of a sweep that was told to end
_LOCK_LIMIT_S = 120.0  # of what a killed night left, to end


def set_aside_if_changed(folder: Path, log: Callable[[str], None]) -> bool:
    """Set a sweep aside that was begun with other code, because its trials would not be comparable.

    Returns:
        whether it was.

    Raises:
        UserError: the sweep that was begun there does not end.
    """
    if not (folder / "sweep.json").exists():
        return False
    _wait_until_free(folder, log)
    if not changed_since(folder):
        return False
    aside = next(p for n in count(1) if not (p := folder.with_name(f"sweep.{n}")).exists())
    log(f"the code changed after the night began: its results move to {aside.name}, and it starts again")
    folder.rename(aside)
    return True


def run_sweep(arguments: Sequence[str], folder: Path, resume_command: str) -> int:
    """Start a night's sweep, or resume it.

    Args:
        arguments: its command line.
        folder: the sweep's.
        resume_command: the command that resumes the night, for the message after an interrupt.

    Returns:
        its exit status: 0, 1 (a trial failed), 2 (refused), or another if it was killed.

    Raises:
        UserError: the sweep cannot be resumed until the user fixes something; nothing of it is lost.
    """
    if not (folder / "sweep.json").exists():
        return _run(["-m", *arguments, "hydra.sweep.dir=" + _quoted(folder)], resume_command)
    options = [argument for argument in arguments if argument.startswith("--config-dir=")]  # taken from no folder
    status = _run(["resume=" + _quoted(folder), *options], resume_command)
    if status == ExitCode.refused:
        raise UserError(f"the night's sweep in {folder} cannot resume: fix the error above, then start again.")
    return status


def changed_since(folder: Path) -> list[str]:
    """Return the changes of code and libraries since a sweep was begun."""
    from fsdp_lab.record.sweep_json import read_record
    from fsdp_lab.sweep.store.changes import changes_of_code

    return changes_of_code(read_record(folder, "sweep"))


def _run(arguments: Sequence[str], resume_command: str) -> int:
    from fsdp_lab.sweep.names import RESUMED_BY

    # in a session of its own: Ctrl-C comes to us, and we hand it on; it ends with us, however we end
    process = subprocess.Popen(
        [sys.executable, "-m", "fsdp_lab", *arguments], start_new_session=True, preexec_fn=_end_with_parent,
        env={**os.environ, RESUMED_BY: resume_command},
    )  # fmt: skip
    try:
        return process.wait()
    except BaseException:
        process.send_signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(_END_LIMIT_S)
        if process.poll() is None:
            process.kill()
            process.wait()
        raise


def _end_with_parent() -> None:
    with suppress(OSError, AttributeError):  # Linux alone has it
        _LIBC.prctl(1, signal.SIGTERM)


def _wait_until_free(folder: Path, log: Callable[[str], None]) -> None:
    """Wait until the sweep of a killed night has ended.

    Raises:
        UserError: it does not end.
    """
    lock = folder / ".lock"
    if holder(lock):
        log(f"waiting up to {_LOCK_LIMIT_S:g} s for the sweep in {folder} to end")
    try:
        with exclusive(lock, _LOCK_LIMIT_S):
            pass
    except InUse as error:
        raise UserError(f"the sweep in {folder} still runs ({error.holder}); end it first.") from None


def _quoted(folder: Path) -> str:
    text = str(folder.absolute()).replace("\\", "\\\\").replace("'", "\\'")
    return f"'{text}'"


def results_in(folder: Path) -> tuple[SweepData | None, str]:
    """Return the sweep in a folder and its id; None if it ended before its first trial."""
    from fsdp_lab.sweep.sweep_data import sweep_in

    try:
        sweep, record, _ = sweep_in(folder)
    except UserError:
        return None, ""
    return sweep, record.id
