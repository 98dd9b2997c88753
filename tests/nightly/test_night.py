"""Real nights: the same code twice, planted regressions, interrupted and killed ones, and the schedule itself."""

from __future__ import annotations

import http.server
import json
import os
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest

from fsdp_lab.nightly.nights import read_nights
from tests import forked
from tests.conftest import ROOT, STORE
from tests.processes import descendants, still_running
from tests.servers import lay_store
from tests.sweep.conftest import artifacts, runs

# Two settings, three repeats, in the sweep's own process: about ten seconds.
INLINE = (
    "engine=inline", "model=mlp", "forecast.enabled=false", "data.num_train=256", "data.num_val=32", "offload=none",
    "training.global_batch_size=32", "training.epochs=2", "sharding=per_block", "precision=fp32,bf16",
    "reshard_after_forward=always", STORE, "nightly.folder=nights", "nightly.repeats=3",
    "nightly.tolerance.samples_per_s=0.8", "nightly.others_cpu=1",
)  # fmt: skip


# Two threads that wait for each other lose a factor of ten when something else takes a core for a moment.
ONE_THREAD = {**os.environ, "OMP_NUM_THREADS": "1"}


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "fsdp_lab.nightly", *arguments]


def nightly(cwd: Path, *arguments: str, code: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run it to its end.

    Args:
        code: a folder with another copy of the package.
    """
    env = {**ONE_THREAD, **({"PYTHONPATH": str(code)} if code else {})}
    lay_store(cwd)
    return forked.run(cwd, "fsdp_lab.nightly", *arguments, seconds=280, environment=env)


def changed_code(folder: Path, file: str, *edits: tuple[str, str]) -> Path:
    """A copy of the project's code with a change in it, as somebody might have committed it."""
    for name in ("fsdp_lab", "conf", "hydra_plugins"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    text = (folder / file).read_text()
    for old, new in edits:
        assert text.count(old) == 1, f"{file} has changed: plant it anew"
        text = text.replace(old, new)
    (folder / file).write_text(text)
    return folder


def regressions(folder: Path) -> list[tuple[str, str]]:
    return [(f["setting"], f["metric"]) for f in read_nights(folder)[-1].findings if f["regression"]]


def pass_a_night(folder: Path) -> Path:
    done = nightly(folder, "--once", *INLINE, "nightly.keep=1", "cluster.storage_path=shared")
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="module")
def one_night(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a night that passed, or with two; what their trials write lies on a disk for all nodes."""
    return pass_a_night(tmp_path_factory.mktemp("nights"))


@pytest.fixture(scope="module")
def two_nights(one_night: Path) -> Path:
    """With a second night, of the same code, that passed, too."""
    return pass_a_night(one_night)


@pytest.fixture
def nights(two_nights: Path, tmp_path: Path) -> Path:
    """A copy of them, to go on with."""
    shutil.copytree(two_nights, tmp_path / "copy")
    return tmp_path / "copy"


@pytest.mark.ci
def test_the_same_code_twice_passes(two_nights: Path):
    first, second = read_nights(two_nights / "nights/nightly")
    assert (first.verdict, first.baseline) == ("good", None)
    assert (second.verdict, second.baseline) == ("good", first.id)
    assert set(second.results) == {"precision=fp32", "precision=bf16"}
    assert all(len(r.values["perf/samples_per_s"]) == 3 for r in second.results.values())
    assert {f["metric"] for f in second.findings} == {"peak MiB", "samples/s", "final loss"}
    tags = {run.info.run_id: run.data.tags for run in runs(two_nights)[0]}
    assert tags[second.run_id]["nightly.verdict"] == "good" and tags[second.run_id]["nightly.baseline"] == first.id
    assert "gate.md" in artifacts(two_nights, next(r for r in runs(two_nights)[0] if r.info.run_id == second.run_id))
    page = (two_nights / "nights/nightly/nights.html").read_text()
    assert first.id in page and second.id in page and "peak MiB by night" in page


@pytest.mark.ci
def test_repeats_lie_far_apart_and_old_nights_keep_all_but_their_checkpoints(two_nights: Path):
    folder = two_nights / "nights/nightly"
    nights = read_nights(folder)
    results = (folder / nights[1].id / "sweep/results.csv").read_text()
    order = [line.split(",")[2:4] for line in results.splitlines()[1:]]
    assert order == [[repeat, precision] for repeat in "012" for precision in ("fp32", "bf16")]
    first, second = (next((two_nights / "shared").glob(f"{night.id}-sweep-*")) for night in nights)
    assert (second / "0/model.pt").exists() and list((second / "0/checkpoints").iterdir())
    assert not (first / "0/model.pt").exists() and not (first / "0/checkpoints").exists()
    assert (first / "0/metrics.jsonl").exists() and (folder / nights[0].id / "sweep/report.html").exists()
    assert [night.pruned for night in nights] == [True, False]


@contextmanager
def webhook(status: int = 200) -> Iterator[tuple[str, list[Any]]]:
    """A server on this machine that takes JSON; `(address, what it got)`."""
    got: list[Any] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            got.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(status)
            self.end_headers()

        def log_message(self, *args: Any) -> None:
            pass

    server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/hook/t0psecret", got
    finally:
        server.shutdown()


@pytest.mark.ci
@pytest.mark.full  # beside other tests, its repeats may differ by more than the loader sleeps
def test_a_loader_that_sleeps_is_named_reported_and_stays_reported_until_it_is_accepted(
    nights: Path, two_nights: Path, tmp_path: Path
):
    sleepy = changed_code(
        tmp_path / "code",
        "fsdp_lab/training/loop.py",
        (
            "in _by_step(loader, config.training.grad_accum_steps, watch.timer):",
            "in _sleepy(loader, config, watch.timer):",
        ),
        (
            "def _by_step(",
            "def _sleepy(loader, config, timer):\n    import time\n"
            "    for step in _by_step(loader, config.training.grad_accum_steps, timer):\n"
            "        time.sleep(0.15 * (config.precision.param_dtype.name == 'bfloat16'))\n        yield step\n\n\n"
            "def _by_step(",
        ),
    )
    folder = nights / "nights/nightly"
    before = read_nights(folder)[-1].id
    with webhook() as (address, got):
        preset = sleepy / "conf/experiment/nightly.yaml"
        preset.write_text(preset.read_text().replace("nightly:\n", f"nightly:\n  notify: {{url: '{address}'}}\n"))
        done = nightly(nights, "--once", *INLINE, code=sleepy)
        trial = [a for a in INLINE if not a.startswith(("nightly.", "precision="))]
        alone = subprocess.run(
            [sys.executable, "-m", "fsdp_lab", "experiment=nightly", *trial, "hydra.run.dir=alone"],
            cwd=nights, env={**os.environ, "PYTHONPATH": str(sleepy)}, capture_output=True, timeout=100, check=False,
        )  # fmt: skip
        assert alone.returncode == 0
    assert done.returncode == 3, done.stdout + done.stderr
    assert regressions(folder) == [("precision=bf16", "samples/s")]
    night = read_nights(folder)[-1]
    assert (night.verdict, night.baseline) == ("regression", before)
    gate = (folder / night.id / "gate.md").read_text()
    assert "| `precision=bf16` | samples/s |" in gate and "**regression**" in gate
    assert re.search(r"^precision=bf16 +samples/s .* regression: worse by", done.stdout, re.MULTILINE), "no Markdown"
    (verdict,) = got
    assert (verdict["verdict"], verdict["night"], verdict["run_id"]) == ("regression", night.id, night.run_id)
    assert [(f["setting"], f["metric"]) for f in verdict["regressions"]] == [("precision=bf16", "samples/s")]
    tags = next(r.data.tags for r in runs(nights)[0] if r.info.run_id == night.run_id)
    assert tags["nightly.verdict"] == "regression" and tags["nightly.regressions"].startswith(
        "precision=bf16: samples/s"
    )
    # the address is a secret: it is nowhere in what the night left, nor in what it said
    assert "t0psecret" not in done.stdout + done.stderr
    everywhere = [*nights.rglob("*"), *two_nights.rglob("*")]  # MLflow keeps artifacts where the store was made
    written = [p for p in everywhere if p.is_file() and b"t0psecret" in p.read_bytes()]
    assert written == []

    plan = nightly(nights, "--check", *INLINE)
    assert f"baseline: {before} (good)" in plan.stdout  # a bad night does not move it
    assert f"last:     {night.id} (regression: precision=bf16: samples/s " in plan.stdout
    accepted = nightly(nights, "--accept", "the data grew", *INLINE)
    assert accepted.returncode == 0, accepted.stderr
    assert "accepts: precision=bf16: samples/s " in accepted.stdout
    assert f"baseline: {night.id} (accepted)" in nightly(nights, "--check", *INLINE).stdout
    tags = next(r.data.tags for r in runs(nights)[0] if r.info.run_id == night.run_id)
    assert tags["nightly.accepted_reason"] == "the data grew"
    assert f"accepted {night.id} nightly" in [run.info.run_name for run in runs(nights)[0]]
    assert read_nights(folder)[-1].accepted["reason"] == "the data grew"  # type: ignore[index]


@pytest.mark.ci
def test_a_setting_that_keeps_every_parameter_unsharded_is_named(tmp_path: Path):
    """With two workers, as one has nothing to shard."""
    ray = (
        "data.num_train=64", "data.num_val=32", "training.global_batch_size=32", "training.timing_warmup_steps=0",
        "training.epochs=1", "cluster.num_workers=2", "sharding=root,per_block", "precision=fp32", "offload=none",
        "reshard_after_forward=always", STORE, "nightly.folder=nights",
        "nightly.repeats=1", "nightly.tolerance.samples_per_s=100", "export=false", "checkpoint.mode=off",
    )  # fmt: skip
    assert nightly(tmp_path, "--once", *ray).returncode == 0
    unsharded = changed_code(
        tmp_path / "code",
        "fsdp_lab/training/parallelize.py",
        ('"reshard_after_forward": reshard_after_forward(config.reshard_after_forward),',
         '"reshard_after_forward": False if config.sharding.granularity.name == "per_block" else '
         "reshard_after_forward(config.reshard_after_forward),"),
    )  # fmt: skip
    done = nightly(tmp_path, "--once", *ray, code=unsharded)
    assert done.returncode == 3, done.stdout + done.stderr
    assert regressions(tmp_path / "nights/nightly") == [("sharding=per_block", "peak MiB")]


@dataclass
class Scheduled:
    """A schedule of every minute at work: `before` so many nights were there when it was started."""

    nights: Path
    started: datetime
    before: int
    process: subprocess.Popen[str]

    @property
    def folder(self) -> Path:
        return self.nights / "nights/nightly"


@pytest.fixture(scope="module")
def schedule(two_nights: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scheduled]:
    """For `test_two_nights_by_the_schedule`; it waits for whole minutes beside the tests before that one, so that what
    they compute is somebody else's, and no speed is judged."""
    nights = tmp_path_factory.mktemp("scheduled") / "copy"
    shutil.copytree(two_nights, nights)
    folder = nights / "nights/nightly"
    started = datetime.now(UTC)
    (folder / "since.json").write_text(json.dumps({"since": (started - timedelta(minutes=30)).timestamp()}))
    for night in read_nights(folder):  # so long ago that minutes were missed since
        content = json.loads((folder / night.id / "night.json").read_text())
        content |= {"due": night.due - 3600, "begun": night.begun - 3600}
        (folder / night.id / "night.json").write_text(json.dumps(content))
    before = len(read_nights(folder))
    process = subprocess.Popen(
        command(*INLINE, "nightly.cron='* * * * *'", "nightly.others_cpu=0.01"), cwd=nights, text=True,
        stdout=(nights / "said.log").open("w"), stderr=subprocess.STDOUT, env=ONE_THREAD,
    )  # fmt: skip
    try:
        yield Scheduled(nights, started, before, process)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


@pytest.mark.usefixtures("schedule")  # its waiting is spent here
@pytest.mark.ci
def test_an_interrupted_night_goes_on_whatever_interrupted_it(nights: Path, tmp_path: Path):
    """By SIGTERM, with other code in between, with the store away, by kill."""
    more = (*INLINE, "training.epochs=20", "nightly.folder=others", "nightly.repeats=2")
    folder = nights / "others/nightly"
    other = changed_code(tmp_path / "code", "fsdp_lab/training/loop.py", ("def _by_step(", "\ndef _by_step("))

    commit = read_nights(nights / "nights/nightly")[0].commit  # of the code as it is; of the copy there is none
    assert commit

    def results() -> dict[Path, str]:
        collected = {}
        for path in folder.glob("*/sweep/*/outcome.json"):
            with suppress(FileNotFoundError):  # just put aside
                collected[path] = path.read_text()
        return collected

    def interrupt(number: signal.Signals, code: Path = ROOT) -> tuple[int, list[psutil.Process]]:
        """Start, wait for one more result, and then."""
        process = subprocess.Popen(
            command("--once", *more), cwd=nights, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            env={**ONE_THREAD, "PYTHONPATH": str(code)},
        )  # fmt: skip
        until, before = time.monotonic() + 100, 0
        # what is put aside first: its results are not of this start
        while (code is ROOT and not list(folder.glob("*/sweep.1"))) or len(results()) <= before:
            assert process.poll() is None and time.monotonic() < until
            time.sleep(0.05)
        children = descendants(process.pid)
        if number == signal.SIGTERM:
            second = nightly(nights, "--once", *more)
            assert second.returncode == 2 and "is in use by another sweep or run (process" in second.stderr
            assert "now:      a night runs here (process" in nightly(nights, "--check", *more).stdout
            assert nightly(nights, "--continue", *more).returncode == 0
        process.send_signal(number)
        return process.wait(60), children

    status, _ = interrupt(signal.SIGTERM, other)
    assert status == 130
    (night,) = read_nights(folder)
    assert night.verdict == "running" and night.commit != commit
    check = nightly(nights, "--check", *more).stdout
    assert re.search(r"to resume it before [^:]+:\d\d \S+: python -m fsdp_lab\.nightly --continue", check), check

    status, children = interrupt(signal.SIGKILL)  # with the code as it was: what the other has is put aside
    assert status == -signal.SIGKILL
    assert still_running(children, 60) == [], "the sweep ends with its night"
    (aside,) = folder.glob("*/sweep.1")
    assert list(aside.glob("*/outcome.json"))
    assert read_nights(folder)[0].commit == commit
    finished = results()
    assert finished

    (nights / "mlflow.db").rename(nights / "away.db")
    (nights / "mlflow.db").mkdir()
    refused = nightly(nights, "--continue", *more)
    assert refused.returncode == 2 and "cannot resume: fix the error above" in refused.stderr
    assert results() == finished and read_nights(folder)[0].verdict == "running"
    (nights / "mlflow.db").rmdir()
    (nights / "away.db").rename(nights / "mlflow.db")
    assert read_nights(folder)[0].attempts == 0  # interrupted three times by now, which costs it no attempt

    done = nightly(nights, "--continue", *more)
    assert done.returncode == 0, done.stdout + done.stderr
    (again,) = read_nights(folder)
    assert (again.id, again.verdict) == (night.id, "good")
    assert all(path.read_text() == text for path, text in finished.items())  # no finished trial was run again
    assert nightly(nights, "--continue", *more).stdout == "no night was interrupted\n"


def test_a_sweep_that_dies_by_itself_is_reported_as_a_failed_night(tmp_path: Path):
    dying = changed_code(
        tmp_path / "code",
        "fsdp_lab/sweep/start.py",
        (
            "    console = Console(plan.state, plan.swept, ticks=plan.config.engine is not Engine.inline)\n",
            "    import os, signal\n    os.kill(os.getpid(), signal.SIGKILL)\n",
        ),
    )
    with webhook() as (address, got):
        done = nightly(tmp_path, "--once", *INLINE, f"++nightly.notify.url={address}", code=dying)
    assert done.returncode == 1, done.stdout + done.stderr
    (night,) = read_nights(tmp_path / "nights/nightly")
    assert (night.verdict, night.attempts) == ("failed", 3)
    assert [verdict["verdict"] for verdict in got] == ["failed"]
    assert "t0psecret" not in (tmp_path / "nights/nightly" / night.id / "sweep/sweep.json").read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("training.epochs=1",), "is of another study: training.epochs was 2 and is 1"),
        (("precision=fp32",), "is of another study: axis precision was fp32,bf16 and is"),
        (("nightly.baseline=yesterday",), "nightly.baseline=yesterday is not a night of"),
        (("nightly.cron='0 0 31 2 *'",), "never runs"),
        (("nightly.repeats=0",), "nightly.repeats=0 is below 1"),
        (("nightly.significance=1",), "nightly.significance=1.0 is outside (0, 0.5)"),
        (("nightly.notify.url=ftp://x",), "nightly.notify.url is not an http or https address"),
        (("nightly.notify.url='http://[x/hook'",), "nightly.notify.url is not an http or https address"),
        (("nightly.cron=0 2,14 * * *",), "nightly.cron has several values, but takes one"),
        (("resume=last",), "resume=last: an interrupted night resumes by itself"),
        (("repeat=0,1",), "nightly.repeats=3 sets how often a night trains each setting"),
        (("nightly.nots=1",), "nightly.nots is not a key"),
        (("--never",), "--never is not an option here"),
        (("--accept",), "--accept takes a reason"),
        (("--accept", "x", "nightly.folder=empty"), "no night has ended in empty/nightly"),
    ],
)
def test_bad_input_is_reported_before_anything_runs(one_night: Path, arguments: tuple[str, ...], message: str):
    option = () if arguments[0].startswith("--") else ("--once",)
    overridden = {a.partition("=")[0] for a in arguments}
    rest = [a for a in INLINE if a.partition("=")[0] not in overridden]
    before = [night.id for night in read_nights(one_night / "nights/nightly")]
    words = [*rest, *arguments] if arguments == ("--accept",) else [*option, *arguments, *rest]  # its reason comes next
    done = nightly(one_night, *words)
    assert done.returncode == 2 and message in done.stderr, done.stdout + done.stderr
    assert "Traceback" not in done.stderr and len(done.stderr.splitlines()) == 1
    assert [night.id for night in read_nights(one_night / "nights/nightly")] == before


