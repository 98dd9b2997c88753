"""A wheel has the YAML values and the plugin, and works from any folder."""

import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "uv", "build", "--wheel", "--out-dir", str(folder), str(ROOT)]
    subprocess.run(build, check=True, capture_output=True, timeout=240)
    (wheel,) = folder.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(folder / "site")
    return folder / "site"


def test_wheel_has_every_value_file(unpacked: Path):
    ours = {f.relative_to(ROOT / "conf") for f in (ROOT / "conf").rglob("*.yaml")}
    theirs = {f.relative_to(unpacked / "fsdp_lab/conf") for f in (unpacked / "fsdp_lab/conf").rglob("*.yaml")}
    assert theirs == ours
    assert (unpacked / "hydra_plugins/fsdp_lab_sweeper/sweeper.py").exists()


@pytest.mark.ci
def test_wheel_forecasts_and_writes_the_page_from_another_folder(unpacked: Path, tmp_path: Path):
    command = [sys.executable, "-m", "fsdp_lab.forecast", "model=mlp", "forecast.folder=here"]
    environment = {**os.environ, "PYTHONPATH": str(unpacked)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "blocks.0" in (tmp_path / "here/timeline_0.html").read_text()


@pytest.mark.ci
def test_wheel_finds_its_own_conf_and_sweeper_from_another_folder(unpacked: Path, tmp_path: Path):
    command = [sys.executable, "-m", "fsdp_lab", "--info", "searchpath"]
    environment = {**os.environ, "PYTHONPATH": str(unpacked)}
    out = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert f"file://{unpacked / 'fsdp_lab/conf'}" in out.stdout, out.stderr
    refused = subprocess.run(
        [sys.executable, "-m", "fsdp_lab", "optimizer.lr=interval(0,1)", "-m"],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert "a grid cannot enumerate an interval" in refused.stderr  # the words of our sweeper, not of Hydra's own


def test_constraints_hold_names_and_versions_only():
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        assert re.fullmatch(r"[A-Za-z0-9._-]+(\[[\w,]+\])?==[\w.+!-]+( ;.*)?", line), line


def test_readme_points_at_files_that_exist():
    for name in ("README.md", "CONTRIBUTING.md"):
        for target in re.findall(r"\]\(([^)#:]+)\)", (ROOT / name).read_text()):
            assert (ROOT / target).exists(), f"{name} points at {target}"
