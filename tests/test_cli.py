"""The command line: help, what is typed with options, what is checked before Ray starts; and whatever else is typed."""

from __future__ import annotations

import inspect
import os
import random
import re
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from fsdp_lab.commands import doctor, nightly, probe, report
from fsdp_lab.commands import forecast as forecast_command
from fsdp_lab.commands import main as trial_command
from fsdp_lab.commands.messages import explain
from fsdp_lab.commands.reference import keys_text
from fsdp_lab.config import all_keys, conf_dir
from fsdp_lab.config.options import group_dirs, groups
from fsdp_lab.sweep import start
from tests.conftest import INLINE, PLAIN, ROOT, run_cli, status_of


@pytest.mark.parametrize("words", ["sharding=foo", "--help", "--keys cluster", "--version", "doctor"])
def test_typos_and_questions_import_nothing_slow(words: str, tmp_path: Path):
    command = [sys.executable, "-X", "importtime", "-m", "fsdp_lab", *words.split()]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False)
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines() if line.startswith("import time:")}
    slow = {"torch"} if words == "doctor" else set()
    assert "fsdp_lab.commands.main" in imported and imported & {"ray", "torch", "mlflow"} == slow, done.stderr


def test_help_has_every_group_option_and_default_axis(tmp_path: Path):
    done = run_cli(tmp_path, "--help")
    assert run_cli(tmp_path, "-m", "sharding=root,per_block", "--help").stdout == done.stdout
    listed = dict(re.findall(r"^(\w+): (.+)$", done.stdout.partition("Groups and their options")[2], re.MULTILINE))
    options = {folder.name: sorted(file.stem for file in folder.glob("*.yaml")) for folder in group_dirs()}
    assert {group: names.split(", ") for group, names in listed.items() if group != "device"} == options
    axes = yaml.safe_load((conf_dir() / "config.yaml").read_text())["hydra"]["sweeper"]["params"]
    assert axes and all(f"  {key}={values}\n" in done.stdout for key, values in axes.items())


def test_a_missing_mlflow_server_is_reported_before_a_start(cli):
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        uri = f"http://127.0.0.1:{closed.getsockname()[1]}"
        done = cli(f"tracking.uri={uri}", *PLAIN, timeout=60)
    assert done.returncode == 2
    assert f"tracking.uri={uri}" in done.stderr and "sqlite:///outputs/mlflow.db" in done.stderr
    assert "Traceback" not in done.stdout + done.stderr and "Ray starts" not in done.stdout


