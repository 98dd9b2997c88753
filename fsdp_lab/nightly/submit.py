"""A night, or every night, that a cluster manager is to run."""

from __future__ import annotations

from collections.abc import Sequence

from fsdp_lab.config import ConfigError
from fsdp_lab.config.job import Manager
from fsdp_lab.deploy.job import Job, job_words
from fsdp_lab.deploy.launch import launch
from fsdp_lab.nightly.read_study import Study


def is_for_manager(study: Study) -> bool:
    """Whether a cluster manager is to run the nights, not this process."""
    return study.cluster.job.manager is not Manager.none


def submit_night(study: Study, option: str | None, overrides: Sequence[str]) -> int:
    """Hand a night to its manager; without `--once` or `--continue`, which is every night, their schedule.

    Returns:
        the exit status of the command.

    Raises:
        ConfigError: the manager has no schedules.
        UserError: see `launch`.
    """
    if option is None and study.cluster.job.manager is Manager.slurm:
        raise ConfigError(
            "cluster=slurm submits one night: add --once, and let scrontab or cron run the command every night."
        )
    nightly = study.nightly
    words = ["-m", "fsdp_lab.nightly", option or "--once", *job_words(overrides, study.cluster)]
    schedule = (nightly.cron, nightly.timezone) if option is None else None
    code = launch(Job(words, words, "", study.folder.absolute(), study.cluster.job, schedule))
    if schedule is None and study.cluster.job.submit:
        print(f"  verdict: the end of the job's log, and gate.md in {study.folder}/<night>; a regression exits with 3")
    return code
