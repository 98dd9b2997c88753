"""Hydra's `-m`: plan the sweep, record it, run it."""

from __future__ import annotations

import copy
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.types import HydraContext
from omegaconf import DictConfig, OmegaConf

from fsdp_lab.config import ConfigError, SweepConfig, objectives
from fsdp_lab.config.compose import Trial, cell_trial, check_hydra
from fsdp_lab.config.status import ExitCode
from fsdp_lab.config.wording import count
from fsdp_lab.forecast.devices import check_sweep
from fsdp_lab.machine.hardware import num_gpus
from fsdp_lab.record.hydra_folder import write_hydra_folder, write_multirun_yaml
from fsdp_lab.record.sweep_json import SweepStart, begin_folder, read_start
from fsdp_lab.record.trials_jsonl import add_trial, read_trials
from fsdp_lab.storage.locks import locked
from fsdp_lab.sweep.grid import enumerate_grid, fixed_words, repeat_axis, swept_keys, with_overrides
from fsdp_lab.sweep.names import run_name
from fsdp_lab.sweep.plan import plan_sweep
from fsdp_lab.sweep.runner import SweepPlan, reach_cluster
from fsdp_lab.sweep.search import OptunaSearch, read_space
from fsdp_lab.sweep.state import SweepState, TrialState
from fsdp_lab.sweep.store.find import remember_last
from fsdp_lab.sweep.store.folder import check_trial_folders, new_folder
from fsdp_lab.sweep.store.resume import check_unchanged, resumed_states


def run_multirun(
    context: HydraContext, config: DictConfig, defaults: Mapping[str, str | None], arguments: Sequence[str]
) -> None:
    """Run every trial of the sweep, then leave with its exit status.

    Raises:
        SystemExit: 1 when a trial failed, 130 when interrupted.
        ConfigError: before anything starts, for a value that is wrong.
    """
    command = Command(context, config, defaults, arguments)
    if command.common.config.resume is None:
        plan, notes = command.new_sweep()  # first: a command that is refused writes nothing
    if command.common.config.dry_run:
        if command.common.config.resume is not None:
            plan, notes = command.resumed_sweep(), []
        print(_first_line(plan), *notes, *trial_lines(plan), sep="\n")
        return
    if command.common.config.resume is None:
        reach_cluster(plan)
        with new_folder(command.folder, "hydra.sweep.dir", config.hydra) as folder:
            if folder != command.folder:
                config.hydra.sweep.dir = str(folder)
                plan, notes = Command(context, config, defaults, arguments).new_sweep()
            write_multirun(config, plan)
            code = _run(plan, notes)
    else:
        with locked(command.folder, "resume"):  # first: another resume may be at work
            plan = command.resumed_sweep()
            reach_cluster(plan)
            remember_last(command.folder)
            code = _run(plan, [])
    if code:
        sys.exit(code)


def _run(plan: SweepPlan, notes: Sequence[str]) -> ExitCode:
    print(_first_line(plan), *notes, sep="\n")

    from fsdp_lab.sweep.start import start_sweep

    return start_sweep(plan)


def _first_line(plan: SweepPlan) -> str:
    return f"{_how_many(plan)}: {' × '.join(plan.swept) or 'nothing is swept'}"


def trial_lines(plan: SweepPlan) -> list[str]:
    """Return a line for each known trial: its number, and what distinguishes it."""
    left = [(number, state) for number, state in enumerate(plan.state.trials) if not state.ended]
    lines = [f"  {number}  {run_name(state.trial, plan.swept)}" for number, state in left]
    return [*lines, "  further ones are suggested while it runs"] if plan.search is not None else lines


def axes_notes(
    defaults: Mapping[str, str | None], arguments: Sequence[str], swept: Sequence[str], config: SweepConfig
) -> list[str]:
    """Return notes about swept axes that nobody typed, and about those that have no effect on this machine.

    Args:
        defaults: `hydra.sweeper.params`.
        arguments: the command line's overrides.
        swept: the keys that differ between trials.
    """
    typed = {word.lstrip("+~").partition("=")[0] for word in arguments}
    axes = [f"{key}={defaults[key]}" for key in swept if key not in typed and defaults.get(key)]
    notes = [f"swept by default: {' '.join(axes)}; type one value to fix an axis"] if axes else []
    if config.cluster.is_here and "offload" in swept and not num_gpus():
        notes.append("without a GPU offload changes nothing: its trials run, and count as repeats")
    return notes


def _how_many(plan: SweepPlan) -> str:
    """Return how many trials a sweep has, as far as that is known."""
    trials = plan.state.trials
    number, up_to = len(trials), ""
    if plan.config.search.samples:
        number, up_to = max(number, plan.config.search.num_trials), "up to "
    text = f"{up_to}{count(number, 'trial')}"
    if plan.resumed:
        text = f"the sweep resumes: {number - sum(state.ended for state in trials)} of {text} left"
    return text


