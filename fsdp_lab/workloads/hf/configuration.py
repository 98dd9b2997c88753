"""A model's configuration: read from a folder, a JSON file or the hub, with the typed values over it."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fsdp_lab.config.errors import ConfigError, UserError
from fsdp_lab.config.serialize import merge
from fsdp_lab.config.suggest import closest
from fsdp_lab.workloads.hf.library import transformers

CONFIG_FILE = "config.json"
# Keys that identify the model or belong to one machine: users cannot set them.
_NOT_KEYS = {
    "model_type", "architectures", "auto_map", "transformers_version", "_name_or_path", "dtype", "torch_dtype",
    "quantization_config", "id2label", "label2id",
}  # fmt: skip
_ATTENTION = {"attn_implementation", "_attn_implementation", "_attn_implementation_internal"}
_ALSO_KEYS = {"num_labels"}  # every configuration has it, though no file does
Config = str | Mapping[str, Any]  # where a configuration is, or its values


def read_config(config: Config | None, overrides: Mapping[str, Any]) -> Any:
    """Return the `PreTrainedConfig` that `model.config` names, changed by the other keys below `model`.

    Args:
        config: where the configuration is, or its values.

    Raises:
        UserError: it cannot be read, transformers has no such model, or the configuration has no such key.
    """
    values = read_values(config)
    kind = _class_of(values, config)
    with translated(config, overrides):
        plain = kind.from_dict(copy.deepcopy(values))
        _check_keys(plain, overrides, config)
        merged = merge(values, {plain.attribute_map.get(name, name): value for name, value in overrides.items()})
        check_values(merged, named(config))
        return kind.from_dict(with_layers(merged, overrides))


@contextmanager
def translated(config: Config | None, overrides: Mapping[str, Any]) -> Iterator[None]:
    """Translate any error of a configuration or a model of transformers into a ConfigError."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        shown = "".join(f" model.{name}={value}" for name, value in overrides.items())
        raise ConfigError(f"{named(config)}{shown}: {' '.join(str(error).split())}") from error


def read_values(config: Config | None) -> dict[str, Any]:
    """Return the content of a configuration's file, or a copy of values that are given directly.

    Raises:
        UserError: the file is missing or not JSON; see also `check_values`.
    """
    if not config:
        raise ConfigError(
            "model.config is not set; give a folder with a config.json, such a file, or a name on the Hugging Face "
            "hub, such as model.config=openai-community/gpt2."
        )
    values = dict(config) if isinstance(config, Mapping) else _read(config)
    check_values(values, named(config))
    return values


def check_values(values: Mapping[str, Any], typed: str) -> None:
    """Check that a configuration can be trained without running code of the hub.

    Args:
        typed: the source of the values, for messages.

    Raises:
        ConfigError: the weights are quantized, or the attention is not PyTorch's: transformers loads code of the hub
            for such a name.
    """
    if values.get("quantization_config") is not None:
        raise ConfigError(
            f"{typed} has quantized weights, which cannot be trained here; use the model that was quantized, or remove "
            "quantization_config."
        )
    for key, name in _attention_names(values):
        if name not in (None, "sdpa", "eager"):
            raise ConfigError(
                f"{typed}: {key}={name} is not an attention of PyTorch, and code from the hub is not run; use sdpa or "
                f"eager, or remove {key}."
            )


def _attention_names(values: Any) -> Iterator[tuple[str, Any]]:
    """Yield the keys that name an attention, at any depth, with the names; a mapping has one for each part."""
    if isinstance(values, Mapping):
        for key, value in values.items():
            if key in _ATTENTION:
                parts = value.values() if isinstance(value, Mapping) else [value]
                yield from ((key, part) for part in parts)
            else:
                yield from _attention_names(value)
    elif isinstance(values, list | tuple):
        for value in values:
            yield from _attention_names(value)


def folder_of(config: Config) -> Path | None:
    """Return the folder of a configuration; None for a name on the hub, and for values that are in no file."""
    if isinstance(config, Mapping) or not _is_path(config):
        return None
    path = Path(config).expanduser()
    return path if path.is_dir() else path.parent


def named(config: Config | None) -> str:
    """Return how a configuration was typed, for messages."""
    return "below model.config" if isinstance(config, Mapping) else f"model.config={config}"


def _is_path(config: str) -> bool:
    """Return whether this is a path. A name on the hub is a word, or two with a slash between them."""
    return Path(config).exists() or config.startswith((".", "/", "~")) or config.count("/") > 1 or ".json" in config


def _read(config: str) -> dict[str, Any]:
    """Return the values of a folder, of a file, or of a name on the hub, which may be in the cache of this machine."""
    name, local = config, _is_path(config)
    if local:
        path = Path(config).expanduser()
        name = str(path / CONFIG_FILE if path.is_dir() else path)
        if not Path(name).is_file():
            raise ConfigError(f"model.config={config}: there is no file {name}; give a folder with a {CONFIG_FILE}.")
    read = transformers().PreTrainedConfig.get_config_dict
    try:
        try:
            values, _ = read(name, local_files_only=True)
        except OSError:
            if local:
                raise
            values, _ = read(name)
        return dict(values)
    except Exception as error:  # a file without an object fails in its own way
        reason = " ".join(str(error).split())[:300]
        remedy = "give another file" if local else f"run hf download {config} --local-dir <folder>, then use the folder"
        raise UserError(f"model.config={config} cannot be read ({reason}); {remedy}.") from error


def _class_of(values: dict[str, Any], config: Config | None) -> Any:
    """Return the configuration's class by its `model_type`."""
    mapping = transformers().CONFIG_MAPPING
    name = str(values.get("model_type"))
    if name in mapping:
        return mapping[name]
    meant = closest(name, list(mapping.keys())) if "model_type" in values else None
    remedy = f"did you mean {meant}? " if meant else ""
    raise ConfigError(
        f"{named(config)}: model_type={name} is not one of transformers {transformers().__version__}; {remedy}"
        "code from the hub is not run (trust_remote_code is off): use model._target_ for such a model."
    )


def _check_keys(config: Any, overrides: Mapping[str, Any], typed: Config | None) -> None:
    known = (set(config.to_dict()) | set(config.attribute_map) | _ALSO_KEYS) - _NOT_KEYS
    for name, value in overrides.items():
        if name in known:
            continue
        meant = closest(name, sorted(known))
        raise ConfigError(
            f"model.{name}={value}: the configuration {named(typed)} ({config.model_type}) has no key {name}. "
            + (f"Did you mean model.{meant}? " if meant else "")
            + f"Its keys are: {', '.join(sorted(known))}."
        )


def with_layers(merged: dict[str, Any], typed: Collection[str]) -> dict[str, Any]:
    """Return values whose list of layer types fits the number of layers: cut, or left to the configuration's class.

    Args:
        typed: the keys that were typed; a typed list stays.
    """
    count, types = merged.get("num_hidden_layers"), merged.get("layer_types")
    if "layer_types" in typed or not isinstance(types, list) or not isinstance(count, int) or count == len(types):
        return merged
    rest = {name: value for name, value in merged.items() if name != "layer_types"}
    return {**rest, "layer_types": types[:count]} if count < len(types) else rest
