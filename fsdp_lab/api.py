"""Sweeps, forecasts and reports from Python: each function takes the overrides of its command and returns its record.

    from fsdp_lab.api import forecast, report, sweep

    result = sweep("sharding=ddp,per_block", {"precision": "fp32", "offload": "none", "optimizer.lr": [1e-3, 1e-2]})
    print(result.recommendation.sentence)
    result.frame()

They run in this process, and leave its arguments, folder and environment as they were. Importing this module imports no
library.
"""

from __future__ import annotations

import os
import sys
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fsdp_lab.config import ConfigError, UserError
from fsdp_lab.status import ExitCode

if TYPE_CHECKING:
    import pandas as pd

    from fsdp_lab.report.result import SweepResult

__all__ = ["UserError", "forecast", "report", "sweep"]


def sweep(*overrides: Any, folder: Path | str | None = None, quiet: bool = False) -> SweepResult:
    """Run a sweep as `python -m fsdp_lab -m <overrides>` does, and return its record.

    Args:
        *overrides: strings as on the command line, lists of them, or dictionaries: key -> value, or a list of values.
        folder: where it writes; None: a new folder below `outputs/multirun`.
        quiet: do not print what the command prints.

    Raises:
        UserError: the command line is refused, with its message; or no trial has finished.
        KeyboardInterrupt: it was interrupted, and can be resumed: `python -m fsdp_lab resume=last`.
    """
    from fsdp_lab.__main__ import Refused, run

    chosen = Path(folder) if folder is not None else _new_folder("outputs/multirun")
    with _as_command("fsdp_lab", quiet):
        try:
            run(["-m", *_words(overrides), f"hydra.sweep.dir={chosen}"])
        except Refused as refused:
            raise ConfigError(refused.message) from refused.__cause__
        except SystemExit as end:
            if end.code == ExitCode.interrupted:
                raise KeyboardInterrupt from None
    return report(chosen)


def forecast(*overrides: Any, folder: Path | str | None = None, quiet: bool = False) -> pd.DataFrame:
    """Forecast as `python -m fsdp_lab.forecast -m <overrides>` does, and return a row a configuration, the best first.

    The columns are those of `forecast.csv`: the axes, bytes, seconds, samples/s; `no_forecast` says why there is none.

    Args:
        *overrides: as for `sweep`; the configurations are those of the sweep with these overrides.
        folder: where its pages go; None: a new folder below `outputs/forecast`.
        quiet: do not print what the command prints.

    Raises:
        UserError: the command line is refused, with its message.
        KeyboardInterrupt: it was interrupted.
    """
    import pandas as pd

    from fsdp_lab.explain import explain
    from fsdp_lab.forecast.__main__ import run
    from fsdp_lab.forecast.cells import plan_forecasts

    chosen = Path(folder) if folder is not None else _new_folder("outputs/forecast")
    with _as_command("fsdp_lab.forecast", quiet):
        try:
            run(*plan_forecasts([*_words(overrides), f"forecast.folder={chosen}"], multirun=True))
        except Exception as error:
            if (message := explain(error)) is None:
                raise
            raise ConfigError(message) from error
    return pd.read_csv(chosen / "forecast.csv", keep_default_na=False, na_values=[""])


def report(which: Path | str = "last", *, trust: bool = False) -> SweepResult:
    """Read the record of a sweep. Writes nothing.

    Args:
        which: the sweep's folder, an address in object storage, the id of its parent run, or `last`.
        trust: read a folder that is another user's.

    Raises:
        UserError: there is no such sweep, or none of its trials has finished.
    """
    from fsdp_lab.config.sweep import TrackingConfig
    from fsdp_lab.report.result import SweepResult
    from fsdp_lab.sweep.store.trust import find_trusted
    from fsdp_lab.sweep.sweep_data import require_results, sweep_in

    folder, _ = find_trusted(str(which), "sweep", TrackingConfig(), trust)
    read, _, _ = sweep_in(folder)
    require_results(read, str(which))
    return SweepResult.of(read)


def _words(overrides: Any) -> list[str]:
    """Return overrides as they are typed."""
    if isinstance(overrides, str):
        return [overrides]
    if isinstance(overrides, Mapping):
        return [f"{key}={_value(value)}" for key, value in overrides.items()]
    if isinstance(overrides, (list, tuple)):
        return [word for one in overrides for word in _words(one)]
    raise ConfigError(f"{overrides!r} is no override; give strings, lists or dictionaries: {{'sharding': 'root'}}.")


def _value(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return ",".join(map(_value, value))
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


@contextmanager
def _as_command(name: str, quiet: bool) -> Iterator[None]:
    """Let a command run here, with its arguments, and put back what it changes of this process."""
    from fsdp_lab.compose import forget_hydra

    arguments, folder, path, environment = sys.argv, os.getcwd(), list(sys.path), dict(os.environ)
    sys.argv = [name]
    forget_hydra()
    with ExitStack() as stack:
        if quiet:
            nowhere = stack.enter_context(open(os.devnull, "w"))
            stack.enter_context(redirect_stdout(nowhere))
            stack.enter_context(redirect_stderr(nowhere))
        try:
            yield
        finally:
            forget_hydra()
            sys.argv, sys.path[:] = arguments, path
            os.chdir(folder)
            for key in os.environ.keys() - environment.keys():
                del os.environ[key]
            os.environ.update(environment)


def _new_folder(below: str) -> Path:
    return Path(below, f"{time.strftime('%Y-%m-%d/%H-%M-%S')}-{uuid.uuid4().hex[:4]}")
