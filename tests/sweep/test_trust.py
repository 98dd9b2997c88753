"""Folders of others run no code and get no secret; credentials are refused in addresses and are in no file."""

from __future__ import annotations

import json
import os
import pickle
import stat
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from fsdp_lab.config import ConfigError
from fsdp_lab.config.address import check_credentials
from fsdp_lab.config.status import TrialStatus
from fsdp_lab.config.words import CODE_KEYS
from fsdp_lab.record.hydra_folder import write_hydra_folder
from fsdp_lab.record.sweep_json import SweepStart, begin_folder
from fsdp_lab.record.trials_jsonl import add_trial
from fsdp_lab.sweep.record import record_of, sweep_in
from fsdp_lab.sweep.store import find as trust
from fsdp_lab.sweep.store.resume import changes_of_config, resume_arguments
from fsdp_lab.sweep.trial import TrialState
from fsdp_lab.tracking.tags import trial_params
from tests import forked, trained
from tests.conftest import INLINE, STORE, run_cli, without
from tests.folders import SweepFolder
from tests.servers import mlflow_server
from tests.sweep.planted import Compose

SOMEBODY = 54321

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")


# What people type for sweeps.
TYPED = (
    "optimizer.lr=1e-3,1e-2", "+optimizer.lr=0.1", "++optimizer.lr=0.1", "~experiment", "sharding=root,ddp",
    "sharding=choice(root,'ddp')", "+experiment=zero2_zero3", "sharding=glob(*)", "hydra.sweep.dir='a b/c'",
    "hydra.run.dir=out", "hydra.sweep.subdir=${hydra.job.num}", "hydra.sweeper.params.sharding=null",
    "hydra.sweeper.params.optimizer.lr=1e-3,1e-2", "training.global_batch_size=${per_worker:8}",
    "objective=[memory/peak_bytes:min,val/loss:min]", "tracking.uri=http://host:5000", "model._target_=mine.Net",
    "model.head={_target_:mine.Head}", "task.loss=mine.loss,mine.other", "hydra.sweeper.params.task.loss=mine.loss",
)  # fmt: skip
# What could run code before any trial, or speak for the user.
HOSTILE = (
    "--experimental-rerun=x.pickle", "--config-dir=.", "-cd", "+hydra.callbacks.x._target_=psutil.Popen",
    "hydra.sweeper._target_=os.system", "hydra/launcher=x", "hydra.searchpath=[file:///tmp]",
    "hydra.sweeper.params={}", "hydra.sweeper.params.hydra.callbacks.x._target_=os.system",
    "sharding@hydra.callbacks=root", "model@hydra.callbacks=root", "offload._target_=mine.Net", " hydra.run.dir=x",
    "trust=true", "resume_anyway=true", "resume_failed=true",
)  # fmt: skip


def test_a_file_sets_keys_of_trials_and_no_others(tmp_path: Path):
    trust.check_keys(TYPED, tmp_path / "sweep.json")
    for word in HOSTILE:
        with pytest.raises(ConfigError, match="no key of a trial"):
            trust.check_keys([word], tmp_path / "sweep.json")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """That of a sweep of four trials that has ended."""
    return trained.copy_trained(tmp_path) / "out"


def add_words(folder: Path, of_sweep: Sequence[str] = (), of_trials: Sequence[str] = ()) -> None:
    """As if the sweep had been started with more words, and each of its trials with these."""
    start = json.loads((folder / "sweep.json").read_text())
    (folder / "sweep.json").write_text(json.dumps(start | {"arguments": [*start["arguments"], *of_sweep]}))
    trials = [json.loads(line) for line in (folder / "trials.jsonl").read_text().splitlines()]
    lines = (json.dumps(trial | {"overrides": [*trial["overrides"], *of_trials]}) for trial in trials)
    (folder / "trials.jsonl").write_text("".join(f"{line}\n" for line in lines))


def replace_in_configs(folder: Path, old: str, new: str) -> None:
    for path in folder.glob("*/.hydra/config.yaml"):
        path.write_text(path.read_text().replace(old, new))


