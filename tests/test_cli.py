"""What the command line prints instead of training, and what it checks before Ray starts."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from fsdp_lab.commands.main import options_first
from fsdp_lab.config import conf_dir
from fsdp_lab.config.conf import group_dirs
from tests.conftest import INLINE, run_cli

NO_AXES = ["sharding=per_block", "precision=fp32", "offload=none", "reshard_after_forward=default"]


def test_a_process_of_its_own_refuses_a_typo_before_it_imports_anything_slow(tmp_path: Path):
    """Python and Hydra start, too; tests/test_refusals.py has every refusal."""
    command = [sys.executable, "-X", "importtime", "-m", "fsdp_lab", "sharding=foo"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False)
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines() if line.startswith("import time:")}
    assert done.returncode == 2 and "fsdp_lab: sharding=foo is not an option" in done.stderr
    assert "hydra" in imported and not imported & {"ray", "torch", "mlflow"}


def test_a_sweeps_config_is_shown_as_a_trials(cli):
    trial = cli("experiment=zero2_zero3", "objective=val/loss:min", "--cfg", "job")
    for show in (["--cfg", "job"], ["-c", "job"]):
        sweep = cli(*show, "-m", "experiment=zero2_zero3", "objective=val/loss:min")
        assert (sweep.returncode, sweep.stderr, sweep.stdout) == (0, "", trial.stdout)
    assert yaml.safe_load(trial.stdout)["objective"] == "val/loss:min"


@pytest.mark.parametrize("typed", ["--package p a=1 b=2 -m", "a=1 --package p -m b=2", "a=1 -m b=2 --package p"])
def test_options_may_stand_between_overrides(typed: str):
    assert options_first(typed.split(), "c") == ["-m", "--config-dir=c", "--package", "p", "a=1", "b=2"]


def test_what_a_word_implies_may_stand_with_an_option(cli):
    done = cli("--cfg", "job", "task=language")
    assert done.returncode == 0, done.stderr
    shown = yaml.safe_load(done.stdout)
    assert shown["task"]["name"] == "language" and "vocab_size" in shown["model"]


@pytest.fixture(scope="module")
def help_text(tmp_path_factory) -> str:
    done = run_cli(tmp_path_factory.mktemp("help"), "--help", list_imports=True)
    assert done.returncode == 0
    assert done.stderr == "imported:\n"
    return done.stdout


def test_help_is_the_same_whatever_else_is_typed(help_text: str, tmp_path: Path):
    done = run_cli(tmp_path, "-m", "sharding=root,per_block", "--help")
    assert done.returncode == 0 and done.stdout == help_text, done.stderr


def test_help_lists_the_groups_that_conf_has_with_their_options(help_text: str):
    listed = dict(re.findall(r"^(\w+): (.+)$", help_text.partition("Groups and their options")[2], re.MULTILINE))
    folders = {d.name: d for d in group_dirs()}
    assert "device" in listed and "data sheets for forecast.device=<name>" in help_text
    assert listed.keys() - {"device"} == folders.keys()
    for group, folder in folders.items():
        assert listed[group].split(", ") == sorted(file.stem for file in folder.glob("*.yaml"))


def test_help_lists_the_default_axes(help_text: str):
    axes = yaml.safe_load((conf_dir() / "config.yaml").read_text())["hydra"]["sweeper"]["params"]
    assert axes
    for key, values in axes.items():
        assert f"  {key}={values}\n" in help_text


@pytest.mark.parametrize("flag", [[], pytest.param(["-m"], marks=pytest.mark.ci)], ids=["trial", "sweep"])
def test_an_mlflow_server_that_is_not_there_is_reported_before_anything_starts(cli, tmp_path, flag: list[str]):
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        uri = f"http://127.0.0.1:{closed.getsockname()[1]}"
        done = cli(f"tracking.uri={uri}", *NO_AXES, *flag, timeout=60)
    assert done.returncode == 2
    assert f"tracking.uri={uri}" in done.stderr and "sqlite:///outputs/mlflow.db" in done.stderr
    assert "Traceback" not in done.stdout + done.stderr and "Ray starts" not in done.stdout


def test_a_launchers_variables_are_left_and_a_second_start_is_refused(cli, monkeypatch: pytest.MonkeyPatch):
    """As in a pod of a PyTorchJob, in which PyTorch would wait half an hour for another rank."""
    for name, value in {"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    done = cli(*INLINE, "training.max_steps=1", timeout=100)
    assert done.returncode == 0, done.stderr
    monkeypatch.setenv("RANK", "1")
    refused = cli(*INLINE, timeout=60)
    assert refused.returncode == 2 and "RANK=1, WORLD_SIZE=2: a launcher has started this command" in refused.stderr


_AS_COMMAND = """
import atexit, gc, runpy, sys
atexit.register(lambda: print(gc.isenabled(), file=sys.stderr))
runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)
"""


def test_a_command_imports_without_the_garbage_collector_and_runs_with_it():
    command = [sys.executable, "-c", _AS_COMMAND, "fsdp_lab", "--keys"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0 and done.stderr.splitlines() == ["True"]


@pytest.mark.parametrize(
    ("words", "note"),
    [(["experiment=zero2_zero3"],
      "experiment=zero2_zero3 sweeps sharding, reshard_after_forward; without -m this is one trial"),
     (["repeat=3"], "repeat=3 names one run; for several of each setting use -m and repeats=..."),
     (["experiment=ray_template"], ""), ([], "")],
)  # fmt: skip
def test_one_trial_that_looks_like_several_is_noted(cli, words: list[str], note: str):
    lines = cli(*words, "dry_run=true").stdout.splitlines()
    assert lines[:-1] == ([note] if note else []) and lines[-1].startswith("1 trial: ")
