"""The command line as people use it: a process of its own, in a folder of its own."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FASHION_MNIST = ROOT.parent / "shared" / "data"

# Calls `main` and says afterwards which of the slow libraries came to be imported.
_MAIN_THAT_TELLS = """
import sys
from fsdp_lab.__main__ import main
try:
    main()
finally:
    print("imported:", *[m for m in ("ray", "torch", "mlflow") if m in sys.modules], file=sys.stderr)
"""


def command_line(*arguments: str, tell_imports: bool = False) -> list[str]:
    start = ["-c", _MAIN_THAT_TELLS] if tell_imports else ["-m", "fsdp_lab"]
    return [sys.executable, *start, *arguments]


def run_cli(
    cwd: Path, *arguments: str, tell_imports: bool = False, timeout: float = 200
) -> subprocess.CompletedProcess[str]:
    """`python -m fsdp_lab <arguments>` in `cwd`, to its end."""
    command = command_line(*arguments, tell_imports=tell_imports)
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=timeout, check=False)


@pytest.fixture
def cli(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """`cli(*arguments)` in the test's own folder."""
    return lambda *arguments, **options: run_cli(tmp_path, *arguments, **options)
