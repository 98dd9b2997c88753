"""Private names of PyTorch, Ray, Hydra, transformers and Python stay in the one file that each of them has."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tests.conftest import ROOT

FILES = [*sorted((ROOT / "fsdp_lab").rglob("*.py")), *sorted((ROOT / "hydra_plugins").rglob("*.py"))]
OWNERS = {
    "fsdp_lab/training/torch_private.py", "fsdp_lab/forecast/torch_private.py", "fsdp_lab/engine/shortcut.py",
    "fsdp_lab/workloads/hf/hf_private.py",
}  # fmt: skip
# Without a leading underscore, and as private.
PRIVATE_MODULES = {"ray.train.v2", "torch.testing"}
# Public in spite of their names: the libraries' manuals have them.
PUBLIC = {"os._exit", "sys._current_frames", "_fields", "_asdict", "_replace"}
# Python has no public name for it: what is registered for the end runs, and the interpreter is not taken down.
PUBLIC |= {"atexit._run_exitfuncs"}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name != "_" and name not in PUBLIC


def private_names(source: str) -> Iterator[str]:
    """Yield what a file uses of others' private names: modules and names that it imports, attributes of anything but
    itself, attributes of itself that it does not define, and texts that `getattr`, `patch` and the like are given."""
    tree = ast.parse(source)
    own = set(defined(tree))
    for node in ast.walk(tree):
        match node:
            case ast.Import():
                yield from (alias.name for alias in node.names if is_private_module(alias.name))
            case ast.ImportFrom(module=str() as module) if module != "__future__":
                for alias in node.names:
                    if is_private_module(f"{module}.{alias.name}"):
                        yield f"{module}.{alias.name}"
            case ast.Attribute(value=ast.Name(id="self" | "cls"), attr=attr):
                if is_private(attr) and attr not in own:
                    yield f"self.{attr}"
            case ast.Attribute(value=value, attr=attr):
                shown = f"{ast.unparse(value)}.{attr}"
                if is_private(attr) and shown not in PUBLIC:
                    yield shown
            case ast.Call(func=func, args=args) if ast.unparse(func).endswith(("attr", "patch", "patch.object")):
                yield from (
                    arg.value
                    for arg in args
                    if isinstance(arg, ast.Constant) and isinstance(arg.value, str) and is_private(arg.value)
                )


def is_private_module(name: str) -> bool:
    return any(map(is_private, name.split("."))) or any(f"{name}.".startswith(f"{m}.") for m in PRIVATE_MODULES)


def defined(tree: ast.AST) -> Iterator[str]:
    """Yield the names of a file's functions and classes, and of what it assigns to, attributes too."""
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield name
            case ast.Attribute(attr=name, ctx=ast.Store()) | ast.Name(id=name, ctx=ast.Store()):
                yield name


def test_no_file_uses_a_private_name_of_a_library():
    names = {str(file.relative_to(ROOT)): file for file in FILES}
    used = {name: list(private_names(names[name].read_text())) for name in names.keys() - OWNERS}
    assert {name: private for name, private in used.items() if private} == {}, f"use public names, or one of {OWNERS}"
