"""Imports the callables that `_target_` and other dotted paths name, and checks their arguments.

Imports the user's modules, and no heavy library itself.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import pkgutil
import sys
import sysconfig
import traceback
from collections.abc import Collection, Iterator, Mapping
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

from fsdp_lab.config.errors import ConfigError
from fsdp_lab.config.serialize import typed
from fsdp_lab.config.suggest import did_you_mean

_PLAIN = {"int": int, "float": float, "bool": bool, "str": str}  # annotations that are checked
# The arguments that fsdp_lab adds to the user's.
NAMED = "named_parameters"  # parameter of an optimizer class that requires names, in place of `params`
_CALLED_WITH = {
    "split": 'split="train" and then split="val"',
    **{name: f"{name}=<a number>" for name in ("batch_size", "rank", "world_size", "seed", "size")},
    "params": "params=<parameters of the model>",
    "optimizer": "the optimizer",
    NAMED: f"{NAMED}=<pairs of a name and a parameter>",
}

# Module -> the optional dependencies that have it (pyproject.toml).
_EXTRAS = {"torchao": "float8", "transformers": "hf", "safetensors": "hf", "tokenizers": "text"}


def import_callable(path: str, key: str) -> Any:
    """Return the callable that a dotted path names.

    Args:
        path: such as `my_project.net.Net`.

    Raises:
        ConfigError: the module cannot be imported, lacks the name, or the object cannot be called.
    """
    function = import_object(path, key)
    if not callable(function):
        raise ConfigError(
            f"{key}={path} is a {type(function).__name__}, which cannot be called; name a class or a function."
        )
    return function


@cache
def import_object(path: str, key: str) -> Any:
    """Return the object that a dotted path names, of any type.

    Args:
        path: such as `my_project.net.Net`.

    Raises:
        ConfigError: the module cannot be imported or lacks the name.
    """
    parts = path.split(".")
    if len(parts) < 2 or not all(part.isidentifier() for part in parts):
        raise ConfigError(
            f"{key}={path} is not an import path; write package.module.name, for example my_project.net.Net."
        )
    target, names = _import_module(parts, f"{key}={path}")
    for i, name in enumerate(names):
        if not hasattr(target, name):
            where = ".".join(parts[: len(parts) - len(names) + i])
            raise ConfigError(f"{key}={path}: {where} has no {name}. {did_you_mean(name, _names_in(target))}".rstrip())
        target = getattr(target, name)
    return target


def _import_module(parts: list[str], typed: str) -> tuple[Any, list[str]]:
    for count in range(len(parts) - 1, 0, -1):
        name = ".".join(parts[:count])
        try:
            return importlib.import_module(name), parts[count:]
        except ModuleNotFoundError as error:
            if error.name is None or not f"{name}.".startswith(f"{error.name}."):
                raise ConfigError(
                    f"{typed} cannot be imported: {name} imports {error.name}, which is not installed."
                    f"{_how_to_install(str(error.name))}"
                ) from error
        except (Exception, SystemExit) as error:
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            raise ConfigError(f"{typed} cannot be imported: importing {name} fails with {reason}.") from error
    beside = [path.stem for path in Path.cwd().iterdir() if path.is_dir() or path.suffix == ".py"]
    raise ConfigError(
        f"{typed} cannot be imported: there is no module {parts[0]}. {did_you_mean(parts[0], beside)}Python looks for "
        f"modules in the current folder ({Path.cwd()}), in PYTHONPATH and in the installed packages."
        f"{_how_to_install(parts[0])}"
    )


def _how_to_install(module: str) -> str:
    extra = _EXTRAS.get(module.partition(".")[0])
    return f" To install it: pip install -e '.[{extra}]' in the clone." if extra else ""


def _names_in(holder: Any) -> list[str]:
    submodules = [module.name for module in pkgutil.iter_modules(getattr(holder, "__path__", []))]
    return [*submodules, *(name for name in dir(holder) if not name.startswith("_"))]


def check_arguments(
    function: Any, path: str, group: str, arguments: Mapping[str, Any], given: Collection[str] = (),
    key: str = "_target_",
) -> None:  # fmt: skip
    """Compare arguments with the signature of their callable.

    Args:
        function: the callable. One without a readable signature, such as some builtins, is not checked.
        group: the config group whose keys the arguments are.
        arguments: by name, as typed.
        given: the names of the arguments that fsdp_lab adds.
        key: of the group, which names the callable.

    Raises:
        ConfigError: the callable does not take an argument, or lacks a required one.
    """
    if (known := parameters(function)) is None:
        return
    named = {n: p for n, p in known.items() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    takes = [name for name in named if name not in given]
    if not any(p.kind is p.VAR_KEYWORD for p in known.values()):
        for name in given:
            if name not in named:
                raise ConfigError(
                    f"{group}.{key}={path} has no parameter {name}; fsdp_lab calls it with {_CALLED_WITH[name]}, so "
                    "add that parameter."
                )
        unknown = [name for name in arguments if name not in named]
        if len(unknown) > 1:
            raise ConfigError(
                f"{path} has no parameters {', '.join(unknown)}; if they come from the chosen option of {group}, add "
                f"{group}=custom, or `override /{group}: custom` to the defaults of a preset."
            )
        for name, value in arguments.items():
            if name not in named:
                valid = f"It takes: {', '.join(takes)}" if takes else "It takes no arguments"
                meant = did_you_mean(name, [*takes, "_target_"])
                raise ConfigError(f"{group}.{name}={value}: {path} has no parameter {name}. {meant}{valid}.")
    for name, value in arguments.items():
        annotation = named[name].annotation if name in named else ""  # text, if its file postpones annotations
        kind, _, other = (annotation.__name__ if isinstance(annotation, type) else str(annotation)).partition(" | ")
        if kind in _PLAIN and other in ("", "None") and not (value is None and (other or named[name].default is None)):
            if value is None:
                raise ConfigError(f"{group}.{name}=null: {path} needs it; set {group}.{name} to a value.")
            typed(_PLAIN[kind], value, f"{group}.{name}")
    for name in given:
        if name in arguments:
            raise ConfigError(
                f"{group}.{name}={arguments[name]}: fsdp_lab itself passes {name} to {path}; leave it out."
            )
    needed = [name for name in takes if named[name].default is inspect.Parameter.empty and name not in arguments]
    if needed:
        keys = ", ".join(f"{group}.{name}" for name in needed)
        have = "has no default" if len(needed) == 1 else "have no defaults"
        raise ConfigError(f"{group}.{key}={path} needs {keys}, which {have}; add {group}.{needed[0]}=<value>.")


def parameters(function: Any) -> Mapping[str, inspect.Parameter] | None:
    """Return the parameters of a callable by their names; None for some builtins, of which nothing is known."""
    try:
        return inspect.signature(function).parameters
    except (ValueError, TypeError):
        return None


def given_to(function: Any) -> str:
    """Return the name of the argument of an optimizer class for the parameters."""
    return NAMED if NAMED in (parameters(function) or {}) else "params"


def check_loss(path: str, key: str) -> None:
    """Check that a callable accepts a model and a batch, as a loss does.

    Raises:
        ConfigError: it cannot be imported, is a class, or takes other arguments.
    """
    if inspect.isclass(import_callable(path, key)):
        raise ConfigError(
            f"{key}={path} is a class; give a function that takes the model and a batch, and returns the loss: "
            f"def loss(model, batch): return {path.rpartition('.')[2]}()(model(batch['x']), batch['y'])."
        )
    check_signature(path, key, ("model", "batch"))


def check_signature(path: str, key: str, names: tuple[str, str]) -> None:
    """Check that a callable accepts two positional arguments.

    Raises:
        ConfigError: it cannot be imported, or requires other arguments.
    """
    try:
        signature = inspect.signature(import_callable(path, key))
    except (ValueError, TypeError):  # some builtins have no signature
        return
    try:
        signature.bind(*names)
    except TypeError as error:
        called = f"{path.rpartition('.')[2]}({', '.join(names)})"
        raise ConfigError(
            f"{key}={path} takes {signature}, but is called as {called}; give it these two parameters."
        ) from error


def user_line(error: BaseException) -> str:
    """Return the innermost line of the user's code in a traceback, such as `my_project/net.py:31`; "" if none."""
    location = ""
    for frame, line in traceback.walk_tb(error.__traceback__):
        file = Path(frame.f_code.co_filename)
        if file.is_file() and not is_installed(file.resolve()):
            location = f"{file.relative_to(Path.cwd()) if file.is_relative_to(Path.cwd()) else file}:{line}"
    return location


