"""The oldest versions that `pyproject.toml` declares run a sweep: `python -m tests.oldest`, in `make test-all`.

They go into an environment of their own, which is removed afterwards. What they bring is as new as they allow, as it is
for who installs them today.
"""

from __future__ import annotations

import csv
import subprocess
import sys
import tempfile
import time
import tomllib
from pathlib import Path

from packaging.requirements import Requirement

from tests.conftest import ROOT

SWEEP = (
    "-m", "model=mlp", "data.num_train=128", "training.max_steps=8", "optimizer.lr=1e-3,1e-2", "sharding=per_block",
    "precision=fp32", "offload=none", "reshard_after_forward=always", "tracking.uri=sqlite:///mlflow.db",
    "hydra.sweep.dir=out",
)  # fmt: skip


def main() -> None:
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        python = install(Path(folder))
        print(f"installed in {time.monotonic() - begun:.0f} s: {', '.join(versions(python))}", flush=True)
        subprocess.run([python, "-m", "fsdp_lab", *SWEEP], cwd=folder, check=True)
        with (Path(folder) / "out" / "results.csv").open() as file:
            statuses = [row["status"] for row in csv.DictReader(file)]
    if statuses != ["finished"] * 2:
        sys.exit(f"the oldest versions do not train: {statuses}")
    print(f"the oldest versions train, {time.monotonic() - begun:.0f} s in all")


def install(folder: Path) -> str:
    """The interpreter of a new environment with the lowest versions of what `pyproject.toml` names."""
    uv, python = [sys.executable, "-m", "uv"], str(folder / "oldest" / "bin" / "python")
    subprocess.run([*uv, "venv", "--quiet", "--python", sys.executable, folder / "oldest"], check=True)
    lowest = ["pip", "install", "--quiet", "--python", python, "--resolution", "lowest-direct"]
    subprocess.run([*uv, *lowest, "--editable", ROOT], check=True)
    return python


def versions(python: str) -> list[str]:
    """`name version` of everything that `pyproject.toml` names."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = [Requirement(line).name for line in project["dependencies"]]
    ask = "import sys; from importlib.metadata import version; print(*map(version, sys.argv[1:]))"
    result = subprocess.run([python, "-c", ask, *names], capture_output=True, text=True, check=True).stdout.split()
    return [f"{name} {version}" for name, version in zip(names, result, strict=True)]


if __name__ == "__main__":
    main()
