"""The words of a command line before Hydra reads them: options, implied words, and commands without Hydra."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence

from fsdp_lab.config.address import check_credentials
from fsdp_lab.config.errors import ConfigError
from fsdp_lab.config.options import conf_dir, option_values
from fsdp_lab.config.sweep import TrackingConfig

_CONFIG_DIR = ("--config-dir", "-cd")
# Keys whose value names code to import, in addition to the `_target_` of those groups.
CODE_KEYS = (
    *("model.block_classes", "data.collate_fn", "data.loader", "data.example_batch"),
    *("task.loss", "task.metrics", "task.after_step", "optimizer.groups"),
)
# A key that exists only with the option `custom` of its group -> the group.
_CUSTOM = {
    **{"task.loss": "task", "data.loader": "data"},
    **{f"{name}._target_": name for name in ("model", "data", "optimizer", "lr_schedule")},
}
_CHOSEN = ("task", "model", "data")
# Task -> the targets of its models and data sets, and the words that it implies if nothing else is typed.
_TEXT = {
    "language": (
        ("fsdp_lab.workloads.examples.language.", "fsdp_lab.workloads.hf.models.causal_lm"),
        {"model": "lm_tiny", "data": "pydoc"},
    ),
    "seq2seq": (
        ("fsdp_lab.workloads.examples.seq2seq.", "fsdp_lab.workloads.hf.models.seq2seq"),
        {"model": "t5_tiny", "data": "pydoc_summaries"},
    ),
}
_OURS = ("lm_tiny", "hf_causal_lm")  # models that train on any text; all others are published sizes
_UNUSED = {
    "MLFLOW_EXPERIMENT_ID": "tracking.experiment, or MLFLOW_EXPERIMENT_NAME, names the experiment",
    "MLFLOW_RUN_ID": "each trial gets a run of its own",
}
MLFLOW_VARIABLES = {"tracking.uri": "MLFLOW_TRACKING_URI", "tracking.experiment": "MLFLOW_EXPERIMENT_NAME"}


def key_of(word: str) -> str:
    """Return the key of an override, without the sign before it."""
    return word.partition("=")[0].lstrip("+~")


def with_overrides(overrides: Sequence[str], on_top: Sequence[str]) -> list[str]:
    """Return overrides; those in `on_top` replace the ones for the same keys."""
    keys = {key_of(override) for override in on_top}
    return [*(override for override in overrides if key_of(override) not in keys), *on_top]


def read_words(arguments: Sequence[str], keys: Sequence[str], usage: str) -> dict[str, str]:
    """Return the `key=value` arguments as a dictionary; with `--help`, or without arguments, print the usage instead.

    Raises:
        ConfigError: an unknown key, or credentials in an address.
        SystemExit: the usage was printed.
    """
    if not arguments or {"-h", "--help"} & set(arguments):
        print(usage)
        raise SystemExit(0 if arguments else 2)
    check_words(arguments)
    options = dict(argument.partition("=")[::2] for argument in arguments)
    for key in options:
        if key not in keys:
            raise ConfigError(f"{key} is not a key. The keys are: {', '.join(keys)}.")
    return options


def check_words(words: Sequence[str]) -> None:
    """Check that no argument has credentials in it. Raises as `check_credentials`."""
    for word in words:
        key = key_of(word)
        check_credentials("an argument" if "://" in key else key, word)


def split_config_dir(words: Sequence[str]) -> tuple[str | None, list[str]]:
    """Return the folder of `--config-dir`, which adds the user's options, and the other arguments.

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
            raise ConfigError(f"{word} needs a folder, as in --config-dir=conf_of_mine.")
        if config_dir not in (None, folder):
            raise ConfigError(f"--config-dir={folder}: {config_dir} is named already; put all options into one folder.")
        config_dir = folder
    return config_dir, rest


