"""Write the tables of the pages that are made from the code: `python docs/tables.py`.

They stand between `<!-- generated: name -->` and `<!-- end -->`. A test compares them with the code.
Claims are made from the planted faults of `tests/faults.py`.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from fsdp_lab.config.describe import KeyDescription, describe_keys
from fsdp_lab.config.metrics import METRICS, Metric
from fsdp_lab.config.options import data_sheets, group_dirs
from fsdp_lab.report.their_keys import KINDS, Row, trainers

DOCS = Path(__file__).resolve().parent
_PACKAGE = DOCS.parent / "fsdp_lab"
_TABLE = re.compile(r"^\|.*\|$(\n^\|.*\|$)+", re.MULTILINE)
FILES = (*(DOCS / "reference").glob("*.md"), DOCS / "claims.md")


def keys_page() -> str:
    """Return the keys of each group, as Markdown."""
    return "\n\n".join(_group_list(name, keys) for name, _, keys in describe_keys())


def _group_list(name: str, keys: Sequence[KeyDescription]) -> str:
    rows = [f"- {_code(_with_default(key))}{_values(key)}: {_text(key.meaning)}" for key in keys]
    return "\n".join([f"## {name or 'Keys without a group'}", "", *rows])


def _with_default(key: KeyDescription) -> str:
    return f"{key.name}={key.default}" if key.default else key.name


_KINDS = {"true or false": "bool", "whole number": "int", "number": "float", "mapping of text": "mapping"}


def _values(key: KeyDescription) -> str:
    """Return what a key takes, by a type of Python and a rule; nothing where the default shows it."""
    kind, null, _ = key.kind.partition(" or null")
    rule = re.sub(
        r"([\d.]+) or more", r"≥\1", key.takes.removeprefix("a number ").replace("above ", ">").replace("below ", "<")
    )
    if kind == "choice" or "`" in rule:
        return f" ({rule}{', null' * bool(null)})"
    known = [
        *[_KINDS.get(kind, kind)] * (kind != "true or false"),
        rule,
        "null" * (bool(null) and key.default != "null"),
    ]
    return f" ({', '.join(filter(None, known))})" if any(known) else ""


def options_page() -> str:
    """Return the options of each group of `conf/`, and the data sheets, as Markdown."""
    groups = {folder.name: (folder.name, sorted(folder.glob("*.yaml"))) for folder in group_dirs()}
    groups["Data sheets"] = ("forecast.device", list(data_sheets()))
    return "\n\n".join(
        "\n".join([f"## {head}", "", *(f"- `{key}={file.stem}`: {option_comment(file)}" for file in files)])
        for head, (key, files) in groups.items()
    )


def option_comment(file: Path) -> str:
    """Return the first line of the comment at the head of an option's file, without directives; "" without one."""
    lines = (line for line in file.read_text().splitlines() if not line.startswith("# @package"))
    head = next(lines, "")
    return head.removeprefix("# ").removesuffix(":") if head.startswith("# ") else ""


def trainers_page() -> str:
    """Return the keys of each trainer that `python -m fsdp_lab.read` knows, as Markdown: a line for each answer."""
    return "\n\n".join("\n".join([f"## {name}", "", *_trainer_lines(one.rows)]) for name, one in trainers().items())


def _trainer_lines(rows: Sequence[Row]) -> list[str]:
    answers: dict[str, dict[str, None]] = {}
    refused: dict[str, None] = {}
    for row in rows:
        kinds = "" if len(row.kinds) == len(KINDS) else f" ({', '.join(row.kinds)})"
        if any(words and not words.startswith("no: ") for words in row.ours.values()) or not row.reads:
            answers.setdefault(_answer(row), {})[f"`{row.key}`{kinds}"] = None
        else:
            refused[f"`{row.key}`"] = None
    lines = [f"- {', '.join(keys)}: {answer}" for answer, keys in answers.items()]
    return [*lines, "", f"No counterpart, but for a value that changes nothing: {', '.join(refused)}."]


def _answer(row: Row) -> str:
    """Return what the values of a key mean here, but for those that change nothing."""
    ways: dict[str, list[str]] = {}
    for option, words in row.ours.items():
        if words:
            told = "none" if words.startswith("no: ") else _code(words)
            ways.setdefault(told, []).append({"*": "other", "?": "else"}.get(option, _code(option)))
    parts = [f"{', '.join(options)} → {told}" for told, options in ways.items()]
    if len(ways) == 1 and "*" in row.ours:
        parts = [*ways]
    absent = "" if row.default is None else f"absent: {_code(_default(row.default))}"
    return "; ".join(filter(None, [*(parts if row.reads else ["part of other keys"]), absent, _text(row.remark)]))


def _default(value: object) -> str:
    return "" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def claims_page() -> str:
    """Return what the tests of each package notice, a line for each test, as Markdown."""
    sys.path.append(str(DOCS.parent))
    from tests.faults import FAULTS, MAKE_ALL, MAKE_TEST

    rooms: dict[str, dict[str, list[str]]] = {}
    for fault in FAULTS:
        room = fault.file.removeprefix("fsdp_lab/").partition("/")[0].removesuffix(".py")
        tier = {MAKE_TEST: "", MAKE_ALL: " (in `make test-all`)"}.get(fault.marks, " (in `make ci`)")
        test = f"`tests/{fault.test.partition('[')[0]}`{tier}"
        rooms.setdefault(room, {}).setdefault(test, []).append(_text(fault.name))
    pages = ((room, [f"- {'; '.join(names)}: {test}" for test, names in of.items()]) for room, of in rooms.items())
    return "\n\n".join("\n".join([f"## {room}", "", *lines]) for room, lines in sorted(pages))


def metrics_page() -> str:
    """Return every metric, as Markdown."""
    return "\n".join(map(_metric_line, METRICS))


def _metric_line(metric: Metric) -> str:
    key = f"`{metric.key}`" + (f", `{metric.mib_key}` in MiB" if metric.mib_key else "")
    better = {"min": "lower", "max": "higher", "": ""}[metric.better] + "*" * metric.objective
    known = ", ".join(filter(None, [metric.unit, better]))
    return f"- {key}{f' ({known})' if known else ''}: {metric.about or metric.label}"


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


PAGES = {
    "keys": keys_page,
    "options": options_page,
    "trainers": trainers_page,
    "claims": claims_page,
    "metrics": metrics_page,
}
_GENERATED = re.compile(r"(<!-- generated: (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)


def filled(markdown: str) -> str:
    """Return a page with its tables as the code has them: by a name in `PAGES`, or in the docstring of a file."""

    def fill(found: re.Match[str]) -> str:
        table = PAGES[found[2]]() if found[2] in PAGES else table_in(found[2])
        return f"{found[1]}\n{table}\n\n{found[3]}"

    return _GENERATED.sub(fill, markdown)


if __name__ == "__main__":
    for page in FILES:
        page.write_text(filled(page.read_text()))
