"""Everything that can be typed: every key, and the options of the groups in `conf/`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any, Optional, get_type_hints

from fsdp_lab.config.conf import OPEN_GROUPS, conf_dir, groups
from fsdp_lab.config.convert import flatten
from fsdp_lab.config.errors import ConfigError
from fsdp_lab.config.key import keys_of
from fsdp_lab.config.nightly import NightlyConfig
from fsdp_lab.config.suggest import did_you_mean


def all_keys() -> list[str]:
    """Return every key that can be typed, dotted."""
    return list(keys_of(NightlyConfig))


@cache
def text_keys() -> frozenset[str]:
    """Return the keys whose value is text."""
    return frozenset(_text_keys(NightlyConfig, ""))


def _text_keys(config_class: type, prefix: str) -> Iterator[str]:
    hints = get_type_hints(config_class)
    for each in fields(config_class):
        if isinstance(each.default_factory, type) and is_dataclass(each.default_factory):
            yield from _text_keys(each.default_factory, f"{prefix}{each.name}.")
        elif hints[each.name] in (str, Optional[str]):
            yield f"{prefix}{each.metadata['key'].named or each.name}"


# Keys whose value names code to import, in addition to the `_target_` of those groups.
CODE_KEYS = ("model.block_classes", "data.collate_fn", "task.loss", "task.metrics")
_CONFIG_DIR = ("--config-dir", "-cd")
# A key that only the option `custom` of its group has -> the group.
_CUSTOM = {"model._target_": "model", "data._target_": "data", "optimizer._target_": "optimizer", "task.loss": "task"}


_CHOSEN = ("task", "model", "data")
_PACKAGE = "_target_: fsdp_lab.workloads."
# Task -> what is in the files of its models and data sets, and what stands with it where nothing else is typed.
_TEXT = {
    "language": (("examples.language.", "hf.models.causal_lm"), {"model": "lm_tiny", "data": "pydoc"}),
    "seq2seq": (("examples.seq2seq.", "hf.models.seq2seq"), {"model": "t5_tiny", "data": "pydoc_summaries"}),
}
_OURS = ("lm_tiny", "hf_causal_lm")  # models that train on any text; the others are published sizes


def with_custom(words: Sequence[str]) -> list[str]:
    """Return a command line in which `model._target_=...` implies `model=custom`; likewise `data` and `task.loss`.

    Without it the sizes of the default model would become arguments of the user's callable.
    """
    typed = [word.partition("=")[0].lstrip("+") if not word.endswith("=null") else "" for word in words]
    implied = [(typed.index(key), group) for key, group in _CUSTOM.items() if key in typed and group not in typed]
    first = [f"{group}=custom" for _, group in implied if group == "optimizer"]  # before an `optimizer.lr`
    others = {at: group for at, group in implied if group != "optimizer"}
    rest = [[f"{others[i]}=custom", word] if i in others else [word] for i, word in enumerate(words)]
    return with_task([*first, *(each for some in rest for each in some)])


def with_task(words: Sequence[str]) -> list[str]:
    """Return a command line with the task, model and data that the typed ones imply.

    - A language model or token data implies `task=language`, which implies `model=lm_tiny` and `data=pydoc`.
    - A published model implies `data=synthetic_tokens`.
    - Pair data implies `task=seq2seq`, which implies `model=t5_tiny` and `data=pydoc_summaries`.

    What is typed or chosen by a preset stays. A preset of the user's own counts as choosing all three.
    """
    typed = {group: word.partition("=")[2] for word in words for group in _CHOSEN if word.startswith(f"{group}=")}
    options = [(group, option) for group, value in typed.items() for option in value.split(",")]
    task = next((task for task in _TEXT if any(_is_of(task, *each) for each in options)), None)
    if task is None:
        return list(words)
    chosen = {*typed, *(group for word in words if word.startswith("experiment=") for group in _chosen_by(word[11:]))}
    models = [option for group, option in options if group == "model" and option not in _OURS]
    published = any(_is_of("language", "model", option) for option in models)
    implied = {"task": task, **_TEXT[task][1], **({"data": "synthetic_tokens"} if published else {})}
    return [*(f"{group}={option}" for group, option in implied.items() if group not in chosen), *words]


def _chosen_by(preset: str) -> list[str]:
    file = conf_dir() / "experiment" / f"{preset}.yaml"
    text = file.read_text() if file.is_file() else None
    return [group for group in _CHOSEN if text is None or f"override /{group}:" in text]


def _is_of(task: str, group: str, option: str) -> bool:
    if group == "task":
        return option == task
    file = conf_dir() / group / f"{option}.yaml"
    text = file.read_text() if file.is_file() else ""
    return any(f"{_PACKAGE}{target}" in text for target in _TEXT[task][0])


def split_config_dir(words: Sequence[str]) -> tuple[str | None, list[str]]:
    """Return the folder that `--config-dir` names, which adds the user's options to ours, and the other arguments.

    The folder is None without the option.

    Raises:
        ConfigError: the option has no value, or two.
    """
    config_dir, rest, left = None, [], iter(words)
    for word in left:
        name, has_value, value = word.partition("=")
        if name not in _CONFIG_DIR:
            rest.append(word)
            continue
        folder = value if has_value else next(left, "")
        if not folder:
            raise ConfigError(f"{word} names no folder; give one, as in --config-dir=conf_of_mine.")
        if config_dir not in (None, folder):
            raise ConfigError(f"--config-dir={folder}: {config_dir} is named already; put all options into one folder.")
        config_dir = folder
    return config_dir, rest


def names_code(words: Sequence[str]) -> bool:
    """Return whether any argument of a command line names the user's code."""
    return any(word.partition("=")[0].lstrip("+") in CODE_KEYS or "_target_" in word for word in words)


