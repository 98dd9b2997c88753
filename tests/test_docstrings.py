"""What a class's docstring lists is what the class has; ruff's pydocstyle rules hold the rest."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest

from tests.conftest import ROOT

FILES = [*sorted((ROOT / "fsdp_lab").rglob("*.py")), *sorted((ROOT / "hydra_plugins").rglob("*.py"))]


def listed(node: ast.ClassDef, section: str) -> list[str] | None:
    """Return the names in a section of a class's docstring; None without it."""
    _, found, rest = (ast.get_docstring(node) or "").partition(f"\n{section}:\n")
    return re.findall(r"^    (\w+):", rest.partition("\n\n")[0], re.MULTILINE) if found else None


def declared(node: ast.ClassDef) -> set[str]:
    """Return the public fields of a class."""
    names = {
        each.target.id for each in node.body if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
    }
    return {name for name in names if not name.startswith("_")}


def assigned(node: ast.ClassDef) -> set[str]:
    """Return the attributes of `self` that the methods of a class name, and its properties."""
    own = {
        each.attr for each in ast.walk(node) if isinstance(each, ast.Attribute) and ast.unparse(each.value) == "self"
    }
    return own | {each.name for each in node.body if isinstance(each, ast.FunctionDef)}


def arguments(node: ast.ClassDef) -> list[str]:
    """Return the arguments of a class's constructor."""
    made = [each for each in node.body if isinstance(each, ast.FunctionDef) and each.name == "__init__"]
    return [a.arg for init in made for a in (*init.args.args[1:], *init.args.kwonlyargs)]


def problems(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.ClassDef):
            continue
        if (names := listed(node, "Attributes")) is not None:
            yield from (f"{node.name} has no {name}" for name in set(names) - declared(node) - assigned(node))
            yield from (f"{node.name}: {name} is not described" for name in declared(node) - set(names))
        if (names := listed(node, "Args")) is not None and arguments(node):
            yield from (f"{node.name} takes no {name}" for name in set(names) - set(arguments(node)))
            yield from (f"{node.name}: {name} is not described" for name in set(arguments(node)) - set(names))


def test_classes_describe_what_they_have():
    found = {str(file.relative_to(ROOT)): wrong for file in FILES if (wrong := list(problems(file.read_text())))}
    assert found == {}


@pytest.mark.parametrize(
    ("body", "wrong"),
    [
        ('"""A.\n\n    Attributes:\n        x: one.\n    """\n    x: int\n    _y: int', []),
        ('"""A.\n\n    Attributes:\n        x: one.\n    """\n    x: int\n    y: int', ["A: y is not described"]),
        ('"""A.\n\n    Attributes:\n        z: one.\n    """', ["A has no z"]),
        ('"""A.\n\n    Args:\n        x: one.\n    """\n    def __init__(self, x, y): ...', ["A: y is not described"]),
        ('"""A."""\n    x: int', []),
    ],
)
def test_a_list_that_differs_is_found(body: str, wrong: list[str]):
    assert list(problems(f"class A:\n    {body}\n")) == wrong
