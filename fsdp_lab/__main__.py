"""The command line: one trial, or with -m a sweep. `python -m fsdp_lab --help` is the table of contents."""

from __future__ import annotations

import atexit
import os
import sys
from typing import Any, NoReturn

import hydra

from fsdp_lab.compose import check, explain, register_schema, single_trial
from fsdp_lab.config import conf_dir


def main() -> None:
    """Run, and leave with 0 (every trial has a result), 1 (one failed), 2 (bad input) or 130 (interrupted)."""
    os.environ["HYDRA_FULL_ERROR"] = "1"  # errors come to us, to be told in one message
    sys.argv[1:] = multirun_first(sys.argv[1:])
    register_schema()
    app = hydra.main(version_base="1.3", config_path=str(conf_dir()), config_name="config")(run_single)
    try:
        app()
    except KeyboardInterrupt:
        end_interrupted()
    except SystemExit as end:
        if end.code == 130:
            end_interrupted()
        raise
    except Exception as error:  # noqa: BLE001 - told or raised again by `leave`
        leave(error)


def end_interrupted() -> NoReturn:
    """Leave with 130 after everything that is registered for the end: Ray's native threads, interrupted in the
    middle of their start, would crash the interpreter as it takes itself down."""
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(130)


def run_single(cfg: Any) -> None:
    """One trial: what Hydra calls without -m."""
    try:
        trial = single_trial(cfg)
        check(trial.config)
        from fsdp_lab.sweep.run import run_trials

        status = run_trials([trial], trial.folder, [], sweep=False)
    except Exception as error:  # noqa: BLE001 - told or raised again by `leave`
        leave(error)  # here already: Hydra would print a line of its own first
    if status:
        sys.exit(status)


def leave(error: Exception) -> NoReturn:
    """Tell what the user can mend and exit with 2; let a bug keep its traceback."""
    message = explain(error)
    if message is None:
        raise error
    print(f"fsdp_lab: {message}", file=sys.stderr)
    sys.exit(2)


def multirun_first(arguments: list[str]) -> list[str]:
    """`-m` to the front: argparse wants the overrides in one piece, people put it anywhere."""
    flags = [a for a in arguments if a in ("-m", "--multirun")]
    return flags[:1] + [a for a in arguments if a not in ("-m", "--multirun")]


if __name__ == "__main__":
    main()
