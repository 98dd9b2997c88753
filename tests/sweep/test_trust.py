"""Folders of others run no code and get no secret; credentials are refused in addresses and are in no file."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from fsdp_lab.config import ConfigError, SweepConfig
from fsdp_lab.config.address import check_credentials
from fsdp_lab.config.options import CODE_KEYS
from fsdp_lab.config.status import TrialStatus
from fsdp_lab.record.hydra_folder import write_hydra_folder
from fsdp_lab.record.paths import storage
from fsdp_lab.record.sweep_json import SweepStart, begin_folder
from fsdp_lab.record.trial_json import Outcome, write_outcome
from fsdp_lab.record.trials_jsonl import add_trial
from fsdp_lab.storage.files import append_line
from fsdp_lab.sweep.state import TrialState
from fsdp_lab.sweep.store import find as trust
from fsdp_lab.sweep.store.resume import changes_of_config, resume_arguments
from fsdp_lab.sweep.sweep_data import sweep_in
from fsdp_lab.tracking.tags import trial_params
from tests import forked
from tests.conftest import INLINE, STORE, run_cli, without
from tests.folders import SweepFolder
from tests.servers import lay_store, mlflow_server
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
def lay_sweep(compose_trial, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """The folder of a sweep of one trial that finished, `tmp_path/out`.

    Its record has the first words, too, its list those of the trial; the trial itself is made of the composed ones.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["fsdp_lab"])

    def lay(
        words: Sequence[str] = (), trial_words: Sequence[str] = (), multirun: bool = True, composed: Sequence[str] = ()
    ) -> Path:
        folder = tmp_path / "out"
        lay_store(tmp_path)
        trial = compose_trial([STORE, *composed], 0)
        where = folder / "0" if multirun else folder
        object.__setattr__(trial, "folder", where)
        object.__setattr__(trial, "overrides", [STORE, *composed, *trial_words])
        folder.mkdir(mode=0o755)
        begin_folder(folder, [trial])
        write_hydra_folder(trial)
        files = storage(trial, folder)
        write_outcome(files, Outcome(TrialStatus.finished, None, 1.0))
        metrics = {"epoch": 1, "step": 4, "val/loss": 1.5, "memory/peak_bytes": 1.0, "perf/samples_per_s": 9.0}
        append_line(files / "metrics.jsonl", json.dumps(metrics))
        add_trial(folder, trial)
        SweepStart.of([*words, *composed, STORE], multirun, SweepConfig()).write(folder)
        return folder

    return lay


