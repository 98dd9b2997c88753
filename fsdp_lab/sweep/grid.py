"""Overrides -> the list of trials, as Hydra itself enumerates and composes them."""

from __future__ import annotations

import itertools
import pickle
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache, lru_cache

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import IntervalSweep, Override, Transformer
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from fsdp_lab.config import ConfigError, SweepConfig, all_keys, conf_dir
from fsdp_lab.config.compose import register_schema
from fsdp_lab.config.overrides import value_word
from fsdp_lab.config.words import key_of

_KEYS = frozenset(all_keys())


@dataclass(frozen=True)
class Composer:
    """Composes cells as a sweep does, for a command that is not a Hydra application.

    Attributes:
        defaults: the default axes of a sweep, with those of a preset among the overrides.
        compose: overrides of a cell -> its config, with Hydra's part.
    """

    parser: OverridesParser
    defaults: dict[str, str | None]
    compose: Callable[[Sequence[str]], DictConfig]


@contextmanager
def composer(overrides: Sequence[str], search_words: Sequence[str]) -> Iterator[Composer]:
    """Let Hydra compose the cells of a command line.

    Args:
        search_words: overrides by which Hydra finds the user's options; they are not part of a cell.
    """
    register_schema()
    with initialize_config_dir(str(conf_dir()), version_base="1.3"):
        parser = OverridesParser.create(config_loader=GlobalHydra.instance().config_loader())

        def composed(words: Sequence[str]) -> DictConfig:
            return compose("config", [*words, *search_words], return_hydra_config=True)

        cells = Cells(parser, composed)
        shared = cells.config(fixed_words(parser, {}, overrides))
        yield Composer(parser, dict(shared.hydra.sweeper.params), cells.config)


class Cells:
    """Composes cells as Hydra does, but each combination of options once: the keys of a cell are set in a copy.

    Args:
        compose: overrides of a cell -> its config with Hydra's part, by Hydra.
    """

    def __init__(self, parser: OverridesParser, compose: Callable[[Sequence[str]], DictConfig]) -> None:
        self._compose = compose
        self._parsed = cache(lambda word: parser.parse_overrides([word])[0])
        self._shared: dict[tuple[str, ...], bytes] = {}

    def config(self, words: Sequence[str]) -> DictConfig:
        """Return the config of a cell. Raises what Hydra raises for an invalid override."""
        overrides = [self._parsed(word) for word in words]
        # Hydra applies options first, then the rest in order. So it composes all up to the last that is neither key nor
        # option.
        first = 1 + max((n for n, one in enumerate(overrides) if not (is_key(one) or _is_option(one))), default=-1)
        keys = {n: override for n, override in enumerate(overrides) if n >= first and is_key(override)}
        shared = tuple(word for n, word in enumerate(words) if n not in keys)
        if shared not in self._shared:
            self._shared[shared] = pickle.dumps(self._compose(shared))
        config: DictConfig = pickle.loads(self._shared[shared])  # a third of the time of a deep copy
        try:
            for override in keys.values():
                OmegaConf.update(config, override.key_or_group, override.value())
        except OmegaConfBaseException:
            return self._compose(words)  # which raises Hydra's own
        own = [override for override in overrides if not override.is_hydra_override()]
        naming = config.hydra.job.config.override_dirname
        lines = sorted(str(one.input_line) for one in own if one.key_or_group not in naming.exclude_keys)
        config.hydra.job.override_dirname = naming.item_sep.join(lines).replace("=", naming.kv_sep)
        config.hydra.overrides.task = [override.input_line for override in own]
        return config


def is_key(override: Override) -> bool:
    """Return whether an override sets a key to a value, and chooses no option of a group."""
    key = override.get_key_element()
    dotted = "." in key and not (override.package or override.is_hydra_override())
    return (dotted or key in _KEYS) and key[0] not in "+~" and not override.is_sweep_override()


def unlike_schema(words: Iterable[str]) -> list[str]:
    """Return the overrides that only composing can check: all but a key of the schema with a value of its type."""
    parser, schema = OverridesParser.create(), ConfigStore.instance().load("schema.yaml").node
    OmegaConf.set_struct(schema, True)

    def fits(override: Override) -> bool:
        if not is_key(override) or "${" in str(override.value()):
            return False
        with suppress(OmegaConfBaseException):
            OmegaConf.update(schema, override.key_or_group, override.value())
            return True
        return False

    return [word for word in words if not fits(parser.parse_override(word))]


def _is_option(override: Override) -> bool:
    return override.get_key_element()[0] not in "+~" and isinstance(override.value(), str)


