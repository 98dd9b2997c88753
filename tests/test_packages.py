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

# Room -> the rooms that it may import. Each row names only rows above it, so no import goes back up.
MAY_IMPORT: dict[str, set[str]] = {
    "machine": set(),
    "config": {"machine"},
    "storage": {"config"},
    "workloads": {"machine", "config", "storage"},
    "training": {"machine", "config", "storage", "workloads"},
    "record": {"config", "storage"},
    "report": {"config", "storage", "training", "record"},
    "forecast": {"machine", "config", "storage", "workloads", "training", "record", "report"},
    "engine": {"machine", "config", "storage", "training", "record"},
    "tracking": {"config", "storage"},
    "sweep": {"machine", "config", "storage", "workloads", "record", "report", "forecast", "engine", "tracking"},
    "nightly": {"machine", "config", "storage", "record", "report", "tracking", "sweep"},
    "commands": {"machine", "config", "storage", "workloads", "training", "record", "report", "forecast", "engine",
        "tracking", "sweep", "nightly"},
}  # fmt: skip
# What lies beside the rooms: the Python API, Hydra's plugin, and the files by which `python -m` starts a command.
BESIDE = {
    "api": {"config", "report", "forecast", "sweep", "commands"},
    "hydra_plugins": {"config", "sweep"},
    "python -m": {"commands"},
}
OWNERS = {
    "ray": {"engine", "sweep"},
    "mlflow": {"tracking"},
    "hydra": {"config", "sweep", "commands", "hydra_plugins"},
    "fsspec": {"storage"},
    "omegaconf": {"config", "sweep", "commands", "hydra_plugins"},
    "torch": {"workloads", "training", "forecast", "commands"},
    "torchvision": {"workloads"},
    "transformers": {"workloads"},
    "huggingface_hub": {"workloads"},
    "safetensors": {"workloads"},
}
FILES = [*sorted((ROOT / "fsdp_lab").rglob("*.py")), *sorted((ROOT / "hydra_plugins").rglob("*.py"))]


def room_of(file: Path) -> str:
    """Return the room of a file, or what it is beside the rooms."""
    parts = file.relative_to(ROOT).with_suffix("").parts
    if parts[0] == "hydra_plugins":
        return parts[0]
    if parts in (("fsdp_lab", "predict"), ("fsdp_lab", "doctor")) or (
        parts[-1] == "__main__" and "training" not in parts
    ):
        return "python -m"
    return parts[1]


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
    may_import = (MAY_IMPORT | BESIDE).get(package)
    if may_import is None:
        return [f"{package} is a new room: say in this test what it may import"]
    broken = []
    for name in imports(source):
        top, *rest = name.split(".")
        if package not in OWNERS.get(top, {package}):
            broken.append(f"{package} imports {top}, which belongs to {', '.join(sorted(OWNERS[top]))}")
        if top == "fsdp_lab" and rest and rest[0] not in {package, *may_import}:
            broken.append(f"{package} imports {name}, and may see {', '.join(sorted(may_import)) or 'no package'}")
    return broken


def test_files_import_only_what_their_package_may_see():
    found = {file.relative_to(ROOT): broken_rules(room_of(file), file.read_text()) for file in FILES}
    assert {str(file): broken for file, broken in found.items() if broken} == {}


def test_no_import_goes_back_up():
    rooms = list(MAY_IMPORT)
    assert len(rooms) == 13
    assert [room for n, room in enumerate(rooms) if not MAY_IMPORT[room] <= set(rooms[:n])] == []


def test_the_table_of_rooms_is_right():
    page = (ROOT / "CONTRIBUTING.md").read_text()
    rows = re.findall(r"^\| `(\w+)/` \| [^|]+ \| ([^|]+) \|$", page.partition("## The rooms")[2], re.MULTILINE)
    shown = {room: set() if may.startswith("nothing") else set(re.findall(r"`(\w+)`", may)) for room, may in rows}
    assert list(shown.items()) == list(MAY_IMPORT.items())


def test_a_room_says_what_it_owns_what_it_imports_and_where_to_start():
    for room in MAY_IMPORT:
        text = inspect.getdoc(importlib.import_module(f"fsdp_lab.{room}")) or ""
        assert "Start with `" in text and "mport" in text and len(text.splitlines()) <= 6, room


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
