"""Bad input ends at once, with one message and without Ray; `--help` tells what there is."""

from __future__ import annotations

import os
import re
import resource
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from fsdp_lab.__main__ import options_first
from fsdp_lab.config import conf_dir
from fsdp_lab.config.conf import group_dirs
from tests.conftest import command_line, run_cli

NO_AXES = ["sharding=per_block", "precision=fp32", "offload=none", "reshard_after_forward=default"]
SHARDINGS = ["ddp", "per_block", "per_layer", "root", "size_based"]
SHARES = "cluster.num_workers=2"  # the same rules on a machine with GPUs

# What is typed -> what the message must say: key and value, the rule, the remedy.
BAD = {
    "unknown option": (["sharding=foo"], ["sharding=foo is not an option", *SHARDINGS]),
    "unknown group": (["shardin=root"], ["shardin is not a key", "groups are", "sharding", "precision"]),
    "unknown key": (["optimizer.rate=0.1"], ["optimizer.rate is not a key", "optimizer.lr", "optimizer.momentum"]),
    "key by another name": (["optimizer.learning_rate=1"], ["optimizer.learning_rate is not", "mean optimizer.lr?"]),
    "key of another group": (["training.lr=1"], ["training.lr is not a key", "mean optimizer.lr?"]),
    "number for an objective": (["objective=3"], ["objective=3", "takes a"]),
    "unknown objective": (["objective=val_loss:min"], ["objective=val_loss:min is not", "mean val/loss?"]),
    "unknown key of none": (["bogus.key=1"], ["bogus.key is not a key", "optimizer", "training"]),
    "key that + adds": (["+nonsense=1"], ["nonsense is not a key", "nothing would read it", "keys begin with"]),
    "key of a group that + adds": (["+training.epoch=5"], ["training.epoch is not", "mean training.epochs?"]),
    "class of a group that + adds": (["+offload._target_=my.Net"], ["offload._target_ is not a key", "offload.target"]),
    "number for a group": (["precision=16"], ["precision=16", "is a group", "bf16, bf16_mixed, float8, fp16"]),
    "nothing for a group": (["offload=null"], ["offload=null", "is a group", "cpu, cpu_unpinned, none"]),
    "list for a group": (
        ["data=[1,2]"],
        ["data=[1,2]", "is a group", "digits", "fashion_mnist, pydoc, pydoc_summaries, synthetic"],
    ),
    "dictionary for a group": (["sharding={a:1}"], ["sharding={a:1}", "is a group", *SHARDINGS]),
    "too large": (["model.hidden_dim=9223372036854775808"], ["model.hidden_dim=9223372036854775808", "too large"]),
    "text for a number": (["optimizer.lr=abc"], ["optimizer.lr=abc", "Float", "use a number such as 0.001"]),
    "text for a size": (["forecast.capacity_gib=lots"], ["capacity_gib=lots", "Float", "use a number such as 24."]),
    "text for a whole number": (["training.epochs=two"], ["training.epochs=two", "Integer", "use a whole number"]),
    "fastest on another device": (
        ["forecast.keep=5", "forecast.device=mi300x"],
        ["forecast.keep=5 with forecast.device=mi300x", "these trials run on", "leave forecast.keep out"],
    ),
    "text for a truth value": (["compile=maybe"], ["compile=maybe", "bool", "use true or false"]),
    "unknown value of a key": (["init=foo"], ["init=foo", "expected one of [rank0, meta]"]),
    "no epochs": (["training.epochs=0"], ["training.epochs=0 is below 1", "1 or more"]),
    "negative rate": (["optimizer.lr=-1"], ["optimizer.lr=-1", "not above 0", "use a positive number"]),
    "batch": (["training.global_batch_size=63", SHARES], ["global_batch_size=63", "num_workers=2", "62 or 64"]),
    "dp_replicate": (["sharding.dp_replicate=3", SHARES], ["dp_replicate=3 does not divide", "use one of 1, 2"]),
    "to_size": (
        ["reshard_after_forward=to_size", "reshard_after_forward.size=3", SHARES],
        ["reshard_after_forward.size=3 does not divide", "degree 2", "use one of 1, 2"],
    ),
    "to_size without size": (
        ["reshard_after_forward=to_size", SHARES],
        ["reshard_after_forward.size=null", "to_size needs", "one of 1, 2"],
    ),
    "size_based without threshold": (
        ["sharding=size_based"],
        ["sharding.min_num_params=null", "needs", "sharding.min_num_params=20000"],
    ),
    "ddp with offload": (["sharding=ddp", "offload=cpu"], ["sharding=ddp with offload=cpu", "use offload=none"]),
    "no such preset": (
        ["experiment=nope"],
        ["experiment=nope", "fsdp_rules, nightly, precision_and_offload, ray_template"],
    ),
    "mistyped sweep": (["training.seed=choice(1,2"], ["training.seed=choice(1,2", "close every bracket"]),
    "mistyped range": (["training.seed=range(1,2,3,4)"], ["training.seed=range(1,2,3,4)", "too many"]),
    "no equals sign": (["training.epochs"], ["training.epochs", "missing EQUAL"]),
    "more workers than cores": (["cluster.num_workers=5000"], ["num_workers=5000", "5000 CPUs", "this machine has"]),
    "no images": (
        ["data=fashion_mnist", "data.download=false", "data.root=nowhere"],
        ["data.root=nowhere", "nowhere/FashionMNIST/raw", "data=digits"],
    ),
}
ONLY_ALONE = {
    "several values without -m": (["optimizer.lr=1e-3,1e-2"], ["optimizer.lr=1e-3,1e-2", "add -m"]),
    "choice without -m": (["optimizer.lr=choice(1,2)"], ["optimizer.lr=choice(1,2)", "add -m"]),
    "unwritable folder": (["hydra.run.dir=/proc/nope/x"], ["/proc/nope", "set hydra.run.dir"]),
}
ONLY_SWEPT = {
    "interval": (["optimizer.lr=interval(0,1)"], ["optimizer.lr=interval(0,1)", "use a list or range"]),
    "axis that + adds": (["+training.epoch=1,5"], ["training.epoch is not a key", "mean training.epochs?"]),
    "numbers for a group": (["precision=16,32"], ["precision=16,32", "is a group", "bf16, bf16_mixed, float8, fp16"]),
    "number of a run as a count": (
        ["repeat=3"],
        ["repeat=3 names one run", "three runs of each setting use repeat=0,1,2, and use repeat=auto"],
    ),
    "one bad value of several": (["training.epochs=1,0"], ["training.epochs=0 is below 1"]),
    "unwritable folder": (["hydra.sweep.dir=/proc/nope/x"], ["hydra.sweep.dir=/proc/nope/x", "cannot be written"]),
}


