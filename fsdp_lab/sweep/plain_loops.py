"""Plain loops of the user's own code, which run while Ray starts, and with which the trials of a sweep are compared.

Figures are kept in `outputs/plain_loops`, by the values of the trial. They are valid while Python, PyTorch, fsdp_lab
and the files of the user's modules are the same. Other changes, such as in files of data, show as a trial that differs:
then the loop runs again after the last trial.
"""

from __future__ import annotations

import json
import platform
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import asdict, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

from fsdp_lab.config import SweepConfig, TrialConfig, UserError, from_dict, part, to_dict, workers_of
from fsdp_lab.config.closeness import why_other_weights
from fsdp_lab.config.compare import layout_settings, plain_kind, plain_settings
from fsdp_lab.config.ranks import Ranks
from fsdp_lab.config.source_code import code_digest, same_files
from fsdp_lab.engine.plain_loop import Question, run_plain_loop
from fsdp_lab.forecast.devices import torch_version
from fsdp_lab.forecast.pool import NoAnswerError, Pool
from fsdp_lab.record.plain_loops import PlainLoop, read_plain_loops, write_plain_loops
from fsdp_lab.report.plain_check import check_against_plain
from fsdp_lab.storage.files import read_object, write_json
from fsdp_lab.sweep.sweep import Sweep

_FOLDER = Path("outputs/plain_loops")
_MOST = 5  # of a sweep
_IMPORTS_S = 20.0  # before a loop starts to count its seconds
_FIRST_LOG_S, _LOG_EVERY_S = 5.0, 15.0


