"""Reads the overrides of a command line with Hydra's grammar, and normalizes their spelling."""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, Glob, Override, Quote, QuotedString, Transformer, ValueType
from hydra.errors import HydraException

from fsdp_lab.config import ConfigError, all_keys
from fsdp_lab.config.describe import text_keys
from fsdp_lab.config.options import OPEN_GROUPS, conf_dir, groups, options_of, use_devices_of
from fsdp_lab.config.suggest import closest
from fsdp_lab.config.words import check_words, key_of

_KEYS, _PARSER = frozenset(all_keys()), OverridesParser.create()
_TEXT_KEYS = text_keys() | {"hydra.run.dir", "hydra.sweep.dir", "hydra.sweep.subdir"}
_PRESET = "experiment"  # the only group that may be without an option
_COMMANDS = ("forecast", "nightly", "report", "training")  # each runs as `python -m fsdp_lab.<name>`
# Keys that an option sets; tables and reports show the option's name.
_OF_OPTIONS = ("sharding.granularity", "optimizer.name", "lr_schedule.name", "task.name", "check.name")
_REFUSED = {
    **{key: f"use {key.partition('.')[0]}=<option>, whose name the tables show" for key in _OF_OPTIONS},
    "hydra.searchpath": "name the folder of your own options by --config-dir=<folder>",
    "hydra/launcher": "Ray runs the trials, or engine=inline this process",
    "hydra/sweeper": "search=grid, random or optuna chooses the trials",
}


def read_overrides(words: Sequence[str], config_dir: str | None = None) -> list[str]:
    """Return normalized overrides: equal ones have equal text, so that other code can compare text.

    - A sweep of one value becomes that value, and a sweep of options a list of names.
    - Names of options and values of text keys stay as typed: `1e3` is text there.
    - Our groups and keys have no `+`, `++` or `@package`.

    Prints to standard error each override that a later one for the same key replaces, as in Hydra.

    Args:
        words: without options such as `-m`.
        config_dir: the folder that `--config-dir` names.

    Raises:
        ConfigError: an argument has credentials, is no override, names an unknown option or sets a reserved key; or a
            swept key occurs twice.
        OverrideParseException: an override cannot be parsed.
    """
    check_words(words)
    words = [_with_quotes(word) for word in words]
    for word in words:
        if "=" not in word and not word.startswith("~"):
            raise ConfigError(_no_override(word))
    parsed = _PARSER.parse_overrides(words)
    read = [_spelt(override, config_dir) for override in parsed]
    times, last = Counter(override.key_or_group for override in parsed), {key_of(word): word for word in read}
    for override, word in zip(parsed, read, strict=True):
        if (count := times[override.key_or_group]) > 1 and _PARSER.parse_override(word).is_sweep_override():
            raise ConfigError(
                f"{override.input_line}: {override.key_or_group} is there {count} times, and the last would replace "
                "the values to sweep; leave one."
            )
    for word in read:
        if last[key_of(word)] != word:
            print(f"note: {word} is replaced by {last[key_of(word)]}", file=sys.stderr)
    return read


def _with_quotes(word: str) -> str:
    """Quote the overrides in `check.keys=[model.num_layers=2]`: Hydra's grammar takes no `=` in a value."""
    key, _, value = word.partition("=")
    plain = re.fullmatch(r"\[?([^\[\]'\"]*=[^\[\]'\"]*)\]?", value)
    if key.lstrip("+") != "check.keys" or not plain:
        return word
    items = [f"'{item.strip()}'" for item in plain[1].split(",")]
    return f"{key}=[{','.join(items)}]"


def _no_override(word: str) -> str:
    if word in _COMMANDS:
        return f"{word} is a command of its own: python -m fsdp_lab.{word}"
    meant = closest(word, [*_COMMANDS, "doctor", *groups(), *_KEYS])
    close = f" Did you mean {meant if meant in (*_COMMANDS, 'doctor') else f'{meant}=...'}?" if meant else ""
    return f"{word} is no override, because it has no value; write key=value.{close}"


def _spelt(override: Override, config_dir: str | None) -> str:
    key, line = override.key_or_group, override.input_line or ""
    if key in _REFUSED:
        raise ConfigError(f"{line} cannot be set: {_REFUSED[key]}.")
    group, _, below = key.partition("/")
    if below and group in groups():
        raise ConfigError(f"{line}: an option in a folder is named by its path: {group}={below}/{override.value()}.")
    is_group = key in groups()
    if is_group and override.package not in (None, key):
        raise ConfigError(f"{line}: an option of {key} has its own place; leave out @{override.package}.")
    if override.is_delete():
        if is_group and key != _PRESET:
            raise ConfigError(f"{line}: every trial has an option of {key}; leave it out for the default, or name one.")
        return line
    is_ours = is_group or key in _KEYS or key.partition(".")[0] in OPEN_GROUPS
    name, typed = key if is_ours else override.get_key_element(), override.get_value_string().strip()
    if is_group:
        return f"{name}={','.join(_options(override, typed, config_dir))}"
    given = override.value()
    if other := _other_keys(given.list if isinstance(given, ChoiceSweep) else given):
        raise ConfigError(f"{line}: a dictionary's keys are text here, not {other[0]}; begin them with a letter.")
    if not override.is_discrete_sweep():
        value = override.value()
        is_literal = isinstance(value, int | float) and "(" not in typed
        is_changed = key in _TEXT_KEYS and is_literal and str(value) != typed
        return f"{name}={value_word(typed, typed) if is_changed else typed}"
    if override.value_type is ValueType.GLOB_CHOICE_SWEEP:
        return f"{name}={typed}"
    values = list(override.sweep_iterator())
    if key in _TEXT_KEYS:
        _texts(values, line, typed)
    return f"{name}={value_word(values[0], Transformer.str(values[0])) if len(values) == 1 else typed}"