def enumerate_grid(
    parser: OverridesParser, defaults: Mapping[str, str | None], arguments: Sequence[str]
) -> list[list[str]]:
    """Return every combination of the swept values, each as a list of overrides, the last axis fastest.

    Args:
        parser: with a config loader, so that `glob` can see the options of a group.
        defaults: `hydra.sweeper.params`; an axis in `arguments` replaces it; null means none.
        arguments: the command line's overrides.

    Raises:
        ConfigError: an `interval`, which has infinitely many values.
        OverrideParseException: an override that cannot be parsed.
    """
    values = (discrete_values(override) for override in all_overrides(parser, defaults, arguments).values())
    return [list(cell) for cell in itertools.product(*values)]


def repeat_axis(parser: OverridesParser, config: SweepConfig, arguments: Sequence[str]) -> list[str]:
    """Return the axis that `repeats` stands for: `repeat=range(3)` for `repeats=3`.

    Raises:
        ConfigError: `repeats` has several values, the sweep is a search, or `repeat` was typed; `repeat` is a count,
            as in `repeat=3`, which names one run (`repeat=0` is the first run).
    """
    for override in parser.parse_overrides(list(arguments)):
        if override.key_or_group == "repeats" and override.is_sweep_override():
            raise ConfigError(f"{override.input_line} has several values, but is one number: the runs of each setting.")
        number = override.value()
        if override.key_or_group == "repeat" and isinstance(number, int) and number > 0:
            raise ConfigError(
                f"repeat={number} names one run, not a number of runs; for {max(2, number)} runs of each setting use "
                f"repeats={max(2, number)}."
            )
    if config.repeats <= 1:  # a trial's own check refuses 0
        return []
    if config.search.samples:
        raise ConfigError(
            f"repeats={config.repeats} needs a grid; after a search, run a grid of its best settings with it."
        )
    if "repeat" in map(key_of, arguments):
        raise ConfigError(f"repeats={config.repeats} numbers the runs of each setting; leave out repeat=...")
    return [f"repeat=range({config.repeats})"]


def all_overrides(
    parser: OverridesParser, defaults: Mapping[str, str | None], arguments: Sequence[str]
) -> dict[str, Override]:
    """Return the default and the typed axes by key, in the order of a trial's overrides."""
    given = parser.parse_overrides(list(arguments))
    # A typed axis replaces its default, in its own place in the order, as in Hydra. `+key` and `~key` are other keys.
    replaced = {override.get_key_element() for override in given}
    named = {override.key_or_group for override in given} - replaced
    axes = [f"{key}={value}" for key, value in defaults.items() if value is not None and key not in named]
    return {override.get_key_element(): override for override in (*parser.parse_overrides(axes), *given)}


def fixed_words(parser: OverridesParser, defaults: Mapping[str, str | None], arguments: Sequence[str]) -> list[str]:
    """Return the overrides that every cell of a grid shares."""
    given = all_overrides(parser, defaults, arguments).values()
    return [word for override in given if not override.is_sweep_override() for word in discrete_values(override)]


def discrete_values(override: Override) -> list[str]:
    key = override.get_key_element()
    if override.is_delete():
        return [override.input_line or key]
    if not override.is_sweep_override():
        return [f"{key}={value_word(override.value(), override.get_value_element_as_str())}"]
    if not override.is_discrete_sweep():
        raise ConfigError(
            f"{override.input_line}: a grid cannot enumerate an interval; use a list or range, for example "
            f"{key}={_between(override)}, or search=random or search=optuna."
        )
    return [f"{key}={value_word(value, Transformer.str(value))}" for value in override.sweep_iterator()]


@lru_cache(maxsize=1000)  # most words of a trial are those of the trial before it
def unescaped(word: str) -> str:
    """Return an override without escapes that Hydra does not need, such as a backslash before the colon of `s3://`."""
    if "\\" not in word:
        return word
    parser, plain = OverridesParser.create(), re.sub(r"\\(.)", r"\1", word)
    with suppress(HydraException):
        if discrete_values(parser.parse_override(plain)) == discrete_values(parser.parse_override(word)):
            return plain
    return word


def _between(override: Override) -> str:
    """Return some values of an interval, in the form of a typed list."""
    sweep = override.value()
    assert isinstance(sweep, IntervalSweep)
    return f"{sweep.start:g},{sweep.end:g}"


def swept_keys(grid: Sequence[Sequence[str]]) -> list[str]:
    """Return the keys that differ between trials, or that some lack, in the order of the command line."""
    cells = [{override.partition("=")[0].lstrip("+"): override for override in cell} for cell in grid]
    keys = dict.fromkeys(key for cell in cells for key in cell)
    return [key for key in keys if len({cell.get(key) for cell in cells}) > 1]
