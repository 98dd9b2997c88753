"""Hydra's `-m`: plan the sweep, write down what it is, run it."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.types import HydraContext
from omegaconf import DictConfig, OmegaConf, open_dict

from fsdp_lab.compose import Trial, group_choices, typed_config
from fsdp_lab.config import ConfigError, objectives
from fsdp_lab.config.schema import SearchName
from fsdp_lab.sweep.grid import all_overrides, discrete_values, enumerate_grid, swept_keys
from fsdp_lab.sweep.plan import plan_sweep
from fsdp_lab.sweep.record import (
    Record,
    add_trial,
    locked,
    read_record,
    read_trials,
    with_overrides,
    write_hydra_folder,
)
from fsdp_lab.sweep.results import TrialState
from fsdp_lab.sweep.resume import check_unchanged, resumed_states
from fsdp_lab.sweep.search import OptunaSearch, read_space


def run_multirun(
    context: HydraContext, config: DictConfig, defaults: Mapping[str, str | None], arguments: Sequence[str]
) -> None:
    """Run every trial of the sweep, then leave with its exit status.

    Raises:
        SystemExit: 1 when a trial failed, 130 when interrupted.
        ConfigError: before anything starts, for a value that is wrong.
    """
    parser = OverridesParser.create(config_loader=context.config_loader)
    folder = Path(config.hydra.sweep.dir).absolute()

    def compose(overrides: Sequence[str], number: int) -> Trial:
        cfg = context.config_loader.load_sweep_config(config, list(overrides))
        with open_dict(cfg):
            cfg.hydra.job.id = f"{cfg.hydra.job.name}_{number}"
            cfg.hydra.job.num = number
        trial_folder = folder / str(cfg.hydra.sweep.subdir)
        return Trial(number, typed_config(cfg), group_choices(cfg), list(overrides), trial_folder, cfg)

    given = all_overrides(parser, defaults, arguments).values()
    common = compose([word for o in given if not o.is_sweep_override() for word in discrete_values(o)], 0)
    resumed = common.config.resume is not None
    record = read_record(folder) if resumed else Record.of(sys.argv[1:], multirun=True)
    on_top = [argument for argument in arguments if argument not in record.arguments] if resumed else []
    search = None
    if common.config.search.name is SearchName.grid:
        if resumed:
            cells = read_trials(folder)
            swept = swept_keys(cells)
            trials = [replace(compose(with_overrides(c, on_top), i), overrides=c) for i, c in enumerate(cells)]
            if not trials:
                raise ConfigError(f"resume={folder}: no trial was written down there yet; start the sweep anew.")
            notes = []
        else:
            grid = enumerate_grid(parser, defaults, arguments)
            plan = plan_sweep(grid, compose)
            swept, trials, notes = swept_keys(grid), plan.trials, plan.notes()
    else:
        space = read_space(parser, defaults, [a for a in arguments if a not in on_top])
        swept, notes = list(space.dimensions), []

        def compose_suggested(overrides: Sequence[str], number: int) -> Trial:
            return replace(compose(with_overrides(overrides, on_top), number), overrides=list(overrides))

        search = OptunaSearch(common.config.search, space, objectives(common.config), compose_suggested)
        trials = [compose_suggested(o, i) for i, o in enumerate(read_trials(folder))] if resumed else []

    first = trials[0] if trials else common
    with locked(folder, "hydra.sweep.dir"):
        if resumed:
            states = resumed_states(trials, folder, first.config)
            check_unchanged(record, states, folder, first.config)
            if search is not None:
                search.go_on([(state.trial, state.status, state.metrics) for state in states])
        else:
            states = [TrialState(trial) for trial in trials]
            write_multirun(folder, config, record, trials)
        count = f"{len(trials)} trials" if search is None else f"up to {common.config.search.num_trials} trials"
        print(f"{count}: {' × '.join(swept) or 'nothing is swept'}", flush=True)
        for line in notes:
            print(line, flush=True)

        from fsdp_lab.sweep.run import run_trials

        status = run_trials(search, states, first, folder, swept, record, resumed)
    if status:
        sys.exit(status)


def write_multirun(folder: Path, config: DictConfig, record: Record, trials: Sequence[Trial]) -> None:
    """`multirun.yaml` and the record of the sweep, and `.hydra/` of each trial that is known, as Hydra's own launcher
    leaves it."""
    OmegaConf.save(config, folder / "multirun.yaml")
    (folder / "trials.jsonl").unlink(missing_ok=True)  # of another sweep that had this folder before
    for trial in trials:
        write_hydra_folder(trial)
        add_trial(folder, trial.overrides)
    record.write(folder)
