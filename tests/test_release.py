"""What a release is made of: one version everywhere, archives with the license, the changelog's part of it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
import yaml

from fsdp_lab import __version__
from tests.conftest import ROOT

_PARTS = (
    ".ci", "fsdp_lab", "hydra_plugins", "conf", "pyproject.toml", "README.md", "LICENSE", "CITATION.cff",
    "CHANGELOG.md",
)  # fmt: skip


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    for name in _PARTS:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


def release(checkout: Path, tag: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHON": sys.executable}
    return subprocess.run(
        [checkout / ".ci" / "release", tag], env=environment, capture_output=True, text=True, timeout=240, check=False
    )


def change(file: Path, before: str, after: str) -> None:
    assert before in file.read_text()
    file.write_text(file.read_text().replace(before, after, 1))


def test_a_release_is_built_from_a_tag(checkout: Path):
    change(checkout / "CHANGELOG.md", "## Unreleased", f"## {__version__}")
    change(checkout / "CHANGELOG.md", f"## {__version__}", f"## Unreleased\n\n- Later.\n\n## {__version__}")
    done = release(checkout, f"v{__version__}")
    assert done.returncode == 0, done.stderr
    notes = (checkout / "dist" / "notes.md").read_text()
    assert "Later." not in notes and "One trial in plain PyTorch" in notes
    (wheel,), (archive,) = (checkout / "dist").glob("*.whl"), (checkout / "dist").glob("*.tar.gz")
    with zipfile.ZipFile(wheel) as files:
        assert any(name.endswith("LICENSE") for name in files.namelist())
        assert "fsdp_lab/conf/config.yaml" in files.namelist()
    with tarfile.open(archive) as files:
        assert any(name.endswith("/LICENSE") for name in files.getnames())


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ("pyproject.toml", 'set version = "9.9.9"'),
        ("fsdp_lab/__init__.py", 'set __version__ = "9.9.9"'),
        ("CITATION.cff", "set version: 9.9.9"),
        ("CHANGELOG.md", "rename Unreleased to ## 9.9.9"),
    ],
)
def test_a_version_that_differs_is_reported(checkout: Path, file: str, message: str):
    for name in ("pyproject.toml", "fsdp_lab/__init__.py", "CITATION.cff"):
        if name != file:
            change(checkout / name, __version__, "9.9.9")
    if file != "CHANGELOG.md":
        change(checkout / "CHANGELOG.md", "## Unreleased", "## 9.9.9")
    done = release(checkout, "v9.9.9")
    assert done.returncode == 1 and message in done.stderr and not (checkout / "dist").exists()


def test_the_workflow_runs_what_is_here():
    """Parsed, not run: there is no such service here."""
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "release.yml").read_text())
    steps = [step["run"] for step in workflow["jobs"]["release"]["steps"] if "run" in step]
    scripts = [word for step in steps for word in step.split() if word.startswith(".ci/")]
    assert scripts == [".ci/run", ".ci/release"] and all(os.access(ROOT / script, os.X_OK) for script in scripts)
    assert workflow["permissions"] == {"contents": "write"}
