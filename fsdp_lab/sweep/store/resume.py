"""Resuming an interrupted sweep from its folder alone, whatever ended it."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from hydra.core.override_parser.overrides_parser import OverridesParser

from fsdp_lab.config import ConfigError, SweepConfig, UserError, settings, to_dict, workers_of
from fsdp_lab.config.checks import check
from fsdp_lab.config.compare import CHECKPOINT, RESUMED, STARTS, counts
from fsdp_lab.config.compose import Trial, with_variables
from fsdp_lab.config.source_code import code_digest, commit
from fsdp_lab.config.status import TrialStatus
from fsdp_lab.config.words import key_of, quoted, with_overrides
from fsdp_lab.engine.ray_job import COPIES, is_rays_copy
from fsdp_lab.record.hydra_folder import saved_choices, saved_config
from fsdp_lab.record.paths import storage
from fsdp_lab.record.sweep_json import SweepStart, read_start, versions
from fsdp_lab.record.trial_files import read_metrics
from fsdp_lab.record.trial_json import read_trial
from fsdp_lab.record.trials_jsonl import lines_of
from fsdp_lab.sweep.names import label
from fsdp_lab.sweep.store.find import check_keys, find_trusted, read_trust
from fsdp_lab.sweep.trial import TrialState

_UNREADABLE = ".hydra"  # a trial's saved config
Changes = dict[str, tuple[str, str]]  # key or part -> the difference in words, and its value now


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
    lines = list(lines_of(folder))
    before = [word for line in lines for word in line.get("resumed", ())]
    check_keys([*before, *(word for line in lines for word in line["overrides"])], folder / "trials.jsonl")
    typed = typed if record.multirun else with_overrides(before, typed)
    place = "hydra.sweep.dir" if record.multirun else "hydra.run.dir"
    # Hydra writes the config of a single trial before it calls us, but the saved one is still to be compared.
    ours = [] if record.multirun else ["hydra.output_subdir=null"]
    ours += [f"{key}={quoted(folder)}" for key in (place, "resume")]
    return [*(["-m"] if record.multirun else []), *with_overrides(record.arguments, [*ours, *typed])]


def typed_since(arguments: Sequence[str]) -> list[str]:
    """Return the words of `resume_arguments` that were typed for the resume, even if the start had them."""
    place = next(n for n, word in enumerate(arguments) if word.startswith("resume="))
    return [*arguments[place + 1 :]]


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


def settings_typed(typed: Iterable[str], axes: Sequence[str], record: SweepStart, folder: Path) -> list[str]:
    """Return those of the words typed for a resume that set what trials compute.

    Raises:
        ConfigError: one is an axis, which distinguishes the trials, or another place for what they have written.
    """
    moved = next((w for w in typed if key_of(w) == "cluster.storage_path" and w not in record.arguments), None)
    if moved is not None:
        raise ConfigError(
            f"resume={folder}: {moved} names another place than the one where the results of this sweep are; leave it "
            "out, or start a new sweep."
        )
    words = [word for word in typed if counts(key_of(word), (*RESUMED, "hydra"))]
    if named := next((word for word in words if key_of(word) in axes), None):
        raise ConfigError(
            f"resume={folder}: {named} is an axis of this sweep, and each trial has its own value; leave it out, or "
            "start a new sweep."
        )
    return words


def resumed_states(
    trials: Sequence[Trial], record: SweepStart, folder: Path, config: SweepConfig, typed: Sequence[str] = ()
) -> list[TrialState]:
    """Return the state of each trial by the content of its folder.

    One without a result waits for its turn, and resumes from its last checkpoint. What it changes from the start is
    recorded. One with a result keeps its saved config.

    Args:
        typed: for this resume, see `settings_typed`.

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
    own = [changes_of_config(state.trial.folder, state.trial.config) for state in states]
    shared = changes_of_code(record) | changes_of_workers(record, config) | _changes_of_data(states, config)
    if not config.resume_anyway:
        _check_unchanged(record, shared, own, folder)
    for state, changes in zip(states, own, strict=True):
        if not state.ended:  # it reports its epochs again
            check(state.trial.config)
            _check_goes_on(state, changes, folder)
            state.recorded([], state.forecast_figures, state.forecast_words)
            state.facts = {}
            kept = {key: change for key, change in changes.items() if counts(key, RESUMED)}
            _note_changes(state, _words(shared | kept, state.variables), typed)
        elif changes and _UNREADABLE not in changes:
            _keep_saved(state)
    return states


def _check_goes_on(state: TrialState, changes: Changes, folder: Path) -> None:
    """Check that a trial has settings that fit its checkpoint. Otherwise it would fail when it starts."""
    fixed = [text for key, (text, _) in changes.items() if key != _UNREADABLE and counts(key, CHECKPOINT)]
    if fixed and any(storage(state.trial, folder).glob("checkpoints/*")):  # not of one in object storage
        raise UserError(
            f"resume={folder}: {label(state.trial)} resumes from its checkpoint, which has other settings: "
            f"{'; '.join(fixed)}. Leave that out, or start a new sweep with it; checkpoint.resume_from takes over "
            "weights."
        )


def without_effect(states: Sequence[TrialState], typed: Sequence[str]) -> list[str]:
    """Return a note if what was typed for a resume changes no trial, since all have a result."""
    if not typed or not all(state.ended for state in states):
        return []
    return [f"{' '.join(typed)} changes nothing: every trial has a result, and keeps what it was trained with"]


