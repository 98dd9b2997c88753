"""A sweep that a cluster manager is to run: the command line that was checked here, typed again there."""

from __future__ import annotations

import sys
from pathlib import Path

from omegaconf import DictConfig

from fsdp_lab.config import SweepConfig
from fsdp_lab.config.job import Manager
from fsdp_lab.config.key_value_args import key_of, quoted
from fsdp_lab.deploy.job import Job, job_words
from fsdp_lab.deploy.launch import launch
from fsdp_lab.locks import locked
from fsdp_lab.status import ExitCode
from fsdp_lab.sweep.names import config_dir_words, folder_key, relative
from fsdp_lab.sweep.store.folder import new_folder


def submit_sweep(config: SweepConfig, planned: Path, hydra: DictConfig, multirun: bool) -> ExitCode:
    """Pass a sweep, or the rest of one, to its cluster manager.

    Args:
        config: of the sweep.
        planned: its folder.
        hydra: Hydra's own part of the config.
        multirun: whether `-m` was typed.

    Raises:
        UserError: see `launch`; or the folder is another sweep's.
    """
    if config.resume is not None:
        with locked(planned, "resume"):
            return ExitCode(launch(_job(config, planned, again=True, multirun=multirun)))
    with new_folder(planned, folder_key(multirun), hydra) as folder:
        return ExitCode(launch(_job(config, folder, again=False, multirun=multirun)))


def _job(config: SweepConfig, folder: Path, again: bool, multirun: bool) -> Job:
    """Return the job for a sweep.

    Args:
        config: of the sweep.
        folder: the sweep's.
        again: it exists already.
        multirun: whether `-m` was typed.
    """
    typed = sys.argv[1:]
    module, place = ["-m", "fsdp_lab"], folder_key(multirun)
    there = folder if config.cluster.job.manager is Manager.slurm else relative(folder)  # of pods this is another disk
    resume = [*module, f"resume={quoted(there)}", *config_dir_words(typed)]
    words = [word for word in job_words(typed, config.cluster) if key_of(word) != place]
    command = resume if again else [*module, *words, f"{place}={quoted(there)}"]
    return Job(command, resume, str(there / "sweep.json"), folder, config.cluster.job)
