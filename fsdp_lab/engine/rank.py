"""What a rank's process does: the training core, with its reports in the trial's folder."""

from __future__ import annotations

import faulthandler
import os
import socket
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from fsdp_lab import quick_imports
from fsdp_lab.config import TrialConfig, UserError, from_dict
from fsdp_lab.engine.failures import kind_of, record_failure
from fsdp_lab.engine.rank_process import Channel, end_with, name_process
from fsdp_lab.engine.rendezvous import join
from fsdp_lab.engine.stacks import StackDump, long_s
from fsdp_lab.engine.trial_files import EpochLines, Progress, hold_alive
from fsdp_lab.files import write_json
from fsdp_lab.hardware import WORKER_CPUS, driver, num_gpus

_PEER_S = 0.5  # after another rank has ended, for this rank's worker to end, too


class FolderReporter:
    """Writes to the trial's folder. Rank 0 writes; every rank takes part.

    Args:
        folder: the trial's, or this rank's own.
        rank: of this process.
        data_name: of the data set, for `facts.json`.
        stacks: dumps the stacks of a process whose log is its own; None for one that shares a terminal.
    """

    def __init__(self, folder: Path, rank: int, data_name: str, stacks: StackDump | None = None) -> None:
        self.folder, self.first, self.data_name, self.stacks = folder, rank == 0, data_name, stacks
        self.progress = Progress(folder)
        self.lines = EpochLines(folder)

    def facts(self, facts: dict[str, Any]) -> None:
        """Write `facts.json`, with the name of the data set; only on rank 0."""
        if self.first:
            write_json(self.folder / "facts.json", {**facts, "data": self.data_name}, parents=False)

    def phase(self, name: str) -> None:
        """Record the phase, and restart the count for a stack dump."""
        if self.stacks:
            self.stacks.phase()
        if self.first:
            self.progress.phase(name)

    def step(self, step: int) -> None:
        """Record the step, and restart the count for a stack dump."""
        if self.stacks:
            self.stacks.step()
        if self.first:
            self.progress.step(step)

    def epoch(self, metrics: dict[str, float], checkpoint: Path | str | None) -> None:
        """Write the metrics into the folder, the only way by which they reach the driver, then wake it.

        Raises:
            FileNotFoundError: the folder was removed. Ray may have made it again: it holds no `facts.json` then.
        """
        if self.first:
            (self.folder / "facts.json").stat()
            self.lines.keep(metrics)
            self.progress.reported()
        self.wake(metrics["epoch"])

    def wake(self, epoch: float) -> None:
        """Let the driver look at the folder."""


class RankReporter(FolderReporter):
    """Also reports to Ray's worker, and waits until it has passed the report on."""

    def __init__(self, folder: Path, rank: int, data_name: str, channel: Channel, stacks: StackDump) -> None:
        super().__init__(folder, rank, data_name, stacks)
        self._channel = channel

    def wake(self, epoch: float) -> None:
        """Report the epoch.

        Raises:
            ConnectionError: Ray's worker is gone.
        """
        self._channel.send(epoch=epoch)
        if self._channel.receive() is None:
            raise ConnectionError("Ray's worker of this rank has ended")


@dataclass(frozen=True)
class Work:
    """What Ray's worker asks of a rank's process. Plain values only: they are sent as JSON.

    Attributes:
        job: `Job.as_dict`.
        rank: of the process.
        folder: the trial's, or this rank's own.
        meeting: how the ranks meet, see `rendezvous.join`.
        gpu: the index of the rank's GPU among the visible ones; None: it trains on the CPU.
    """

    job: dict[str, Any]
    rank: int
    folder: str
    meeting: dict[str, Any]
    gpu: int | None


def unseen_gpu(rank: int) -> str | None:
    """Compare this worker's GPU with what PyTorch sees, before NCCL is started on it.

    Returns:
        the problem; None: PyTorch sees the GPU.
    """
    from fsdp_lab.training.distributed import sees_cuda

    available, built_for = sees_cuda()
    if available:
        return None
    installed, visible = driver(), os.environ.get("CUDA_VISIBLE_DEVICES")
    count = f"the driver's NVML counts {num_gpus()}"
    if installed is not None:
        count += f" ({installed.version}, up to CUDA {'.'.join(map(str, installed.cuda or ('?',)))})"
    return (
        f"rank {rank} on {socket.gethostname()} was given a GPU and PyTorch sees none: torch.cuda.is_available() is "
        f"False, torch.version.cuda={built_for}, CUDA_VISIBLE_DEVICES={visible}, {count}; `python -c 'import "
        "torch; torch.cuda.init()'` there says why. Update the driver or install a PyTorch built for its CUDA, or hide "
        'the GPUs with CUDA_VISIBLE_DEVICES="" to train on the CPU.'
    )


def refuse_unseen_gpu(rank: int) -> None:
    """Raise a UserError if PyTorch does not see the GPU of this rank."""
    if problem := unseen_gpu(rank):
        raise UserError(problem)


def check_no_gpu() -> None:
    """Refuse to train on a CPU if PyTorch sees GPUs that the driver did not count.

    Raises:
        UserError: it does.
    """
    from fsdp_lab.training.distributed import sees_cuda

    if sees_cuda()[0]:
        raise UserError(
            f"PyTorch sees GPUs on {socket.gethostname()}, but NVML (libnvidia-ml.so.1), which Ray and fsdp_lab ask, "
            "counts none, so this trial would train on the CPU; in a container allow the driver's utilities "
            '(NVIDIA_DRIVER_CAPABILITIES=compute,utility), or hide the GPUs with CUDA_VISIBLE_DEVICES="".'
        )


