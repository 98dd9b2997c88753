"""Run a batch in processes of its own, watch it, and go on after a crash or a hang."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchmarks.check_gpu.child import BEGUN, end_with_parent
from benchmarks.check_gpu.lines import FAIL, Bench, Line, Result
from benchmarks.check_gpu.state import State
from benchmarks.check_gpu.subjects import subject
from fsdp_lab.files import write_json

_LOOK_S = 0.2
_START_S = 120.0  # for a process to import PyTorch, take its device and begin its first line
_PREPARE_S = 300.0
_TERM_S = 3.0


@dataclass(frozen=True)
class Launcher:
    """Starts processes for a bench.

    `deadline`: of `time.monotonic()`, when everything ends. `on_result`: told each result as it becomes known.
    """

    bench: Bench
    state: State
    deadline: float
    on_result: Callable[[Result], None]

    @property
    def late(self) -> bool:
        return time.monotonic() > self.deadline

    def run(self, name: str, lines: Sequence[Line]) -> None:
        """Measure lines of one number of workers. Those left without a result were cut by the deadline."""
        left = {line.id: line for line in lines}
        needing = [line for line in lines if hasattr(subject(line.subject), "prepare")]
        reason = self._prepare(name, needing) if needing else None
        if reason is not None:
            self._fail_all({line.id: left.pop(line.id) for line in needing}, f"not prepared: {reason}")
        attempt = 0
        while left and not self.late:
            attempt += 1
            self._measure(f"{name}_x{lines[0].workers}_{attempt}", left)

    def _prepare(self, name: str, lines: Sequence[Line]) -> str | None:
        """Return what went wrong, or None, also when the time is over."""
        log, job = self._files(f"prepare_{name}_x{lines[0].workers}", lines)
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
        until = min(self.deadline, time.monotonic() + _PREPARE_S)
        with _Child([*_child("prepare"), str(job)], environment, log) as child:
            while child.poll() is None and time.monotonic() < until:
                time.sleep(_LOOK_S)
            status = child.poll()
        if status == 0 or self.late:
            return None
        return f"no end within {_PREPARE_S:.0f} s" if status is None else _last_line(log)

    def _measure(self, name: str, left: dict[str, Line]) -> None:
        """Start one process group; take what got a result out of `left`, and at least one line if it broke."""
        lines = list(left.values())
        log, job = self._files(name, lines)
        begun_file = Path(self.bench.folder, BEGUN)
        begun_file.unlink(missing_ok=True)
        workers, now = lines[0].workers, time.monotonic()
        current, until = "", now + _START_S
        with _Child([*command(workers), str(job)], environment_of(self.bench, workers), log) as child:
            while True:
                ended = child.poll() is not None
                self._take(left)
                begun = _begun(begun_file)
                if begun != current:
                    current, until = begun, time.monotonic() + (left[begun].limit_s if begun in left else _START_S)
                if ended or self.late or time.monotonic() > until:
                    break
                time.sleep(_LOOK_S)
        self._take(left)
        if not left or (self.late and not ended):
            return
        why = f"process ended: {_last_line(log)}" if ended else "hung: ended after its time limit"
        if not current:
            self._fail_all(left, why)
        elif current in left:
            self._fail(left, current, why)

    def _take(self, left: dict[str, Line]) -> None:
        results = self.state.results()
        for line_id in [line_id for line_id in left if line_id in results]:
            self.on_result(results[line_id])
            del left[line_id]

    def _fail_all(self, left: dict[str, Line], why: str) -> None:
        for line_id in list(left):
            self._fail(left, line_id, why)

    def _fail(self, left: dict[str, Line], line_id: str, why: str) -> None:
        self.state.append(Result(line_id, FAIL, why))
        self._take(left)

    def _files(self, name: str, lines: Sequence[Line]) -> tuple[Path, Path]:
        folder = Path(self.bench.folder, "logs")
        job = folder / f"{name}.json"
        bench = self.bench.as_dict()
        write_json(job, {"bench": bench, "key": self.state.key, "ids": [line.id for line in lines]})
        return folder / f"{name}.log", job


class _Child:
    """A process with its own session, whose whole group has ended when the context is left."""

    def __init__(self, arguments: list[str], environment: dict[str, str], log: Path) -> None:
        self._arguments, self._environment, self._log = arguments, environment, log

    def __enter__(self) -> subprocess.Popen[bytes]:
        with self._log.open("wb") as out:
            self._process = subprocess.Popen(
                self._arguments,
                stdout=out,
                stderr=out,
                env=self._environment,
                start_new_session=True,
                preexec_fn=partial(end_with_parent, signal.SIGTERM),  # torchrun ends its ranks then
            )
        return self._process

    def __exit__(self, *_: object) -> None:
        for number in (signal.SIGTERM, signal.SIGKILL):  # torchrun passes the first on to its ranks
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=_TERM_S)


def command(workers: int) -> list[str]:
    """One worker is a plain process, several are torchrun's."""
    if workers == 1:
        return _child("measure")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(workers)]
    return [*torchrun, *_child("measure")[1:]]


def environment_of(bench: Bench, workers: int) -> dict[str, str]:
    """The threads that the product gives a worker. On a CPU one, and no GPU: others may use the cores."""
    if not bench.cuda:
        return {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return {**os.environ, "OMP_NUM_THREADS": str(bench.cores_per_worker(workers))}


def _child(what: str) -> list[str]:
    return [sys.executable, "-m", "benchmarks.check_gpu.child", what]


def _begun(path: Path) -> str:
    """The line that is being measured, or "" before the first."""
    try:
        return json.loads(path.read_text())["id"]
    except FileNotFoundError:
        return ""


def _last_line(log: Path) -> str:
    """The last words of a process that look like an error, or its last line."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip(" =-\n")]
    errors = [line for line in lines if ("Error" in line or "Signal" in line) and "ChildFailedError" not in line]
    return (errors or lines or [f"no output, see {log.name}"])[-1][:300]