def test_a_launchers_variables_are_left_a_second_start_refused(cli, monkeypatch: pytest.MonkeyPatch):
    """As in a pod of a PyTorchJob, in which PyTorch would wait half an hour for another rank."""
    for name, value in {"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    done = cli(*INLINE, "training.max_steps=1", timeout=100)
    assert done.returncode == 0, done.stderr
    monkeypatch.setenv("RANK", "1")
    refused = cli(*INLINE, timeout=60)
    assert refused.returncode == 2 and "RANK=1, WORLD_SIZE=2: a launcher has started this command" in refused.stderr


@pytest.mark.parametrize(
    ("words", "note"),
    [(["experiment=zero2_zero3"],
      "experiment=zero2_zero3 sweeps sharding, reshard_after_forward; without -m this is one trial"),
     (["repeat=3"], "repeat=3 names one run; for several of each setting use -m and repeats=..."), ([], "")],
)  # fmt: skip
def test_one_trial_that_looks_like_several_is_noted(cli, words: list[str], note: str):
    lines = cli(*words, "dry_run=true").stdout.splitlines()
    assert lines[:-1] == ([note] if note else []) and lines[-1].startswith("1 trial: ")


def test_an_override_that_another_one_replaces_is_noted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(forecast_command, "run", lambda plan, swept, as_code: 0)
    words = ["precision=fp32", "training.epochs=1", "+precision=bf16", "training.epochs=1"]
    for main, rest in (
        (trial_command.main, ["dry_run=true"]),
        (forecast_command.main, []),
        (nightly.main, ["--check"]),
    ):
        status_of(main, [*words, *rest], monkeypatch)
        assert capsys.readouterr().err == "note: precision=fp32 is replaced by precision=bf16\n"


@pytest.mark.parametrize("target", ["nowhere", "outputs"])  # which is a loop
def test_a_link_that_leads_nowhere_is_named_with_the_commands_key(
    target: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    Path("outputs").symlink_to(target)
    for main, words, key in (
        (trial_command.main, [], "hydra.run.dir"),
        (trial_command.main, ["-m"], "hydra.sweep.dir"),
        (forecast_command.main, [], "forecast.folder"),
        (nightly.main, ["--once"], "nightly.folder"),
    ):
        assert status_of(main, [*PLAIN, *words], monkeypatch) == 2
        error = capsys.readouterr().err
        assert f"{key}=" in error and "outputs is a link to what does not exist" in error and key in error[-50:]
    with pytest.raises(OSError):
        doctor._disk("", Path("outputs"))


_HELP = """
import sys
from contextlib import suppress
from fsdp_lab.commands import doctor, forecast, nightly, probe, report
from fsdp_lab.commands.reference import keys_text
for module in (doctor, forecast, nightly, probe, report):
    sys.argv = [module.__name__, "--help"]
    with suppress(SystemExit):
        module.main()
print(keys_text([], 120))
"""


def test_help_is_there_without_docstrings(tmp_path: Path):
    command = [sys.executable, "-OO", "-c", _HELP]
    done = subprocess.run(command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True,
                          text=True, timeout=100)  # fmt: skip
    texts = [inspect.getdoc(module) or "" for module in (doctor, forecast_command, nightly, probe, report)]
    assert done.stdout == "\n".join([*texts, keys_text([], 120), ""]), done.stderr


def test_letters_that_the_locale_lacks_are_named():
    message = explain(UnicodeEncodeError("utf-8", "/home/caf\udce9", 9, 10, "surrogates not allowed"))
    assert message and message.startswith("/home/caf\\udce9 has letters") and "LC_ALL=C.UTF-8" in message


# Whatever is typed. In this process, for the sake of time: the commands' own `main`, in which only the training and the
# forecasting that would follow are left out.

VALUES = (
    "", "null", "true", "off", "-1", "0", "1", "3", "1.5", "1e400", "-inf", "nan", "abc", "'a b'", "é", "[]", "[1,2]",
    "[a:min]", "{}", "{a:1}", "9223372036854775808", "-9223372036854775809", "4611686018427387904", "1,2", "a,b",
    "choice(1,x)", "range(1,4)", "range(0,1,0.3)", "interval(0,1)", "glob(*)", "tag(a,1)", "shuffle(1,2)", "int(2.5)",
    "${per_worker:8}", "${per_worker:x}", "${oc.env:NO_SUCH_NAME}", "${nothing.here}", "???", "..", "/proc/x",
    "http://user:word@127.0.0.1:1/x", "$(x)", "a=b", "a:b", "(", "]", "\\", "--x",
)  # fmt: skip
PARTS = 16  # of the commands: one runs in `make test`, three in `make ci`, and the others in `make test-all`


def commands() -> list[list[str]]:
    """Each key and group with a value drawn at random; some added or taken away, half of them swept in one cell."""
    rng = random.Random(20261121)
    made = []
    for key in [*all_keys(), *groups(), "nonsense", "model._target_", "hydra.run.dir"]:
        (value,) = rng.sample(VALUES, 1)
        sign = rng.choice(["", "", "", "+", "++", "~"])
        word = f"{sign}{key}={value}" if sign != "~" or rng.random() < 0.5 else f"~{key}"
        sweep = rng.random() < 0.5
        fixed = [w for w in PLAIN if w.partition("=")[0] != key] if sweep else []
        made.append([*fixed, word, *(["-m"] if sweep else [])])
    return made


@pytest.mark.parametrize(
    "part",
    [0, *(pytest.param(n, marks=pytest.mark.ci if n < 4 else pytest.mark.full) for n in range(1, PARTS))],
)
@pytest.mark.parametrize("main", [trial_command.main, forecast_command.main], ids=["fsdp_lab", "forecast"])
def test_whatever_is_typed_ends_with_a_message(
    main: Callable[[], int | None], part: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
):  # fmt: skip
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(start, "start_sweep", lambda plan: 0)
    monkeypatch.setattr(forecast_command, "run", lambda plan, swept, as_code: 0)
    typed = commands()[part::PARTS]
    result, observed = [], 0
    for words in typed:
        try:
            status = status_of(main, words, monkeypatch)
        except Exception as error:  # noqa: BLE001 - every one is a finding
            result.append(f"{' '.join(words)}: {type(error).__name__}: {error}")
            continue
        out, err = capsys.readouterr()
        if "Traceback" in out + err or status not in (0, 2) or (status == 2 and len(err.splitlines()) != 1):
            result.append(f"{' '.join(words)}: status {status}: {err[-300:]}")
        observed += status == 2
    assert not result, "\n".join(result)
    assert observed > len(typed) / 2, "most of these are mistakes"