def run_request(request: Mapping[str, Any], channel: Channel) -> int:
    """Train as Ray's worker asks, in its environment, and return the exit status.

    Args:
        request: the `environment`, the import `path` and the `work` of `run_rank`.
        channel: to the worker.
    """
    os.environ.clear()
    os.environ.update(request["environment"])
    sys.path[:] = request["path"]
    return run_rank(Work(**request["work"]), channel)


def run_rank(work: Work, channel: Channel) -> int:
    """Train on this rank, and return the exit status: 0 if it trained to the end. Errors are in `failures/`."""
    job, folder = work.job, Path(work.folder)
    stacks, has_log = StackDump(long_s(job["timeout_s"])), False
    try:
        name_process(f"rank{work.rank}")
        leave_to_rank(channel)
        if os.path.isdir(job["launched_in"]):  # another node may not have that folder, and then paths are its own
            os.chdir(job["launched_in"])
        os.environ[WORKER_CPUS] = str(job["cpus_per_worker"])
        hold_alive(folder)
        redirect_output(folder / "logs" / f"rank{work.rank}.log")
        has_log = True
        faulthandler.enable()
        config = from_dict(TrialConfig, job["config"])
        reporter = RankReporter(folder, work.rank, config.data.name, channel, stacks)
        reporter.phase("importing PyTorch and joining the other workers")
    except BaseException as error:  # noqa: BLE001 - the process ends by its status
        record_failure(folder, work.rank, error, "user" if isinstance(error, UserError) else kind_of(error), has_log)
        return 1
    try:
        on_cpu, storage = not job["use_gpu"], job["storage"]
        trained = train_and_record(
            config, folder, work.rank, reporter, on_cpu=on_cpu, storage=storage, join=lambda: join_ranks(work)
        )
        if trained:
            channel.send(done=True)
        return 0 if trained else 1
    except BaseException:  # noqa: BLE001 - it is recorded
        return 1
    finally:
        stacks.end()


def leave_to_rank(channel: Channel) -> None:
    """Keep processes that this one starts from holding the channel, and from being called as it is."""
    channel.connection.set_inheritable(False)

    def in_child() -> None:
        with suppress(OSError):
            os.close(channel.connection.fileno())
        name_process("of a rank")

    os.register_at_fork(after_in_child=in_child)


def join_ranks(work: Work) -> None:
    """Choose the GPU that Ray gave to this rank, and join the process group.

    Raises:
        UserError: PyTorch does not see the GPU, on which NCCL would fail.
    """
    from fsdp_lab.training.distributed import choose_gpu

    if work.gpu is not None:
        refuse_unseen_gpu(work.rank)
        choose_gpu(work.gpu)
    join(work.meeting)


def end_process(status: int) -> NoReturn:
    """End this process. gloo's threads may outlive the interpreter, and then abort a process that has done its work."""
    if status == 0:  # else other ranks may not take part, for which NCCL would wait
        with suppress(Exception):
            sys.modules["torch"].distributed.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def train_and_record(
    config: TrialConfig,
    folder: Path,
    rank: int,
    reporter: FolderReporter,
    on_cpu: bool = False,
    has_log: bool = True,
    storage: str | None = None,
    join: Callable[[], None] = lambda: None,
) -> bool:
    """Train, and record an error in `failures/`. It is raised if another attempt may succeed.

    Returns whether it trained to the end.

    Args:
        config: the trial.
        folder: the trial's, or this rank's own.
        rank: of this process.
        reporter: where results go.
        on_cpu: whether the trial is meant to train on a CPU; then a GPU that PyTorch sees is an error.
        has_log: whether this process prints to a log of the rank's own, not to the terminal.
        storage: the trial's address in object storage, see `train`.
        join: makes the process group; by default `train` does.
    """
    try:
        from fsdp_lab.training import DivergedError, train
        from fsdp_lab.training.distributed import keep_threads

        quick_imports.end()
        keep_threads()
        if on_cpu:
            check_no_gpu()
        join()
        if not folder.is_dir():  # `train` would make it again
            raise FileNotFoundError(f"{folder} is gone: it was removed or moved before the training began")
        train(config, folder, reporter, storage=storage)
        return True
    except UserError as error:
        record_failure(folder, rank, error, "user", has_log)
    except DivergedError as error:  # it would diverge again
        record_failure(folder, rank, error, "diverged", has_log)
    except KeyboardInterrupt:  # of a trial in this process: the user's wish, and no failure
        raise
    except BaseException as error:
        kind = kind_of(error)
        if kind == "peer":  # workers of a stopped trial end one after another, and this process with its own
            time.sleep(_PEER_S)
        record_failure(folder, rank, error, kind, has_log)
        raise
    return False


def redirect_output(path: Path) -> None:
    """Redirect everything that this process prints, from C too, to a file of the trial."""
    path.parent.mkdir(exist_ok=True)  # not the trial's: it may have been removed
    out = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(out, 1)
    os.dup2(out, 2)
    os.close(out)
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115 - lives as long as the process
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115


if __name__ == "__main__":
    end_with(int(sys.argv[2]))
    quick_imports.begin()
    _channel = Channel(socket.socket(fileno=int(sys.argv[1])))
    _request = _channel.receive()
    end_process(1 if _request is None else run_request(_request, _channel))
