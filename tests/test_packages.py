"""What imports what: rooms by the table of CONTRIBUTING.md, libraries by their owners, training with PyTorch alone."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
import tomllib
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from tests.conftest import LONGEST, ROOT
from tests.gpu import plain_yaml

# Room -> the rooms that it may import.
_ROW = re.compile(r"^\| `(\w+)/` \| .+ \| ([^|]+) \|$", re.MULTILINE)
MAY_IMPORT = {
    room: set() if may.startswith("nothing") else set(re.findall(r"`(\w+)`", may))
    for room, may in _ROW.findall((ROOT / "CONTRIBUTING.md").read_text())
}
# What lies beside the rooms: the Python API, Hydra's plugin, and the files by which `python -m` starts a command.
BESIDE = {
    "__init__": set[str](),
    "api": {"config", "training", "record", "report", "forecast", "sweep", "commands"},
    "hydra_plugins": {"config", "sweep"},
    "python -m": {"commands"},
}
_LINT = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["ruff"]["lint"]
_BANNED = _LINT["flake8-tidy-imports"]["banned-api"]
# Library -> its rooms: those of the messages of the linter, and PyTorch's.
OWNERS = {name: set(re.findall(r"(?<=fsdp_lab/)\w+|hydra_plugins", rule["msg"])) for name, rule in _BANNED.items()}
OWNERS |= {
    "torch": {"workloads", "memory", "training", "forecast", "probe", "commands", "api"},
    "torchvision": {"workloads"},
}
FILES = [*sorted((ROOT / "fsdp_lab").rglob("*.py")), *sorted((ROOT / "hydra_plugins").rglob("*.py"))]


def room_of(file: Path) -> str:
    """Return the room of a file, or what it is beside the rooms."""
    parts = file.relative_to(ROOT).with_suffix("").parts
    if parts[0] == "hydra_plugins":
        return parts[0]
    if parts[0] == "fsdp_lab" and parts[1:] in (("doctor",), ("explain",), ("plan",), ("read",)):
        return "python -m"
    if parts[-1] == "__main__" and "training" not in parts:
        return "python -m"
    return parts[1]


@cache
def imports(source: str) -> list[str]:
    """Every module that a file imports, inside functions too, as a dotted name."""
    found: list[str] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "write imports out: `from fsdp_lab.package import ...`"
            found += [f"{node.module}.{alias.name}" for alias in node.names]
    return found


def broken_rules(room: str, source: str) -> list[str]:
    may_import = (MAY_IMPORT | BESIDE)[room]
    broken = []
    for name in imports(source):
        top, *rest = name.split(".")
        if room not in OWNERS.get(top, {room}):
            broken.append(f"{room} imports {top}, which belongs to {', '.join(sorted(OWNERS[top]))}")
        if top == "fsdp_lab" and rest and rest[0] not in {room, *may_import}:
            broken.append(f"{room} imports {name}, and may see {', '.join(sorted(may_import)) or 'no room'}")
    return broken


def test_files_import_only_what_their_package_may_see():
    found = {file.relative_to(ROOT): broken_rules(room_of(file), file.read_text()) for file in FILES}
    assert {str(file): broken for file, broken in found.items() if broken} == {}


def test_each_room_may_import_only_rooms_above_it():
    rooms = list(MAY_IMPORT)
    assert set(rooms) == {file.parent.name for file in (ROOT / "fsdp_lab").glob("*/__init__.py")}
    assert [room for n, room in enumerate(rooms) if not MAY_IMPORT[room] <= set(rooms[:n])] == []


_DOCS = ("architecture", "extending", "durability", "decisions")
PAGES = ("CONTRIBUTING.md", "tests/README.md", *(f"docs/{name}.md" for name in _DOCS))
_FILE = re.compile(r"`([\w./-]+\.py|[\w.-]+/[\w./-]+\.(?:yml|json))`")


def test_pages_for_developers_name_files_that_exist():
    folders = {ROOT, ROOT / "fsdp_lab", ROOT / "tests", ROOT / "docs", *(file.parent for file in FILES)}
    named = {(page, name) for page in PAGES for name in _FILE.findall((ROOT / page).read_text())}
    assert [each for each in named if not any((folder / each[1]).is_file() for folder in folders)] == []


def module_of(file: Path) -> str:
    return ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def test_no_module_imports_one_that_imports_it():
    """Inside functions, too, and for types: but for an axis, whose rules are of the trial that has its keys."""
    sources = {module_of(file): file.read_text() for file in FILES}
    for module in sources:
        if module.startswith("fsdp_lab.config.axes"):
            sources[module] = re.sub(r"^if TYPE_CHECKING:\n(    .*\n)+", "", sources[module], flags=re.MULTILINE)
    imported: dict[str, set[str]] = {}
    for module, source in sources.items():
        # `from fsdp_lab.package import name`: the name is a module, or of the package's own file
        names = (next((n for n in (name, name.rpartition(".")[0]) if n in sources), module) for name in imports(source))
        imported[module] = set(names) - {module}
    TopologicalSorter(imported).prepare()  # raises CycleError: move what both need into a module of its own


def test_the_files_of_tests_that_begin_are_there():
    assert [name for name in LONGEST if not (ROOT / "tests" / name).is_file()] == []


# By the names that are imported: what torch and torchvision declare, ourselves, pytest, what setuptools has in it.
BROUGHT = (
    "torch", "torchgen", "functorch", "torchvision", "numpy", "PIL", "filelock", "typing_extensions", "sympy", "mpmath",
    "networkx", "jinja2", "markupsafe", "fsspec", "triton", "nvidia", "fsdp_lab",
    "pytest", "_pytest", "py", "pluggy", "iniconfig", "packaging", "pygments", "tests", "sitecustomize", "setuptools",
    "_distutils_hack", "jaraco", "more_itertools", "backports", "platformdirs", "wheel", "tomli",
)  # fmt: skip
# Hides all other modules, as if they were not installed: a stand-in for an environment that has only these.
_HOOK = f"""
import sys
from importlib.machinery import PathFinder

