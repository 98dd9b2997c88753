"""Credentials in an address are refused; those of the environment are in no file and on no screen."""

from __future__ import annotations

import stat
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from fsdp_lab.config import ConfigError
from fsdp_lab.config.address import check_credentials
from fsdp_lab.config.compose import Trial
from fsdp_lab.record.hydra_folder import write_hydra_folder
from fsdp_lab.record.sweep_json import SweepStart, begin_folder
from fsdp_lab.record.trials_jsonl import add_trial
from fsdp_lab.sweep.state import TrialState
from fsdp_lab.sweep.store.resume import changes_of_config
from fsdp_lab.tracking.tags import trial_params
from tests import forked
from tests.conftest import INLINE, STORE, run_cli
from tests.folders import SweepFolder
from tests.servers import mlflow_server

PASSWORD = "hunter2"
TYPED = f"http://me:{PASSWORD}@host:5000"
NAMES = (
    "access_token", "client_secret", "auth", "passphrase", "X-Amz-Signature", "user", "pw", "access", "API-Key",
    "%74oken", "AWSAccessKeyId", "X-Goog-Credential",
)  # fmt: skip
ADDRESSES = [
    TYPED,
    TYPED.replace(":", "\\:"),
    f"http://{PASSWORD}@host",
    f"http://me:pass/{PASSWORD}@host",
    f"http://u:12/{PASSWORD}@host/",
    f"http://[me:{PASSWORD}@host",
    f"http://me:{PASSWORD}@[::1]:5000",
    f"http://host/?next=http://me:{PASSWORD}@host",
    f"http://me:{PASSWORD}${{oc.env:X}}@host",
    "http://me:${oc.env:X}@host",
    f"https://host/#access_token={PASSWORD}",
    *(f"http://host:5000/?{name}={PASSWORD}&page=2" for name in NAMES),
    rf"http\://host\:5000/?token\={PASSWORD}",
    f"mssql+pyodbc:///?odbc_connect=DRIVER%3DX%3BPWD%3D{PASSWORD}%3B",
    f"mssql+pyodbc:///?odbc_connect=DRIVER={{ODBC 18}};PWD={PASSWORD};Encrypt=yes",
]  # fmt: skip
HARMLESS = (
    "http://10.0.0.1:5000", "sqlite:////home/me@lab/mlflow.db", "postgresql://host/db?sslmode=require&timeout=30",
    "hf://datasets/org/name@rev", "http://host:5000/name@rev", "http://[::1]:5000/a@b",
    "http://host/?author=me&design=1&keywords=1&sigma=1&page_token=2&to=me@there", "[http://a:5000,http://b/x@y]",
    "'tag(log,interval(1e-4,1e-2))' # a=b", "${oc.env:X}",
)  # fmt: skip


def holding(folder: Path) -> list[str]:
    """The files that hold the password."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return sorted(str(path.relative_to(folder)) for path in files if PASSWORD.encode() in path.read_bytes())


@pytest.mark.parametrize("address", ADDRESSES)
def test_an_address_with_credentials_is_refused_without_repeating_them(address: str):
    with pytest.raises(ConfigError, match=r"^tracking\.uri: .*MLFLOW_TRACKING_PASSWORD.*PGPASSWORD") as caught:
        check_credentials("tracking.uri", address)
    assert PASSWORD not in str(caught.value)


def test_an_address_of_the_users_class_is_for_it_to_read():
    with pytest.raises(ConfigError, match=r"^data\.url: .* let the class read it from the environment\. ") as caught:
        check_credentials("data.url", TYPED)
    assert "MLFLOW" not in str(caught.value)


def test_other_addresses_are_taken():
    for address in HARMLESS:
        check_credentials("tracking.uri", address)


@pytest.mark.parametrize("key", ["tracking.uri", "tracking.ui", "cluster.address", "+data.index"])
def test_credentials_that_come_by_a_variable_are_refused(
    key: str, compose_trial: Callable[[Sequence[str], int], Trial], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("ADDRESS", TYPED)
    with pytest.raises(ConfigError, match=f"{key.lstrip('+')}: its address") as caught:
        compose_trial([f"{key}='${{oc.env:ADDRESS}}'"], 0)
    assert PASSWORD not in str(caught.value)


def test_a_variable_in_a_key_of_the_users_own_is_kept_as_typed(
    compose_trial: Callable[[Sequence[str], int], Trial], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("TOKEN", PASSWORD)
    word = "+data.token='${oc.env:TOKEN}'"
    trial = compose_trial(["data._target_=collections.OrderedDict", word], 0)
    assert trial.values["data.token"] == PASSWORD
    begin_folder(tmp_path / "out", [trial])
    write_hydra_folder(trial)
    add_trial(tmp_path, trial)
    SweepStart.of([word], True, trial.config).write(tmp_path)
    assert holding(tmp_path) == []
    assert stat.S_IMODE((tmp_path / "sweep.json").stat().st_mode) == 0o600
    assert stat.S_IMODE(trial.folder.stat().st_mode) == 0o700
    assert changes_of_config(trial.folder, trial.config) == []
    state = TrialState(trial)
    assert trial_params(trial.config, {}, 2, state.variables)["data.token"] == "${oc.env:TOKEN}"


@pytest.mark.parametrize("program", ["fsdp_lab", "fsdp_lab.forecast", "fsdp_lab.nightly", "fsdp_lab.report"])
def test_no_program_shows_a_typed_password(tmp_path: Path, program: str):
    words = (f"tracking.uri=http://bob:{PASSWORD}@127.0.0.1:9/?api_key={PASSWORD}", "sweep=last")
    done = forked.run(tmp_path, program, *words[: 2 if program == "fsdp_lab.report" else 1])
    assert done.returncode == 2 and PASSWORD not in done.stdout + done.stderr, done.stdout + done.stderr
    assert "tracking.uri: its address has a user, a password or a token" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_an_option_of_the_users_own_with_a_password_is_refused_and_not_copied(tmp_path: Path):
    (tmp_path / "mine/experiment").mkdir(parents=True)
    (tmp_path / "mine/experiment/theirs.yaml").write_text(f"# @package _global_\ntracking:\n  uri: {TYPED}\n")
    done = run_cli(tmp_path, "--config-dir=mine", "experiment=theirs")
    assert done.returncode == 2 and "tracking.uri: its address" in done.stderr, done.stderr
    assert PASSWORD not in done.stdout + done.stderr
    assert holding(tmp_path) == ["mine/experiment/theirs.yaml"]


@pytest.mark.ci
@pytest.mark.parametrize("multirun", [True, pytest.param(False, marks=pytest.mark.full)])
def test_a_sweep_with_a_password_leaves_it_nowhere_and_goes_on(
    multirun: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """With a real server, which asks for none."""
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", "me")
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", PASSWORD)
    with mlflow_server(tmp_path) as (address, _):
        axis = ["-m", "optimizer.lr=1e-3,1e-2"] if multirun else []
        done = run_cli(folder, *axis, *(word for word in INLINE if word != STORE), f"tracking.uri={address}")
        output = done.stdout + done.stderr
        assert done.returncode == 0, output
        trial = SweepFolder(folder / "out").trials[-1]
        trial.change(outcome=None)
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
    for path in (folder / "out", trial.path):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
