"""Differences between now and the start of a sweep: code, libraries, settings, workers."""

from __future__ import annotations

from pathlib import Path

from fsdp_lab.config import SweepConfig, UserError, settings, workers_of
from fsdp_lab.config.code import code_digest, commit
from fsdp_lab.config.compare import STARTS
from fsdp_lab.config.compose import with_variables
from fsdp_lab.record.hydra_folder import read_hydra_file, saved_config
from fsdp_lab.record.sweep_json import SweepStart, versions


def changes_of_code(record: SweepStart) -> list[str]:
    now = versions()
    libraries = [
        f"{name} was {there} and is {now[name]}"
        for name, there in record.libraries.items()
        if now.get(name, there) != there  # other versions may look at more
    ]
    changed = record.code != code_digest(record.user_packages)
    whose = " or ".join(["fsdp_lab", *record.user_packages])
    return [*([f"the code of {whose} changed{_commits(record.commit, commit())}"] if changed else []), *libraries]


def _commits(there: str, here: str) -> str:
    if not (there and here) or there == here:  # then the change is in files that are not committed
        return ""
    return f" (fsdp_lab's commit {there[:12]} then, {here[:12]} now)"


def changes_of_workers(record: SweepStart, config: SweepConfig) -> list[str]:
    """Return a sentence if `cluster.num_workers=null` stands for another number of workers now."""
    workers = workers_of(config)
    if config.cluster.num_workers or workers == record.num_workers:
        return []
    return [f"cluster.num_workers=null was {record.num_workers} workers and is {workers}"]


def changes_of_config(trial_folder: Path, config: SweepConfig) -> list[str]:
    """Return the differences between a trial's saved config and `config`, in words."""
    try:
        before = with_variables(saved_config(read_hydra_file(trial_folder, "config.yaml")))
    except UserError as error:
        return [f"{trial_folder / '.hydra/config.yaml'}: {error}"]
    there, here = settings(before, STARTS), settings(config, STARTS)
    return [
        f"{key} was {there.get(key)} and is {here.get(key)}"
        for key in dict.fromkeys([*here, *there])
        if there.get(key) != here.get(key)
    ]
