"""A sweep as its report sees it: from the driver's states, or from a folder."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fsdp_lab.config import SweepConfig, UserError, is_address
from fsdp_lab.config.compose import Trial
from fsdp_lab.config.status import TrialStatus
from fsdp_lab.config.sweep import SearchConfig, objectives
from fsdp_lab.record.hydra_folder import read_hydra_file, saved_choices, saved_config
from fsdp_lab.record.paths import storage
from fsdp_lab.record.plain_loops import read_plain_loops
from fsdp_lab.record.results_csv import read_run_ids
from fsdp_lab.record.sweep_json import SweepStart, read_start
from fsdp_lab.record.trials_jsonl import changes_of_resumes, lines_of, read_trials
from fsdp_lab.report import data
from fsdp_lab.report.settings import CHANGED
from fsdp_lab.sweep.grid import swept_keys, unescaped
from fsdp_lab.sweep.names import preset_of, setting_text
from fsdp_lab.sweep.state import TrialState
from fsdp_lab.sweep.store.resume import read_state
from fsdp_lab.sweep.sweep import Sweep
from fsdp_lab.tracking import runs_url


def sweep_of(sweep: Sweep, run_id: Callable[[int | None], str]) -> data.SweepData:
    """Return the report's view of a sweep.

    Args:
        run_id: returns the id of a trial's run by its number, or with None of the sweep's own; "": not known.
    """
    config, record = sweep.config, sweep.started
    sizes = {size for state in sweep.trials if isinstance(size := state.facts.get("world_size"), int)}
    is_changed = any(state.trial.changed for state in sweep.trials)
    for number, state in enumerate(sweep.trials):
        state.setting = {key: setting_text(state.trial, key) for key in sweep.swept}
        state.overrides = [unescaped(override) for override in state.trial.words]
        if is_changed:
            state.setting[CHANGED] = ", ".join(state.trial.changed) or "no"
        state.folder, state.run_id = sweep.folder_of(number), run_id(number)
    return data.SweepData(
        "/".join(sweep.folder.absolute().parts[-2:]),
        shlex.join(["python", "-m", "fsdp_lab", *(["-m"] if record.multirun else []), *record.arguments]),
        [*sweep.swept, *([CHANGED] if is_changed else [])],
        list(sweep.trials),
        config.report.loss_tolerance,
        config.report.speed_tolerance,
        runs_url(config.tracking),
        [
            *record.libraries.items(),
            *([("workers", ", ".join(map(str, sorted(sizes))))] if sizes else []),
            *([("MLflow run", parent)] if (parent := run_id(None)) else []),
        ],
        asked_for(config.search, config.objective, record.arguments),
        "" if "experiment" in sweep.swept else preset_of(sweep.trials[0].trial),
        list(sweep.plain_loops),
    )


def asked_for(search: SearchConfig, words: list[str], arguments: Sequence[str]) -> list[tuple[str, str]]:
    """Return the objectives that a recommendation follows: those of a search, or those typed for a grid.

    Empty for a grid without any, whose answer is the fastest setting that qualifies. `words`: those in the config.
    """
    typed = any(word.lstrip("+").startswith("objective=") for word in arguments)
    if not search.samples and not typed and words == SweepConfig().objective:
        return []
    return objectives(words)


def sweep_in(folder: Path) -> tuple[data.SweepData, SweepStart, SweepConfig]:
    """Return the sweep, its record and the config of its first trial, from a folder.

    Raises:
        UserError: no sweep was started there, or none of its trials has ended.
    """
    record = read_start(folder, "sweep")
    if record.multirun:
        listed = read_trials(folder, record.num_trials, "sweep")
    else:
        listed = [next(lines_of(folder), {}) | {"overrides": record.arguments, "folder": folder}]
    trials = [_trial_in(number, line, record.launched_in) for number, line in enumerate(listed)]
    if not trials:
        raise UserError(f"sweep={folder}: no trial has started there, so there is nothing to report.")
    states = [read_state(TrialState(trial), storage(trial, folder)) for trial in trials]
    ids, config = read_run_ids(folder), trials[0].config
    swept = swept_keys([trial.overrides for trial in trials]) if record.multirun else []
    sweep = Sweep(states, config, folder, swept, record)
    sweep.plain_loops = read_plain_loops(folder)
    return sweep_of(sweep, lambda number: ids.get(str(number), "")), record, config


def require_results(sweep: data.SweepData, which: str) -> None:
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
    values, hydra = (read_hydra_file(folder, name) for name in ("config.yaml", "hydra.yaml"))
    config = saved_config(values)
    shared = config.cluster.storage_path
    if shared is not None and not is_address(shared) and Path(launched_in).is_dir():
        config = replace(config, cluster=replace(config.cluster, storage_path=str(Path(launched_in, shared))))
    return Trial(number, config, saved_choices(hydra), line["overrides"], folder, {}, **changes_of_resumes(line))
