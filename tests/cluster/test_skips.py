"""A test that lacks a program: skipped by its name on somebody's machine, failed in CI."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest_plugins = "pytester"

_LACKS_SLURM = """
import pytest
from tests.cluster.slurm import why_not

pytestmark = pytest.mark.cluster

@pytest.fixture
def lab():
    pytest.skip(why_not())

def test_with_slurm(lab):
    pass

@pytest.mark.skipif("True", reason="no ray[default]")
def test_with_jobs():
    pass
"""


@pytest.mark.parametrize("ci", [True, False])
def test_what_is_missing_is_named_and_fails_in_ci(
    ci: bool, pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CI", "true" if ci else "false")
    pytester.makeconftest("from tests.cluster.conftest import pytest_runtest_makereport")
    pytester.makepyfile(_LACKS_SLURM)
    done = pytester.runpytest_inprocess("-rs", "-p", "no:cacheprovider")
    done.assert_outcomes(**{"errors" if ci else "skipped": 2})
    assert done.ret == (pytest.ExitCode.TESTS_FAILED if ci else pytest.ExitCode.OK)
    printed = done.stdout.str()
    assert "Slurm needs sbatch" in printed and "make .venv/.cluster" in printed and "no ray[default]" in printed
