"""A sweep as its report sees it: from the driver's states, or from a folder."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, IntervalSweep, Override
from hydra.errors import HydraException

from fsdp_lab.config import SweepConfig, UserError, is_address
from fsdp_lab.config.compose import Trial
from fsdp_lab.config.status import TrialStatus
from fsdp_lab.config.sweep import SearchConfig, objectives_in
from fsdp_lab.record.hydra_folder import read_hydra_file, saved_config
from fsdp_lab.record.paths import storage
from fsdp_lab.record.results_csv import read_run_ids
from fsdp_lab.record.sweep_json import SweepStart, read_start
from fsdp_lab.record.trials_jsonl import read_trials
from fsdp_lab.report import data
from fsdp_lab.sweep.grid import swept_keys, unescaped
from fsdp_lab.sweep.names import setting_text
from fsdp_lab.sweep.state import TrialState
from fsdp_lab.sweep.store.resume import read_state
from fsdp_lab.tracking import runs_url


def sweep_of(
    states: Sequence[TrialState],
    swept: Sequence[str],
    folder: Path,
    record: SweepStart,
    run_id: Callable[[int], str],
    parent: str = "",
) -> data.SweepData:
    """Return the report's view of a sweep that this driver runs.

    Args:
        states: of the trials, in the order of their numbers.
        swept: the keys that differ between trials.
        run_id: returns the id of a trial's run by its number.
        parent: the id of the sweep's own run; "": not known.
    """
    config = states[0].trial.config
    sizes = {size for state in states if isinstance(size := state.facts.get("world_size"), int)}
    for number, state in enumerate(states):
        state.setting = {key: setting_text(state.trial, key) for key in swept}
        state.overrides = [unescaped(override) for override in state.trial.overrides]
        state.folder, state.run_id = storage(state.trial, folder), run_id(number)
    return data.SweepData(
        "/".join(folder.absolute().parts[-2:]),
        shlex.join(["python", "-m", "fsdp_lab", *(["-m"] if record.multirun else []), *record.arguments]),
        list(swept),
        list(states),
        config.report.loss_tolerance,
        config.report.speed_tolerance,
        runs_url(config.tracking),
        [
            *record.libraries.items(),
            *([("workers", ", ".join(map(str, sorted(sizes))))] if sizes else []),
            *([("MLflow run", parent)] if parent else []),
        ],
        asked_for(config.search, config.objective, record.arguments),
        study_of(record.arguments),
        log_axes(record.arguments),
    )


def asked_for(search: SearchConfig, words: list[str], arguments: Sequence[str]) -> list[tuple[str, str]]:
    """Return the objectives that a recommendation follows: those of a search, or those typed for a grid.

    Empty for a grid without any, whose answer is the fastest setting that qualifies.

    Args:
        words: the objectives in the config.
    """
    typed = any(word.lstrip("+").startswith("objective=") for word in arguments)
    if not search.samples and not typed and words == SweepConfig().objective:
        return []
    return objectives_in(words)


def study_of(arguments: Sequence[str]) -> str:
    """Return the chosen preset; "" for none, or several."""
    presets = [o for o in _parsed(arguments) if o.key_or_group == "experiment" and not o.is_sweep_override()]
    return str(presets[-1].value() or "") if presets else ""


def log_axes(arguments: Sequence[str]) -> list[str]:
    """Return the axes searched on a logarithmic scale, and those whose listed numbers span a factor of ten."""
    return [override.key_or_group for override in _parsed(arguments) if _is_log(override.value())]


def _is_log(value: Any) -> bool:
    if isinstance(value, ChoiceSweep):
        numbers = [one for one in value.list if isinstance(one, int | float) and not isinstance(one, bool)]
        return len(numbers) == len(value.list) and min(numbers) > 0 and max(numbers) >= 10 * min(numbers)
    return isinstance(value, IntervalSweep) and "log" in value.tags


def _parsed(arguments: Sequence[str]) -> list[Override]:
    """Return overrides, skipping damaged ones of a line that was cut or edited."""
    parser = OverridesParser.create()
    overrides = []
    for argument in arguments:
        with suppress(HydraException):
            overrides.append(parser.parse_override(argument))
    return overrides


def sweep_in(folder: Path) -> tuple[data.SweepData, SweepStart, SweepConfig]:
    """Return the sweep, its record and the config of its first trial, from a folder.

    Raises:
        UserError: no sweep was started there, or none of its trials has ended.
    """
    record = read_start(folder, "sweep")
    listed = read_trials(folder, record.num_trials, "sweep") if record.multirun else [(record.arguments, folder)]
    trials = [
        _trial_in(where, number, overrides, record.launched_in) for number, (overrides, where) in enumerate(listed)
    ]
    if not trials:
        raise UserError(f"sweep={folder}: no trial has started there, so there is nothing to report.")
    states = [read_state(TrialState(trial), storage(trial, folder)) for trial in trials]
    ids = read_run_ids(folder)
    swept = swept_keys([trial.overrides for trial in trials]) if record.multirun else []
    return sweep_of(states, swept, folder, record, lambda number: ids.get(str(number), "")), record, trials[0].config


def require_results(sweep: data.SweepData, which: str) -> None:
    """Check that there is something to compare.

    Raises:
        UserError: no trial of the sweep has finished.
    """
    if TrialStatus.finished not in (statuses := sweep.statuses):
        counts = ", ".join(f"{statuses.count(status)} {status}" for status in dict.fromkeys(statuses))
        raise UserError(f"sweep={which}: no trial has finished ({counts}), so there is nothing to compare.")


def _trial_in(folder: Path, number: int, overrides: Sequence[str], launched_in: str) -> Trial:
    """Return a trial by the files that Hydra wrote, which exist before the trial is recorded.

    Its files on a shared disk are found from any folder.

    Raises:
        UserError: a file is missing, or cannot be read.
    """
    values, hydra = (read_hydra_file(folder, name) for name in ("config.yaml", "hydra.yaml"))
    options = hydra["runtime"]["choices"].items()
    choices = {k: str(v) for k, v in options if v and not k.startswith("hydra/")}
    config = saved_config(values)
    shared = config.cluster.storage_path
    if shared is not None and not is_address(shared) and Path(launched_in).is_dir():
        config = replace(config, cluster=replace(config.cluster, storage_path=str(Path(launched_in, shared))))
    return Trial(number, config, choices, list(overrides), folder, {})