def test_a_store_of_a_newer_mlflow_is_reported_and_the_night_has_failed(one_night: Path, tmp_path: Path):
    nights = shutil.copytree(one_night, tmp_path / "copy")
    with closing(sqlite3.connect(nights / "mlflow.db")) as database:
        database.execute("UPDATE alembic_version SET version_num = 'ffffffffffff'")
        database.commit()
    done = nightly(nights, "--once", *INLINE)
    assert done.returncode == 2 and "another version of MLflow" in done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    assert read_nights(nights / "nights/nightly")[-1].verdict == "failed"


def test_a_webhook_that_is_down_or_refuses_changes_nothing():
    from fsdp_lab.config.nightly import NotifyConfig
    from fsdp_lab.nightly.notify import notify

    problem = notify(NotifyConfig("http://127.0.0.1:9/t0psecret", 2.0), {"verdict": "good"})
    assert problem is not None and "127.0.0.1:9 did not take the verdict" in problem and "t0psecret" not in problem
    with webhook(status=500) as (address, got):
        problem = notify(NotifyConfig(address, 5.0), {"verdict": "good"})
    assert problem is not None and "refused the verdict (500 Internal Server Error); it is not sent again" in problem
    assert "t0psecret" not in problem and len(got) == 1
    assert notify(NotifyConfig(None), {}) is None


