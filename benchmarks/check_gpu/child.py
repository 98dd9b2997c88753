"""A process that measures: one rank of a batch, or what a batch needs prepared.

python -m benchmarks.check_gpu.child measure|prepare JOB.json
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import signal
import sys
import time
import traceback
from pathlib import Path

from benchmarks.check_gpu.lines import Bench, Line, Measured, Result
from benchmarks.check_gpu.state import State
from benchmarks.check_gpu.subjects import all_lines, subject
from fsdp_lab.files import write_json

BEGUN = "begun.json"
_PR_SET_PDEATHSIG = 1


def wanted(job: dict) -> tuple[Bench, list[Line]]:
    bench = Bench.from_dict(job["bench"])
    every = {line.id: line for lines in all_lines(bench).values() for line in lines}
    return bench, [every[line_id] for line_id in job["ids"]]


def prepare(job: dict) -> None:
    """Let each subject write what its lines are compared with."""
    bench, lines = wanted(job)
    for name in dict.fromkeys(line.subject for line in lines):
        if hasattr(subject(name), "prepare"):
            begun = time.perf_counter()
            subject(name).prepare([line for line in lines if line.subject == name], bench)
            print(f"prepared {name} in {time.perf_counter() - begun:.1f} s", flush=True)


def measure(job: dict) -> None:
    """Measure the lines in turn, and append each result as soon as it is known."""
    from fsdp_lab.training.distributed import setup_distributed

    bench, lines = wanted(job)
    state = State(Path(bench.folder), job["key"])
    ranks = setup_distributed()
    for line in lines:
        if ranks.is_first:
            write_json(Path(bench.folder, BEGUN), {"id": line.id})
        begun = time.perf_counter()
        measured, broken = attempt(line, bench)
        if ranks.is_first or broken:
            state.append(Result.of(line, measured, time.perf_counter() - begun))
        if broken and (ranks.world_size > 1 or "CUDA error" in measured.text):
            os._exit(1)  # the other ranks wait in a collective, or the context is of no more use: begin anew
        give_back()


def attempt(line: Line, bench: Bench) -> tuple[Measured, bool]:
    """What was measured, and whether an exception ended it."""
    try:
        return subject(line.subject).measure(line, bench), False
    except Exception as error:  # noqa: BLE001 - a line that fails is a result
        print(f"--- {line.id}", flush=True)
        traceback.print_exc()
        on_error = getattr(subject(line.subject), "on_error", None)
        if on_error is not None and (measured := on_error(line, bench, error)) is not None:
            return measured, True
        return Measured(False, cause(error)), True


def cause(error: BaseException) -> str:
    """The error's type and first line: of CUDA's five lines the last ones are general advice."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0][:200] if lines else ''}"


def give_back() -> None:
    """Leave nothing on the device to the next line."""
    import torch

    from fsdp_lab.training.torch_private import free_cublas_workspaces

    gc.collect()
    if torch.cuda.is_available():
        torch.backends.cudnn.allow_tf32 = True
        torch.cuda.synchronize()
        free_cublas_workspaces(torch.device("cuda", torch.cuda.current_device()))
        torch.cuda.empty_cache()


def end_with_parent(number: int) -> None:
    """Let the kernel send this process a signal when its parent ends, however that ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)


def main() -> None:
    end_with_parent(signal.SIGKILL)  # torchrun starts its ranks in sessions of their own
    job = json.loads(Path(sys.argv[2]).read_text())
    {"prepare": prepare, "measure": measure}[sys.argv[1]](job)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # gloo's threads may outlive the interpreter, and then abort a process that has done its work


if __name__ == "__main__":
    main()