class Command:
    """A command line with `-m`, and its trials.

    Attributes:
        common: what all trials share, as a trial.
    """

    def __init__(
        self, context: HydraContext, config: DictConfig, defaults: Mapping[str, str | None], arguments: Sequence[str]
    ) -> None:
        check_hydra(config.hydra)
        HydraConfig.instance().set_config(copy.deepcopy(config))  # which `${hydra:...}` reads
        self.folder = Path(config.hydra.sweep.dir).absolute()
        self._defaults, self._arguments = defaults, list(arguments)
        self._parser = OverridesParser.create(config_loader=context.config_loader)
        self._loader, self._config = context.config_loader, config
        self.common = self._compose(fixed_words(self._parser, defaults, self._arguments), 0)
        check_sweep(self.common.config)  # a grid takes seconds to compose

    def _compose(self, overrides: Sequence[str], number: int) -> Trial:
        """Return the trial of a cell. Raises what Hydra raises for an invalid override."""
        cfg = self._loader.load_sweep_config(self._config, list(overrides))
        return cell_trial(cfg, overrides, number, self.folder)

    def new_sweep(self) -> tuple[SweepPlan, list[str]]:
        """Return the plan of a sweep that starts now, and notes about what was left out of its grid.

        Raises:
            ConfigError: a value is invalid, or no trial is valid.
        """
        record = SweepStart.of(sys.argv[1:], True, self.common.config)
        repeats = repeat_axis(self._parser, self.common.config, self._arguments)
        if not self.common.config.search.samples:
            grid = enumerate_grid(self._parser, self._defaults, [*self._arguments, *repeats])
            planned = plan_sweep(grid, self._compose)
            check_trial_folders(self.folder, [trial.folder for trial in planned.trials])
            record = replace(record, num_trials=len(planned.trials))
            record = record.with_code([path for trial in planned.trials for path in trial.config.code()])
            states = [TrialState(trial) for trial in planned.trials]
            swept = swept_keys(grid)
            known = axes_notes(self._defaults, self._arguments, swept, self.common.config)
            notes = [*known, *planned.notes(), *self._idle_search_keys()]
            return self._plan(states, swept, record), notes
        search, swept = self._search([])
        try:
            first = search.next()  # now: what is wrong in it is reported before anything starts
        except ConfigError:
            print(*search.notes(), sep="\n", flush=True)
            raise
        if first is not None:  # two trials of a search may differ in nothing but their numbers
            check_trial_folders(self.folder, [self._compose(first.overrides, number).folder for number in range(2)])
        states = [TrialState(first)] if first else []
        return self._plan(states, swept, record.with_code(search.code()), search), search.notes()

    def _idle_search_keys(self) -> list[str]:
        """Return typed keys of a search, which have no effect on a grid."""
        typed = [
            word for word in self._arguments if word.lstrip("+").startswith(("search.num_trials=", "search.seed="))
        ]
        return [f"{word} has no effect with search=grid, which runs every setting; add search=random" for word in typed]

    def resumed_sweep(self) -> SweepPlan:
        """Return the plan for the rest of a sweep in the folder, which the caller has locked.

        Raises:
            UserError: the folder holds no sweep, or one of other settings, code or data.
        """
        record = read_start(self.folder)
        typed_now = [argument for argument in self._arguments if argument not in record.arguments]
        trials = [
            replace(self._compose_with(typed_now, overrides, number), folder=folder)
            for number, (overrides, folder) in enumerate(read_trials(self.folder, record.num_trials))
        ]
        search = None
        if self.common.config.search.samples:
            search, swept = self._search(typed_now)
        elif trials:
            swept = swept_keys([trial.overrides for trial in trials])
        else:
            raise ConfigError(f"resume={self.folder}: no trial is recorded there yet; start a new sweep.")
        config = trials[0].config if trials else self.common.config
        states = resumed_states(trials, self.folder, config)
        check_unchanged(record, states, self.folder, config)
        if search is not None:
            search.resume([(state.trial, state.status, state.figures) for state in states])
        return replace(self._plan(states, swept, record, search), resumed=True)

    def _plan(
        self,
        states: Sequence[TrialState],
        swept: Sequence[str],
        record: SweepStart,
        search: OptunaSearch | None = None,
    ) -> SweepPlan:
        config = states[0].trial.config if states else self.common.config
        state = SweepState(states, objectives(config))
        return SweepPlan(state, config, self.folder, swept, record, search)

    def _search(self, typed_now: Sequence[str]) -> tuple[OptunaSearch, list[str]]:
        """Return the search, and the keys that it varies.

        Args:
            typed_now: overrides that were typed for a resume; they are not part of the space.
        """

        def compose(overrides: Sequence[str], number: int) -> Trial:
            return self._compose_with(typed_now, overrides, number)

        space = read_space(self._parser, self._defaults, [a for a in self._arguments if a not in typed_now])
        config = self.common.config
        return OptunaSearch(config.search, space, objectives(config), compose), list(space.dimensions)

    def _compose_with(self, typed_now: Sequence[str], overrides: Sequence[str], number: int) -> Trial:
        """Return a trial as it was suggested or recorded, with the overrides that were typed for the resume."""
        return replace(self._compose(with_overrides(overrides, typed_now), number), overrides=list(overrides))


def write_multirun(config: DictConfig, plan: SweepPlan) -> None:
    """Write `multirun.yaml`, the record of the sweep, and `.hydra/` of each known trial, as Hydra's launcher does."""
    trials = [state.trial for state in plan.state.trials]
    begin_folder(plan.folder, trials)
    write_multirun_yaml(plan.folder, OmegaConf.to_container(config, resolve=False, enum_to_str=True))
    for trial in trials:
        write_hydra_folder(trial)
        add_trial(plan.folder, trial)
    plan.started.write(plan.folder)
    remember_last(plan.folder)
