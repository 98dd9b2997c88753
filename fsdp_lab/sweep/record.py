"""Make the record of a sweep, running or in a folder. Everything that shows or judges results reads it."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from fsdp_lab.config import SweepConfig, UserError, is_address
from fsdp_lab.config.compose import Trial
from fsdp_lab.config.status import TrialStatus
from fsdp_lab.record.hydra_folder import saved_choices, saved_config
from fsdp_lab.record.paths import storage
from fsdp_lab.record.plain_loops import read_plain_loops
from fsdp_lab.record.results_csv import read_run_ids
from fsdp_lab.record.sweep import SweepRecord
from fsdp_lab.record.sweep_json import read_start
from fsdp_lab.record.trials_jsonl import changes_of_resumes, lines_of, read_trials
from fsdp_lab.report.settings import CHANGED
from fsdp_lab.sweep.grid import swept_keys, unescaped
from fsdp_lab.sweep.names import preset_of, setting_text
from fsdp_lab.sweep.store.resume import read_state
from fsdp_lab.sweep.sweep import Sweep
from fsdp_lab.sweep.trial import TrialState
from fsdp_lab.tracking import runs_url


def record_of(sweep: Sweep) -> SweepRecord:
    """Return the record of a sweep, whose trials are its states."""
    config, start = sweep.config, sweep.started
    sizes = {size for state in sweep.trials if isinstance(size := state.facts.get("world_size"), int)}
    changed = [CHANGED] if any(state.trial.changed for state in sweep.trials) else []
    for number, state in enumerate(sweep.trials):
        state.setting = {key: setting_text(state.trial, key) for key in sweep.swept}
        state.setting |= dict.fromkeys(changed, ", ".join(state.trial.changed) or "no")
        state.overrides = [unescaped(override) for override in state.trial.words]
        state.folder = sweep.folder_of(number)
    # without typed objectives, the fastest setting that qualifies is recommended
    typed = any(word.lstrip("+").startswith("objective=") for word in start.arguments)
    asked = typed or config.search.samples or config.objective != SweepConfig().objective
    return SweepRecord(
        "/".join(sweep.folder.absolute().parts[-2:]),
        shlex.join(["python", "-m", "fsdp_lab", *(["-m"] if start.multirun else []), *start.arguments]),
        [*sweep.swept, *changed],
        list(sweep.trials),
        config.report.loss_tolerance,
        config.report.speed_tolerance,
        runs_url(config.tracking),
        [
            *start.libraries.items(),
            *([("workers", ", ".join(map(str, sorted(sizes))))] if sizes else []),
            *([("MLflow run", sweep.run_id)] if sweep.run_id else []),
        ],
        sweep.objectives if asked else [],
        "" if "experiment" in sweep.swept else preset_of(sweep.trials[0].trial),
        list(sweep.plain_loops),
    )


def sweep_in(folder: Path) -> Sweep:
    """Return the sweep in a folder, for its record. Its `config` is that of the first trial.

    Raises:
        UserError: no sweep was started there, or none of its trials has ended.
    """
    start = read_start(folder, "sweep")
    if start.multirun:
        listed = read_trials(folder, start.num_trials, "sweep")
    else:
        listed = [next(lines_of(folder), {}) | {"overrides": start.arguments, "folder": folder}]
    trials = [_trial_in(number, line, start.launched_in) for number, line in enumerate(listed)]
    if not trials:
        raise UserError(f"sweep={folder}: no trial has started there, so there is nothing to report.")
    states, ids = [read_state(TrialState(trial), storage(trial, folder)) for trial in trials], read_run_ids(folder)
    for state in states:
        state.run_id = ids.get(str(state.number), "")
    swept = swept_keys([trial.overrides for trial in trials]) if start.multirun else []
    sweep = Sweep(states, trials[0].config, folder, swept, start)
    sweep.plain_loops = read_plain_loops(folder)
    return sweep


def require_results(sweep: SweepRecord, which: str) -> None:
    """Check that there is something to compare.

    Raises:
        UserError: no trial of the sweep has finished.
    """
    if TrialStatus.finished not in (statuses := sweep.statuses):
        counts = ", ".join(f"{statuses.count(status)} {status}" for status in dict.fromkeys(statuses))
        raise UserError(f"sweep={which}: no trial has finished ({counts}), so there is nothing to compare.")


def _trial_in(number: int, line: Mapping[str, Any], launched_in: str) -> Trial:
    """Return a trial by the files that Hydra wrote, which exist before the trial is recorded.

    Its files on a shared disk are found from any folder.
    """
    folder = line["folder"]
    config = saved_config(folder)
    shared = config.cluster.storage_path
    if shared is not None and not is_address(shared) and Path(launched_in).is_dir():
        config = replace(config, cluster=replace(config.cluster, storage_path=str(Path(launched_in, shared))))
    return Trial(number, config, saved_choices(folder), line["overrides"], folder, {}, **changes_of_resumes(line))
