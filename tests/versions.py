"""Other versions run a sweep: the oldest of what `pyproject.toml` declares, and the pinned ones on each other Python.

`python -m tests.versions [oldest] [3.12] [3.13]`, in `make test-all`. Each is installed into an environment of its own,
which is removed afterwards. What the oldest versions bring is as new as they allow, as for who installs them today.
"""

from __future__ import annotations

import csv
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.conftest import PLAIN, ROOT, without

SWEEP = (
    "-m", "model=mlp", "data.num_train=128", "training.max_steps=8", "optimizer.lr=1e-3,1e-2", *PLAIN,
    "tracking.uri=sqlite:///mlflow.db", "hydra.sweep.dir=out",
)  # fmt: skip
PYTHONS = without(("3.11", "3.12", "3.13"), "{}.{}".format(*sys.version_info))
UV = (sys.executable, "-m", "uv")


def main() -> int:
    """Try the named ones, or all; 1 if one does not train, or if its Python is missing in CI."""
    failed = 0
    for name in sys.argv[1:] or ("oldest", *PYTHONS):
        if not (wanted := sys.executable if name == "oldest" else find_python(name)):
            print(f"{name}: not tried, there is no such Python here", flush=True)
            failed += os.environ.get("CI") == "true"
            continue
        begun = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            problem = attempt(name, wanted, Path(folder))
        print(f"{name}: {problem or 'trains'}, after {time.monotonic() - begun:.0f} s", flush=True)
        failed += bool(problem)
    return int(failed > 0)


def find_python(version: str) -> str:
    """Return a Python of this version that runs, also of pyenv, whose own commands may be switched off; or ""."""
    paths = [shutil.which(f"python{version}"), *Path.home().glob(f".pyenv/versions/{version}.*/bin/python")]
    for path in filter(None, paths):
        if subprocess.run([path, "--version"], capture_output=True, check=False).returncode == 0:
            return str(path)
    return ""


def attempt(name: str, wanted: str, folder: Path) -> str:
    """Install the project for a Python and run the sweep; return what is wrong, or ""."""
    python = str(folder / "other" / "bin" / "python")
    chosen = ["--resolution", "lowest-direct"] if name == "oldest" else ["--constraint", str(ROOT / "constraints.txt")]
    for command in (
        [*UV, "venv", "--quiet", "--python", wanted, str(folder / "other")],
        [*UV, "pip", "install", "--quiet", "--python", python, *chosen, "--editable", str(ROOT)],
        [python, "-m", "fsdp_lab", "--version"],
        [python, "-m", "fsdp_lab", *SWEEP],
    ):
        if status := subprocess.run(command, cwd=folder, check=False).returncode:
            return f"{' '.join(command)} ended with {status}"
    with (folder / "out" / "results.csv").open() as file:
        statuses = [row["status"] for row in csv.DictReader(file)]
    return "" if statuses == ["finished"] * 2 else f"trials are {statuses}"


if __name__ == "__main__":
    sys.exit(main())