class OnlyWhatTorchBrings:
    find_distributions = PathFinder.find_distributions  # PyTorch finds its backends by their entry points

    @staticmethod
    def find_spec(name, path=None, target=None):
        top = name.partition(".")[0]
        known = top in sys.stdlib_module_names or top in {BROUGHT!r} or top.startswith("_sysconfigdata")
        return PathFinder.find_spec(name, path, target) if known else None

sys.meta_path[:] = [f for f in sys.meta_path if f.__module__.startswith(("_frozen_importlib", "zipimport"))]
sys.meta_path[sys.meta_path.index(PathFinder)] = OnlyWhatTorchBrings
ours = (*sys.stdlib_module_names, "__main__", "sitecustomize")
for name in [n for n in sys.modules if n.partition(".")[0] not in ours]:
    del sys.modules[name]  # what .pth files imported
"""


def _gpu_suite(folder: Path, *words: str) -> str:
    """Run the GPU suite on the CPU. The processes that it starts have the hook, too."""
    (folder / "sitecustomize.py").write_text(_HOOK)
    command = [sys.executable, "-m", "pytest", "-c", "tests/gpu/pytest.ini", "tests/gpu", "--device", "cpu", "-q"]
    environment = {**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{ROOT}", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(
        [*command, *words], cwd=ROOT, capture_output=True, text=True, timeout=900, check=False, env=environment
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    return done.stdout


@pytest.mark.ci
def test_the_gpu_suite_imports_pytorch_and_pytest_alone(tmp_path: Path) -> None:
    assert int(_gpu_suite(tmp_path, "--collect-only").partition(" tests collected")[0].split()[-1]) > 60


@pytest.mark.full
def test_the_gpu_suite_runs_with_pytorch_and_pytest_alone(tmp_path: Path) -> None:
    """On the CPU, where none of it may fail: it trains, forecasts and exports."""
    table = tmp_path / "table.json"
    _gpu_suite(tmp_path, "--results", str(table))
    rows = json.loads(table.read_text())["rows"]
    skipped = [row["check"] for row in rows if row["outcome"] == "skipped"]
    assert len(rows) > 60 and any("test_ray" in check for check in skipped), "ray can be imported"


def test_the_gpu_suite_has_the_options_of_conf() -> None:
    """`python -m tests.gpu.plain_yaml` writes them again."""
    assert json.loads(plain_yaml.FILE.read_text()) == plain_yaml.read_conf()


def test_no_test_module_imports_another():
    """What both need stands in a helper module."""
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    found = {file.name: [name for name in imports(file.read_text()) if ".test_" in name] for file in files}
    assert {file: names for file, names in found.items() if names} == {}


PRIVATE_IN = {"torch_private.py", "hf_private.py", "shortcut.py"}  # pyproject.toml has the same for SLF001 and PLC2701
# What the linter does not see: names in texts, and modules that are private in spite of their names. A user's model has
# a `_tp_plan`.
_USES = re.compile(
    r"""(?:attr|patch|patch\.object)\([^()]*["']((?!_fields|_tp_)_[a-z]\w*)["']"""
    r"|^\s*(?:import|from) ((?:ray\.train\.v2|torch\.testing)\b)",
    re.MULTILINE,
)


def test_no_file_uses_a_private_name_of_a_library():
    used = {file.name: _USES.findall(file.read_text()) for file in FILES if file.name not in PRIVATE_IN}
    assert {name: names for name, names in used.items() if names} == {}, f"use public names, or one of {PRIVATE_IN}"
