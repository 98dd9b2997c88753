"""Slurm: a batch script for `sbatch` in the folder of a sweep, which starts the sweep and also resumes it."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib.resources import files
from pathlib import Path

from fsdp_lab.config import UserError
from fsdp_lab.config.key_value_args import quoted
from fsdp_lab.deploy.job import SCRIPT_VARIABLE, Job

_SCRIPT = "job.sbatch"
_ANSWER_S = 60.0  # of sbatch
_NUMBER = re.compile(r"(?:Submitted batch job )?(\d+)(;.*)?")  # and the cluster's name
_NOT_SHOWN = ("--job-name", "--output", "--open-mode", "--signal")
_SIGNAL = "B:USR1@120"  # two minutes before the time limit, to the shell of the script alone


class RefusedError(UserError):
    """Slurm refuses a job, which therefore leaves nothing behind."""


def launch(job: Job) -> int:
    """Write the script of a job, and submit it.

    Inside an allocation of Slurm's the script replaces this process instead, and this does not return.

    Returns:
        the exit status of the command: 0.

    Raises:
        UserError: there is no Slurm here, or it refuses the job.
    """
    allocation = os.environ.get("SLURM_JOB_ID") if job.config.submit else None
    if allocation:
        check_allocation(allocation)
    elif job.config.submit and shutil.which("sbatch") is None:
        raise UserError(
            "cluster=slurm: sbatch is not on PATH; run this on a login node of the Slurm cluster, or only write the "
            "script with cluster.job.submit=false."
        )
    script = job.write(_SCRIPT, batch_script(job))
    script.chmod(0o700)
    if allocation:
        print(f"runs in allocation {allocation} of Slurm: {script}", flush=True)
        os.execvp("bash", ["bash", str(script)])
    if not job.config.submit:
        print(f"batch script: {script}\nto submit it: {shlex.join(['sbatch', str(script)])}", flush=True)
        return 0
    try:
        number = submit(script, _options(job, script.parent))
    except RefusedError:
        script.unlink()  # so that another try may have the folder
        with suppress(OSError):  # it has the logs of earlier jobs
            script.parent.rmdir()
        raise
    print(
        f"job {number} was submitted: {script}\n"
        f"  watch:  tail -F {shlex.quote(str(script.parent / f'{number}.log'))}   squeue --job {number}\n"
        f"  end:    scancel {number}\n"
        f"  resume: {shlex.join(['sbatch', str(script)])}",
        flush=True,
    )
    return 0


def check_allocation(number: str) -> None:
    """Check that this is a node of the allocation.

    Raises:
        UserError: it is not, as with `salloc` on a login node.
    """
    if "SLURMD_NODENAME" not in os.environ:
        raise UserError(
            f"cluster=slurm inside allocation {number}, on a machine outside it: run the command on its first node "
            "(srun --overlap --nodes=1 --ntasks=1 --pty bash), or outside the allocation to submit a job."
        )


def submit(script: Path, options: Sequence[str]) -> str:
    """Submit a script, and return the number of the job.

    Args:
        script: to submit.
        options: of sbatch that it contains.

    Raises:
        RefusedError: Slurm refuses it, in its own words.
        UserError: it does not answer, or prints no number: the job may be in the queue.
    """
    try:
        done = subprocess.run(
            ["sbatch", "--parsable", str(script)], capture_output=True, text=True, timeout=_ANSWER_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise UserError(
            f"sbatch did not answer within {_ANSWER_S:g} s; check with squeue whether the job was submitted."
        ) from None
    if done.returncode:
        lines = [line.removeprefix("sbatch: error: ").rstrip(".") for line in done.stderr.splitlines() if line.strip()]
        reply = ". ".join(lines)
        asked = shlex.join(word for word in options if not word.startswith(_NOT_SHOWN))
        raise RefusedError(
            f"sbatch refused the job: {reply}. It requested {asked}. cluster.job.nodes, cpus_per_node, gpus_per_node, "
            "memory_gib_per_node and sbatch set these; to write the script only, add cluster.job.submit=false."
        )
    numbers = [found for line in done.stdout.splitlines() if (found := _NUMBER.fullmatch(line.strip()))]
    if not numbers:  # a site's own sbatch may print anything
        raise UserError(f"sbatch printed no job number, but: {' '.join(done.stdout.split())}; look with squeue --me.")
    return numbers[-1].group(1)


def batch_script(job: Job) -> str:
    """Return the script: the request to Slurm, the commands, and the body that is the same for all jobs."""
    folder = job.own_folder
    storage = []
    if job.config.nodes > 1 and not any(word.startswith("cluster.storage_path=") for word in job.command):
        storage = ["cluster.storage_path=" + quoted(job.folder / "storage")]
    lines = [
        "#!/usr/bin/env bash",
        "# Written by fsdp_lab. To resume an interrupted sweep, submit this file again.",
        *(f"#SBATCH {shlex.quote(option)}" for option in _options(job, folder)),
        "# shellcheck disable=SC2016,SC2054,SC2317",  # words with commas; what others expand; a function for a trap
        f"cd {shlex.quote(os.getcwd())} || exit",
        f"export {SCRIPT_VARIABLE}={shlex.quote(str(folder / _SCRIPT))}",
        f"python={shlex.quote(sys.executable)}",
        _array("command", [*job.command, *storage]),
        _array("again", job.again),
        f"mark={shlex.quote(job.mark)}",
        f"requeues={'yes' if _requeues(job) else ''}",
        "",
    ]
    return "\n".join(lines) + files("fsdp_lab.deploy").joinpath("slurm.sh").read_text(encoding="utf-8")


def _options(job: Job, folder: Path) -> list[str]:
    asked: dict[str, object] = {"cpus-per-task": job.config.cpus_per_node, "gpus-per-node": job.config.gpus_per_node}
    if job.config.memory_gib_per_node is not None:
        asked["mem"] = f"{round(job.config.memory_gib_per_node * 1024)}M"
    return [
        f"--job-name={job.name}",
        f"--output={str(folder).replace('%', '%%')}/%j.log",
        "--open-mode=append",
        *(["--requeue"] if _requeues(job) else []),
        f"--signal={_SIGNAL}",
        f"--nodes={job.config.nodes}",
        "--ntasks-per-node=1",
        *(f"--{name}={value}" for name, value in asked.items() if value is not None),
        *map(_option, job.config.sbatch),
    ]


def _requeues(job: Job) -> bool:
    return "no-requeue" not in job.config.sbatch


def _option(word: str) -> str:
    """Return `partition:gpu`, which needs no quotes on the command line, as `--partition=gpu`."""
    name, _, value = word.partition(":")
    return f"--{name}={value}" if value else f"--{name}"


def _array(name: str, words: Sequence[str]) -> str:
    return f"{name}=({shlex.join(words)})"
