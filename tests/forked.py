"""Commands in forks of a process that has imported what they need: one starts within milliseconds, not seconds.

`multiprocessing` starts that process, its fork server, when the first test of a worker of pytest needs it. A command is
`python -m module word ...` in all but what it has imported already: its folder, environment, `__main__`, `sys.path`
and its end, with all that is registered for that, are its own.
"""

from __future__ import annotations

import atexit
import gc
import multiprocessing
import os
import runpy
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from multiprocessing import forkserver
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NoReturn
from unittest.mock import patch

_LIMIT_S = 300
_FORKS = multiprocessing.get_context("forkserver")
# What commands and ranks import while they run. Not Ray, which reads its environment as it is imported.
_FORKS.set_forkserver_preload([
    "fsdp_lab.commands.main", "fsdp_lab.commands.report", "fsdp_lab.commands.forecast", "fsdp_lab.sweep.command",
    "fsdp_lab.sweep.runner", "fsdp_lab.sweep.start", "fsdp_lab.training.__main__",
    "fsdp_lab.workloads.examples.vision.digits", "fsdp_lab.workloads.examples.vision.mlp",
    "fsdp_lab.workloads.examples.vision.models",
    "hydra_plugins.fsdp_lab_sweeper.sweeper", "mlflow.store.tracking.sqlalchemy_store", "plotly.graph_objects",
    "plotly.io", "plotly.offline", "pytest", "scipy.stats", "torch.utils.serialization", "torchvision.models",
    "tests.forked",
])  # fmt: skip
# Before any test changes it. One thread for OpenMP: two that wait for each other on a busy core lose a factor of ten.
# MLflow reads its own as it is imported, and would start a thread that reports to its makers.
_ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "MLFLOW_DISABLE_TELEMETRY": "true"}


@cache
def shared_folder() -> Path:
    """Return the folder that all workers of a test run share, removed at its end. The first process makes it."""
    if "FSDP_LAB_TESTS" not in os.environ:
        os.environ["FSDP_LAB_TESTS"] = tempfile.mkdtemp(prefix="fsdp_lab_tests_")
        atexit.register(shutil.rmtree, os.environ["FSDP_LAB_TESTS"], ignore_errors=True)
    return Path(os.environ["FSDP_LAB_TESTS"])


Done = subprocess.CompletedProcess[str]


@cache
def _start_server() -> None:
    with patch.dict(os.environ, _ENVIRONMENT, clear=True):
        forkserver.ensure_running()


def run_all(
    jobs: Sequence[tuple[Path, Sequence[str]]],
    environment: Mapping[str, str] | None = None,
    seconds: float = _LIMIT_S,
    together: bool = False,
) -> Iterator[tuple[int, Done]]:
    """Run `module words...` in a folder, for each job; yield its number and how it ended, as they end.

    Args:
        environment: of the commands; default: this process's. seconds: after so many SIGALRM ends one.
        together: all at the same time, and if one fails the others are killed; else one a core.
    """
    _start_server()
    given = dict(os.environ if environment is None else environment)
    waiting, running = list(enumerate(jobs)), dict[int, tuple[int, BaseProcess, list[Path]]]()
    try:
        while waiting or running:
            while waiting and (together or len(running) < (os.cpu_count() or 1)):
                number, (folder, words) = waiting.pop(0)
                own = Path(tempfile.mkdtemp(dir=shared_folder()))
                printed = [own / "out", own / "err"]
                for file in printed:
                    file.touch()
                process = _FORKS.Process(target=_be_command, args=(folder, words, given, seconds, *printed))
                process.start()
                running[process.sentinel] = number, process, printed
            for ended in wait(list(running)):
                number, process, printed = running.pop(int(ended))  # type: ignore[call-overload]
                process.join()
                if together and process.exitcode:
                    _kill(running.values())
                output = (file.read_text(errors="replace") for file in printed)
                yield number, subprocess.CompletedProcess(jobs[number][1], process.exitcode or 0, *output)
    finally:
        _kill(running.values())


def _kill(running: Iterable[tuple[int, BaseProcess, list[Path]]]) -> None:
    for _, process, _ in running:
        process.kill()


def _read_at_start(environment: Mapping[str, str]) -> dict[str, str]:
    """Return what Python and the dynamic linker read as a process starts: too late for a fork."""
    return {name: value for name, value in environment.items() if name.startswith(("PYTHON", "LD_"))}


def run(folder: Path, *words: str, seconds: float = _LIMIT_S, environment: Mapping[str, str] | None = None) -> Done:
    """Run `python -m <words>`, or `python <words>` where the first is -c, in a folder, to its end.

    In a process of its own where the environment has what is read as one starts.

    Args:
        environment: default: this process's.

    Raises:
        TimeoutExpired: it ran for longer than that.
    """
    given = dict(os.environ if environment is None else environment)
    if _read_at_start(given) != _read_at_start(_ENVIRONMENT):
        command = [sys.executable, *([] if words[0] == "-c" else ["-m"]), *words]
        return subprocess.run(
            command, cwd=folder, env=given, capture_output=True, text=True, timeout=seconds, check=False
        )
    ((_, done),) = run_all([(folder, words)], given, seconds)
    if done.returncode == -signal.SIGALRM:
        late = subprocess.TimeoutExpired(words, seconds, done.stdout, done.stderr)
        late.add_note(f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}")  # pytest shows it
        raise late
    return done


def _be_command(
    folder: Path, words: Sequence[str], environment: Mapping[str, str], seconds: float, out: Path, err: Path
) -> NoReturn:
    """Be the command, and end with it."""
    assert "ray" not in sys.modules, "it has read the environment of the server, not that of a command"
    gc.freeze()  # what is not looked at need not be copied
    os.setsid()
    signal.setitimer(signal.ITIMER_REAL, seconds)
    os.chdir(folder)
    for number, path in enumerate((os.devnull, out, err)):
        os.dup2(os.open(path, os.O_RDWR | os.O_APPEND), number)
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None  # it is looked for in the environment
    # What a process of its own has not got, and what it runs itself.
    for name in [name for name in sys.modules if name.partition(".")[0] == "tests" or name == f"{words[0]}.__main__"]:
        del sys.modules[name]
    sys.path[0] = os.getcwd()  # as `python -m` puts it
    sys.argv = list(words)
    try:
        if words[0] == "-c":
            sys.argv[:2] = ["-c"]
            exec(words[1], {"__name__": "__main__"})
        else:
            runpy.run_module(words[0], run_name="__main__", alter_sys=True)
        _end(None)
    except SystemExit as end:
        _end(end.code)
    except BaseException:  # noqa: BLE001 - as Python ends with it
        sys.excepthook(*sys.exc_info())
        _end(1)


def _end(code: Any) -> NoReturn:
    """End as Python does, but for taking apart what was imported, which takes seconds and has no effect."""
    if not isinstance(code, int | None):
        print(code, file=sys.stderr)
        code = 1
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code or 0)
