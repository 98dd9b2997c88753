"""The reference: every key, option and metric, on a terminal and as Markdown for the pages of `docs/reference`."""

from __future__ import annotations

import ast
import importlib.metadata
import platform
import re
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import fsdp_lab
from fsdp_lab.config import ConfigError, all_keys
from fsdp_lab.config.conf import data_sheets, group_dirs, groups, options_of
from fsdp_lab.config.convert import leaves, value_text
from fsdp_lab.config.describe import KeyDescription, describe_keys
from fsdp_lab.config.metrics import METRICS, Metric
from fsdp_lab.config.options import option_values
from fsdp_lab.config.suggest import did_you_mean

_PACKAGE = Path(fsdp_lab.__file__).parent
_LIBRARIES = ("torch", "ray", "mlflow", "hydra-core")  # what a report of a bug should name
_TABLE = re.compile(r"^\|.*\|$(\n^\|.*\|$)+", re.MULTILINE)


def versions() -> str:
    """Return a line with the version of fsdp_lab, of Python and of the libraries, without importing them."""
    libraries = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in _LIBRARIES)
    return f"fsdp_lab {fsdp_lab.__version__} (Python {platform.python_version()}, {libraries})"


def keys_text(parts: Sequence[str], width: int) -> str:
    """Return the keys for a terminal: each with its default, its values and its meaning.

    Args:
        parts: only keys that contain one of these, or that an option such as `model=llama3_8b` sets; empty: all keys.
        width: of the terminal, in characters.

    Raises:
        ConfigError: no key contains a part, or there is no such option.
    """
    keys = [key for _, _, keys in describe_keys() for key in keys]
    options = [part for part in parts if "=" in part]
    set_by = [key for option in options for key in _keys_of_option(option, keys)]
    parts = [part for part in parts if part not in options]
    for part in parts:
        if not any(part in key.name for key in keys):
            meant = did_you_mean(part, all_keys())
            raise ConfigError(f"--keys {part}: no key contains it. {meant}--keys alone prints every key.")
    shown = [key for key in keys if not (parts or set_by) or any(part in key.name for part in parts)]
    return "\n".join(line for key in (*set_by, *shown) for line in _key_lines(key, width))


def _keys_of_option(option: str, keys: Sequence[KeyDescription]) -> Iterator[KeyDescription]:
    """Yield the keys that an option sets, each with its value there."""
    group, _, name = option.partition("=")
    if group not in groups() or name not in options_of(group):
        known = [f"{group}={each}" for each in options_of(group)] if group in groups() else groups()
        meant = did_you_mean(option if group in groups() else group, known)
        raise ConfigError(f"--keys {option}: no such option. {meant}Choose one of: {', '.join(known)}.")
    described = {key.name: key for key in keys}
    for key, value in leaves(option_values(group, name), "" if group == "experiment" else f"{group}.").items():
        unknown = KeyDescription(key, "", "", "", f"Set by {option}.")
        yield replace(described.get(key, unknown), default=value_text(value))


def _key_lines(key: KeyDescription, width: int) -> Iterator[str]:
    yield f"{key.name}={key.default}"
    for text in filter(None, (_values(key), key.meaning)):
        yield from textwrap.wrap(text.replace("`", ""), width, initial_indent="    ", subsequent_indent="    ")


def _values(key: KeyDescription) -> str:
    return f"{key.kind}: {key.takes}" if key.takes else key.kind


def keys_page() -> str:
    """Return a table of keys for each group, as Markdown."""
    return "\n\n".join(_group_table(*group) for group in describe_keys())


def _group_table(name: str, about: str, keys: Sequence[KeyDescription]) -> str:
    rows = [f"| `{key.name}` | {_values(key)} | {_code(key.default)} | {_text(key.meaning)} |" for key in keys]
    head = f"## {name or 'Keys without a group'}\n\n" + (f"{about}\n\n" if name else "")
    return "\n".join([f"{head}| key | values | default | meaning |", "| --- | --- | --- | --- |", *rows])


def options_page() -> str:
    """Return a table of options for each group of `conf/`, and of data sheets, as Markdown."""
    tables = []
    for folder in group_dirs():
        files = sorted(folder.glob("*.yaml"))
        rows = [f"| `{folder.name}={file.stem}` | {option_comment(file)} |" for file in files]
        tables.append("\n".join([f"## {folder.name}", "", "| option | what it is |", "| --- | --- |", *rows]))
    sheets = [f"| `forecast.device={file.stem}` | {option_comment(file)} |" for file in data_sheets()]
    tables.append("\n".join(["## Data sheets", "", "| device | what it is |", "| --- | --- |", *sheets]))
    return "\n\n".join(tables)


def option_comment(file: Path) -> str:
    """Return the first line of the comment at the head of an option's file, without directives; "" without one."""
    lines = (line for line in file.read_text().splitlines() if not line.startswith("# @package"))
    head = next(lines, "")
    return head.removeprefix("# ").removesuffix(":") if head.startswith("# ") else ""


def metrics_page() -> str:
    """Return a table of every metric, as Markdown."""
    head = ["| metric | unit | better | objective | meaning |", "| --- | --- | --- | --- | --- |"]
    return "\n".join([*head, *map(_metric_row, METRICS)])


def _metric_row(metric: Metric) -> str:
    key = f"`{metric.key}`" + (f", `{metric.mib_key}` in MiB" if metric.mib_key else "")
    better = {"min": "lower", "max": "higher", "": ""}[metric.better]
    about = metric.about or metric.label
    return f"| {key} | {metric.unit} | {better} | {'yes' if metric.objective else ''} | {about} |"


def table_in(file: str) -> str:
    """Return the table in the docstring of a module, as Markdown.

    Args:
        file: below the package, such as `record/trial_files.py`. It is read, not imported.

    Raises:
        ValueError: the docstring has no table.
    """
    match = _TABLE.search(ast.get_docstring(ast.parse((_PACKAGE / file).read_text())) or "")
    if match is None:
        raise ValueError(f"fsdp_lab/{file} has no table in its docstring")
    return _text(match[0])


def _text(markdown: str) -> str:
    """Return Markdown in which `<name>` outside of code is text, not an element."""
    parts = re.split(r"(`[^`]*`)", markdown)
    return "".join(part if part.startswith("`") else part.replace("<", "&lt;") for part in parts)


def _code(text: str) -> str:
    return f"`{text}`" if text else ""
