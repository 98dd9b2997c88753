"""Imported first by each command: if Python lacks a package, it prints one message instead of a traceback."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

# What the commands import first; where these are, so is the rest.
_NEEDED = ("torch", "hydra", "omegaconf", "ray", "mlflow", "rich")


def _remedy() -> str:
    root = Path(__file__).resolve().parent.parent
    python = root / ".venv" / "bin" / "python"
    if python.exists():
        return f"use {python} instead"
    if (root / "Makefile").exists():
        return f"run `make -C {root} sweep`, which installs them into .venv, and use {python} from then on"
    return f"install fsdp_lab with its dependencies: {sys.executable} -m pip install <the wheel>"


if missing := [name for name in _NEEDED if find_spec(name) is None]:
    print(f"fsdp_lab: {sys.executable} does not have {', '.join(missing)}; {_remedy()}.", file=sys.stderr)
    sys.exit(2)