def assert_reported_at_once(cli, arguments: list[str], words: list[str]):
    """One message, no traceback, and nothing slow imported: that, unlike seconds, holds on a busy machine."""
    done = cli(*arguments, list_imports=True, timeout=100)
    *message, imported = done.stderr.splitlines()
    assert imported == "imported:"
    assert done.returncode in (1, 2)
    assert "Traceback" not in done.stderr and done.stdout == ""
    assert len(message) == 1 and message[0].startswith("fsdp_lab: ")
    assert [word for word in words if word not in message[0]] == []


@pytest.mark.parametrize(("arguments", "words"), [*BAD.values(), *ONLY_ALONE.values()], ids=[*BAD, *ONLY_ALONE])
def test_bad_input_of_a_trial_is_reported_at_once(cli, arguments: list[str], words: list[str]):
    assert_reported_at_once(cli, arguments, words)


def test_a_process_of_its_own_reports_it_at_once_too(tmp_path):
    """With what Python and Hydra take to start."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(command_line("sharding=foo"), cwd=tmp_path, capture_output=True, text=True, timeout=100)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 2 and done.stderr.startswith("fsdp_lab: sharding=foo is not an option")
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 4  # 1 s where nothing else runs


@pytest.mark.parametrize(("arguments", "words"), [*BAD.values(), *ONLY_SWEPT.values()], ids=[*BAD, *ONLY_SWEPT])
def test_bad_input_of_a_sweep_is_reported_at_once(cli, tmp_path, arguments: list[str], words: list[str]):
    """With -m the default axes are swept around it; where the folder is bad, few, for the sake of time."""
    few = NO_AXES if arguments[0].startswith("hydra.") else []
    assert_reported_at_once(cli, [*arguments, *few, "-m"], words)
    assert not (tmp_path / "outputs").exists(), "a folder is made for nothing"


@pytest.mark.parametrize("place", range(3))
@pytest.mark.parametrize("flag", ["-m", "--multirun"])
def test_the_flag_may_stand_anywhere(cli, place: int, flag: str):
    """An interval is refused by the sweeper alone: who reads that message was in a sweep."""
    arguments = ["optimizer.lr=interval(0,1)", "training.epochs=1"]
    arguments.insert(place, flag)
    assert "a grid cannot enumerate an interval" in cli(*arguments).stderr


@pytest.mark.parametrize("show", [["--cfg", "job"], ["--cfg=job"], ["-c", "job"]])
def test_a_sweeps_config_is_shown_as_a_trials(cli, show: list[str]):
    trial = cli("experiment=zero2_zero3", "objective=val/loss:min", *show)
    sweep = cli(*show, "-m", "experiment=zero2_zero3", "objective=val/loss:min")
    assert (sweep.returncode, sweep.stderr) == (0, "")
    axes = "# -m sweeps: sharding=ddp,per_block reshard_after_forward=always,never\n"
    assert sweep.stdout == axes + trial.stdout
    assert yaml.safe_load(sweep.stdout)["objective"] == "val/loss:min"


def test_one_objective_may_be_a_word(cli):
    """Its check is behind what types it: the direction is missing, not the list."""
    assert "objective=val/loss has no direction" in cli("objective=val/loss").stderr


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


@pytest.mark.parametrize("flag", [[], ["-m"]], ids=["trial", "sweep"])
def test_an_mlflow_server_that_is_not_there_is_reported_before_anything_starts(cli, tmp_path, flag: list[str]):
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        uri = f"http://127.0.0.1:{closed.getsockname()[1]}"
        done = cli(f"tracking.uri={uri}", *NO_AXES, *flag, timeout=60)
    assert done.returncode in (1, 2)
    assert f"tracking.uri={uri}" in done.stderr
    assert "no MLflow server answers there" in done.stderr
    assert "mlflow server" in done.stderr and "sqlite:///outputs/mlflow.db" in done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    assert "Ray starts" not in done.stdout


def test_an_mlflow_store_that_cannot_be_written_is_reported(cli):
    done = cli("tracking.uri=sqlite:////proc/nope/mlflow.db", timeout=60)
    assert done.returncode in (1, 2)
    assert "tracking.uri=sqlite:////proc/nope/mlflow.db" in done.stderr
    assert "Traceback" not in done.stdout + done.stderr


def test_a_shell_completes_groups_and_options(cli, monkeypatch: pytest.MonkeyPatch):
    """Hydra's completion, which `eval "$(fsdp-lab -sc install=bash)"` turns on: a bash asks so at each Tab."""
    monkeypatch.setenv("COMP_LINE", "fsdp-lab sharding=per_")
    monkeypatch.setenv("COMP_POINT", "22")
    assert cli("-sc", "query=bash").stdout.split() == ["sharding=per_block", "sharding=per_layer"]
    assert "complete -o nospace" in cli("-sc", "install=bash").stdout


@pytest.mark.parametrize(
    ("shell", "words", "expected"),
    [
        ("fish", "fsdp-lab -sc install=fish | source; complete -C 'fsdp-lab sharding='", "sharding=per_block"),
        (
            "zsh",
            "autoload -U compinit bashcompinit && compinit -u && bashcompinit && "
            'eval "$(fsdp-lab -sc install=bash)" && print ${_comps[fsdp-lab]}',
            "hydra_bash_completion",
        ),
    ],
)
def test_other_shells_complete_as_the_quickstart_says(shell: str, words: str, expected: str):
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        [shell, "-c", words], env={**os.environ, "PATH": path}, capture_output=True, text=True, timeout=60, check=False
    )
    assert expected in done.stdout, done.stdout + done.stderr
