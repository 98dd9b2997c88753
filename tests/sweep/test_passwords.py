"""Passwords in an address: in no file and on no screen; from the environment, for a resume too."""

from __future__ import annotations

import dataclasses
import json
import re
import stat
from pathlib import Path

import pytest
import yaml

from fsdp_lab.config import ConfigError, SweepConfig, to_dict
from fsdp_lab.config.key_value_args import check_passwords
from fsdp_lab.config.sweep import TrackingConfig
from fsdp_lab.record.hydra_folder import write_hydra_folder
from fsdp_lab.record.sweep_json import SweepStart, begin_folder
from fsdp_lab.record.trials_jsonl import add_trial
from fsdp_lab.redact import redacted_file
from fsdp_lab.report.__main__ import store_of
from fsdp_lab.sweep.listeners.console import Console
from fsdp_lab.sweep.state import SweepState
from fsdp_lab.sweep.store.changes import changes_of_config
from fsdp_lab.tracking.tags import fact_tags, one_line, sweep_tags, trial_params, trial_tags
from tests import forked
from tests.conftest import run_cli
from tests.servers import mlflow_server
from tests.sweep.conftest import PLAIN, TINY

PASSWORD = "hunter2"
TYPED = f"http://me:{PASSWORD}@host:5000"
NAMES = ("access_token", "client_secret", "auth", "passphrase", "X-Amz-Signature", "unheard_of")
ADDRESSES = [
    TYPED,
    TYPED.replace(":", "\\:"),
    *(f"http://host:5000/?{name}={PASSWORD}&page=2" for name in NAMES),
    rf"http\://host\:5000/?token\={PASSWORD}",
    f"mssql+pyodbc:///?odbc_connect=DRIVER%3DX%3BPWD%3D{PASSWORD}%3B",
    f"mssql+pyodbc:///?odbc_connect=DRIVER={{ODBC 18}};PWD={PASSWORD};Encrypt=yes",
]  # fmt: skip


def holding(folder: Path) -> list[str]:
    """The files that hold the password."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return sorted(str(path.relative_to(folder)) for path in files if PASSWORD.encode() in path.read_bytes())


FROM_A_FILE = (TYPED, f"${{oc.env:NO_SUCH,'{TYPED}'}}")  # of the user's own, for --config-dir


@pytest.mark.parametrize("uri", ["${oc.env:MLFLOW_URL}", "http://me:${oc.env:MLFLOW_PASSWORD}@host:5000", *FROM_A_FILE])
def test_a_trials_files_hold_no_password(uri: str, compose_trial, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MLFLOW_URL", TYPED)
    monkeypatch.setenv("MLFLOW_PASSWORD", PASSWORD)
    monkeypatch.chdir(tmp_path)
    word = f"tracking.uri='{uri}'" if "'" not in uri else f"tracking.uri={uri}"
    trial = compose_trial([word], 0)
    assert trial.config.tracking.uri == TYPED
    words = [] if uri in FROM_A_FILE else [word]
    object.__setattr__(trial, "overrides", words)
    begin_folder(tmp_path / "out", [trial])
    write_hydra_folder(trial)
    add_trial(tmp_path, trial)
    record = SweepStart.of(words, True, trial.config)
    record.write(tmp_path)
    assert holding(tmp_path) == []
    assert stat.S_IMODE((tmp_path / "sweep.json").stat().st_mode) == 0o600
    assert stat.S_IMODE(trial.folder.stat().st_mode) == 0o700
    saved = yaml.safe_load((trial.folder / ".hydra/config.yaml").read_text())
    assert saved["tracking"]["uri"] == uri.replace(f"me:{PASSWORD}", "***")
    assert {**saved, "tracking": 0} == {**to_dict(trial.config), "tracking": 0}, "all else as it is"

    assert changes_of_config(trial.folder, trial.config) == []
    tracking = dataclasses.replace(trial.config.tracking, uri="http://elsewhere")
    other = dataclasses.replace(trial.config, tracking=tracking)
    assert changes_of_config(trial.folder, other) == ["tracking.uri was http://***@host:5000 and is http://elsewhere"]
    config = dataclasses.replace(trial.config, tracking=TrackingConfig(**saved["tracking"]))
    if uri in FROM_A_FILE:
        with pytest.raises(ConfigError, match=r"is not set here; add tracking\.uri="):
            store_of(record, config, own=True)
        return
    assert store_of(record, config, own=True) == TYPED
    monkeypatch.delenv("MLFLOW_URL")
    monkeypatch.delenv("MLFLOW_PASSWORD")
    with pytest.raises(ConfigError, match=r"is not set here; add tracking\.uri="):
        store_of(record, config, own=True)


KEPT_APART = (
    "tracking.uri=${oc.env:X}", "tracking.uri='http://me:${oc.env:X}@host'", "tracking.uri=http://${oc.env:X}@host",
    "tracking.uri='http://${oc.env:U}:${oc.env:X}@host'", "tracking.uri='http://host/?token=${oc.env:X}&page=2'",
)  # fmt: skip
TYPED_ALL_THE_SAME = (
    *(f"tracking.uri={address}" for address in (*ADDRESSES, *FROM_A_FILE)), f"+data.index={TYPED}",
    f"tracking.uri=http://me:{PASSWORD}${{oc.env:X}}@host", f"tracking.uri=http://me:${{oc.env:X}}{PASSWORD}@host",
    f"tracking.uri=http://me:{PASSWORD}@${{oc.env:X}}", f"tracking.uri=http://host/?token={PASSWORD}${{oc.env:X}}",
)  # fmt: skip


def test_only_what_the_environment_gives_may_be_typed():
    assert check_passwords(KEPT_APART) is None
    for word in TYPED_ALL_THE_SAME:
        key = word.partition("=")[0].lstrip("+")
        with pytest.raises(ConfigError, match=re.escape(f"write '{key}=${{oc.env:NAME}}'")) as caught:
            check_passwords([word])
        assert PASSWORD not in str(caught.value)


@pytest.mark.parametrize("uri", ADDRESSES)
def test_it_is_redacted_wherever_it_can_appear(uri: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """What goes to MLflow, the report's files, and what is printed."""
    error = f"could not reach {uri} at all"
    config = SweepConfig(tracking=TrackingConfig(uri=uri))
    output = [
        str(trial_params(config, {}, 2)),
        str(sweep_tags(tmp_path, f"python -m fsdp_lab -m tracking.uri={uri}")),
        str(trial_tags(tmp_path, [f"tracking.uri={uri}"])),
        str(fact_tags({"notes": [error], "device": "cpu"})),
        one_line(error, 500),
    ]
    (tmp_path / "failures").mkdir()
    (tmp_path / "failures/rank0.json").write_text(json.dumps({"message": error, "traceback": [error]}))
    (tmp_path / "error.txt").write_text(error)
    (tmp_path / "results.csv").write_text(f"trial,error\n0,{error}\n")
    (tmp_path / "rank0.log").write_text(error)
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({"uri": uri}))
    output += [redacted_file(tmp_path / name) for name in holding(tmp_path)]
    assert len(output) == 10
    console = Console(SweepState([], [("val/loss", "min")]), [])
    console.log(error)
    output.append(capsys.readouterr().out)
    # each names the host, or shows that something was left out
    assert [text for text in output if PASSWORD in text or not ("host" in text or "***" in text)] == []


