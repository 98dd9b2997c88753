"""Hydra's `-m`: plan the sweep, write down what it is, run it."""

from __future__ import annotations

import copy
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType
from hydra.errors import HydraException
from hydra.types import HydraContext
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from fsdp_lab.compose import Trial, group_choices, typed_config
from fsdp_lab.config import ConfigError, all_keys, objectives
from fsdp_lab.config.schema import SearchName
from fsdp_lab.sweep.grid import all_overrides, discrete_values, enumerate_grid, swept_keys
from fsdp_lab.sweep.plan import plan_sweep
from fsdp_lab.sweep.record import (
    Record,
    add_trial,
    begin_folder,
    locked,
    read_record,
    read_trials,
    remember_last,
    with_overrides,
    write_hydra_folder,
)
from fsdp_lab.sweep.resume import check_unchanged, resumed_states
from fsdp_lab.sweep.runner import SweepPlan
from fsdp_lab.sweep.search import OptunaSearch, read_space
from fsdp_lab.sweep.state import SweepState, TrialState

_KEYS = frozenset(all_keys())


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
    compose = Composer(context, config, parser, folder)
    given = all_overrides(parser, defaults, arguments).values()
    common = compose([word for o in given if not o.is_sweep_override() for word in discrete_values(o)], 0)
    config_of_all = common.config
    resumed = config_of_all.resume is not None
    record = read_record(folder) if resumed else Record.of(sys.argv[1:], True, config_of_all)
    on_top = [argument for argument in arguments if argument not in record.arguments] if resumed else []

    def compose_again(overrides: Sequence[str], number: int) -> Trial:
        """As it was suggested or written down, with what was typed for the resume."""
        return replace(compose(with_overrides(overrides, on_top), number), overrides=list(overrides))

    search, notes = None, []
    trials = [replace(compose_again(o, i), folder=f) for i, (o, f) in enumerate(read_trials(folder))] if resumed else []
    if config_of_all.search.name is not SearchName.grid:
        space = read_space(parser, defaults, [a for a in arguments if a not in on_top])
        swept = list(space.dimensions)
        search = OptunaSearch(config_of_all.search, space, objectives(config_of_all), compose_again)
        if not resumed:  # the first now: what is wrong in it is told before anything starts
            trials = [trial for trial in [search.next()] if trial is not None]
    elif resumed:
        swept = swept_keys([trial.overrides for trial in trials])
        if not trials:
            raise ConfigError(f"resume={folder}: no trial was written down there yet; start the sweep anew.")
    else:
        grid = enumerate_grid(parser, defaults, arguments)
        plan = plan_sweep(grid, compose)
        swept, trials, notes = swept_keys(grid), plan.trials, plan.notes()

    first = trials[0] if trials else common
    with locked(folder, "hydra.sweep.dir"):
        if resumed:
            states = resumed_states(trials, folder, first.config)
            check_unchanged(record, states, folder, first.config)
            remember_last(folder)
            if search is not None:
                search.go_on([(state.trial, state.status, state.metrics) for state in states])
        else:
            states = [TrialState(trial) for trial in trials]
            write_multirun(folder, config, record, trials)
        count = f"{len(trials)} trials" if search is None else f"up to {config_of_all.search.num_trials} trials"
        print(f"{count}: {' × '.join(swept) or 'nothing is swept'}", flush=True)
        for line in notes:
            print(line, flush=True)

        from fsdp_lab.sweep.start import start_sweep

        state = SweepState(states, objectives(first.config))
        code = start_sweep(SweepPlan(state, first.config, folder, swept, record, search, resumed))
    if code:
        sys.exit(code)


class Composer:
    """Makes the trial of a cell, as Hydra does. Cells with the same options of all groups share Hydra's work on these,
    which is nearly all of it."""

    def __init__(self, context: HydraContext, config: DictConfig, parser: OverridesParser, folder: Path) -> None:
        self._loader, self._config, self._parser, self._folder = context.config_loader, config, parser, folder
        self._by_options: dict[tuple[str, ...], DictConfig] = {}

    def __call__(self, overrides: Sequence[str], number: int) -> Trial:
        """
        Raises:
            HydraException, OmegaConfBaseException: an override that cannot be.
        """
        cfg = self._by_parts(overrides)
        if cfg is None:
            cfg = self._loader.load_sweep_config(self._config, list(overrides))
        with open_dict(cfg):
            cfg.hydra.job.id = f"{cfg.hydra.job.name}_{number}"
            cfg.hydra.job.num = number
        trial_folder = self._folder / str(cfg.hydra.sweep.subdir)
        return Trial(number, typed_config(cfg), group_choices(cfg), list(overrides), trial_folder, cfg)

    def _by_parts(self, overrides: Sequence[str]) -> DictConfig | None:
        """The values set on what the options give; None where only Hydra itself can tell what is meant, or say what
        is wrong."""
        parsed = self._parser.parse_overrides(list(overrides))
        values = [o for o in parsed if o.key_or_group in _KEYS and o.type is OverrideType.CHANGE]
        options = tuple(o.input_line or "" for o in parsed if o not in values)
        try:
            if options not in self._by_options:
                self._by_options[options] = self._loader.load_sweep_config(self._config, list(options))
            cfg = copy.deepcopy(self._by_options[options])
            OmegaConf.copy_cache(from_config=self._config, to_config=cfg)
            for override in values:
                OmegaConf.update(cfg, override.key_or_group, override.value(), merge=True)
        except (HydraException, OmegaConfBaseException):
            return None
        naming = cfg.hydra.job.config.override_dirname
        cfg.hydra.overrides.task = list(overrides)
        kept = [override for override in parsed if override.key_or_group not in naming.exclude_keys]
        cfg.hydra.job.override_dirname = dirname(kept, naming.item_sep, naming.kv_sep)
        return cfg


def dirname(overrides: Sequence[Override], item_sep: str, kv_sep: str) -> str:
    """What Hydra makes of overrides for `${hydra.job.override_dirname}`; its own function is private."""
    return item_sep.join(sorted(override.input_line or "" for override in overrides)).replace("=", kv_sep)


def write_multirun(folder: Path, config: DictConfig, record: Record, trials: Sequence[Trial]) -> None:
    """`multirun.yaml` and the record of the sweep, and `.hydra/` of each trial that is known, as Hydra's own launcher
    leaves it."""
    begin_folder(folder, trials)
    kept = copy.deepcopy(config)
    with open_dict(kept):
        kept.nightly.notify.url = None  # often a secret, and no sweep's
    OmegaConf.save(kept, folder / "multirun.yaml")
    for trial in trials:
        write_hydra_folder(trial)
        add_trial(folder, trial)
    record.write(folder)
