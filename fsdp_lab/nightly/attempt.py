"""The sweep of a night, in a process of its own, and its frame."""

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
from fsdp_lab.nightly.gate import STATUS

if TYPE_CHECKING:
    import pandas as pd

_LIBC = ctypes.CDLL(None)  # now: between fork and exec nothing may be loaded
_END_LIMIT_S = 60.0  # of a sweep that was told to end, and that takes some seconds for it


def frame_of(folder: Path) -> pd.DataFrame:
    """Return the sweep in a folder as a frame: a row a trial; none, if it ended before its first trial.

    It has the columns of `SweepRecord.frame`, with the name of each setting.
    """
    import pandas as pd

    from fsdp_lab.report.settings import Settings
    from fsdp_lab.sweep.sweep_data import sweep_in

    try:
        sweep = sweep_in(folder)[0]
    except UserError:
        return pd.DataFrame(columns=["setting", STATUS])
    frame = sweep.frame()
    names = {number: setting.name for number, setting in Settings(frame, sweep.rules).of_trial.items()}
    return frame.assign(setting=frame.index.map(names))


def run_sweep(arguments: Sequence[str], folder: Path) -> int:
    from fsdp_lab.sweep.names import OF_A_NIGHT

    words = ["-m", *arguments, "hydra.sweep.dir=" + quoted(folder.absolute())]
    # in a session of its own: Ctrl-C comes to us, and we hand it on; it ends with us, however we end
    process = subprocess.Popen(
        [sys.executable, "-m", "fsdp_lab", *words], start_new_session=True, preexec_fn=_end_with_parent,
        env={**os.environ, OF_A_NIGHT: "true"},
    )  # fmt: skip
    try:
        return process.wait()
    except BaseException:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(_END_LIMIT_S)
        process.kill()
        process.wait()
        raise


def _end_with_parent() -> None:
    with suppress(OSError, AttributeError):  # Linux alone has it
        _LIBC.prctl(1, signal.SIGTERM)
