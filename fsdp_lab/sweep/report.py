"""A sweep as its report sees it: from the driver's states, from a folder, or from the store."""

from __future__ import annotations

import csv
import re
import shlex
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, IntervalSweep, Override
from hydra.errors import HydraException
from omegaconf import OmegaConf

from fsdp_lab.compose import Trial
from fsdp_lab.config import SweepConfig, TrialConfig, UserError, from_dict, is_address, part
from fsdp_lab.config.sweep import ReportConfig, SearchConfig, TrackingConfig, objectives_in
from fsdp_lab.config.words import AUTO_REPEAT
from fsdp_lab.engine.files import read_any_facts, read_latest, read_metrics
from fsdp_lab.metrics import PREDICTED_BY
from fsdp_lab.redact import redact
from fsdp_lab.report import data
from fsdp_lab.status import TrialStatus
from fsdp_lab.sweep.grid import swept_keys
from fsdp_lab.sweep.names import setting
from fsdp_lab.sweep.state import TrialState
from fsdp_lab.sweep.store.paths import storage
from fsdp_lab.sweep.store.record import Record, read_hydra_file, read_record, read_trials, saved_config
from fsdp_lab.sweep.store.resume import resumed_states
from fsdp_lab.takehome import read_setup
from fsdp_lab.tracking import command_of, fetch_artifact, read_sweep, runs_url


def sweep_of(
    states: Sequence[TrialState],
    swept: Sequence[str],
    folder: Path,
    record: Record,
    run_id: Callable[[int], str],
    parent: str = "",
) -> data.Sweep:
    """What the driver knows.

    Args:
        run_id: the id of a trial's run, by its number.
        parent: the id of the sweep's own run, where it is known.
    """
    config = states[0].trial.config
    trials = [
        data.Trial(
            number,
            {key: typed(setting(state.trial, key)) for key in swept},
            state.status,
            state.figures(),
            list(read_metrics(storage(state.trial, folder))),
            [redact(override) for override in state.trial.overrides],
            redact(state.error) if state.error else None,
            run_id(number),
            state.seconds,
            str(facts.get("device", "")),
            read_setup(_title(number, state), part(state.trial.config, TrialConfig), facts),
            state.predicted_by,
        )
        for number, state in enumerate(states)
        for facts in [read_any_facts(storage(state.trial, folder)) or {}]
    ]
    return data.Sweep(
        "/".join(folder.absolute().parts[-2:]),
        redact(shlex.join(["python", "-m", "fsdp_lab", *(["-m"] if record.multirun else []), *record.arguments])),
        list(swept),
        trials,
        config.report.loss_tolerance,
        config.report.speed_tolerance,
        runs_url(config.tracking),
        [
            *record.libraries.items(),
            ("workers", str(config.cluster.num_workers or record.num_workers)),
            *([("MLflow run", parent)] if parent else []),
        ],
        config.report.others_cpu,
        asked_for(config.search, config.objective, record.arguments),
        config.repeat_max if AUTO_REPEAT in record.arguments else None,
        study_of(record.arguments),
        log_axes(record.arguments),
    )


def asked_for(search: SearchConfig, words: list[str], arguments: Sequence[str]) -> list[tuple[str, str]]:
    """The objectives that a recommendation follows: those of a search, or what a grid was given. Empty for a grid
    without any, of which the fastest setting that learned is wanted.

    Args:
        arguments: what was typed.
    """
    typed = any(word.lstrip("+").startswith("objective=") for word in arguments)
    if not search.samples and not typed and words == SweepConfig().objective:
        return []
    return objectives_in(words)


def _title(number: int, state: TrialState) -> str:
    return f"Trial {number}: {redact(' '.join(state.trial.overrides))}"


def study_of(arguments: Sequence[str]) -> str:
    """The preset that was chosen; "" for none, or several."""
    presets = [o for o in _parsed(arguments) if o.key_or_group == "experiment" and not o.is_sweep_override()]
    return str(presets[-1].value() or "") if presets else ""


def log_axes(arguments: Sequence[str]) -> list[str]:
    """The axes that were searched on a logarithmic scale, and those whose numbers, as listed, span a factor of ten."""
    return [override.key_or_group for override in _parsed(arguments) if _is_log(override.value())]


def _is_log(value: Any) -> bool:
    if isinstance(value, ChoiceSweep):
        numbers = [number for one in value.list if (number := data.as_number(str(one))) is not None]
        return len(numbers) == len(value.list) and min(numbers) > 0 and max(numbers) >= 10 * min(numbers)
    return isinstance(value, IntervalSweep) and "log" in value.tags


def _parsed(arguments: Sequence[str]) -> list[Override]:
    """Overrides, without what a line that was cut or changed by hand left of one."""
    parser = OverridesParser.create()
    found = []
    for argument in arguments:
        with suppress(HydraException):
            found.append(parser.parse_override(argument))
    return found


def sweep_in(folder: Path) -> tuple[data.Sweep, Record, SweepConfig]:
    """What a folder knows, with the config of its first trial.

    Raises:
        UserError: no sweep was started there, or none of its trials has ended.
    """
    record = read_record(folder, "sweep")
    listed = read_trials(folder, record.num_trials, "sweep") if record.multirun else [(record.arguments, folder)]
    trials = [
        _trial_in(where, number, overrides, record.launched_in) for number, (overrides, where) in enumerate(listed)
    ]
    if not trials:
        raise UserError(f"sweep={folder}: no trial was begun there, so there is nothing to report.")
    states = resumed_states(trials, folder, trials[0].config)
    for state in states:
        state.metrics = state.metrics or read_latest(storage(state.trial, folder))
    ids = _run_ids(folder)
    swept = swept_keys([trial.overrides for trial in trials]) if record.multirun else []
    return sweep_of(states, swept, folder, record, lambda number: ids.get(str(number), "")), record, trials[0].config


