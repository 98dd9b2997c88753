"""The sweep of a night: started, or resumed; and its frame."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fsdp_lab.config import UserError
from fsdp_lab.config.key_value_args import quoted
from fsdp_lab.nightly.gate import EXCLUDED, STATUS
from fsdp_lab.status import ExitCode

if TYPE_CHECKING:
    import pandas as pd


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
    """Run the sweep of a command line in a folder in this process, or resume it, and return its exit status.

    An interrupt ends this process with 130, after the sweep has saved its state and printed `resume_command`.

    Raises:
        UserError: the sweep cannot be resumed until the user fixes something; nothing of it is lost.
    """
    from fsdp_lab.__main__ import main
    from fsdp_lab.sweep.names import RESUMED_BY

    resumes = (folder / "sweep.json").exists()
    options = [argument for argument in arguments if argument.startswith("--config-dir=")]  # taken from no folder
    new = ["-m", *arguments, "hydra.sweep.dir=" + quoted(folder.absolute())]
    sys.argv[1:] = ["resume=" + quoted(folder.absolute()), *options] if resumes else new
    os.environ[RESUMED_BY] = resume_command
    try:
        main()
    except SystemExit as end:
        if end.code == ExitCode.refused and resumes:
            raise UserError(
                f"the night's sweep in {folder} cannot resume: fix the error above, then start again."
            ) from None
        return int(end.code or 0)
    except Exception:  # noqa: BLE001 - the night fails with its sweep, and its verdict is delivered
        traceback.print_exc()
        return ExitCode.failed
    return ExitCode.finished