def report(cwd: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return forked.run(cwd, "fsdp_lab.report", *arguments, environment={**os.environ, **environment})


class _Pickled:
    def __init__(self, made: Path) -> None:
        self.made = str(made)

    def __reduce__(self) -> tuple[Callable[..., None], tuple[str]]:
        return os.mkdir, (self.made,)


def test_a_resume_runs_no_code_that_the_folder_names(lay_sweep, tmp_path: Path):
    """Each of these did: it made `made`. The folder is the user's own, for example out of an archive."""
    made, job = tmp_path / "made", tmp_path / "job.pickle"
    job.write_bytes(pickle.dumps(_Pickled(made)))
    of_trial = "+hydra.callbacks.x._target_=os.mkdir"
    for file, key, words in (
        ("sweep.json", "--experimental-rerun", ([f"--experimental-rerun={job}"], [])),
        ("trials.jsonl", "hydra.callbacks.x._target_", ([], [of_trial, f"+hydra.callbacks.x.path={made}"])),
    ):
        folder = lay_sweep(*words)
        done = run_cli(tmp_path, "resume=out")
        assert done.returncode == 2 and not made.exists(), done.stdout + done.stderr
        assert f"resume={folder}: {file} holds {key}, which is no key of a trial" in done.stderr
        shutil.rmtree(folder)


def test_a_word_that_is_typed_again_is_taken(lay_sweep, tmp_path: Path):
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment/mine.yaml").write_text("# @package _global_\ntraining:\n  seed: 7\n")
    lay_sweep([f"--config-dir={tmp_path}", "experiment=mine"], multirun=False)
    assert run_cli(tmp_path, "resume=out", "--cfg", "job").returncode == 2
    done = run_cli(tmp_path, "resume=out", f"--config-dir={tmp_path}", "--cfg", "job")
    assert done.returncode == 0 and "seed: 7" in done.stdout, done.stderr


@needs_root
def test_another_users_folder_runs_no_code_unless_trusted(lay_sweep, tmp_path: Path):
    (tmp_path / "theirs.py").write_text(f"import os\n\nos.mkdir({str(tmp_path / 'made')!r})\nloss = Net = print\n")
    naming_code = [f"{key}=theirs.loss" for key in ("model._target_", *CODE_KEYS)]
    folder = lay_sweep(naming_code, naming_code)
    os.chown(folder, SOMEBODY, SOMEBODY)
    for done, key in ((run_cli(tmp_path, "resume=out"), "resume"), (report(tmp_path, "sweep=out"), "sweep")):
        assert done.returncode == 2, done.stdout + done.stderr
        assert f"{key}={folder}: {folder} belongs to user {SOMEBODY}" in done.stderr
        assert "trust=true" in done.stderr and "Traceback" not in done.stderr
    assert not (tmp_path / "made").exists()
    assert "trust=yes" in run_cli(tmp_path, "resume=out", "trust=yes").stderr
    assert [word for word in naming_code if word not in resume_arguments([f"resume={folder}", "trust=true"])] == []


@needs_root
def test_another_users_folder_resumes_if_trust_is_typed(lay_sweep, tmp_path: Path):
    os.chown(lay_sweep(), SOMEBODY, SOMEBODY)
    done = run_cli(tmp_path, "resume=out", "trust=true")
    assert done.returncode == 0 and "nothing to do" in done.stdout, done.stdout + done.stderr


DISK = ("cluster.storage_path=disk",)


@pytest.mark.parametrize("multirun", [True, False])
@needs_root
def test_what_another_user_wrote_on_the_shared_disk_is_refused(lay_sweep, multirun: bool, tmp_path: Path):
    folder = lay_sweep(composed=DISK, multirun=multirun)
    (shared,) = (tmp_path / "disk").iterdir()
    assert stat.S_IMODE(shared.stat().st_mode) == 0o700
    assert trust.why_foreign(folder) is None
    where = shared / "0" if multirun else shared
    os.chown(where, SOMEBODY, SOMEBODY)
    assert trust.why_foreign(folder) == f"{where} belongs to user {SOMEBODY}"


@pytest.mark.parametrize("multirun", [True, False])
def test_a_relative_shared_disk_is_below_where_a_sweep_started(
    lay_sweep, multirun: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """From elsewhere, a report found no results."""
    folder = lay_sweep(composed=DISK, multirun=multirun)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert sweep_in(folder)[0].statuses == [TrialStatus.finished]


def test_what_others_can_write_into_is_foreign(tmp_path: Path):
    tmp_path.chmod(0o755)
    assert trust.why_foreign(tmp_path) is None
    for mode in (0o775, 0o777, 0o702):
        tmp_path.chmod(mode)
        assert trust.why_foreign(tmp_path) == f"others can write into {tmp_path} (`chmod go-w` prevents it)"


@pytest.fixture
def listener() -> Iterator[tuple[str, list[str]]]:
    """An address, and what was sent there to authorize: "" for a request without."""
    heard: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            heard.append(self.headers.get("Authorization", ""))
            self.send_response(404)
            self.end_headers()

        do_POST = do_GET

        def log_message(self, format: str, *args: object) -> None: ...

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", heard
    server.shutdown()


@pytest.mark.ci
@needs_root
def test_a_report_sends_no_token_to_addresses_of_others_folders(
    lay_sweep, listener: tuple[str, list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    uri, heard = listener
    folder = lay_sweep([f"tracking.uri={uri}"])
    config = folder / "0/.hydra/config.yaml"
    config.write_text(config.read_text().replace(STORE.partition("=")[2], uri))
    os.chown(folder, SOMEBODY, SOMEBODY)
    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", "secret-token")
    assert report(tmp_path, "sweep=out").returncode == 2
    done = report(tmp_path, "sweep=out", "trust=true")
    assert done.returncode == 0 and f"tracking.uri={uri} is from another user's folder" in done.stderr
    assert (folder / "report.html").exists()
    assert run_cli(tmp_path, "resume=out").returncode == 2
    assert heard == []
    assert report(tmp_path, "sweep=out", "trust=true", f"tracking.uri={uri}").returncode == 0
    assert "Bearer secret-token" in heard, "it was typed"
    heard.clear()
    os.chown(folder, 0, 0)
    assert report(tmp_path, "sweep=out").returncode == 0
    assert "Bearer secret-token" in heard, "the folder is our own"


@needs_root
def test_a_variable_goes_into_no_report_of_anothers_folder(lay_sweep, tmp_path: Path):
    folder = lay_sweep()
    config = folder / "0/.hydra/config.yaml"
    config.write_text(config.read_text().replace("ui: null", "ui: http://host/${oc.env:SOME_SECRET}"))
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


@pytest.mark.parametrize("key", ["tracking.uri", "+data.index"])
def test_credentials_that_come_by_a_variable_are_refused(
    key: str, compose_trial: Compose, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("ADDRESS", SECRET)
    with pytest.raises(ConfigError, match=f"{key.lstrip('+')}: its address") as caught:
        compose_trial([f"{key}='${{oc.env:ADDRESS}}'"], 0)
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


def test_an_own_option_with_a_password_is_refused(tmp_path: Path):
    (tmp_path / "mine/experiment").mkdir(parents=True)
    (tmp_path / "mine/experiment/theirs.yaml").write_text(f"# @package _global_\ntracking:\n  uri: {SECRET}\n")
    done = run_cli(tmp_path, "--config-dir=mine", "experiment=theirs")
    assert done.returncode == 2 and "tracking.uri: its address" in done.stderr, done.stderr
    assert PASSWORD not in done.stdout + done.stderr
    assert holding(tmp_path) == ["mine/experiment/theirs.yaml"]


@pytest.mark.ci
def test_a_sweep_with_a_password_leaves_it_nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """With a real server, which asks for none."""
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", "me")
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", PASSWORD)
    with mlflow_server(tmp_path) as (address, _):
        done = run_cli(folder, "-m", "optimizer.lr=1e-3,1e-2", *without(INLINE, STORE), f"tracking.uri={address}")
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