def may_name_code(key: str) -> bool:
    """Return whether the values of a key, or the options of a group, may name the user's code."""
    return key in (*_CHOSEN, "optimizer", "experiment") or names_code([f"{key}="])


def option_values(group: str, option: str, config_dir: str | None = None) -> dict[str, Any]:
    """Return the keys and values of a group's option, as its file has them.

    It is empty for an option that is not ours, nor in the folder of the user's options.
    """
    import yaml  # neither PyTorch nor torchvision brings it, and training takes no more than these

    files = (folder / group / f"{option}.yaml" for folder in (conf_dir(), Path(config_dir or conf_dir())))
    file = next((file for file in files if file.is_file()), None)
    return (yaml.safe_load(file.read_text()) or {}) if file is not None else {}


@cache
def values_implied_by_option(group: str, option: str) -> dict[str, Any]:
    """Return the values that the name of a group's option implies, such as `{"sharding.granularity": "per_block"}`."""
    values = option_values(group, option)
    defaults, keys = flatten(NightlyConfig()), keys_of(NightlyConfig)
    implied = [name for name in keys if name.startswith(f"{group}.") and keys[name].named_by_option]
    return {name: values.get(name.partition(".")[2], defaults[name]) for name in implied}


def valid_keys(key: str) -> str:
    """Return sentences about the keys and groups that there are, and which one was probably meant."""
    prefix = key.split(".")[0].lstrip("+~")
    same = [k for k in all_keys() if k.startswith(f"{prefix}.")]
    if "." in key and same:
        known = [*same, *(f"{group}._target_" for group in OPEN_GROUPS if group == prefix)]
        return (
            f"{did_you_mean(key, known) or did_you_mean(key, all_keys())}The keys of {prefix} are: {', '.join(same)}."
        )
    top = sorted({k.split(".")[0] for k in all_keys()})
    meant = did_you_mean(key, [*groups(), *top, *all_keys()])
    return f"{meant}The groups are: {', '.join(groups())}. The keys begin with: {', '.join(top)}."