def _other_keys(value: Any) -> list[Any]:
    """Return the dictionary keys in a value that are not text: files and processes would convert them to text."""
    inner = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else []
    own = [key for key in value if not isinstance(key, str)] if isinstance(value, dict) else []
    return [*own, *(key for each in inner for key in _other_keys(each))]


def _options(override: Override, typed: str, config_dir: str | None) -> list[str]:
    """Return the names of a group's options, each as a word."""
    group, given = override.key_or_group, override.value()
    values: list[Any]
    if isinstance(given, ChoiceSweep):
        values = list(override.sweep_iterator())
    elif isinstance(given, Glob):
        values = given.filter(options_of(group, config_dir))
    else:
        values = [given]
    if group == _PRESET and values == [None]:
        return ["null"]
    if group == _PRESET and len(values) > 1:
        raise ConfigError(
            f"{override.input_line}: each preset has axes of its own, so a command takes one; type two commands."
        )
    plain = [each.text if isinstance(each, QuotedString) else each for each in values]
    is_name = [isinstance(each, str | int | float) and not re.search(r"\$\{(?!oc\.env:)", str(each)) for each in plain]
    if not plain or not all(is_name):
        raise ConfigError(
            f"{override.input_line} is not an option: {group} is a group, and takes a name. Choose one of: "
            f"{', '.join(options_of(group))}."
        )
    is_literal = len(plain) == 1 and not isinstance(plain[0], str) and "(" not in typed
    texts = [typed] if is_literal else _texts(plain, override.input_line or "", typed)
    return [value_word(text, text) for text in texts]


def _texts(values: Sequence[Any], line: str, typed: str) -> list[str]:
    """Return values as the text that was typed.

    Raises:
        ConfigError: Hydra read one of them as another number, such as `1e3` as `1000.0`.
    """
    numbers = [str(each) for each in values if isinstance(each, int | float)]
    if lost := [each for each in numbers if each not in re.split(r"[\s,()]+", typed)]:
        raise ConfigError(f"{line}: quote text that looks like a number or true, else it is read as {lost[0]}.")
    return [str(each) for each in values]


def value_word(value: Any, text: str) -> str:
    """Return a value as a word that Hydra reads as that value: its own functions drop quotes, as in `choice('1')`.

    Args:
        text: the word without more quotes.
    """
    plain = _mapped(value, lambda each: each.text if isinstance(each, QuotedString) else each)
    with suppress(HydraException):
        if _PARSER.parse_override(f"key={text}").value() == plain:
            return text
    quoted = _mapped(plain, lambda each: QuotedString(each, Quote.single) if isinstance(each, str) else each)
    return Transformer.str(quoted)


def _mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    if isinstance(value, list):
        return [_mapped(each, change) for each in value]
    if isinstance(value, dict):
        return {key: _mapped(each, change) for key, each in value.items()}
    return change(value)


def search_path(config_dir: str | None) -> list[str]:
    """Return the overrides with which Hydra also finds the user's options, and register the user's devices.

    Raises:
        ConfigError: there is no such folder; or Hydra would ignore a file in it, because of its suffix or because one
            of ours has its name.
    """
    use_devices_of(config_dir)
    if config_dir is None:
        return []
    folder = Path(config_dir).absolute()
    if not folder.is_dir():
        raise ConfigError(
            f"--config-dir={config_dir}: folder {folder} not found; name one that holds options, as in model/mine.yaml."
        )
    for ours in conf_dir().rglob("*.yaml"):
        mine = folder / ours.relative_to(conf_dir())
        if mine.is_file() and mine.read_bytes() != ours.read_bytes():
            raise ConfigError(f"{mine} has the name of one of fsdp_lab's own files, which would be used; rename it.")
    for group in groups():
        for mine in (folder / group).rglob("*.[yY]*"):
            if mine.suffix != ".yaml":
                raise ConfigError(f"{mine} would be ignored: options end in .yaml; rename it to {mine.stem}.yaml.")
    quoted = str(folder).replace("\\", "\\\\").replace("'", "\\'")
    return [f"hydra.searchpath=['file://{quoted}']"]
