"""Resuming an interrupted sweep from its folder alone, whatever ended it."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Sequence
from pathlib import Path

from hydra.core.override_parser.overrides_parser import OverridesParser

from fsdp_lab.config import ConfigError, SweepConfig, UserError, settings, to_dict, workers_of
from fsdp_lab.config.checks import check
from fsdp_lab.config.code import code_digest, commit
from fsdp_lab.config.compare import STARTS
from fsdp_lab.config.compose import Trial, with_variables
from fsdp_lab.config.key_value_args import key_of, quoted
from fsdp_lab.config.status import TrialStatus
from fsdp_lab.engine.ray_job import COPIES, is_rays_copy
from fsdp_lab.record.hydra_folder import read_hydra_file, saved_config
from fsdp_lab.record.paths import storage
from fsdp_lab.record.sweep_json import SweepStart, read_start, versions
from fsdp_lab.record.trial_files import read_metrics
from fsdp_lab.record.trial_json import read_trial
from fsdp_lab.record.trials_jsonl import lines_of
from fsdp_lab.sweep.grid import with_overrides
from fsdp_lab.sweep.state import TrialState
from fsdp_lab.sweep.store.find import check_keys, find_trusted, read_trust


def resume_arguments(arguments: Sequence[str]) -> list[str]:
    """Return the command line that `resume=...` stands for.

    Raises:
        UserError: there is nothing to resume, it is not trusted, or it was started in another folder.
    """
    resume = next(a for a in arguments if a.startswith("resume="))
    trust = read_trust(next((a.partition("=")[2] for a in arguments if a.startswith("trust=")), None))
    typed = [a for a in arguments if a not in ("-m", "--multirun") and not a.startswith(("resume=", "trust="))]
    override = OverridesParser.create().parse_override(resume)
    if override.is_sweep_override():
        raise ConfigError(f"{resume} has several values; name one folder, in quotes if there is a comma in its name.")
    named = str(override.value()).replace("\\${", "${")
    folder, own = find_trusted(named, "resume", trust)
    record = read_start(folder)
    if own:
        _check_place(record, folder)
    replaced = {key_of(word) for word in typed}
    check_keys([word for word in record.arguments if key_of(word) not in replaced], folder / "sweep.json")
    check_keys([word for line in lines_of(folder) for word in line["overrides"]], folder / "trials.jsonl")
    place = "hydra.sweep.dir" if record.multirun else "hydra.run.dir"
    # Hydra writes the config of a single trial before it calls us: the one that is there is to be compared.
    ours = [f"{key}={quoted(folder)}" for key in ("resume", place)]
    ours += [] if record.multirun else ["hydra.output_subdir=null"]
    return [*(["-m"] if record.multirun else []), *with_overrides(record.arguments, [*typed, *ours])]


def _check_place(record: SweepStart, folder: Path) -> None:
    """Check that a sweep resumes where it was started, since it may have relative paths.

    One that ran in Ray's copy of a job, which Ray deletes, resumes anywhere.
    """
    there = record.launched_in
    if is_rays_copy(Path.cwd()) or COPIES in Path(there).parts:
        return
    if not os.path.isdir(there) or os.path.samefile(there, "."):
        return
    raise UserError(
        f"resume={folder}: the sweep was started in {there}, where its relative paths belong; resume it there, after "
        f"cd {shlex.quote(there)}"
    )


def resumed_states(trials: Sequence[Trial], record: SweepStart, folder: Path, config: SweepConfig) -> list[TrialState]:
    """Return the state of each trial by the content of its folder.

    One without a result waits for its turn, and resumes from its last checkpoint.

    Raises:
        UserError: the sweep was started with other settings, code or data, unless `resume_anyway`; or a trial cannot
            run here.
    """
    states = []
    for trial in trials:
        state = TrialState(trial)
        state.resuming = True
        read_state(state, storage(trial, folder))
        if config.resume_failed and state.status is TrialStatus.failed:  # its outcome is removed later
            state.status, state.reason, state.seconds = TrialStatus.waiting, None, None
        states.append(state)
    if not config.resume_anyway:
        _check_unchanged(record, states, folder, config)
    for state in states:
        if not state.ended:  # it reports its epochs again
            check(state.trial.config)
            state.recorded([], state.forecast_figures, state.forecast_words)
            state.facts = {}
    return states


def read_state(state: TrialState, folder: Path) -> TrialState:
    """Fill in what a trial's folder records, and return the same."""
    recorded = read_trial(folder)
    outcome, state.facts = recorded.outcome, recorded.any_facts
    state.recorded(list(read_metrics(folder)), recorded.forecast, recorded.forecast_words)
    if outcome is not None:
        state.status, state.reason, state.seconds = outcome.status, outcome.reason, outcome.seconds
        state.span = (outcome.ended - (outcome.seconds or 0.0), outcome.ended) if outcome.ended else None
    return state


def _check_unchanged(record: SweepStart, states: Sequence[TrialState], folder: Path, config: SweepConfig) -> None:
    changes = {"": changes_of_code(record)}
    for number, state in enumerate(states):
        whose = f"trial {number}" if record.multirun else "the trial"
        changes[whose] = changes_of_config(state.trial.folder, state.trial.config)
    changes["workers"] = changes_of_workers(record, config)
    changes["data"] = _changes_of_data(states)
    if text := _in_words(changes):
        raise UserError(
            f"resume={folder}: this differs from the start of the sweep: {text}. Restore it, start a new sweep, or "
            "resume anyway with resume_anyway=true."
        )


def _in_words(changes: dict[str, list[str]]) -> str:
    """Return each difference once, with the first place where it was found."""
    found: dict[str, str] = {}
    for whose, differences in changes.items():
        for change in differences:
            found.setdefault(change, whose)
    return "; ".join(f"{whose}: {change}" if whose else change for change, whose in found.items())


def _changes_of_data(states: Sequence[TrialState]) -> list[str]:
    """Compare the digests that trials reported with those of the current data."""
    if all(state.ended for state in states):
        return []
    recorded: dict[str, tuple[str, SweepConfig]] = {}  # what was reported, and a config that could read the data
    for state in states:
        data = state.trial.config.data
        if "data_digest" in state.facts and data.name != "synthetic":  # which is made from its settings
            key = json.dumps(to_dict(data), sort_keys=True)
            recorded.setdefault(key, (state.facts["data_digest"], state.trial.config))
    if not recorded:
        return []
    from fsdp_lab.workloads.build import build_workload

    changed = []
    for before, config in recorded.values():
        now = build_workload(config.model, config.data, config.task).data.load().digest
        if now != before:
            changed.append(f"data={config.data.name}: its digest was {before} and is {now}")
    return changed


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
