"""Passes a command line to the cluster manager that its configuration names."""

from __future__ import annotations

from fsdp_lab.config.job import Manager
from fsdp_lab.deploy.job import Job


def launch(job: Job) -> int:
    """Write the manager's files below the sweep's folder, and submit the job if the configuration says so.

    Returns:
        the exit status of the command.

    Raises:
        UserError: the manager is not here, or refuses the job; or the job's results would be lost.
    """
    if job.config.manager is Manager.slurm:
        from fsdp_lab.deploy import slurm

        return slurm.launch(job)
    from fsdp_lab.deploy import kuberay

    return kuberay.launch(job)
