"""The configurations that `python -m fsdp_lab.forecast` forecasts: one, or every cell of a grid."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from hydra.core.global_hydra import GlobalHydra
from hydra.core.singleton import Singleton

from fsdp_lab.commands.forecast_lengths import chosen, key_of_lengths, read_lengths
from fsdp_lab.config import (
    ConfigError,
    SweepConfig,
    split_config_dir,
    with_custom,
    workers_of,
)
from fsdp_lab.config.checks import check_to_forecast
from fsdp_lab.config.compose import Trial, cell_trial
from fsdp_lab.config.options import option_values
from fsdp_lab.config.overrides import read_overrides, search_path
from fsdp_lab.forecast.devices import check_device
from fsdp_lab.sweep.grid import all_overrides, composer, enumerate_grid, swept_keys
from fsdp_lab.sweep.plan import Plan, plan_sweep


@contextmanager
def hydra_as_it_was() -> Iterator[None]:
    """Restore Hydra's schemas and OmegaConf's resolvers at the end, because the caller may use Hydra, too."""
    state = Singleton.get_state()
    GlobalHydra.instance().clear()  # from a notebook that has composed, or from `@hydra.main`
    try:
        yield
    finally:
        Singleton.set_state(state)


def plan_forecasts(overrides: list[str], multirun: bool) -> tuple[Plan, list[str]]:
    """Return the configurations to forecast, and the keys that differ between them.

    Raises:
        Exception: Hydra or the checks refuse the overrides.
    """
    config_dir, overrides = split_config_dir(overrides)
    if options := [word for word in overrides if word.startswith("-")]:
        raise ConfigError(
            f"{options[0]} is not an option here; the options are -m, --config-dir and --help, all else is key=value."
        )
    search_words = search_path(config_dir)
    overrides = with_custom(read_overrides(overrides, config_dir))
    with composer(overrides, search_words) as hydra:

        def cell(values: Sequence[str], number: int) -> Trial:
            return cell_trial(hydra.compose(values), values, number, Path())

        if not multirun:
            trial = cell(overrides, 0)
            check(trial.config)
            if trial.config.forecast.lengths is None:
                return Plan([trial]), []
            key, lengths = key_of_lengths(trial.config.data), chosen(read_lengths(trial.config.forecast.lengths))
            trials = [cell([*overrides, f"{key}={length}"], number) for number, length in enumerate(lengths)]
            for each in trials:
                check(each.config)
            return Plan(trials), [key]
        if any(word.startswith("forecast.lengths=") for word in overrides):
            raise ConfigError("forecast.lengths compares the lengths of one setting; leave -m out.")
        grid = enumerate_grid(hydra.parser, hydra.defaults, overrides)
        plan, swept = plan_sweep(grid, cell, check, fold=False), swept_keys(grid)
        named = all_overrides(hydra.parser, {}, overrides)
        return replace(plan, unnamed=[key for key in swept if key not in named]), swept


def check(config: SweepConfig) -> None:
    """Apply the rules for forecasts, including that for the device. Raises UserError."""
    check_to_forecast(config)
    check_device(config, workers_of(config))


def arguments(trial: Trial) -> dict[str, object]:
    """Return the arguments of the user's model and data set, by their keys.

    Arguments of the model that the name of its option implies are left out.
    """
    of_option = option_values("model", trial.choices["model"])
    theirs = {key: value for key, value in trial.values.items() if key.startswith("model.")}
    values = {key: value for key, value in theirs.items() if of_option.get(key.partition(".")[2]) != value}
    if trial.choices["data"] != "custom" and trial.config.data.sizes_from(trial.config.model):
        return values
    values |= {"data": trial.choices["data"]}
    return values | {f"data.{name}": value for name, value in trial.config.data.arguments.items() if value is not None}
