"""From a command line to its sweep. A command without `-m` is a sweep with one cell."""

from __future__ import annotations

import copy
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.types import HydraContext
from omegaconf import DictConfig

from fsdp_lab.config import ConfigError, SweepConfig, objectives
from fsdp_lab.config.checks import check, check_hydra
from fsdp_lab.config.compose import Trial, cell_trial
from fsdp_lab.config.words import with_overrides
from fsdp_lab.machine.hardware import num_gpus
from fsdp_lab.record.sweep_json import SweepStart, read_start
from fsdp_lab.record.trials_jsonl import changes_of_resumes, lines_of, read_trials
from fsdp_lab.sweep.grid import Cells, enumerate_grid, fixed_words, repeat_axis, swept_keys
from fsdp_lab.sweep.names import preset_of
from fsdp_lab.sweep.plan import plan_sweep
from fsdp_lab.sweep.store.folder import check_trial_folders
from fsdp_lab.sweep.store.resume import changes_since, resumed_states, settings_typed, typed_since, without_effect
from fsdp_lab.sweep.sweep import Sweep
from fsdp_lab.sweep.trial import TrialState

if TYPE_CHECKING:
    from fsdp_lab.sweep.search import OptunaSearch


class Alone:
    """A command without `-m`: one trial.

    Attributes:
        key: the key that sets the folder on the command line.
        config: what its trials share.
        hydra: Hydra's own part of the config.
        multirun: the composed config of `-m`; None without.
    """

    key = "hydra.run.dir"
    multirun: DictConfig | None = None

    def __init__(self, trial: Trial) -> None:
        self._trial, self.config, self.folder = trial, trial.config, trial.folder
        self.hydra = trial.hydra_config.hydra

    def sweep(self) -> tuple[Sweep, list[str]]:
        """Return the sweep, new or resumed, and notes about what looks like several trials.

        Raises:
            UserError: a value is invalid, or there is nothing to resume.
        """
        trial, config = self._trial, self.config
        check(config)
        if config.repeats > 1:
            raise ConfigError(f"repeats={config.repeats} is for sweeps; add -m.")
        notes = []
        axes = [key for key, values in self.hydra.sweeper.params.items() if "," in str(values)]
        if (preset := preset_of(trial)) and axes:
            notes.append(f"experiment={preset} sweeps {', '.join(axes)}; without -m this is one trial")
        if config.repeat:
            notes.append(f"repeat={config.repeat} names one run; for several of each setting use -m and repeats=...")
        if config.resume is not None:
            record = read_start(self.folder)
            words = [word for word in record.arguments if not word.startswith(("-", "hydra."))]
            trial = replace(trial, overrides=words, **changes_of_resumes(next(lines_of(self.folder), {})))
            typed = settings_typed(typed_since(self.hydra.overrides.task), [], record, self.folder)
            states = resumed_states([trial], record, self.folder, config, typed)
            notes += without_effect(states, typed)
            return Sweep(states, config, self.folder, [], record, resumed=True), notes
        record = SweepStart.of(sys.argv[1:], False, config)
        return Sweep([TrialState(trial)], config, self.folder, [], record), notes


