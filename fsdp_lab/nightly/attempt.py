"""The sweep of a night, in a process of its own: started, or resumed; and its frame."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from fsdp_lab.config import UserError
from fsdp_lab.config.key_value_args import quoted
from fsdp_lab.nightly.gate import EXCLUDED, STATUS
from fsdp_lab.status import ExitCode

if TYPE_CHECKING:
    import pandas as pd

_LIBC = ctypes.CDLL(None)  # now: between fork and exec nothing may be loaded
_END_LIMIT_S = 60.0  # of a sweep that was told to end, and that takes some seconds for it


def frame_of(folder: Path) -> pd.DataFrame:
    """Return the sweep in a folder as a frame: a row a trial; none, if it ended before its first trial.

    It has the columns of `SweepRecord.frame`, with the name of each setting, and whether its timing is excluded.
    """
    import pandas as pd

    from fsdp_lab.report.settings import Settings
    from fsdp_lab.sweep.sweep_data import sweep_in

    try:
        sweep = sweep_in(folder)[0]
    except UserError:
        return pd.DataFrame(columns=["setting", STATUS, EXCLUDED])
    frame = sweep.frame()
    names = {number: setting.name for number, setting in Settings(frame, sweep.rules).of_trial.items()}
    return frame.assign(**{"setting": frame.index.map(names), EXCLUDED: frame[EXCLUDED].notna()})


def changed_since(folder: Path) -> list[str]:
    """Return the changes of code and libraries since a sweep began: its trials would not be comparable."""
    from fsdp_lab.record.sweep_json import read_start
    from fsdp_lab.sweep.store.changes import changes_of_code

    return changes_of_code(read_start(folder, "sweep")) if (folder / "sweep.json").exists() else []


def run_sweep(arguments: Sequence[str], folder: Path, resume_command: str) -> int:
    """Start the sweep of a command line in a folder, or resume it, and return its exit status.

    After an interrupt it prints `resume_command`.

    Raises:
        UserError: the sweep cannot be resumed until the user fixes something; nothing of it is lost.
    """
    from fsdp_lab.sweep.names import RESUMED_BY

    resumes, place = (folder / "sweep.json").exists(), quoted(folder.absolute())
    if resumes:
        words = ["resume=" + place, *(word for word in arguments if word.startswith("--config-dir="))]
    else:
        words = ["-m", *arguments, "hydra.sweep.dir=" + place]
    # in a session of its own: Ctrl-C comes to us, and we hand it on; it ends with us, however we end
    process = subprocess.Popen(
        [sys.executable, "-m", "fsdp_lab", *words], start_new_session=True, preexec_fn=_end_with_parent,
        env={**os.environ, RESUMED_BY: resume_command},
    )  # fmt: skip
    try:
        status = process.wait()
    except BaseException:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(_END_LIMIT_S)
        process.kill()
        process.wait()
        raise
    if resumes and status == ExitCode.refused:
        raise UserError(f"the night's sweep in {folder} cannot resume: fix the error above, then start again.")
    return status


def _end_with_parent() -> None:
    with suppress(OSError, AttributeError):  # Linux alone has it
        _LIBC.prctl(1, signal.SIGTERM)
