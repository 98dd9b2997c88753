"""Processes that are the ranks of one process group, and call function after function together."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, ProcessPoolExecutor, wait
from contextlib import suppress
from datetime import timedelta
from typing import Any

START_S = 150.0  # for the imports of PyTorch from a cold disk, and a context on the GPU
_GRACE_S = 5.0  # for the other ranks, once one has failed


class RankError(AssertionError):
    """A rank raised an error, died or hung. `seconds`: how long the call had run."""

    seconds = 0.0


class Ranks:
    """Ranks of one node, started by the first call, and again after a failure.

    Args:
        count: of ranks; if there are fewer GPUs, several share one.
        cuda: compute on GPUs; else on the CPU.
        backend: of the process group; default: NCCL for GPUs, gloo for the CPU.
        timeout_s: of a collective.
    """

    def __init__(self, count: int, cuda: bool, backend: str = "", timeout_s: float = 120.0) -> None:
        self.count, self.timeout_s = count, timeout_s
        self.cuda, self.backend = cuda, backend or ("cpu:gloo,cuda:nccl" if cuda else "gloo")
        self._pools: list[ProcessPoolExecutor] = []  # a process each
        self._processes: list[int] = []

    def run(self, function: Callable[..., Any], *args: Any, seconds: float = 120.0) -> list[Any]:
        """Call `function(*args)` on every rank; return the results in rank order.

        Raises:
            RankError: a rank failed, or there was no answer within `seconds`.
        """
        if not self._pools:
            store, context = f"{tempfile.mkdtemp(prefix='fsdp_lab_gpu_')}/store", multiprocessing.get_context("spawn")
            self._pools = [ProcessPoolExecutor(1, context) for _ in range(self.count)]
            self._processes = [pool.submit(os.getpid).result(START_S) for pool in self._pools]
            group = (self.count, self.cuda, self.backend, store, self.timeout_s)
            self._all([(_join, rank, *group) for rank in range(self.count)], START_S)
        return self._all([(_call, self.cuda, function, *args)] * self.count, seconds)

    def _all(self, calls: list[tuple[Any, ...]], seconds: float) -> list[Any]:
        begun = time.monotonic()
        futures = [pool.submit(*call) for pool, call in zip(self._pools, calls, strict=True)]
        done, late = wait(futures, seconds, FIRST_EXCEPTION)
        if not late and not any(future.exception() for future in done):
            return [future.result() for future in futures]
        took = time.monotonic() - begun
        done, late = wait(futures, _GRACE_S)
        errors = {rank: future.exception() for rank, future in enumerate(futures) if future in done}
        error = RankError("\n".join(f"rank {rank}: {each}" for rank, each in errors.items() if each) or "ranks hang")
        error.seconds = took
        # Alone, a rank that raised an error goes on, unless the GPU's context is of no more use.
        if self.count > 1 or late or "CUDA error" in str(error) or "terminated" in str(error):
            self.end()
        raise error

    def end(self) -> None:
        """End the processes."""
        for process in self._processes:
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        for pool in self._pools:
            pool.shutdown()
        self._pools, self._processes = [], []


def _join(rank: int, count: int, cuda: bool, backend: str, store: str, timeout_s: float) -> None:
    """Become a rank."""
    multiprocessing.set_start_method("fork", force=True)  # of loader processes, as under torchrun and Ray
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(count))
    if not cuda:
        os.environ.update(OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="")
    import torch
    import torch.distributed as dist

    if cuda:
        torch.cuda.set_device(rank % torch.cuda.device_count())
    else:
        torch.set_num_threads(1)
    dist.init_process_group(
        backend, init_method=f"file://{store}", rank=rank, world_size=count, timeout=timedelta(seconds=timeout_s),
        device_id=torch.device("cuda", torch.cuda.current_device()) if "nccl" in backend else None,
    )  # fmt: skip


def _call(cuda: bool, function: Callable[..., Any], *args: Any) -> Any:
    import torch

    try:
        return function(*args)
    except Exception:  # noqa: BLE001 - the class may be unknown to the test's process
        raise RuntimeError(traceback.format_exc()) from None
    finally:
        gc.collect()  # a model and its optimizer are in cycles
        if cuda:
            torch.cuda.empty_cache()