class Multirun:
    """A command with `-m`. Attributes: see `Alone`."""

    key = "hydra.sweep.dir"

    def __init__(
        self, context: HydraContext, config: DictConfig, defaults: Mapping[str, str | None], arguments: Sequence[str]
    ) -> None:
        check_hydra(config.hydra)
        HydraConfig.instance().set_config(copy.deepcopy(config))  # which `${hydra:...}` reads
        self.multirun, self.hydra = config, config.hydra
        self.folder = Path(config.hydra.sweep.dir).absolute()
        self._defaults, self._arguments = defaults, list(arguments)
        loader = context.config_loader
        self._parser = OverridesParser.create(config_loader=loader)
        self._cells = Cells(self._parser, lambda words: loader.load_sweep_config(config, list(words)))
        self.config = self._compose(fixed_words(self._parser, defaults, self._arguments), 0).config

    def _compose(self, overrides: Sequence[str], number: int) -> Trial:
        """Return the trial of a cell. Raises what Hydra raises for an invalid override."""
        return cell_trial(self._cells.config(overrides), overrides, number, self.folder)

    def sweep(self) -> tuple[Sweep, list[str]]:
        """Return the sweep, new or resumed, and notes about what was left out of its grid.

        Raises:
            UserError: a value is invalid, or no trial is valid; the folder of a resume, which the caller has locked,
                holds no sweep, or one of other settings, code or data.
        """
        if self.config.resume is not None:
            return self._resumed()
        record = SweepStart.of(sys.argv[1:], True, self.config)
        return self._search(record) if self.config.search.samples else self._grid(record)

    def _grid(self, record: SweepStart) -> tuple[Sweep, list[str]]:
        repeats = repeat_axis(self._parser, self.config, self._arguments)
        grid = enumerate_grid(self._parser, self._defaults, [*self._arguments, *repeats])
        planned = plan_sweep(grid, self._compose)
        check_trial_folders(self.folder, [trial.folder for trial in planned.trials])
        record = replace(record, num_trials=len(planned.trials))
        record = record.with_code([path for trial in planned.trials for path in trial.config.code()])
        swept = swept_keys(grid)
        notes = [*axes_notes(self._defaults, self._arguments, swept, self.config), *planned.notes()]
        return Sweep([TrialState(trial) for trial in planned.trials], self.config, self.folder, swept, record), notes

    def _search(self, record: SweepStart) -> tuple[Sweep, list[str]]:
        repeat_axis(self._parser, self.config, self._arguments)
        search, swept = self._searcher()
        try:
            first = search.next()  # now, to report its errors before anything starts
        except ConfigError:
            print(*search.notes(), sep="\n", flush=True)
            raise
        if first is not None:  # two trials of a search may differ in nothing but their numbers
            check_trial_folders(self.folder, [self._compose(first.overrides, number).folder for number in range(2)])
        states = [TrialState(first)] if first else []
        record = record.with_code(search.code())
        return Sweep(states, self.config, self.folder, swept, record, search), search.notes()

    def _resumed(self) -> tuple[Sweep, list[str]]:
        record = read_start(self.folder)
        typed_now = [
            word
            for word in typed_since(self._arguments)
            if not (word in record.arguments and self._parser.parse_override(word).is_sweep_override())
        ]
        lines = read_trials(self.folder, record.num_trials)
        search, later = None, {}
        if self.config.search.samples:
            before = [word for line in lines for word in changes_of_resumes(line)["resumed"]]
            words = with_overrides(before, settings_typed(typed_now, [], record, self.folder))
            later = self._later(words, record)
            search, swept = self._searcher(with_overrides(words, typed_now), record.arguments)
        elif lines:
            swept = swept_keys([line["overrides"] for line in lines])
        else:
            raise ConfigError(f"resume={self.folder}: no trial is recorded there yet; start a new sweep.")
        typed = settings_typed(typed_now, swept, record, self.folder)
        trials = []
        for number, line in enumerate(lines):
            before = changes_of_resumes(line)["resumed"]
            trial = self._compose_with(with_overrides(before, typed_now), line["overrides"], number)
            trials.append(replace(trial, folder=line["folder"], **changes_of_resumes(line)))
        config = trials[0].config if trials else self.config
        states = resumed_states(trials, record, self.folder, config, typed)
        if search is not None:
            search.resume([(state.trial, state.status, state.figures) for state in states])
        notes = [] if search is not None else without_effect(states, typed)
        return Sweep(states, config, self.folder, swept, record, search, resumed=True, later=later), notes

    def _later(self, words: list[str], record: SweepStart) -> dict[str, Any]:
        """Return `Trial.resumed` and `changed` of the trials that a resumed search will suggest.

        Args:
            words: overrides typed for resumes that change the trials.
        """
        start = fixed_words(self._parser, self._defaults, record.arguments)
        configs = (self._compose(each, 0).config for each in (start, with_overrides(start, words)))
        return {"resumed": words, "changed": changes_since(record, *configs)}

    def _searcher(self, typed_now: Sequence[str] = (), started: Sequence[str] = ()) -> tuple[OptunaSearch, list[str]]:
        """Return the search, and the keys that it varies.

        Args:
            typed_now: overrides that were typed for a resume; they are not part of the space.
            started: those of the start, if this is a resume.
        """
        from fsdp_lab.sweep.search import OptunaSearch, read_space  # imports Optuna

        compose = partial(self._compose_with, typed_now)
        space = read_space(self._parser, self._defaults, started or self._arguments)
        return OptunaSearch(self.config.search, space, objectives(self.config.objective), compose), list(
            space.dimensions
        )

    def _compose_with(self, typed_now: Sequence[str], overrides: Sequence[str], number: int) -> Trial:
        """Return a trial as it was suggested or recorded, with the overrides that were typed for the resume."""
        return replace(self._compose(with_overrides(overrides, typed_now), number), overrides=list(overrides))


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