def with_custom(words: Sequence[str]) -> list[str]:
    """Return a command line in which `model._target_=...` implies `model=custom`; likewise `data` and `task.loss`.

    Otherwise the sizes of the default model would become arguments of the user's callable.
    """
    rest: list[str] = []
    chosen = {key_of(word) for word in words}
    for word in words:
        group = _CUSTOM.get(word.partition("=")[0].lstrip("+"))
        if group and group not in chosen and not word.endswith("=null"):
            chosen.add(group)
            rest.append(f"{group}=custom")
        rest.append(word)
    return _with_task(rest)


def _with_task(words: Sequence[str]) -> list[str]:
    """Return a command line with the task, model and data that the typed ones imply.

    - A language model or token data implies `task=language`, which implies `model=lm_tiny` and `data=pydoc`.
    - A published model implies `data=synthetic_tokens`.
    - Pair data implies `task=seq2seq`, which implies `model=t5_tiny` and `data=pydoc_summaries`.

    Typed options and those of a preset stay. A user's own preset counts as choosing all three.
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
    return str(option_values(group, option).get("_target_")).startswith(_TEXT[task][0])


def names_code(words: Sequence[str]) -> bool:
    """Return whether any argument of a command line names the user's code."""
    return any(key_of(word) in CODE_KEYS or "_target_" in word for word in words)


def may_name_code(key: str) -> bool:
    """Return whether the values of a key, or the options of a group, may name the user's code."""
    return key in (*_CHOSEN, "optimizer", "experiment") or names_code([f"{key}="])


def with_environment(words: Sequence[str], config_dir: str | None = None) -> list[str]:
    """Return a command line with the store and the experiment that MLflow's variables name, unless it names them.

    They become words of the command line, so that the sweep's record has them: a resume from another shell uses the
    same store. Keys of the preset stay.

    Args:
        config_dir: the folder of the user's options; None: there is none.

    Raises:
        ConfigError: a variable has credentials in it.
    """
    if any(word.lstrip("+").startswith("resume=") for word in words):
        return list(words)
    preset = next((word.partition("=")[2] for word in words if word.startswith("experiment=")), "null")
    content = option_values("experiment", preset, config_dir)
    of_preset = content.get("tracking") or {} if isinstance(content, dict) else {}  # else composing rejects it
    typed = {*map(key_of, words), *(f"tracking.{key}" for key in of_preset)}
    missing = {key: name for key, name in MLFLOW_VARIABLES.items() if os.environ.get(name) and key not in typed}
    for name in missing.values():
        check_credentials(name, os.environ[name])
    return [*(f"{key}={quoted(os.environ[name])}" for key, name in missing.items()), *words]


def unused_variables() -> list[str]:
    """Return a note on each variable of MLflow's in the environment that sweeps do not use."""
    return [f"{name} is not used: {why}" for name, why in _UNUSED.items() if os.environ.get(name)]


def store_named(options: Mapping[str, str]) -> str:
    """Return the MLflow store that a command without Hydra uses: the typed one, MLflow's variable, or the default."""
    return options.get("tracking.uri") or os.environ.get("MLFLOW_TRACKING_URI") or TrackingConfig.uri


def quoted(value: object) -> str:
    """Return a value as text in a Hydra override: quoted, except for a plain path."""
    if _PLAIN_PATH.fullmatch(str(value)):
        return str(value)
    text = re.sub(r"(\\*)\$\{", r"\1\1\\${", str(value))  # otherwise OmegaConf interpolates it
    text = re.sub(r"(\\*)('|$)", r"\1\1\2", text).replace("'", "\\'")  # a backslash escapes only before a quote
    return f"'{text}'"


# Hydra would not read 1e3, true or null as text.
_PLAIN_PATH = re.compile(
    r"(?!(?:null|true|false|nan|inf)$)[a-z_][\w.-]*(/[\w.-]+)*|[\w.-]*(/[\w.-]+)+", re.ASCII | re.IGNORECASE
)
