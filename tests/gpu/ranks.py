"""Processes that are the ranks of one process group, and call function after function together."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import tempfile
import traceback
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, ProcessPoolExecutor, wait
from contextlib import suppress
from datetime import timedelta
from typing import Any

START_S = 150.0  # for the imports of PyTorch from a cold disk, and a context on the GPU
_GRACE_S = 5.0  # for the other ranks, once one has failed


class Ranks:
    """Ranks of one node, started by the first call, and again after a failure; with `cuda` each has a GPU."""

    def __init__(self, count: int, cuda: bool) -> None:
        self.count, self.cuda = count, cuda
        self._pools: list[ProcessPoolExecutor] = []  # a process each
        self._processes: list[int] = []

    def run(self, function: Callable[..., Any], *args: Any, seconds: float = 120.0) -> list[Any]:
        """Call `function(*args)` on every rank; return the results in rank order.

        Raises:
            AssertionError: a rank failed, or there was no answer within `seconds`.
        """
        if not self._pools:
            store, context = f"{tempfile.mkdtemp(prefix='fsdp_lab_gpu_')}/store", multiprocessing.get_context("spawn")
            self._pools = [ProcessPoolExecutor(1, context) for _ in range(self.count)]
            self._processes = [pool.submit(os.getpid).result(START_S) for pool in self._pools]
            self._all([(_join, rank, self.count, self.cuda, store) for rank in range(self.count)], START_S)
        return self._all([(_call, self.cuda, function, *args)] * self.count, seconds)

    def _all(self, calls: list[tuple[Any, ...]], seconds: float) -> list[Any]:
        futures = [pool.submit(*call) for pool, call in zip(self._pools, calls, strict=True)]
        done, late = wait(futures, seconds, FIRST_EXCEPTION)
        if not late and not any(future.exception() for future in done):
            return [future.result() for future in futures]
        done, late = wait(futures, _GRACE_S)
        errors = {rank: future.exception() for rank, future in enumerate(futures) if future in done}
        error = "\n".join(f"rank {rank}: {each}" for rank, each in errors.items() if each) or "ranks hang"
        # Alone, a rank that raised an error goes on, unless the GPU's context is of no more use.
        if self.count > 1 or late or "CUDA error" in error or "terminated" in error:
            self.end()
        raise AssertionError(error)

    def end(self) -> None:
        """End the processes."""
        for process in self._processes:
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        for pool in self._pools:
            pool.shutdown()
        self._pools, self._processes = [], []


def _join(rank: int, count: int, cuda: bool, store: str) -> None:
    """Become a rank."""
    multiprocessing.set_start_method("fork", force=True)  # of loader processes, as under torchrun and Ray
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(count))
    if not cuda:
        os.environ.update(OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="")
    import torch
    import torch.distributed as dist

    if cuda:
        torch.cuda.set_device(rank)
    else:
        torch.set_num_threads(1)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if cuda else "gloo", init_method=f"file://{store}", rank=rank, world_size=count,
        timeout=timedelta(seconds=120), device_id=torch.device("cuda", torch.cuda.current_device()) if cuda else None,
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