def report(cwd: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return forked.run(cwd, "fsdp_lab.report", *arguments, environment={**os.environ, **environment})


class _Pickled:
    def __init__(self, made: Path) -> None:
        self.made = str(made)

    def __reduce__(self) -> tuple[Callable[..., None], tuple[str]]:
        return os.mkdir, (self.made,)


def test_a_resume_runs_no_code_that_the_folder_names(folder: Path, tmp_path: Path):
    """Each of these did: it made `made`. The folder is the user's own, for example out of an archive."""
    made = tmp_path / "made"
    (tmp_path / "job.pickle").write_bytes(pickle.dumps(_Pickled(made)))
    hook = ["+hydra.callbacks.x._target_=os.mkdir", "+hydra.callbacks.x.path=made"]
    add_words(folder, of_trials=hook)
    for file, key in (("trials.jsonl", "hydra.callbacks.x._target_"), ("sweep.json", "--experimental-rerun")):
        done = run_cli(tmp_path, "resume=out")
        assert done.returncode == 2 and not made.exists(), done.stdout + done.stderr
        assert f"resume={folder}: {file} holds {key}, which is no key of a trial" in done.stderr
        add_words(folder, of_sweep=["--experimental-rerun=job.pickle"])  # which is read first


@needs_root
def test_another_users_folder_runs_no_code_unless_trusted(folder: Path, tmp_path: Path):
    os.chown(folder, SOMEBODY, SOMEBODY)
    trusted = run_cli(tmp_path, "resume=out", "trust=true")
    assert trusted.returncode == 0 and "nothing to do" in trusted.stdout, trusted.stdout + trusted.stderr
    assert "trust=yes" in run_cli(tmp_path, "resume=out", "trust=yes").stderr
    (tmp_path / "theirs.py").write_text(f"import os\n\nos.mkdir({str(tmp_path / 'made')!r})\nloss = Net = print\n")
    naming_code = [f"{key}=theirs.loss" for key in ("model._target_", *CODE_KEYS)]
    add_words(folder, naming_code, naming_code)
    for done, key in ((run_cli(tmp_path, "resume=out"), "resume"), (report(tmp_path, "sweep=out"), "sweep")):
        assert done.returncode == 2, done.stdout + done.stderr
        assert f"{key}={folder}: {folder} belongs to user {SOMEBODY}" in done.stderr
        assert "trust=true" in done.stderr and "Traceback" not in done.stderr
    assert not (tmp_path / "made").exists()
    assert set(naming_code) <= set(resume_arguments([f"resume={folder}", "trust=true"]))


@needs_root
def test_what_another_user_wrote_on_the_shared_disk_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A relative path is below where the sweep started; from elsewhere, a report once found no results."""
    done = run_cli(tmp_path, "-m", *INLINE, "cluster.storage_path=disk", "training.max_steps=1")
    assert done.returncode == 0, done.stdout + done.stderr
    monkeypatch.chdir("/")
    folder = tmp_path / "out"
    assert record_of(sweep_in(folder)).statuses == [TrialStatus.finished]
    (shared,) = (tmp_path / "disk").iterdir()
    assert stat.S_IMODE(shared.stat().st_mode) == 0o700
    assert trust.why_foreign(folder) is None
    os.chown(shared / "0", SOMEBODY, SOMEBODY)
    assert trust.why_foreign(folder) == f"{shared / '0'} belongs to user {SOMEBODY}"


def test_what_others_can_write_into_is_foreign(tmp_path: Path):
    for mode in (0o755, 0o775, 0o777, 0o702):
        tmp_path.chmod(mode)
        message = f"others can write into {tmp_path} (`chmod go-w` prevents it)"
        assert trust.why_foreign(tmp_path) == (None if mode == 0o755 else message)


@contextmanager
def listening() -> Iterator[tuple[str, list[str]]]:
    """An address, and what was sent there to authorize: "" for a request without."""
    heard: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            heard.append(self.headers.get("Authorization", ""))
            self.send_error(404)

        do_POST = do_GET

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", heard
    server.shutdown()


@pytest.mark.ci
@needs_root
def test_a_report_sends_no_token_to_addresses_of_others_folders(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", "secret-token")
    os.chown(folder, SOMEBODY, SOMEBODY)
    with listening() as (uri, heard):
        add_words(folder, [f"tracking.uri={uri}"])
        replace_in_configs(folder, STORE.partition("=")[2], uri)
        assert report(tmp_path, "sweep=out").returncode == run_cli(tmp_path, "resume=out").returncode == 2
        done = report(tmp_path, "sweep=out", "trust=true")
        assert done.returncode == 0 and f"tracking.uri={uri} is from another user's folder" in done.stderr
        assert (folder / "report.html").exists() and heard == []
        assert report(tmp_path, "sweep=out", "trust=true", f"tracking.uri={uri}").returncode == 0
        assert "Bearer secret-token" in heard, "it was typed"
        heard.clear()
        os.chown(folder, 0, 0)
        assert report(tmp_path, "sweep=out").returncode == 0
        assert "Bearer secret-token" in heard, "the folder is our own"


@needs_root
def test_a_variable_goes_into_no_report_of_anothers_folder(folder: Path, tmp_path: Path):
    replace_in_configs(folder, "ui: null", "ui: http://host/${oc.env:SOME_SECRET}")
    os.chown(folder, SOMEBODY, SOMEBODY)
    assert report(tmp_path, "sweep=out", "trust=true", SOME_SECRET="hunter2").returncode == 0
    assert "hunter2" not in (folder / "report.html").read_text()


PASSWORD = "hunter2"
SECRET = f"http://me:{PASSWORD}@host:5000"
NAMES = (
    "access_token", "client_secret", "auth", "passphrase", "X-Amz-Signature", "user", "pw", "access", "API-Key",
    "%74oken", "AWSAccessKeyId", "X-Goog-Credential",
)  # fmt: skip
ADDRESSES = [
    SECRET,
    SECRET.replace(":", "\\:"),
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


def test_an_address_with_credentials_is_refused():
    """Without repeating them; an address of the user's class is for it to read."""
    for address in ADDRESSES:
        with pytest.raises(ConfigError, match=r"^tracking\.uri: .*MLFLOW_TRACKING_PASSWORD.*PGPASSWORD") as caught:
            check_credentials("tracking.uri", address)
        assert PASSWORD not in str(caught.value), address
    with pytest.raises(ConfigError, match=r"^data\.url: .* let the class read it from the environment\. ") as caught:
        check_credentials("data.url", SECRET)
    assert "MLFLOW" not in str(caught.value)
    for address in HARMLESS:
        check_credentials("tracking.uri", address)


def test_credentials_that_come_by_a_variable_are_refused(compose_trial: Compose, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("ADDRESS", SECRET)
    for key in ("tracking.uri", "data.index"):
        with pytest.raises(ConfigError, match=f"{key}: its address") as caught:
            compose_trial([f"++{key}='${{oc.env:ADDRESS}}'"], 0)
        assert PASSWORD not in str(caught.value)


def test_a_variable_in_a_users_own_key_is_kept_as_typed(
    compose_trial: Compose, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
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
    assert changes_of_config(trial.folder, trial.config) == {}
    state = TrialState(trial)
    assert trial_params(trial.config, {}, 2, state.variables)["data.token"] == "${oc.env:TOKEN}"


@pytest.mark.parametrize("program", ["fsdp_lab", "fsdp_lab.forecast", "fsdp_lab.nightly", "fsdp_lab.report"])
def test_no_program_shows_a_typed_password(tmp_path: Path, program: str):
    words = (f"tracking.uri=http://bob:{PASSWORD}@127.0.0.1:9/?api_key={PASSWORD}", "sweep=last")
    done = forked.run(tmp_path, program, *words[: 2 if program == "fsdp_lab.report" else 1])
    assert done.returncode == 2 and PASSWORD not in done.stdout + done.stderr, done.stdout + done.stderr
    assert "tracking.uri: its address has a user, a password or a token" in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.ci
def test_a_sweep_with_a_password_leaves_it_nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """With a real server, which asks for none."""
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", "me")
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", PASSWORD)
    with mlflow_server(tmp_path) as (address, _):
        swept = run_cli(folder, "-m", "optimizer.lr=1e-3,1e-2", *without(INLINE, STORE), f"tracking.uri={address}")
        trial = SweepFolder(folder / "out").trials[-1]
        trial.change(outcome=None)
        resumed = run_cli(folder, "resume=out")
        reported = forked.run(folder, "fsdp_lab.report", "sweep=out")
    output = "".join(done.stdout + done.stderr for done in (swept, resumed, reported))
    assert swept.returncode == resumed.returncode == reported.returncode == 0, output
    assert "finished" in resumed.stdout and "the report is not in MLflow" not in reported.stderr, output
    assert PASSWORD not in output
    assert holding(folder / "out") == holding(tmp_path / "mlartifacts") == []
    assert PASSWORD.encode() not in (tmp_path / "mlflow.db").read_bytes()
    assert {stat.S_IMODE(path.stat().st_mode) for path in (folder / "out", trial.path)} == {0o700}
