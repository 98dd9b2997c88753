"""What a release is made of: one version, whole archives, the changelog's part; and how what is installed runs.

Archives are built and installed commands are started in `make ci`.
"""

from __future__ import annotations

import os
import select
import subprocess
import sys
import tarfile
import time
import zipfile
from pathlib import Path

import pytest

from fsdp_lab import __version__
from tests.conftest import ROOT
from tests.faults import copy_project


def release(checkout: Path, tag: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHON": sys.executable}
    return subprocess.run([checkout / ".ci" / "release", tag], env=environment, capture_output=True, text=True)


def change(file: Path, before: str, after: str) -> None:
    assert before in file.read_text()
    file.write_text(file.read_text().replace(before, after, 1))


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ("pyproject.toml", 'set version = "9.9.9"'),
        ("fsdp_lab/__init__.py", 'set __version__ = "9.9.9"'),
        ("CITATION.cff", "set version: 9.9.9"),
        ("CHANGELOG.md", "rename Unreleased to ## 9.9.9"),
    ],
)
def test_a_version_that_differs_is_reported(tmp_path: Path, file: str, message: str):
    checkout = copy_project(tmp_path)
    for name in ("pyproject.toml", "fsdp_lab/__init__.py", "CITATION.cff"):
        if name != file:
            change(checkout / name, __version__, "9.9.9")
    if file != "CHANGELOG.md":
        change(checkout / "CHANGELOG.md", f"## {__version__}", "## 9.9.9")
    done = release(checkout, "v9.9.9")
    assert done.returncode == 1 and message in done.stderr and not (checkout / "dist").exists()


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What is built from a tag."""
    checkout = copy_project(tmp_path_factory.mktemp("checkout"))
    change(checkout / "CHANGELOG.md", f"## {__version__}", f"## Unreleased\n\n- Later.\n\n## {__version__}")
    done = release(checkout, f"v{__version__}")
    assert done.returncode == 0, done.stderr
    return checkout / "dist"


@pytest.fixture(scope="module")
def unpacked(dist: Path) -> Path:
    """The wheel, as it is installed."""
    (wheel,) = dist.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(dist / "site")
    return dist / "site"


@pytest.mark.ci
def test_a_release_is_built_from_a_tag(dist: Path, unpacked: Path):
    notes = (dist / "notes.md").read_text()
    assert "Later." not in notes and "One trial in plain PyTorch" in notes
    (archive,) = dist.glob("*.tar.gz")
    with tarfile.open(archive) as files:
        assert any(name.endswith("/LICENSE") for name in files.getnames())
    assert list(unpacked.glob("*.dist-info/**/LICENSE"))
    options = {file.relative_to(ROOT / "conf") for file in (ROOT / "conf").rglob("*.yaml")}
    assert {file.relative_to(unpacked / "fsdp_lab/conf") for file in unpacked.rglob("conf/**/*.yaml")} == options


@pytest.mark.ci
def test_the_wheel_runs_from_another_folder(unpacked: Path, tmp_path: Path):
    """With its own options, its templates and its sweeper."""

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "PYTHONPATH": str(unpacked)}
        command = [sys.executable, "-m", *words]
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)

    done = run("fsdp_lab.forecast", "model=mlp", "forecast.folder=here")
    assert done.returncode == 0, done.stderr
    assert "blocks.0" in (tmp_path / "here/timeline_0.html").read_text()
    assert f"file://{unpacked / 'fsdp_lab/conf'}" in run("fsdp_lab", "--info", "searchpath").stdout
    refused = run("fsdp_lab", "optimizer.lr=interval(0,1)", "-m")
    assert "a grid cannot enumerate an interval" in refused.stderr  # the words of our sweeper, not of Hydra's own


@pytest.mark.ci
@pytest.mark.documents('eval "$(fsdp-lab -sc install=bash)"', "fsdp-lab sharding=<Tab>")
def test_bash_completes_the_installed_command(tmp_path: Path):
    """In a terminal, at the second Tab. `fsdp-lab` is what pip has installed."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {**os.environ, "PATH": path, "PS1": "ready> ", "TERM": "dumb"}
    ours, its = os.openpty()
    with subprocess.Popen(
        ["bash", "--norc", "--noprofile", "-i"], cwd=tmp_path, env=environment, stdin=its, stdout=its, stderr=its,
        start_new_session=True,
    ) as shell:  # fmt: skip
        try:
            read_until(ours, "ready> ")
            os.write(ours, b'eval "$(fsdp-lab -sc install=bash)"\n')
            read_until(ours, "\nready> ")
            os.write(ours, b"fsdp-lab sharding=per_\t\t")
            shown = read_until(ours, "\nready> fsdp-lab sharding=per_")
            assert {"sharding=per_block", "sharding=per_layer"} <= set(shown.split())
            os.write(ours, b"b\t --cfg job --package sharding\n")
            assert "granularity: per_block" in read_until(ours, "\nready> ")
        finally:
            shell.kill()


def read_until(terminal: int, end: str) -> str:
    """Return what a terminal shows from now on, up to these characters."""
    shown, limit = "", time.monotonic() + 60
    while end not in shown:
        assert select.select([terminal], [], [], max(0.0, limit - time.monotonic()))[0], f"no {end!r} in {shown!r}"
        shown += os.read(terminal, 10_000).decode()
    return shown
