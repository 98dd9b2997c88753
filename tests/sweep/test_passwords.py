"""Passwords in an address: in no file but `sweep.json`, on no screen, and there again for a resume."""

from __future__ import annotations

import dataclasses
import json
import stat
from pathlib import Path

import pytest
import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser

from fsdp_lab.config import SweepConfig, to_dict
from fsdp_lab.config.sweep import TrackingConfig
from fsdp_lab.record.hydra_folder import write_hydra_folder
from fsdp_lab.record.sweep_json import Record, begin_folder
from fsdp_lab.record.trials_jsonl import add_trial
from fsdp_lab.redact import redacted_file
from fsdp_lab.sweep.grid import discrete_values
from fsdp_lab.sweep.listeners.console import Console
from fsdp_lab.sweep.state import SweepState
from fsdp_lab.sweep.store.changes import changes_of_config
from fsdp_lab.sweep.store.passwords import store_address, words_as_typed, words_to_write
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


@pytest.mark.parametrize("uri", [TYPED, "${oc.env:MLFLOW_URL}", f"${{oc.env:NO_SUCH,'{TYPED}'}}"])
def test_a_trials_files_hold_no_password(uri: str, compose_trial, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MLFLOW_URL", TYPED)
    monkeypatch.chdir(tmp_path)
    word = f"tracking.uri={uri}"
    trial = compose_trial([word], 0)
    assert trial.config.tracking.uri == TYPED
    (escaped,) = discrete_values(OverridesParser.create().parse_overrides([word])[0])  # as a grid has it
    object.__setattr__(trial, "overrides", [escaped])
    begin_folder(tmp_path / "out", [trial])
    write_hydra_folder(trial)
    add_trial(tmp_path, trial)
    record = Record.of([word], True, trial.config)
    record.write(tmp_path)
    assert holding(tmp_path) == ([] if "MLFLOW_URL" in uri else ["sweep.json"])
    assert stat.S_IMODE((tmp_path / "sweep.json").stat().st_mode) == 0o600
    assert stat.S_IMODE(trial.folder.stat().st_mode) == 0o700
    saved = yaml.safe_load((trial.folder / ".hydra/config.yaml").read_text())
    assert saved["tracking"]["uri"] == uri.replace(f"me:{PASSWORD}", "***")
    assert {**saved, "tracking": 0} == {**to_dict(trial.config), "tracking": 0}, "all else as it is"

    assert changes_of_config(trial.folder, trial.config) == []
    tracking = dataclasses.replace(trial.config.tracking, uri="http://elsewhere")
    other = dataclasses.replace(trial.config, tracking=tracking)
    assert changes_of_config(trial.folder, other) == ["tracking.uri was http://***@host:5000 and is http://elsewhere"]
    (written,) = [json.loads(line) for line in (tmp_path / "trials.jsonl").read_text().splitlines()]
    assert words_as_typed(written["overrides"], record.arguments) == [escaped]
    config = dataclasses.replace(trial.config, tracking=TrackingConfig(**saved["tracking"]))
    assert store_address(config, record.arguments) == TYPED


def test_the_words_of_several_addresses_come_back_each_as_it_was():
    escaped = TYPED.replace(":", "\\:")
    typed = ["optimizer.lr=0.1", f"tracking.uri={escaped}", f"tracking.uri='http://me:{PASSWORD}@other'"]
    arguments = ["optimizer.lr=0.1,0.2", f"tracking.uri={TYPED},'http://me:{PASSWORD}@other'"]
    for words in (typed[:2], [typed[0], typed[2]]):
        written = words_to_write(words)
        assert PASSWORD not in str(written) and written[0] == words[0]
        assert words_as_typed(written, arguments) == words


def test_an_address_that_is_not_there_any_more_is_asked_for():
    config = SweepConfig(tracking=TrackingConfig(uri="http://***@host"))
    with pytest.raises(Exception, match=r"is incomplete.*add tracking\.uri="):
        store_address(config, [])


@pytest.mark.parametrize("uri", ADDRESSES)
def test_it_is_redacted_wherever_it_can_appear(uri: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """What goes to MLflow, the report's files, and what is printed."""
    error = f"could not reach {uri} at all"
    config = SweepConfig(tracking=TrackingConfig(uri=uri))
    output = [
        str(trial_params(config, {})),
        str(sweep_tags(tmp_path, f"python -m fsdp_lab -m tracking.uri={uri}", 1)),
        str(trial_tags(tmp_path, [f"tracking.uri={uri}"], None)),
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


INLINE = (
    *(word for word in TINY if not word.startswith(("cluster.num_workers", "tracking.uri"))), *PLAIN, "engine=inline",
    "model=mlp", "forecast.enabled=false", "export=false",
)  # fmt: skip


@pytest.mark.ci
@pytest.mark.parametrize(
    ("how", "multirun"),
    [
        ("typed", True),
        pytest.param("typed", False, marks=pytest.mark.full),
        pytest.param("variable", True, marks=pytest.mark.full),
        pytest.param("variable", False, marks=pytest.mark.full),
    ],
)
def test_a_sweep_with_a_password_leaves_it_nowhere_and_goes_on(
    how: str, multirun: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """With a real server, which asks for none."""
    folder = tmp_path / "here"
    folder.mkdir()
    with mlflow_server(tmp_path) as (address, _):
        uri = address.replace("://", f"://me:{PASSWORD}@")
        monkeypatch.setenv("MLFLOW_URL", uri)
        word = "tracking.uri=" + ("${oc.env:MLFLOW_URL}" if how == "variable" else uri)
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
    assert holding(folder / "out") == (["sweep.json"] if how == "typed" else [])
    assert PASSWORD.encode() not in (tmp_path / "mlflow.db").read_bytes()
    assert holding(tmp_path / "mlartifacts") == []
    for path in (folder / "out", trial):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
