"""Explain for the report why trials ran out of a GPU's memory, by `python -m fsdp_lab.explain`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from fsdp_lab.config.sweep import Engine
from fsdp_lab.engine.resources import num_gpus
from fsdp_lab.forecast.out_of_memory import WORKING, read_message
from fsdp_lab.record.reasons import Code
from fsdp_lab.record.trial import EXPLAINED
from fsdp_lab.report.settings import REPEATS
from fsdp_lab.storage.files import write_text
from fsdp_lab.sweep.names import label, setting
from fsdp_lab.sweep.sweep import Sweep

_MOST = 3  # settings of a sweep
_LIMIT_S = 300.0  # for each


def explain_shortages(sweep: Sweep) -> None:
    """Write an explanation into the folders of trials that ran out of memory, after the last trial.

    Explains the first such trial of each of the first three settings. An error is only logged, because the sweep has
    its results. A first Ctrl-C ends only this.
    """
    asked = dict[str, int]()
    for number, state in enumerate(sweep.trials):
        reason, config = state.reason, state.trial.config
        if reason is None or reason.code is not Code.out_of_memory or config.engine is not Engine.ray:
            continue
        if config.forecast.enabled and read_message(str(reason.values.get("text", ""))) is not None:
            keys = [key for key in sweep.swept if key not in REPEATS]
            asked.setdefault(str([setting(state.trial, key) for key in keys]), number)
    for number in [*asked.values()][:_MOST]:
        folder = sweep.folder_of(number)
        if not (folder / EXPLAINED).exists() and sweep.ends_by is None:
            name = label(sweep.trials[number].trial)
            sweep.log(f"explaining why {name} ran out of memory, in {_LIMIT_S:g} s at most; Ctrl-C skips this")
            _explain(sweep, folder)


def _explain(sweep: Sweep, folder: Path) -> None:
    options = [word for word in sweep.started.arguments if word.startswith("--config-dir=")]
    device = ["forecast.device=auto"] if num_gpus() else []
    command = [sys.executable, "-m", "fsdp_lab.explain", str(folder), *options, *device]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_S, check=False)
        if done.returncode == 0:
            lines = [line for line in done.stdout.splitlines() if not line.startswith(WORKING)]
            write_text(folder / EXPLAINED, "\n".join(lines), parents=False)
            for line in lines:
                sweep.log(f"  {line}")
        else:
            sweep.log(f"no explanation of trial {folder.name}: {' '.join(done.stderr.split())[-300:]}")
    except (OSError, subprocess.TimeoutExpired) as error:
        sweep.log(f"no explanation of trial {folder.name}: {error}")
