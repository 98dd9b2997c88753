"""Hydra's `-m`: plan the sweep, write down what it is, run it."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.utils import _save_config
from hydra.types import HydraContext
from omegaconf import DictConfig, OmegaConf, open_dict

from fsdp_lab.compose import Trial, group_choices, typed_config
from fsdp_lab.config import UserError
from fsdp_lab.sweep.grid import enumerate_grid, swept_keys
from fsdp_lab.sweep.plan import plan_sweep


def run_multirun(
    context: HydraContext, config: DictConfig, defaults: Mapping[str, str | None], arguments: Sequence[str]
) -> None:
    """Run every trial of the sweep, then leave with its exit status.

    Raises:
        SystemExit: 1 when a trial failed, 130 when interrupted.
        ConfigError: before anything starts, for a value that is wrong.
    """
    parser = OverridesParser.create(config_loader=context.config_loader)
    grid = enumerate_grid(parser, defaults, arguments)
    folder = Path(config.hydra.sweep.dir).absolute()

    def compose(overrides: Sequence[str], number: int) -> Trial:
        cfg = context.config_loader.load_sweep_config(config, list(overrides))
        with open_dict(cfg):
            cfg.hydra.job.id = f"{cfg.hydra.job.name}_{number}"
            cfg.hydra.job.num = number
        trial_folder = folder / str(cfg.hydra.sweep.subdir)
        return Trial(number, typed_config(cfg), group_choices(cfg), list(overrides), trial_folder, cfg)

    plan = plan_sweep(grid, compose)
    write_multirun(folder, config, plan.trials)
    swept = swept_keys(grid)
    print(f"{len(plan.trials)} trials: {' × '.join(swept) or 'nothing is swept'}", flush=True)
    for line in plan.notes():
        print(line, flush=True)

    from fsdp_lab.sweep.run import run_trials

    status = run_trials(plan.trials, folder, swept, sweep=True)
    if status:
        sys.exit(status)


def write_multirun(folder: Path, config: DictConfig, trials: Sequence[Trial]) -> None:
    """`multirun.yaml` of the sweep and `.hydra/` of each trial, as Hydra's own launcher leaves them.

    Raises:
        UserError: the folder cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        OmegaConf.save(config, folder / "multirun.yaml")
        for trial in trials:
            hydra_folder = trial.folder / ".hydra"
            hydra_folder.mkdir(parents=True, exist_ok=True)
            own = OmegaConf.masked_copy(trial.hydra_config, [str(k) for k in trial.hydra_config if k != "hydra"])
            _save_config(own, "config.yaml", hydra_folder)
            _save_config(OmegaConf.masked_copy(trial.hydra_config, "hydra"), "hydra.yaml", hydra_folder)
            OmegaConf.save(OmegaConf.create(trial.overrides), hydra_folder / "overrides.yaml")
    except OSError as error:
        raise UserError(
            f"hydra.sweep.dir={folder} cannot be written ({error.strerror}); free the disk or set hydra.sweep.dir "
            "to a folder that can be."
        ) from error
