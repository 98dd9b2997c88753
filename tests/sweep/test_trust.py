"""Folders of others: what a resume and a report take from them, and to whom they talk because of them."""

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
from fsdp_lab.config.key_value_args import key_of
from fsdp_lab.config.options import CODE_KEYS
from fsdp_lab.config.status import TrialStatus
from fsdp_lab.record.hydra_folder import write_hydra_folder
from fsdp_lab.record.paths import storage
from fsdp_lab.record.sweep_json import SweepStart, begin_folder
from fsdp_lab.record.trial_json import Outcome, write_outcome
from fsdp_lab.record.trials_jsonl import add_trial
from fsdp_lab.storage.files import append_line
from fsdp_lab.sweep.store import find as trust
from fsdp_lab.sweep.store.resume import resume_arguments
from fsdp_lab.sweep.sweep_data import sweep_in
from tests import forked
from tests.conftest import STORE, run_cli
from tests.servers import lay_store

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
    made = tmp_path / "made"
    evil = f"# @package _global_\nhydra:\n  callbacks:\n    x:\n      _target_: os.mkdir\n      path: {made}\n"
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment/evil.yaml").write_text(evil)
    (tmp_path / "job.pickle").write_bytes(pickle.dumps(_Pickled(made)))
    words = (
        [f"--experimental-rerun={tmp_path}/job.pickle"],
        ["+hydra.callbacks.x._target_=os.mkdir", f"+hydra.callbacks.x.path={made}"],
        ["hydra.sweeper._target_=os.mkdir", f"+hydra.sweeper.path={made}"],
        [f"--config-dir={tmp_path}", "experiment=evil"],
    )
    of_trial = "+hydra.callbacks.x._target_=os.mkdir"
    for of_sweep in (*words, []):
        folder = lay_sweep(of_sweep, [] if of_sweep else [of_trial])
        done = run_cli(tmp_path, "resume=out")
        assert not made.exists()
        assert done.returncode == 2, done.stdout + done.stderr
        file, (word, *_) = ("sweep.json", of_sweep) if of_sweep else ("trials.jsonl", [of_trial])
        assert f"resume={folder}: {file} holds {key_of(word)}, which is no key of a trial" in done.stderr
        assert "add it to the command after resume=...:" in done.stderr and "Traceback" not in done.stderr
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
    """A word of its own file does not count."""
    folder = lay_sweep(["trust=true"])
    os.chown(folder, SOMEBODY, SOMEBODY)
    assert "belongs to user" in run_cli(tmp_path, "resume=out").stderr
    os.chown(folder, 0, 0)
    assert "sweep.json holds trust," in run_cli(tmp_path, "resume=out").stderr
    shutil.rmtree(folder)
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
def test_a_relative_path_to_the_shared_disk_is_meant_where_the_sweep_was_started(
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
def test_a_report_sends_the_token_to_no_address_of_somebody_elses_folder(
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
def test_a_variable_goes_into_no_report_of_somebody_elses_folder(lay_sweep, tmp_path: Path):
    folder = lay_sweep()
    config = folder / "0/.hydra/config.yaml"
    config.write_text(config.read_text().replace("ui: null", "ui: http://host/${oc.env:SOME_SECRET}"))
    os.chown(folder, SOMEBODY, SOMEBODY)
    assert report(tmp_path, "sweep=out", "trust=true", SOME_SECRET="hunter2").returncode == 0
    assert "hunter2" not in (folder / "report.html").read_text()