def test_a_refusal_shows_no_password(tmp_path: Path):
    for uri in ADDRESSES[:2]:
        done = run_cli(tmp_path, f"tracking.uri='{uri}'", "nonsense=1", timeout=60)
        assert done.returncode == 2 and PASSWORD not in done.stdout + done.stderr, done.stderr
        done = run_cli(tmp_path, f"tracking.uir='{uri}'", timeout=60)
        assert done.returncode == 2 and PASSWORD not in done.stdout + done.stderr


@pytest.mark.parametrize("program", ["fsdp_lab", "fsdp_lab.forecast", "fsdp_lab.nightly", "fsdp_lab.report"])
def test_no_program_shows_the_password_in_a_word_that_cannot_be_read(tmp_path: Path, program: str):
    words = (f"tracking.uri=http://bob:{PASSWORD}@127.0.0.1:9/?api_key={PASSWORD}", "sweep=last")
    done = forked.run(tmp_path, program, *words[: 2 if program == "fsdp_lab.report" else 1])
    assert done.returncode == 2 and PASSWORD not in done.stdout + done.stderr, done.stdout + done.stderr
    assert program == "fsdp_lab.report" or "write 'tracking.uri=${oc.env:NAME}'" in done.stderr
    assert list(tmp_path.iterdir()) == []


INLINE = (
    *(word for word in TINY if not word.startswith(("cluster.num_workers", "tracking.uri"))), *PLAIN, "engine=inline",
    "model=mlp", "forecast.enabled=false", "export=false",
)  # fmt: skip


@pytest.mark.ci
@pytest.mark.parametrize(
    ("how", "multirun"),
    [
        ("address", True),
        pytest.param("address", False, marks=pytest.mark.full),
        pytest.param("password", True, marks=pytest.mark.full),
        pytest.param("password", False, marks=pytest.mark.full),
    ],
)
def test_a_sweep_with_a_password_leaves_it_nowhere_and_goes_on(
    how: str, multirun: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """With a real server, which asks for none."""
    folder = tmp_path / "here"
    folder.mkdir()
    with mlflow_server(tmp_path) as (address, _):
        monkeypatch.setenv("SECRET", address.replace("://", f"://me:{PASSWORD}@") if how == "address" else PASSWORD)
        uri = "${oc.env:SECRET}" if how == "address" else address.replace("://", "://me:${oc.env:SECRET}@")
        word = f"tracking.uri='{uri}'"
        done = run_cli(folder, *(["-m", "optimizer.lr=1e-3,1e-2"] if multirun else []), *INLINE, word)
        output = done.stdout + done.stderr
        assert done.returncode == 0, output
        trial = folder / "out" / ("1" if multirun else "")
        (trial / "outcome.json").unlink()
        done = run_cli(folder, "resume=out")
        output += done.stdout + done.stderr
        assert done.returncode == 0 and "finished" in done.stdout, output
        done = forked.run(folder, "fsdp_lab.report", "sweep=out")
        output += done.stdout + done.stderr
        assert done.returncode == 0 and "the report is not in MLflow" not in done.stderr, output
    assert PASSWORD not in output
    assert holding(folder / "out") == []
    assert PASSWORD.encode() not in (tmp_path / "mlflow.db").read_bytes()
    assert holding(tmp_path / "mlartifacts") == []
    for path in (folder / "out", trial):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