def sweep_stored(tracking: TrackingConfig, run_id: str) -> data.Sweep:
    """What the MLflow store knows of a sweep, wherever it ran; with the tolerances that it was run with.

    Raises:
        TrackingError: there is no such store or run.
    """
    parent, runs = read_sweep(tracking, run_id)
    # The command of a trial is the one that trains it again, alone.
    commands = [shlex.split(command_of(run.tags))[3:] for run in runs]
    typed_overrides = [[word for word in words if not word.startswith("--")] for words in commands]
    same_keys = len({tuple(o.partition("=")[0] for o in overrides) for overrides in typed_overrides}) == 1
    axes = swept_keys(typed_overrides) if same_keys else []
    trials = [
        data.Trial(
            number,
            {axis: words.get(axis, "") for axis in axes},
            _status(run.tags.get("status")),
            run.metrics,
            run.epochs,
            overrides,
            run.tags.get("error"),
            run.run_id,
            run.seconds,
            run.tags.get("device", ""),
            predicted_by=run.tags.get(PREDICTED_BY, ""),
        )
        for number, (run, overrides) in enumerate(zip(runs, typed_overrides, strict=True))
        for words in [{o.partition("=")[0].lstrip("+"): o.partition("=")[2] for o in overrides}]
    ]
    libraries = [
        (name, parent.tags[f"version.{name}"]) for name in ("torch", "ray") if f"version.{name}" in parent.tags
    ]
    name = parent.tags.get("mlflow.runName", run_id)
    command = command_of(parent.tags)
    arguments = _arguments(command)
    report, wanted, most = _report_config(tracking, runs[0].run_id, command.split())
    tolerances = (report.loss_tolerance, report.speed_tolerance)
    return data.Sweep(
        name, command, axes, trials, *tolerances, runs_url(tracking), libraries, report.others_cpu, wanted,
        most if AUTO_REPEAT in arguments else None, study_of(arguments), log_axes(arguments),
    )  # fmt: skip


def _arguments(command: str) -> list[str]:
    """What stands behind `python -m fsdp_lab`."""
    try:
        return shlex.split(command)[3:]
    except ValueError:  # the store cut a long one within quotes
        return command.split()[3:]


def _status(tag: str | None) -> TrialStatus:
    """What a run's tag says; running where it says nothing, or what no version wrote."""
    return TrialStatus.__members__.get(tag or "", TrialStatus.running)


def _report_config(
    tracking: TrackingConfig, run_id: str, arguments: Sequence[str]
) -> tuple[ReportConfig, list[tuple[str, str]], int]:
    """Of a trial in the store, with its objectives and `repeat_max`; the defaults where its config is not there, or is
    of other code."""
    try:
        with TemporaryDirectory() as folder:
            path = fetch_artifact(tracking, run_id, "config/config.yaml", Path(folder))
            saved = yaml.safe_load(path.read_text())
        report, search = from_dict(ReportConfig, saved["report"]), from_dict(SearchConfig, saved["search"])
        return (
            report,
            asked_for(search, [str(word) for word in saved["objective"]], arguments),
            int(saved["repeat_max"]),
        )
    except (UserError, KeyError, TypeError, ValueError, yaml.YAMLError):
        return ReportConfig(), [], SweepConfig().repeat_max


def require_results(sweep: data.Sweep, which: str) -> None:
    """
    Raises:
        UserError: no trial of the sweep has finished.
    """
    if TrialStatus.finished not in (statuses := sweep.statuses):
        told = ", ".join(f"{statuses.count(status)} {status}" for status in dict.fromkeys(statuses))
        raise UserError(f"sweep={which}: no trial has finished ({told}), so there is nothing to compare.")


def typed(value: Any) -> str:
    """A value as it is typed."""
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else f"{value:.6g}" if isinstance(value, float) else str(value)


def _trial_in(folder: Path, number: int, overrides: Sequence[str], launched_in: str) -> Trial:
    """A trial by the files that Hydra left: a trial has them before it is written down. What it keeps on a shared disk
    is found from any folder.

    Raises:
        UserError: one is damaged or gone.
    """
    values, hydra = (read_hydra_file(folder, name) for name in ("config.yaml", "hydra.yaml"))
    if values is None or hydra is None:
        raise UserError(
            f"{folder / '.hydra' / ('config.yaml' if values is None else 'hydra.yaml')} is damaged or missing, so "
            "this trial's settings are unknown; `python -m fsdp_lab resume=<the sweep's folder>` writes the file again."
        )
    options = hydra["runtime"]["choices"].items()
    choices = {k: str(v) for k, v in options if v and not k.startswith("hydra/")}
    config = saved_config(values)
    shared = config.cluster.storage_path
    if shared is not None and not is_address(shared) and Path(launched_in).is_dir():
        config = replace(config, cluster=replace(config.cluster, storage_path=str(Path(launched_in, shared))))
    return Trial(number, config, choices, list(overrides), folder, OmegaConf.create())


def _run_ids(folder: Path) -> dict[str, str]:
    try:
        with (folder / "results.csv").open(newline="") as rows:
            ids = {row["trial"]: row["run_id"] for row in csv.DictReader(rows)}
    except (OSError, KeyError, ValueError, csv.Error):
        return {}
    return {number: run_id for number, run_id in ids.items() if re.fullmatch("[0-9a-f]{32}", run_id or "")}