@pytest.mark.ci
def test_two_nights_by_the_schedule(schedule: Scheduled):
    """A night that was missed while nothing ran is run once, the next at its minute; then SIGTERM is a clean end."""
    process, folder, started = schedule.process, schedule.folder, schedule.started
    try:
        until = time.monotonic() + 200
        while sum(night.over for night in read_nights(folder)) < schedule.before + 2:
            assert process.poll() is None, (schedule.nights / "said.log").read_text()
            assert time.monotonic() < until, "no two nights within 200 s"
            time.sleep(0.2)
        # beside it, but not within a night: where these take long the next has begun
        accepting = (schedule.nights, "--accept", "as it should be", *INLINE)
        while "is in use" in (accepted := nightly(*accepting)).stderr:
            assert time.monotonic() < until, accepted.stderr
        assert accepted.returncode == 0, accepted.stderr
    finally:
        process.terminate()
        process.wait(100)
    printed = (schedule.nights / "said.log").read_text()
    missed, regular, *more = read_nights(folder)[schedule.before :]
    assert missed.verdict == "good" and "accepted" in [night.verdict for night in (regular, *more)]
    assert missed.due <= started.timestamp() and missed.due % 60 == 0  # one of thirty
    assert regular.due >= started.timestamp() and regular.due % 60 == 0
    assert 0 <= regular.begun - regular.due < 5 or regular.begun >= missed.ended  # or it waited for the one before
    third = any(not night.over for night in read_nights(folder))  # where a minute went by meanwhile
    assert process.returncode == (130 if third else 0), printed
    assert "Traceback" not in printed
