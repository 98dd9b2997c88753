"""A command line of ours that is to run under a cluster manager."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from fsdp_lab.config import to_dict
from fsdp_lab.config.conf import conf_dir
from fsdp_lab.config.job import JobConfig
from fsdp_lab.config.key_value_args import quoted
from fsdp_lab.config.sweep import ClusterConfig
from fsdp_lab.files import write_text

# The batch script, or the manifest, of the job that this process is in. Its folder is the sweep's `job/`.
SCRIPT_VARIABLE = "FSDP_LAB_JOB"


@dataclass(frozen=True)
class Job:
    """A command line, and the request to the manager.

    Attributes:
        command: Python's arguments, such as `-m fsdp_lab ...`, without arguments for the manager.
        again: the command that resumes it once the file `mark` exists; the same command if it detects that itself.
        mark: see `again`; "": there is none.
        folder: the sweep's, or the study's of a night; absolute. Files of the manager go into `job/` there.
        config: the request.
        schedule: cron's fields and the time zone, for a command that runs repeatedly; None: it runs once.
    """

    command: list[str]
    again: list[str]
    mark: str
    folder: Path
    config: JobConfig
    schedule: tuple[str, str | None] | None = None

    @property
    def own_folder(self) -> Path:
        """The folder of the manager's files."""
        return self.folder / "job"

    def write(self, name: str, text: str) -> Path:
        """Write a file into the job's own folder, which only this user can read, and return its path."""
        self.own_folder.mkdir(0o700, parents=True, exist_ok=True)
        write_text(self.own_folder / name, text)
        return self.own_folder / name

    @property
    def name(self) -> str:
        """The job's name, at most 40 characters: Kubernetes takes small letters, digits and hyphens."""
        parts = re.sub(r"[^a-z0-9]+", "-", "-".join(self.folder.parts[-2:]).lower()).strip("-")
        return f"fsdp-lab-{parts}"[:40].rstrip("-")


def job_words(typed: Sequence[str], cluster: ClusterConfig) -> list[str]:
    """Return the command line for the job.

    Arguments for the manager are left out. Values of the user's own option of `cluster` are added.

    Args:
        typed: the command line.
        cluster: its configuration.
    """
    option = next((word.partition("=")[2] for word in typed if word.startswith("cluster=")), "local")
    keys = [word.partition("=")[0].lstrip("+") for word in typed]
    implied = [] if (conf_dir() / "cluster" / f"{option}.yaml").exists() else _words_implied_by_option(cluster, keys)
    left = [word for word, key in zip(typed, keys, strict=True) if key != "cluster" and not is_managers(key)]
    return [*left, *implied]


def is_managers(key: str) -> bool:
    """Return whether a key is for the manager."""
    return key.startswith("cluster.job.")


def _words_implied_by_option(cluster: ClusterConfig, typed: Sequence[str]) -> list[str]:
    before = to_dict(ClusterConfig())
    values = {key: value for key, value in to_dict(cluster).items() if key != "job" and value != before[key]}
    return [
        f"cluster.{key}={quoted(value) if isinstance(value, str) else value}"
        for key, value in values.items()
        if f"cluster.{key}" not in typed
    ]


def in_job_of(folder: Path) -> bool:
    """Return whether this process is the job that was made for a folder."""
    script = os.environ.get(SCRIPT_VARIABLE)
    return script is not None and Path(script).absolute().parent.parent == folder.absolute()


def note_progress() -> None:
    """Note for the job's script, if this process is in one, that an epoch or a trial was finished since its start."""
    if script := os.environ.get(SCRIPT_VARIABLE):
        with suppress(OSError):  # the script then does not requeue the job, and says how to resume it
            Path(script).with_name("progress").touch()


def resume_by() -> str | None:
    """Return the shell command that starts this process's job again; None outside of a job."""
    script = os.environ.get(SCRIPT_VARIABLE)
    if script is None:
        return None
    manager = ["kubectl", "replace", "--force", "-f"] if script.endswith(".yaml") else ["sbatch"]
    return shlex.join([*manager, script])
