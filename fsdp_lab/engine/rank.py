"""The code of each worker: the training core, with its reports in the trial's folder."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from fsdp_lab import quick_imports
from fsdp_lab.config import TrialConfig, UserError, from_dict
from fsdp_lab.engine.failures import kind_of, record_failure, write_failure
from fsdp_lab.engine.mirror import Sender, scratch_folder
from fsdp_lab.engine.spare_workers import has_imported_early
from fsdp_lab.engine.stacks import StackDump, long_s
from fsdp_lab.engine.trial_files import EpochLines, Progress, hold_alive
from fsdp_lab.files import write_json
from fsdp_lab.hardware import WORKER_CPUS, driver, num_gpus
from fsdp_lab.storage import Storage


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


class RayReporter(FolderReporter):
    """Also reports to Ray Train. Ray gets no checkpoint: its manager would refuse a run whose older ones were removed.

    Attributes:
        sender: of a folder that is this rank's alone; None: the folder is shared.
    """

    sender: Sender | None = None

    def wake(self, epoch: float) -> None:
        """Report the epoch to Ray Train, after its files were sent."""
        import ray.train

        if self.sender is not None:
            self.sender.send()  # the driver is to find the epoch
        ray.train.report({"epoch": epoch})


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


def refuse_unseen_gpus(folder: Path, problems: Sequence[str | None]) -> None:
    """Fail if some rank's PyTorch does not see its GPU.

    Args:
        folder: the trial's, on this node; workers may not have it.
        problems: the results of `unseen_gpu`, by rank.

    Raises:
        UserError: of the first such rank. All are recorded in `failures/`, too.
    """
    wrong = {rank: message for rank, message in enumerate(problems) if message is not None}
    for rank, message in wrong.items():
        write_failure(folder, rank, "user", message, "")
    for message in wrong.values():
        raise UserError(message)


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


def own_session() -> None:
    """Move this process to a session of its own, as torchrun does with a rank.

    Linux divides the cores among sessions (`sched_autogroup_enabled`). In Ray's session all ranks would have one share,
    together with Ray's own processes.
    """
    if os.getsid(0) != os.getpid():
        with suppress(OSError):
            os.setpgid(0, os.getpgid(os.getppid()))  # Ray lets it lead a group, and a leader cannot begin a session
            try:
                os.setsid()
            except OSError:  # a child of this process is still in the group that it led
                os.setpgid(0, 0)


def train_worker(job: dict[str, Any]) -> None:
    """Train on this rank: the function of Ray Train.

    A user's error ends the trial without a retry. Any other is raised, so that Ray starts the workers again from the
    last checkpoint.
    """
    import ray.train

    rank = ray.train.get_context().get_world_rank()
    own_session()
    if os.path.isdir(job["launched_in"]):  # another node may not have that folder, and then paths are its own
        os.chdir(job["launched_in"])
    os.environ[WORKER_CPUS] = str(job["cpus_per_worker"])
    if job["storage"] is not None:
        with scratch_folder() as scratch:
            sender = Sender(Storage(job["storage"]), scratch)
            sender.begin(rank)
            try:
                train_in(scratch, rank, job, sender)
            finally:
                sender.end()
        return
    folder = Path(job["folder"])
    if not folder.is_dir():
        raise FileNotFoundError(
            f"{folder} is not on {socket.gethostname()}: it was removed, or this node does not mount it; set "
            "cluster.storage_path to a folder on a disk that every node mounts, or to an address in object storage"
        )
    train_in(folder, rank, job)


def train_in(folder: Path, rank: int, job: dict[str, Any], sender: Sender | None = None) -> None:
    """Train on this rank, which writes into a folder.

    Args:
        folder: the trial's, or this rank's own.
        rank: of this process.
        job: `Job.as_dict`.
        sender: of a folder that is this rank's alone; None: the folder is shared.
    """
    hold_alive(folder)
    redirect_output(folder / "logs" / f"rank{rank}.log")
    config = from_dict(TrialConfig, job["config"])
    stacks = StackDump(long_s(job["timeout_s"]))
    reporter = RayReporter(folder, rank, config.data.name, stacks)
    reporter.sender = sender
    reporter.phase("importing PyTorch and joining the other workers")
    try:
        train_and_record(config, folder, rank, reporter, on_cpu=not job["use_gpu"], storage=job["storage"])
    finally:
        stacks.end()


def train_and_record(
    config: TrialConfig,
    folder: Path,
    rank: int,
    reporter: FolderReporter,
    on_cpu: bool = False,
    has_log: bool = True,
    storage: str | None = None,
) -> None:
    """Train, and record an error in `failures/`. It is raised if another attempt may succeed.

    Args:
        config: the trial.
        folder: the trial's, or this rank's own.
        rank: of this process.
        reporter: where results go.
        on_cpu: whether the trial is meant to train on a CPU; then a GPU that PyTorch sees is an error.
        has_log: whether this process prints to a log of the rank's own, not to the terminal.
        storage: the trial's address in object storage, see `train`.
    """
    try:
        from fsdp_lab.training import DivergedError, train
        from fsdp_lab.training.distributed import keep_threads

        quick_imports.end()
        if has_imported_early():
            keep_threads()
        if on_cpu:
            check_no_gpu()
        train(config, folder, reporter, storage=storage)
    except UserError as error:
        record_failure(folder, rank, error, "user", has_log)
    except DivergedError as error:  # it would diverge again
        record_failure(folder, rank, error, "diverged", has_log)
    except KeyboardInterrupt:  # of a trial in this process: the user's wish, and no failure
        raise
    except BaseException as error:
        record_failure(folder, rank, error, kind_of(error), has_log)
        raise


def redirect_output(path: Path) -> None:
    """Redirect everything that this process prints, from C too, to a file of the trial."""
    path.parent.mkdir(parents=True, exist_ok=True)
    out = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(out, 1)
    os.dup2(out, 2)
    os.close(out)
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115 - lives as long as the process
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
