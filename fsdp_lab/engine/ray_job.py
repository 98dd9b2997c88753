"""A sweep as a job of a Ray cluster (`ray job submit`): checks that it uses the cluster and loses no results."""

from __future__ import annotations

import os
from pathlib import Path

from fsdp_lab.config import ConfigError, is_address
from fsdp_lab.config.sweep import Engine, SweepConfig

# The variable that `ray job submit` sets for its command, and the folder with the files that were uploaded with it.
JOB_VARIABLE = "RAY_JOB_CONFIG_JSON_ENV_VAR"
COPIES = "runtime_resources"


def in_job() -> bool:
    """Return whether Ray's job server started this process."""
    return JOB_VARIABLE in os.environ


def is_rays_copy(path: Path) -> bool:
    """Return whether a path is in Ray's copy of a `working_dir` or of `py_modules`.

    Every node has such a copy, and Ray deletes it.
    """
    return in_job() and COPIES in path.absolute().parts


def check_job(config: SweepConfig, folder: Path, key: str) -> None:
    """Reject a sweep that would not use its cluster, or would lose its results with the job's files.

    Args:
        key: the key that sets the folder on the command line.

    Raises:
        ConfigError: only in a job of Ray's.
    """
    if not in_job():
        return
    if config.engine is Engine.ray and config.cluster.address is None:
        raise ConfigError(
            "cluster.address=null starts a second Ray inside this job; add cluster.address=auto to use the job's "
            "cluster."
        )
    storage, uri = config.cluster.storage_path, config.tracking.uri
    lost = []
    if storage is not None and not is_address(storage) and is_rays_copy(Path(storage)):
        lost.append("cluster.storage_path=/shared/fsdp_lab")
    if is_rays_copy(folder):
        lost.append(f"{key}=/shared/fsdp_lab/<a name>")
    if uri.startswith("sqlite:///") and is_rays_copy(Path(uri.removeprefix("sqlite:///"))):
        lost.append("tracking.uri=sqlite:////shared/fsdp_lab/mlflow.db")
    if lost:
        raise ConfigError(
            f"this job runs in Ray's copy of its files ({Path.cwd()}), which Ray deletes; add permanent folders, for "
            f"example {' '.join(lost)}"
        )
