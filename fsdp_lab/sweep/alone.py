"""One trial without a sweep: a command without `-m`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from fsdp_lab.config import objectives
from fsdp_lab.config.compose import Trial
from fsdp_lab.config.status import ExitCode
from fsdp_lab.record.hydra_folder import write_hydra_folder
from fsdp_lab.record.sweep_json import SweepStart, begin_folder, read_start
from fsdp_lab.record.trials_jsonl import add_trial
from fsdp_lab.storage.locks import locked
from fsdp_lab.sweep.names import run_name
from fsdp_lab.sweep.runner import SweepPlan, reach_cluster
from fsdp_lab.sweep.state import SweepState, TrialState
from fsdp_lab.sweep.store.find import remember_last
from fsdp_lab.sweep.store.folder import new_folder
from fsdp_lab.sweep.store.resume import check_unchanged, resumed_states


def run_alone(trial: Trial) -> ExitCode:
    """Train a trial, or resume it, and return the exit status.

    Raises:
        UserError: its folder is taken, or nothing can be resumed there; see also `run_sweep`.
    """
    if trial.config.resume is not None:
        with locked(trial.folder, "resume"):
            record = read_start(trial.folder)
            states = resumed_states([trial], trial.folder, trial.config)
            check_unchanged(record, states, trial.folder, trial.config)
            plan = _plan(states, record, resumed=True)
            reach_cluster(plan)
            remember_last(trial.folder)
            return _start(plan)
    record = SweepStart.of(sys.argv[1:], False, trial.config)
    reach_cluster(_plan([TrialState(trial)], record))
    with new_folder(trial.folder, "hydra.run.dir", trial.hydra_config.hydra) as folder:
        trial = replace(trial, folder=folder)
        begin_folder(folder, [trial])
        write_hydra_folder(trial)
        add_trial(folder, trial)
        record.write(folder)
        remember_last(folder)
        return _start(_plan([TrialState(trial)], record))


def list_alone(trial: Trial) -> ExitCode:
    print(f"1 trial: {run_name(trial, [])}", flush=True)
    _remove_empty(trial.folder)
    return ExitCode.finished


def _remove_empty(folder: Path) -> None:
    """Remove the folder that Hydra has made, and those above it, as far as they are empty and below this one."""
    with suppress(OSError):
        for made in (folder, *folder.parents):
            if made.is_relative_to(Path.cwd()) and made != Path.cwd():
                made.rmdir()


def _plan(states: Sequence[TrialState], record: SweepStart, resumed: bool = False) -> SweepPlan:
    trial = states[0].trial
    state = SweepState(states, objectives(trial.config))
    return SweepPlan(state, trial.config, trial.folder, [], record, resumed=resumed)


def _start(plan: SweepPlan) -> ExitCode:
    from fsdp_lab.sweep.start import start_sweep

    return start_sweep(plan)
