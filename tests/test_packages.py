"""Imports between the packages point one way, by the table of CONTRIBUTING.md; each third-party system has owners."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from tests.conftest import LONGEST, ROOT

# What every package may import; it imports nothing of ours.
FOR_ALL = {"metrics", "output", "status", "wording"}
SYSTEM = {"hardware", "files", "locks", "storage"}
# Package -> the packages that it may import besides itself and these. A new one is added here, with what it may see.
MAY_IMPORT = {
    "metrics": set(),
    "output": set(),
    "status": set(),
    "terminal": set(),
    "wording": set(),
    "hardware": set(),
    "cpu_contention": {"hardware"},
    "config": set(),
    "config.machine": {"config", "hardware"},
    "reference": {"config"},
    "api": {"config", "explain", "forecast", "report", "sweep", "terminal"},
    "doctor": {"hardware", "config", "tracking"},
    "files": {"config"},
    "locks": {"config"},
    "private": set(),
    "storage": {"config"},
    "compose": {"config", "explain"},
    "overrides": {"config"},
    "explain": {"config"},
    "profile": set(),
    "layout": set(),
    "tracking": {"locks", "config"},
    "workloads": {"locks", "private", "config"},
    "training": {"cpu_contention", "hardware", "files", "private", "storage", "config", "layout", "profile",
        "workloads"},
    "speed": {"config"},
    "forecast": {*SYSTEM, "config", "layout", "profile", "record", "report", "speed", "terminal", "training",
        "workloads"},
    "forecast.cells": {"config", "compose", "overrides", "forecast", "sweep"},
    "forecast.grid": {"config", "compose", "forecast", "sweep"},
    "forecast.__main__": {"config", "explain", "forecast", "report", "sweep", "terminal"},
    "record": {"compose", "config", "files", "locks"},
    "engine": {*SYSTEM, "private", "config", "record", "training"},
    "report": {"files", "config", "layout", "record"},
    "report.__main__": {"config", "compose", "record", "report", "sweep", "tracking"},
    "sweep": {*SYSTEM, "config", "compose", "overrides", "workloads", "forecast", "speed", "engine", "record", "report",
        "terminal", "tracking"},
    "nightly": {"locks", "files", "config", "record", "report", "storage", "sweep",
        "terminal", "tracking"},
    "nightly.__main__": {"locks", "config", "explain", "nightly", "storage"},
    "nightly.read_study": {"config", "compose", "overrides", "hardware", "nightly", "sweep"},
    "predict": {"config", "training", "tracking", "workloads"},
    "__main__": {"locks", "files", "config", "compose", "overrides", "explain", "doctor", "reference", "training",
        "engine", "sweep", "terminal", "tracking"},
    "hydra_plugins": {"config", "sweep"},
}  # fmt: skip
OWNERS = {
    "ray": {"engine", "sweep"},
    "mlflow": {"tracking"},
    "hydra": {
        "compose",
        "overrides",
        "explain",
        "__main__",
        "forecast.cells",
        "nightly.read_study",
        "sweep",
        "hydra_plugins",
    },
    "fsspec": {"storage"},
    "omegaconf": {"compose", "explain", "__main__", "sweep", "hydra_plugins"},
    "torch": {"workloads", "training", "forecast", "doctor", "predict"},
    "torchvision": {"workloads"},
    "transformers": {"workloads"},
    "huggingface_hub": {"workloads"},
    "safetensors": {"workloads"},
}
FILES = [*sorted((ROOT / "fsdp_lab").rglob("*.py")), *sorted((ROOT / "hydra_plugins").rglob("*.py"))]


def package_of(file: Path) -> str:
    parts = file.relative_to(ROOT).with_suffix("").parts
    if parts[0] == "hydra_plugins":
        return parts[0]
    # a command's own file sees more than the package it lies in
    return ".".join(parts[1:]) if ".".join(parts[1:]) in MAY_IMPORT else parts[1]


@cache
def imports(source: str) -> list[str]:
    """Every module that a file imports, inside functions too, as a dotted name."""
    return list(_imports(source))


def _imports(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "write imports out: `from fsdp_lab.package import ...`"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def broken_rules(package: str, source: str) -> list[str]:
    if package == "__init__":
        return [f"the package itself imports nothing, not {name}" for name in imports(source)]
    if package not in MAY_IMPORT:
        return [f"{package} is a new package: say in this test what it may import"]
    broken = []
    may_import = MAY_IMPORT[package] | FOR_ALL - {package}
    for name in imports(source):
        top, *rest = name.split(".")
        if package not in OWNERS.get(top, {package}):
            broken.append(f"{package} imports {top}, which belongs to {', '.join(sorted(OWNERS[top]))}")
        if top == "fsdp_lab" and rest and rest[0] not in {package, *may_import}:
            broken.append(f"{package} imports {name}, and may see {', '.join(sorted(may_import)) or 'no package'}")
    return broken


def test_files_import_only_what_their_package_may_see():
    found = {file.relative_to(ROOT): broken_rules(package_of(file), file.read_text()) for file in FILES}
    assert {str(file): broken for file, broken in found.items() if broken} == {}


def test_the_table_of_packages_is_right():
    page = (ROOT / "CONTRIBUTING.md").read_text()
    rows = re.findall(r"^\| `(\w+)/?` \| [^|]+ \| ([^|]+) \|$", page.partition("## The packages")[2], re.MULTILINE)
    shown = {package: set() if may.startswith("nothing") else set(re.findall(r"`(\w+)`", may)) for package, may in rows}
    in_words = {"__main__", *(package for package in MAY_IMPORT if "." in package)}
    assert shown == {package: may for package, may in MAY_IMPORT.items() if package not in in_words}


_DOCS = ("architecture", "extending", "durability", "decisions", "facts")
_PACKAGES = (file for file in FILES if file.name == "__init__.py")
PAGES = ("CONTRIBUTING.md", *(f"docs/{name}.md" for name in _DOCS), *(str(p.relative_to(ROOT)) for p in _PACKAGES))
_FILE = re.compile(r"`([\w./-]+\.py|[\w.-]+/[\w./-]+\.(?:yml|json))`")


def missing_files(page: str) -> list[str]:
    """Return the files that a page names and that do not exist."""
    named = _FILE.findall((ROOT / page).read_text())
    folders = {ROOT, ROOT / "fsdp_lab", (ROOT / page).parent}
    if page.endswith(".md"):
        folders |= {file.parent for file in FILES}
    return [name for name in named if not any((folder / name).is_file() for folder in folders)]


def test_pages_for_developers_name_files_that_exist():
    assert {page: missing for page in PAGES if (missing := missing_files(page))} == {}


def test_what_a_package_exports_has_a_docstring():
    packages = [module_of(file) for file in FILES if file.name == "__init__.py" and "hydra_plugins" not in file.parts]
    exported = {
        f"{package}.{name}": getattr(module, name)
        for package in [*packages, "fsdp_lab.api"]
        for module in [importlib.import_module(package)]
        for name in getattr(module, "__all__", [])
    }
    named = {name: thing for name, thing in exported.items() if inspect.isclass(thing) or inspect.isfunction(thing)}
    assert len(named) >= 20
    assert [
        name for name, thing in named.items() if (thing.__doc__ or f"{name}(").startswith(name.split(".")[-1])
    ] == []


def module_of(file: Path) -> str:
    return ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def cycles(sources: dict[str, str]) -> dict[str, set[str]]:
    """Module -> what it imports that imports it in turn, straight or by others; inside functions too."""
    imported: dict[str, set[str]] = {}
    for module, source in sources.items():
        # `from fsdp_lab.package import name`: the name is a module, or of the package's own file
        names = (next((n for n in (name, name.rpartition(".")[0]) if n in sources), module) for name in imports(source))
        imported[module] = set(names) - {module}
    reached = {module: set(names) for module, names in imported.items()}
    for between in sources:
        for names in reached.values():
            if between in names:
                names |= reached[between]
    collected = {module: {n for n in names if module in reached[n]} for module, names in imported.items()}
    return {module: names for module, names in collected.items() if names}


def test_no_module_imports_one_that_imports_it():
    cyclic = cycles({module_of(file): file.read_text() for file in FILES})
    assert cyclic == {}, "move what both need into a module of its own"


def test_the_files_of_tests_that_begin_are_there():
    assert [name for name in LONGEST if not (ROOT / "tests" / name).is_file()] == []
