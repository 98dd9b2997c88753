"""A search: trials that a sampler of Optuna's suggests. Imports no Ray.

Every suggestion is composed and checked here, in the driver; an invalid one costs no trial.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

import optuna
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import IntervalSweep, Override
from hydra.utils import get_object
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.samplers import BaseSampler, RandomSampler
from optuna.trial import TrialState

from fsdp_lab.config import CombinationError, ConfigError, SweepConfig, flatten, workers_of
from fsdp_lab.config.checks import check as check_here
from fsdp_lab.config.compose import Trial
from fsdp_lab.config.key import check_range, keys_of
from fsdp_lab.config.options import path_of
from fsdp_lab.config.status import TrialStatus
from fsdp_lab.config.sweep import SearchConfig
from fsdp_lab.config.words import may_name_code
from fsdp_lab.sweep.grid import all_overrides, discrete_values, unlike_schema
from fsdp_lab.sweep.plan import effect

_DEFAULTS = flatten(SweepConfig())
_FEW = 10  # suggestions that were tried before or are invalid; then settings are drawn at random
_MOST_REFUSED = 1_000  # random draws in a row without a new and valid one; then the search ends


@dataclass(frozen=True)
class Space:
    """A search space.

    Attributes:
        fixed: overrides that every trial has.
        dimensions: key -> the distribution of its values; a categorical one holds whole overrides.
    """

    fixed: list[str]
    dimensions: dict[str, BaseDistribution]

    def overrides(self, params: Mapping[str, Any]) -> list[str]:
        numbers = (int, float)
        made = [f"{key}={value!r}" if isinstance(value, numbers) else str(value) for key, value in params.items()]
        return [*self.fixed, *made]


def read_space(parser: OverridesParser, defaults: Mapping[str, str | None], arguments: Sequence[str]) -> Space:
    """Return the search space of a command line.

    Lists, ranges and groups become categories. An `interval` becomes a float or, with `int(...)`, a whole number; with
    `tag(log, ...)` on a logarithmic scale.

    Args:
        parser: see `grid.enumerate_grid`.
        defaults: see `grid.enumerate_grid`.

    Raises:
        ConfigError: an interval is empty, or not positive on a logarithmic scale; or there is nothing to search.
    """
    fixed: list[str] = []
    dimensions: dict[str, BaseDistribution] = {}
    for key, override in all_overrides(parser, defaults, arguments).items():
        if override.is_sweep_override() and not override.is_discrete_sweep():
            dimensions[key] = _interval(override)
            continue
        values = discrete_values(override)
        if len(values) == 1:
            fixed += values
        else:
            dimensions[key] = CategoricalDistribution(values)
    if not dimensions:
        raise ConfigError(
            "the search has nothing to vary; give a key several values or an interval, for example "
            "optimizer.lr='tag(log,interval(1e-4,1e-2))'."
        )
    return Space(fixed, dimensions)


def _interval(override: Override) -> BaseDistribution:
    sweep = override.value()
    assert isinstance(sweep, IntervalSweep) and sweep.start is not None and sweep.end is not None
    text, log = override.input_line, "log" in sweep.tags
    if unknown := sweep.tags - {"log"}:
        raise ConfigError(f"{text}: the tag {min(unknown)} is not known; the only one is log.")
    if not math.isfinite(sweep.end - sweep.start):  # also if both ends are
        raise ConfigError(f"{text}: the interval is too wide to draw from; use finite ends, less than 1.7e308 apart.")
    if not sweep.start < sweep.end:
        raise ConfigError(f"{text}: the interval is empty; give the smaller end first.")
    if log and sweep.start <= 0:
        raise ConfigError(f"{text}: a logarithmic scale begins above 0; use a positive start.")
    key = override.get_key_element()
    for end in (sweep.start, sweep.end):
        check_range(key, end, keys_of(SweepConfig).get(key))
    if type(_DEFAULTS.get(key)) is int and not isinstance(sweep.start, int):
        raise ConfigError(
            f"{text}: {key} takes whole numbers; write {key}='int(interval({sweep.start:g},{sweep.end:g}))'."
        )
    if isinstance(sweep.start, int) and isinstance(sweep.end, int):
        return IntDistribution(sweep.start, sweep.end, log=log)
    return FloatDistribution(sweep.start, sweep.end, log=log)


class OptunaSearch:
    """Trials that a sampler of Optuna's suggests, for one objective or several.

    A random search with the same seed gives the same trials in the same order in every run. Optuna's own samplers
    depend also on the results, and on their order if trials run side by side.
    """

    def __init__(
        self,
        settings: SearchConfig,
        space: Space,
        objectives: Sequence[tuple[str, str]],
        compose: Callable[[Sequence[str], int], Trial],
        check: Callable[[SweepConfig], None] = check_here,
    ) -> None:
        if settings.num_trials < 1:
            raise ConfigError(f"search.num_trials={settings.num_trials} is below 1; use a whole number of 1 or more.")
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        self._settings, self._space, self._objectives = settings, space, list(objectives)
        self._compose, self._check = compose, check
        self._notes: list[str] = []
        self._made = 0
        self._exhausted = False
        self._asked: dict[int, optuna.Trial] = {}  # by the trial's number
        self._tried: set[tuple[str, ...]] = set()  # overrides
        self._seen: set[str] = set()  # effective settings
        self._refused: set[str] = set()
        directions: list[Literal["minimize", "maximize"]] = [
            "minimize" if direction == "min" else "maximize" for _, direction in self._objectives
        ]
        self._study = optuna.create_study(sampler=self._sampler(0), directions=directions)
        self._study.stop = lambda: None  # type: ignore[method-assign]  # some samplers do, which only `optimize` allows
        for value in unlike_schema(itertools.chain(*self._categories().values())):
            with suppress(ConfigError):  # a misspelt one is found now, not when drawn; it may be valid with another
                compose([*space.fixed, value], 0)

    def _sampler(self, known: int) -> BaseSampler:
        """Return a sampler that does not repeat the suggestions of `known` earlier trials."""
        build = get_object(path_of("search.name", self._settings.name))
        sampler: BaseSampler = build(seed=self._settings.seed + 1_000_003 * known)
        return sampler

    def resume(self, trials: Sequence[tuple[Trial, TrialStatus, Mapping[str, float]]]) -> None:
        """Take over the trials of an earlier start, in order: `(trial, status, metrics)` of each.

        The sampler starts anew: its suggestions differ from those of an uninterrupted search.
        """
        self._study.sampler = self._sampler(len(trials))
        for trial, status, metrics in trials:
            self._study.enqueue_trial(self._params_of(trial.overrides))
            self._asked[self._made] = self._study.ask(self._space.dimensions)
            self._seen.add(_settings_of(trial))
            self._tried.add(tuple(trial.overrides))
            self._made += 1
            if status.ended:
                self.report_result(trial, status, metrics)

    def has_more(self) -> bool:
        """Return whether trials are left, and the space is not exhausted."""
        return not self._exhausted and self._made < self._settings.num_trials

    def code(self) -> list[str]:
        """Return the dotted paths to the user's code in all trials that the space allows."""
        named = {key: values for key, values in self._categories().items() if may_name_code(key)}
        group_of = {key: key.lstrip("+").partition(".")[0] for key in named}
        cells: set[tuple[str, ...]] = set()
        for group in set(group_of.values()) or {""}:  # each names its code by its own keys
            axes = (values if group_of[key] == group else values[:1] for key, values in named.items())
            cells.update(itertools.product(*axes))
        trials = (self._compose([*self._space.fixed, *cell], 0) for cell in cells)
        return sorted({path for trial in trials for path in trial.config.code()})

    def _categories(self) -> dict[str, list[str]]:
        return {
            key: [str(value) for value in dimension.choices]
            for key, dimension in self._space.dimensions.items()
            if isinstance(dimension, CategoricalDistribution)
        }

    def _params_of(self, overrides: Sequence[str]) -> dict[str, Any]:
        params: dict[str, Any] = {}
        for override in overrides:
            key, _, value = override.partition("=")
            if key in self._space.dimensions:
                params[key] = override if key in self._categories() else json.loads(value)
        return params

    def next(self) -> Trial | None:
        """Return the next valid suggestion; None if the search is over, or the space exhausted.

        Raises:
            ConfigError: a value that no dimension sets is wrong; or no suggestion is valid.
        """
        reason = ""
        if not self.has_more():
            return None
        for asked in self._suggestions():
            overrides = self._space.overrides(asked.params)
            if (cell := tuple(overrides)) in self._tried:
                self._fail(asked)
                continue
            self._tried.add(cell)
            try:
                trial = self._compose(overrides, self._made)
                self._check(trial.config)
            except ConfigError as error:
                if not isinstance(error, CombinationError) and not self._made and self._fixed_are_wrong():
                    raise
                reason = str(error)
                self._refuse(asked, reason, overrides)
                continue
            if (settings := _settings_of(trial)) in self._seen:
                self._fail(asked)
                continue
            self._seen.add(settings)
            self._asked[self._made] = asked
            self._made += 1
            return trial
        if reason and not self._made:
            raise ConfigError(reason)
        self._exhausted = True
        self._notes.append(
            f"the search ends after {self._made} of search.num_trials={self._settings.num_trials}: {_MOST_REFUSED} "
            "random suggestions in a row were duplicates or invalid"
        )
        return None

    def _suggestions(self) -> Iterator[optuna.Trial]:
        """Yield a few suggestions of the sampler, then random ones.

        A sampler that has found the best cell of a small space suggests little else, but random ones find what is left.
        """
        for _ in range(_FEW):
            yield self._study.ask(self._space.dimensions)
        sampler, at_random = self._study.sampler, RandomSampler(self._settings.seed + len(self._tried))
        for _ in range(_MOST_REFUSED):
            self._study.sampler = at_random
            asked = self._study.ask(self._space.dimensions)
            self._study.sampler = sampler
            yield asked

    def _fixed_are_wrong(self) -> bool:
        """Return whether a value that no dimension sets is wrong, so that no suggestion is valid."""
        try:
            self._check(self._compose(self._space.fixed, self._made).config)
        except CombinationError:
            return False
        except ConfigError:
            return True
        return False

    def notes(self) -> list[str]:
        """Return the messages for the user since the last call."""
        notes, self._notes = self._notes, []
        return notes

    def report_result(self, trial: Trial, status: TrialStatus, metrics: Mapping[str, float]) -> None:
        """Pass the end of a trial to Optuna.

        Finished trials count with their latest values; with a single objective stopped ones do too, as pruned. Trials
        that did not fit, by forecast or in training, count as pruned. Any other end has no value.
        """
        assert trial.index is not None
        if (asked := self._asked.pop(trial.index, None)) is None:
            return
        if status in (TrialStatus.skipped, TrialStatus.oom):
            self._study.tell(asked, state=TrialState.PRUNED)  # a failed one would be forgotten
            return
        values = [metrics.get(metric, math.nan) for metric, _ in self._objectives]
        known = all(math.isfinite(value) for value in values)
        if known and status is TrialStatus.finished:
            self._study.tell(asked, values)
        elif known and status is TrialStatus.stopped and len(values) == 1:
            asked.report(values[0], int(metrics.get("epoch", 0)))
            self._study.tell(asked, state=TrialState.PRUNED)
        else:
            self._fail(asked)

    def _refuse(self, asked: optuna.Trial, reason: str, overrides: Sequence[str]) -> None:
        self._fail(asked)
        if reason not in self._refused:
            self._refused.add(reason)
            self._notes.append(f"not tried: {' '.join(overrides)}: {reason}")

    def _fail(self, asked: optuna.Trial) -> None:
        self._study.tell(asked, state=TrialState.FAIL)


def _settings_of(trial: Trial) -> str:
    return effect(trial.config, workers_of(trial.config))