def changes_since(record: SweepStart, start: SweepConfig, now: SweepConfig) -> list[str]:
    """Return `key=value` of each change since the start of a sweep that counts for its trials."""
    own = {key: change for key, change in _differences(start, now).items() if counts(key, RESUMED)}
    return _words(changes_of_code(record) | changes_of_workers(record, now) | own, {})


def _words(changes: Changes, variables: Mapping[str, str]) -> list[str]:
    return [f"{key}={variables.get(key, value)}" for key, (_, value) in changes.items() if key != _UNREADABLE]


def _note_changes(state: TrialState, changed: list[str], typed: Sequence[str]) -> None:
    words = with_overrides(state.trial.resumed, typed) if changed else state.trial.resumed
    state.trial = replace(state.trial, resumed=words, changed=with_overrides(state.trial.changed, changed))


def _keep_saved(state: TrialState) -> None:
    """Give a trial with a result the settings that it was trained with."""
    folder = state.trial.folder
    state.config = with_variables(saved_config(folder))
    state.trial = replace(state.trial, config=state.config, choices=saved_choices(folder))


def read_state(state: TrialState, folder: Path) -> TrialState:
    """Read the records of a trial's folder into its state, and return the state."""
    recorded = read_trial(folder)
    outcome, state.facts = recorded.outcome, recorded.any_facts
    state.recorded(list(read_metrics(folder)), recorded.forecast, recorded.forecast_words)
    if outcome is not None:
        state.status, state.reason, state.seconds = outcome.status, outcome.reason, outcome.seconds
        state.span = (outcome.ended - (outcome.seconds or 0.0), outcome.ended) if outcome.ended else None
    return state


def _check_unchanged(record: SweepStart, shared: Changes, own: Sequence[Changes], folder: Path) -> None:
    found = {text: text for text, _ in shared.values()}
    for number, changes in enumerate(own):  # each once, with the first trial that has it
        whose = f"trial {number}" if record.multirun else "the trial"
        for text, _ in changes.values():
            found.setdefault(text, f"{whose}: {text}")
    if found:
        raise UserError(
            f"resume={folder}: this differs from the start of the sweep: {'; '.join(found.values())}. Restore it, "
            "start a new sweep, or resume anyway with resume_anyway=true."
        )


def _changes_of_data(states: Sequence[TrialState], config: SweepConfig) -> Changes:
    """Compare the digests that trials reported with those of the current data."""
    if all(state.ended for state in states):
        return {}
    recorded: dict[str, tuple[str, SweepConfig]] = {}  # what was reported, and a config that could read the data
    for state in states:
        data = state.trial.config.data
        if "data_digest" in state.facts and data.name != "synthetic":  # which is made from its settings
            key = json.dumps(to_dict(data), sort_keys=True)
            recorded.setdefault(key, (state.facts["data_digest"], state.trial.config))
    if not recorded:
        return {}
    from fsdp_lab.workloads.build import build_workload

    changed = {}
    for before, own in recorded.values():
        with suppress(*([UserError] if config.resume_anyway else [])):  # data of trials that have ended may be gone
            now = build_workload(own.model, own.data, own.task).data.load().digest
            if now != before:
                changed[f"data.{own.data.name}"] = f"data={own.data.name}: its digest was {before} and is {now}", now
    return changed


def changes_of_code(record: SweepStart) -> Changes:
    now = versions()
    libraries = {
        name: (f"{name} was {there} and is {now[name]}", now[name])
        for name, there in record.libraries.items()
        if now.get(name, there) != there  # other versions may look at more
    }
    if (digest := code_digest(record.user_packages)) == record.code:
        return libraries
    whose = " or ".join(["fsdp_lab", *record.user_packages])
    return {"code": (f"the code of {whose} changed{_commits(record.commit, commit())}", digest[:8]), **libraries}


def _commits(there: str, here: str) -> str:
    if not (there and here) or there == here:  # then the change is in files that are not committed
        return ""
    return f" (fsdp_lab's commit {there[:12]} then, {here[:12]} now)"


def changes_of_workers(record: SweepStart, config: SweepConfig) -> Changes:
    """Return a sentence if `cluster.num_workers=null` stands for another number of workers now."""
    workers = workers_of(config)
    if config.cluster.num_workers or workers == record.num_workers:
        return {}
    text = f"cluster.num_workers=null was {record.num_workers} workers and is {workers}"
    return {"cluster.num_workers": (text, str(workers))}


def changes_of_config(trial_folder: Path, config: SweepConfig) -> Changes:
    """Return the differences between a trial's saved config and `config`, in words."""
    try:
        before = with_variables(saved_config(trial_folder))
    except UserError as error:
        return {_UNREADABLE: (f"{trial_folder / '.hydra/config.yaml'}: {error}", "")}
    return _differences(before, config)


def _differences(before: SweepConfig, now: SweepConfig) -> Changes:
    there, here = settings(before, STARTS), settings(now, STARTS)
    return {
        key: (f"{key} was {there.get(key)} and is {here.get(key)}", str(here.get(key)))
        for key in dict.fromkeys([*here, *there])
        if there.get(key) != here.get(key)
    }
