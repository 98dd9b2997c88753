"""From a command to its exit status: its sweep is planned, checked, recorded and run."""

from __future__ import annotations

import tempfile
from contextlib import ExitStack, suppress
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from fsdp_lab.config import is_address
from fsdp_lab.config.machine import check_open_files, ray_folder
from fsdp_lab.config.status import ExitCode
from fsdp_lab.config.sweep import Engine
from fsdp_lab.config.wording import count
from fsdp_lab.config.words import unused_variables
from fsdp_lab.engine.cluster import start_ray
from fsdp_lab.engine.ray_job import check_job
from fsdp_lab.forecast.devices import check_sweep, no_file_note
from fsdp_lab.record.hydra_folder import write_hydra_folder, write_yaml
from fsdp_lab.record.sweep_json import begin_folder
from fsdp_lab.record.trials_jsonl import add_trial
from fsdp_lab.storage.locks import locked, unwritable
from fsdp_lab.storage.objects import check_access
from fsdp_lab.sweep.command import Alone, Multirun
from fsdp_lab.sweep.names import folder_key, relative, resume_lines, run_name, ui_command
from fsdp_lab.sweep.store.find import remember_last
from fsdp_lab.sweep.store.folder import new_folder
from fsdp_lab.sweep.sweep import Sweep


def run(command: Alone | Multirun) -> ExitCode:
    """Run the sweep of a command, or list its trials with `dry_run`, and return the exit status.

    Raises:
        UserError: the command is refused, and nothing was written; or see `run_sweep`.
    """
    config = command.config
    with ExitStack() as held:
        if config.resume is not None and not config.dry_run:
            held.enter_context(locked(command.folder, "resume"))  # first: another resume may be at work
        sweep, notes = command.sweep()
        check_job(sweep.config, sweep.folder, folder_key(sweep.started.multirun))
        check_sweep(sweep.config)  # each of its trials was checked when it was composed
        if config.dry_run:
            print(*_head(sweep), *notes, *_listed(sweep), sep="\n", flush=True)
            _remove_empty(command.folder)
            return ExitCode.finished
        reach(sweep)
        if config.resume is None:
            folder = held.enter_context(new_folder(command.folder, command.key, command.hydra))
            if folder != command.folder:
                command.folder = folder  # of what a search composes
                if command.multirun is not None:
                    command.multirun.hydra.sweep.dir = str(folder)
                sweep.move(folder)
            _record(sweep, command.multirun)
        remember_last(sweep.folder)
        unmeasured = no_file_note(sweep.config) if sweep.started.multirun else []
        for line in [*_head(sweep), *notes, *unused_variables(), *unmeasured]:
            print(line)
        return start_sweep(sweep)


def reach(sweep: Sweep) -> None:
    """Reach the shared storage, and the Ray at `cluster.address`, before the sweep writes anything anywhere.

    Raises:
        UserError: one does not answer, or refuses; or no Ray can be started here.
    """
    cluster = sweep.config.cluster
    if cluster.storage_path is not None and is_address(cluster.storage_path):
        check_access(cluster.storage_path)
    elif cluster.storage_path is not None:
        folder = Path(cluster.storage_path)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):
                pass
        except OSError as error:
            raise unwritable("cluster.storage_path", folder, error) from error
    if sweep.config.engine is not Engine.ray or not sweep.has_more():
        return
    if cluster.address is None:
        ray_folder()  # which checks it
        check_open_files()
    else:
        print(f"connecting to Ray at {cluster.address}", flush=True)
        start_ray(cluster, sweep.code())


def _record(sweep: Sweep, multirun: DictConfig | None) -> None:
    """Write the record of a new sweep, and `.hydra/` of each known trial, as Hydra's launcher does."""
    trials = [state.trial for state in sweep.trials]
    begin_folder(sweep.folder, trials)
    if multirun is not None:
        content = OmegaConf.to_container(multirun, resolve=False, enum_to_str=True)
        write_yaml(sweep.folder / "multirun.yaml", content)
    for trial in trials:
        write_hydra_folder(trial)
        add_trial(sweep.folder, trial)
    sweep.started.write(sweep.folder)


def start_sweep(sweep: Sweep) -> ExitCode:
    """Run a sweep and print the result. Raises as `run_sweep`."""
    # these imports take seconds: errors are raised before
    from fsdp_lab.sweep.outputs.outputs import Outputs
    from fsdp_lab.sweep.runner import EXECUTORS, run_sweep

    outputs = Outputs(sweep)
    code = run_sweep(sweep, EXECUTORS[sweep.config.engine], outputs)
    outputs.console.final(outputs.answer)
    runs, where = outputs.mlflow.projection, relative(sweep.folder)
    shown = [f"report: {where}/report.html"] if outputs.answer else []
    shown += [f"results: {where}/results.csv", f"compare: {runs.ui_url or ui_command(sweep.config.tracking.uri)}"]
    shown += [f"MLflow run: {parent}"] if (parent := runs.run_id(None)) else []
    shown += resume_lines(sweep.folder) if code is ExitCode.interrupted else []
    outputs.console.rich.print(*shown, sep="\n", highlight=False, soft_wrap=True)
    return code


def _head(sweep: Sweep) -> list[str]:
    """Return the line with the number of a sweep's trials, as far as that is known, and their axes."""
    if not sweep.started.multirun:
        return []
    number, up_to = len(sweep.trials), ""
    if sweep.config.search.samples:
        number, up_to = max(number, sweep.config.search.num_trials), "up to "
    how_many = f"{up_to}{count(number, 'trial')}"
    if sweep.resumed:
        left = number - sum(state.ended for state in sweep.trials)
        how_many = f"the sweep {'would resume' if sweep.config.dry_run else 'resumes'}: {left} of {how_many} left"
    return [f"{how_many}: {' × '.join(sweep.swept) or 'nothing is swept'}"]


def _listed(sweep: Sweep) -> list[str]:
    """Return a line for each known trial: its number, and what distinguishes it."""
    if not sweep.started.multirun:
        return [f"1 trial: {run_name(sweep.trials[0].trial, [])}"]
    left = [(number, state) for number, state in enumerate(sweep.trials) if not state.ended]
    lines = [f"  {number}  {run_name(state.trial, sweep.swept)}" for number, state in left]
    return [*lines, "  further ones are suggested while it runs"] if sweep.search is not None else lines


def _remove_empty(folder: Path) -> None:
    """Remove the folder that Hydra has made, and those above it, as far as they are empty and below this one."""
    with suppress(OSError):
        for made in (folder, *folder.parents):
            if made.is_relative_to(Path.cwd()) and made != Path.cwd():
                made.rmdir()