def in_words(error: BaseException) -> str:
    """Return an error of the user's code as one line, such as `KeyError: 'x' (my_project/net.py:31)`."""
    line = user_line(error)
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}" + (f" ({line})" if line else "")


def is_installed(file: Path) -> bool:
    """Return whether a file belongs to Python, to an installed package, or to fsdp_lab."""
    installed = [Path(sysconfig.get_path(kind)).resolve() for kind in ("stdlib", "platstdlib", "purelib", "platlib")]
    return any(file.is_relative_to(folder) for folder in (*installed, Path(__file__).resolve().parent.parent))


def nested(value: Any, key: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the dotted key and the dictionary of each object among arguments: each dictionary with a `_target_`."""
    if isinstance(value, dict):
        if "_target_" in value:
            yield key, value
        value = value.items()
    elif isinstance(value, list | tuple):
        value = enumerate(value)
    else:
        return
    for name, inner in value:
        yield from nested(inner, f"{key}.{name}")


def check_nested(arguments: Mapping[str, Any], group: str) -> None:
    """Check each `_target_` among arguments as that of a group.

    Raises:
        ConfigError: see `import_callable` and `check_arguments`.
    """
    for key, value in nested(dict(arguments), group):
        path = str(value["_target_"])
        given = {name: inner for name, inner in value.items() if name != "_target_"}
        for name in given:
            if str(name).startswith("_") and str(name).endswith("_"):
                raise ConfigError(f"{key}.{name}: of Hydra's special keys only _target_ is supported; name a function.")
        check_arguments(import_callable(path, f"{key}._target_"), path, key, given)


def instantiate(value: Any, key: str) -> Any:
    """Return a copy of arguments, with each dictionary that has a `_target_` replaced by its object."""
    if isinstance(value, list | tuple):
        return [instantiate(inner, f"{key}.{i}") for i, inner in enumerate(value)]
    if not isinstance(value, dict):
        return deepcopy(value)
    made = {name: instantiate(inner, f"{key}.{name}") for name, inner in value.items()}
    target = made.pop("_target_", None)
    return made if target is None else import_callable(target, f"{key}._target_")(**made)


def argument(function: Any, arguments: Mapping[str, Any], name: str) -> Any:
    """Return the value of a callable's argument, or else its default; None without either."""
    parameter = (parameters(function) or {}).get(name)
    default = None if parameter is None or parameter.default is inspect.Parameter.empty else parameter.default
    return arguments.get(name, default)


def user_root(path: str) -> Path | None:
    """Return the file or folder of the top-level module or package of a dotted path.

    None if it is fsdp_lab's, installed, or missing.
    """
    name = path.partition(".")[0]
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return None
    if spec is None or name == "fsdp_lab":
        return None
    if spec.submodule_search_locations:
        root = Path(next(iter(spec.submodule_search_locations))).resolve()
    elif spec.origin and spec.origin.endswith(".py"):
        root = Path(spec.origin).resolve()
    else:
        return None
    return None if is_installed(root) else root


def import_from(folder: str) -> None:
    """Add a folder to the import path, as `python -m` does with the working directory."""
    if folder not in sys.path:
        sys.path.insert(0, folder)