class PlainLoops:
    """Runs the plain loops of a sweep one after the other, each in a process of its own. Use it as a context.

    Errors here do not end a sweep: the loop records the reason instead of figures.
    """

    def __init__(self, sweep: Sweep) -> None:
        self._sweep = sweep
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="plain loops")
        self._pool: Pool | None = None
        self._lock, self._over = threading.Lock(), False
        self._running: dict[int, Future[PlainLoop]] = {}

    def __enter__(self) -> PlainLoops:
        if self._sweep.resumed:
            earlier = read_plain_loops(self._sweep.folder)
            self._sweep.plain_loops = [replace(loop, kept=True) for loop in earlier if loop.figures]
        self._start(self._planned())
        return self

    def __exit__(self, *_: object) -> None:
        """Kill what still runs."""
        with self._lock:
            self._over = True
            if self._pool is not None:
                self._pool.__exit__()
        self._thread.shutdown(cancel_futures=True)

    def _planned(self) -> list[PlainLoop]:
        """Return the loops that the trials still to run need. One that cannot run has the reason."""
        kinds = {_kind(self._sweep.config_of(loop.trial), loop.dp_degree) for loop in self._sweep.plain_loops}
        planned: list[PlainLoop] = []
        for number, state in enumerate(self._sweep.trials):
            config = state.trial.config
            if state.ended or not config.check.enabled:
                continue
            dp_degree = Ranks.of(config.sharding, workers_of(config)).dp
            layout = f"{layout_settings(config)}{config.precision}" if config.check.keys else ""
            kind = f"{why_other_weights(config)}{_kind(config, dp_degree)}{layout}"
            if kind not in kinds:
                kinds.add(kind)
                planned.append(PlainLoop(number, dp_degree, missing=why_other_weights(config)))
        runnable = [loop for loop in planned if not loop.missing]
        if len(runnable) > _MOST:
            self._sweep.log_once(
                f"plain loops run for the first {_MOST} of {len(runnable)} combinations of model, data, task, "
                "optimizer and batch parts; other settings are compared with each other only"
            )
        return [*(loop for loop in planned if loop.missing), *runnable[:_MOST]]

    def _start(self, loops: list[PlainLoop], anew: bool = False) -> None:
        ends = time.monotonic() + self._sweep.config.check.limit_s
        for loop in loops:
            if loop.missing:
                self._sweep.plain_loops.append(loop)
            else:
                self._running[loop.trial] = self._thread.submit(self._run, loop, ends, anew)

    def ready(self) -> None:
        """Wait for the loops, before the first trial starts."""
        if not self._running and not self._sweep.plain_loops:
            return
        begun, limit, quiet = time.monotonic(), self._sweep.config.check.limit_s, _FIRST_LOG_S
        while wait(self._running.values(), timeout=quiet).not_done:
            quiet = _LOG_EVERY_S
            waited = f"{time.monotonic() - begun:.0f} of at most {limit:g} s"
            self._sweep.log(f"waiting for a plain loop of your own code: {waited}; check=off skips it")
        loops = {loop.trial: loop for loop in self._sweep.plain_loops}
        loops |= {number: future.result() for number, future in self._running.items()}
        self._running.clear()
        self._sweep.plain_loops = list(loops.values())
        for loop in loops.values():
            if loop.missing:
                self._sweep.log_once(f"not compared with a plain loop: {loop.missing}")
        with suppress(OSError):  # a full disk ends the sweep elsewhere
            write_plain_loops(self._sweep.folder, self._sweep.plain_loops)

    def confirm(self) -> None:
        """After the last trial, run the loops again that have kept figures from which a trial differs."""
        kept = [loop for loop in self._sweep.plain_loops if loop.kept]
        if kept and check_against_plain(self._sweep.trials, self._sweep.plain_loops).different:
            self._start([replace(loop, figures={}, kept=False) for loop in kept], anew=True)
            self.ready()

    def _run(self, loop: PlainLoop, ends: float, anew: bool) -> PlainLoop:
        """Return the loop with its figures, or with the reason why it has none."""
        config = self._sweep.config_of(loop.trial)
        keys = config.check.keys
        if not keys and not anew and (kept := _kept(config, loop)) is not None:
            return kept
        limit_s = ends - time.monotonic()
        if limit_s <= 0:
            return replace(loop, missing=f"other plain loops used all of check.limit_s={config.check.limit_s:g} s")
        question = Question(
            to_dict(part(config, TrialConfig)), workers_of(config), limit_s,
            str(self._sweep.folder / "plain_loop.log"), keys,
        )  # fmt: skip
        try:
            answer = self._ask(question, limit_s + _IMPORTS_S)
            files = answer.pop("files", None)
            made = from_dict(PlainLoop, {**asdict(loop), **answer})
        except NoAnswerError as error:
            late = f"; check.limit_s={config.check.limit_s:g} is over" if time.monotonic() > ends else ""
            return replace(loop, missing=f"its process {error}{late}")
        except Exception as error:  # noqa: BLE001 - no comparison is worth a sweep
            return replace(loop, missing=f"{type(error).__name__}: {error}")
        if made.figures and files is not None:
            _keep(config, made, files)
        return made

    def _ask(self, question: Question, limit_s: float) -> dict[str, Any]:
        with Pool(run_plain_loop, 1, limit_s) as pool:
            with self._lock:
                if self._over:
                    raise NoAnswerError("was not started")
                self._pool = pool
            answer: dict[str, Any] = pool.submit(question).result()
        return answer


def _kind(config: SweepConfig, dp_degree: int) -> str:
    return json.dumps(plain_kind(config, dp_degree), sort_keys=True)


def _file(config: SweepConfig, dp_degree: int) -> Path:
    values = json.dumps(plain_settings(config, dp_degree), sort_keys=True)
    return _FOLDER / f"{sha256(values.encode()).hexdigest()[:16]}.json"


def _versions() -> dict[str, str]:
    return {"python": platform.python_version(), "torch": torch_version(), "fsdp_lab": code_digest([])}


def _kept(config: SweepConfig, loop: PlainLoop) -> PlainLoop | None:
    """Return the figures of an earlier loop with these values and this code; None without one."""
    try:
        content = read_object(_file(config, loop.dp_degree)) or {}
        if content["versions"] != _versions() or not same_files(content["files"]):
            return None
        kept = from_dict(PlainLoop, content["loop"])
    except (OSError, UserError, KeyError, ValueError, TypeError, AttributeError):  # it runs again
        return None
    return replace(kept, trial=loop.trial, kept=True) if kept.figures else None


def _keep(config: SweepConfig, loop: PlainLoop, files: Mapping[str, str]) -> None:
    with suppress(OSError):  # a full disk: it runs again
        content = {"versions": _versions(), "files": dict(files), "loop": asdict(loop)}
        write_json(_file(config, loop.dp_degree), content)
