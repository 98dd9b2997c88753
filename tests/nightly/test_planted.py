"""The command of nights, from a sweep's readings to the verdict. The sweeps are planted; real ones: test_night.py."""

from __future__ import annotations

import errno
import json
import os
import re
import subprocess
import threading
import time
from contextlib import nullcontext
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from fsdp_lab.commands import nightly as command
from fsdp_lab.config import ConfigError
from fsdp_lab.config.nightly import ToleranceConfig
from fsdp_lab.config.source_code import code_digest
from fsdp_lab.nightly import night as night_module
from fsdp_lab.nightly import texts
from fsdp_lab.nightly.gate import Night, Verdict
from fsdp_lab.nightly.night import night_id, read_nights, run_night, write_night
from fsdp_lab.nightly.texts import WEBHOOK
from fsdp_lab.record.plain_loops import PlainLoop, write_plain_loops
from tests import trained
from tests.conftest import INLINE, without
from tests.folders import Store
from tests.nightly.conftest import IN_TWELVE_HOURS, made_up_nights

WORDS = (
    *without(INLINE, "precision=", "hydra."), *trained.AXES, "nightly.repeats=1",
    "nightly.folder=nights", *IN_TWELVE_HOURS,
)  # fmt: skip
SLOW = "precision=bf16 optimizer.lr=0.001"
SPEED = "perf/samples_per_s"
BOTH_RATES = {(SLOW, SPEED), ("precision=bf16 optimizer.lr=1e-09", SPEED)}


class PlantedNights:
    """Runs `python -m fsdp_lab.nightly` in this process, each night a minute after the one before.

    Attributes:
        speeds: precision -> samples/s of the next nights, whose sweeps are copies of one that has trained.
        now: the time of the nights, in seconds since 1970.
        sweep: replaces a night's sweep, given its folder; returns its exit status.
    """

    def __init__(self, cwd: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self.speeds, self.now, self.sweep = {"fp32": 1000.0, "bf16": 2000.0}, time.time() - 86400.0, self.copy
        self.cwd, self.folder = cwd, cwd / "nights" / "nightly"
        self._monkeypatch, self._capsys = monkeypatch, capsys
        monkeypatch.chdir(cwd)
        monkeypatch.delenv(WEBHOOK, raising=False)
        monkeypatch.setattr(command.signal, "signal", lambda *arguments: None)
        monkeypatch.setattr(command, "run_night", lambda study: run_night(study, lambda: self.now))
        monkeypatch.setattr(night_module, "run_sweep", lambda arguments, folder: self.sweep(folder))

    def copy(self, folder: Path) -> int:
        trained.copy_sweep(folder, self.speeds)
        return 0

    @property
    def all(self) -> list[Night]:
        return read_nights(self.folder)

    def __call__(self, *words: str) -> subprocess.CompletedProcess[str]:
        self.now += 60.0
        self._monkeypatch.setattr("sys.argv", ["nightly", *words])
        status = command.main()
        out, err = self._capsys.readouterr()
        return subprocess.CompletedProcess(words, status, out, err)


@pytest.fixture
def nights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> PlantedNights:
    """No night yet, in a folder with the store of the sweep that is copied."""
    return PlantedNights(trained.copy_trained(tmp_path), monkeypatch, capsys)


@pytest.mark.ci
@pytest.mark.documents("python -m fsdp_lab.nightly --check", 'python -m fsdp_lab.nightly --accept "reason"')
def test_a_slower_setting_is_reported_until_it_is_accepted(nights: PlantedNights, monkeypatch: pytest.MonkeyPatch):
    """Of four nights: the same readings twice, and then half of the settings at a quarter of their speed, twice."""
    assert [nights("--once", *WORDS).returncode for _ in range(2)] == [0, 0]
    first, before = nights.all
    assert (first.verdict, first.baseline, before.verdict, before.baseline) == ("good", None, "good", first.id)
    nights.speeds["bf16"] = 500.0
    posted: list[Any] = []
    monkeypatch.setenv(WEBHOOK, "http://127.0.0.1/hook")
    post = SimpleNamespace(open=lambda request, timeout: nullcontext(posted.append(request)))
    monkeypatch.setattr(texts, "build_opener", lambda *handlers: post)
    for _ in range(2):
        done = nights("--once", *WORDS)
        assert done.returncode == 3 and re.search(r"samples/s .* -75\.0 % .*regression", done.stdout), done.stderr
        night = nights.all[-1]
        assert (night.verdict, night.baseline) == ("regression", before.id)
        assert {(f.setting, f.metric) for f in night.regressions} == BOTH_RATES
        verdict = json.loads(posted[-1].data)
        assert (verdict["verdict"], verdict["night"], verdict["run_id"]) == ("regression", night.id, night.run_id)
        assert verdict["text"].startswith("nightly: ") and "regression" in verdict["text"]
        assert {(f["setting"], f["metric"]) for f in verdict["regressions"]} == BOTH_RATES
        assert f"| `{SLOW}` | samples/s |" in (nights.folder / night.id / "gate.md").read_text()
        plan = nights("--check", *WORDS).stdout
        assert f"baseline: {before.id} (good)" in plan, "a bad night does not move it"
        assert f"last:     {night.id} (regression: precision=bf16" in plan
    accepted = nights("--accept", "the data grew", *WORDS)
    assert accepted.returncode == 0 and f"accepts: {SLOW}: samples/s" in accepted.stdout
    (run,) = Store(nights.cwd).parents
    tags = {key: run.data.tags[f"nightly.{key}"] for key in ("verdict", "baseline", "accepted_reason")}
    assert tags == {"verdict": "accepted", "baseline": before.id, "accepted_reason": "the data grew"}
    assert "gate.md" in Store(nights.cwd).artifacts(run)
    assert nights("--once", *WORDS).returncode == 0 and nights.all[-1].baseline == night.id
    page = (nights.folder / "nights.html").read_text()
    shown = [str(each.verdict) for each in nights.all if each.id in page]
    assert shown == ["good", "good", "regression", "accepted", "good"]


@pytest.mark.ci
def test_a_setting_that_trains_another_model_has_failed(nights: PlantedNights):
    """By its plain loop: in the second night those of bfloat16, whatever their rate, and in the third all."""
    wrong: list[int] = []

    def sweep(folder: Path) -> int:
        nights.copy(folder)
        first = "train/first_loss"
        loss = json.loads((folder / "0/metrics.jsonl").read_text().splitlines()[0])[first]
        write_plain_loops(folder, [PlainLoop(0, 1, {first: loss}, steps=3, device="cpu")])
        for number in wrong:
            trained.plant(folder / str(number), **{first: 2 * loss})
        return 0

    nights.sweep = sweep
    assert nights("--once", *WORDS).returncode == 0
    wrong.append(2)
    assert nights("--once", *WORDS).returncode == 3
    rates = (SLOW, "precision=bf16 optimizer.lr=1e-09")
    assert {(f.setting, f.metric) for f in nights.all[-1].regressions} == {(rate, "status") for rate in rates}
    wrong.append(0)
    assert nights("--once", *WORDS).returncode == 1 and nights.all[-1].verdict == "failed"


def test_what_changed_in_the_users_code_is_named(nights: PlantedNights, monkeypatch: pytest.MonkeyPatch):
    """The user's file is another one in the second night, which is 30 % slower."""
    monkeypatch.syspath_prepend(nights.cwd)

    def sweep(folder: Path) -> int:
        nights.copy(folder)
        file, own = folder / "sweep.json", {"user_packages": ["my_model"], "code": code_digest(["my_model"])}
        file.write_text(json.dumps(json.loads(file.read_text()) | own))
        return 0

    nights.sweep = sweep
    for speed, status in ((262.0, 0), (183.0, 3)):
        nights.speeds["fp32"] = speed
        (nights.cwd / "my_model.py").write_text(f"SPEED = {speed}")
        assert nights("--once", *WORDS).returncode == status
    night = nights.all[-1]
    assert {(f.setting.split()[0], f.metric) for f in night.regressions} == {("precision=fp32", SPEED)}
    assert [what for what, *_ in night.changed] == ["user code my_model"]
    assert "your code (my_model)" in (nights.folder / "nights.html").read_text()


@pytest.mark.ci
def test_an_interrupted_night_is_incomplete_and_the_next_starts(nights: PlantedNights):
    assert nights("--once", *WORDS).returncode == 0
    nights.sweep = Mock(side_effect=KeyboardInterrupt)
    done = nights("--once", *WORDS)
    assert done.returncode == 130 and "interrupted during a night, which stays incomplete" in done.stdout
    first, cut = nights.all
    incomplete = f"<td>{cut.id}</td><td>incomplete</td>"
    assert incomplete in (nights.folder / "nights.html").read_text()
    plan = nights("--check", *WORDS).stdout
    assert f"last:     {cut.id} (incomplete)" in plan and f"baseline: {first.id} (good)" in plan
    for exits_with, status in ((-9, 1), (2, 2)):  # it dies, or is refused
        nights.sweep = Mock(return_value=exits_with)
        done = nights("--once", *WORDS)
        assert done.returncode == status and f"the night's sweep ended with status {exits_with}" in done.stdout
    nights.sweep = nights.copy
    assert nights("--once", *WORDS).returncode == 0
    assert [night.verdict for night in nights.all] == ["good", "incomplete", "failed", "failed", "good"]
    assert nights.all[-1].baseline == first.id
    assert (nights.folder / "nights.html").read_text().count(incomplete) == 1


def test_a_night_of_a_clock_that_was_wrong_keeps_its_place(nights: PlantedNights):
    """The second of three nights is dated years ahead. It is the third one that counts from then on."""
    for ahead in (0.0, 4e8, -4e8):
        nights.now += ahead
        assert nights("--once", *WORDS).returncode == 0
    first, wrong, third = nights.all
    assert first.begun < third.begun < wrong.begun and (wrong.baseline, third.baseline) == (first.id, wrong.id)
    plan = nights("--check", *WORDS).stdout
    assert f"by a clock that was wrong: night {wrong.id};" in plan and f"baseline: {third.id} (good)" in plan
    assert f"night {third.id} is the baseline" in nights("--accept", "the clock is right", *WORDS).stdout


def test_a_machine_is_known_by_its_device_and_not_by_its_name(nights: PlantedNights, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(night_module, "cpu_name", lambda: "A CPU (96 cores)")
    for name in ("pod-1", "pod-2"):
        monkeypatch.setattr("platform.node", lambda name=name: name)
        assert nights("--once", *WORDS).returncode == 0
    assert nights.all[-1].origin["machine"] == "A CPU (96 cores), 1 worker"
    assert [f.outcome for f in nights.all[-1].findings if f.metric == SPEED] == ["ok"] * trained.COUNT


def test_the_gate_judges_by_what_is_typed(nights: PlantedNights, monkeypatch: pytest.MonkeyPatch):
    judge = Mock(return_value=[])
    monkeypatch.setattr(night_module, "judge", judge)
    assert nights("--once", *WORDS, "nightly.significance=0.02", "nightly.tolerance.loss=0.1").returncode == 0
    assert judge.call_args.args[2:] == (ToleranceConfig(loss=0.1), 0.02)


BAD_INPUT = (
    (("--once", "training.epochs=1"), "is of another study: training.epochs was 3 and is 1"),
    (("--once", "precision=fp32"), "is of another study: axis precision was fp32,bf16 and is"),
    (("--once", "nightly.cron=0 2,14 * * *"), "nightly.cron has several values, but takes one"),
    (("--once", "resume=last"), "resume=last: a night always trains anew"),
    (("--accept",), "--accept takes a reason"),
)


@pytest.mark.ci
def test_bad_input_is_reported_before_anything_runs(nights: PlantedNights):
    nights.sweep = lambda folder: pytest.fail("it runs")
    study = command.read_study(list(WORDS)).settings
    write_night(nights.folder, Night(night_id(nights.now), nights.now, Verdict.good, study=study))
    for arguments, message in BAD_INPUT:
        done = nights(*without(WORDS, *(word.partition("=")[0] + "=" for word in arguments)), *arguments)
        assert done.returncode == 2 and message in done.stderr and len(done.stderr.splitlines()) == 1
    assert len(nights.all) == 1


@pytest.mark.parametrize("words", ["search=optuna", "search=random", "scheduler=asha", "forecast.prune=true"])
def test_a_study_that_draws_or_drops_settings_is_refused(words: str):
    more = ["forecast.capacity_gib=24"] if "prune" in words else []
    with pytest.raises(ConfigError, match=f"^{words}: a night runs every setting of its study to its end"):
        command.read_study([*without(WORDS, "engine=", "forecast.enabled="), *more, words])


def test_nights_with_other_cores_are_of_another_study():
    here, there = (command.read_study([*WORDS, *words]) for words in ([], ["cluster.cpus_per_worker=0.5"]))
    night = Night("", 0.0, study=here.settings)
    assert there.differences(night) == ["cluster.cpus_per_worker was 1.0 and is 0.5"]
    assert command.read_study([*WORDS, "cluster.cpus_per_worker=1"]).differences(night) == []


def test_a_webhook_that_is_down_is_a_note_and_changes_no_verdict(
    nights: PlantedNights, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv(WEBHOOK, "http://127.0.0.1:9/t0psecret")
    done = nights("--once", *WORDS)
    note = f"{WEBHOOK}: 127.0.0.1:9 did not accept the verdict"
    assert done.returncode == 0 and done.stdout.count(note) == 1 and nights.all[-1].verdict == "good"
    assert nights.all[-1].note.startswith(note) and note in (nights.folder / "nights.html").read_text()
    assert "t0psecret" not in done.stdout + done.stderr + nights.all[-1].note
    for address in ("ftp://x/t0psecret", "http://me:t0psecret@x/"):
        monkeypatch.setenv(WEBHOOK, address)
        refused = nights("--once", *WORDS)
        assert refused.returncode == 2 and f"{WEBHOOK} is not an http or https address" in refused.stderr
        assert "t0psecret" not in refused.stderr


@pytest.mark.documents("python -m fsdp_lab.nightly --judge")
def test_a_verdict_that_the_disk_does_not_take_is_posted_and_judged_again(
    nights: PlantedNights, monkeypatch: pytest.MonkeyPatch
):
    """The disk is full from the end of the sweep on."""
    refused = nights("--judge", *WORDS)
    assert refused.returncode == 2 and "nothing to judge; run one with --once" in refused.stderr
    posted: list[Any] = []
    monkeypatch.setenv(WEBHOOK, "http://127.0.0.1/hook")
    post = SimpleNamespace(open=lambda request, timeout: nullcontext(posted.append(request)))
    monkeypatch.setattr(texts, "build_opener", lambda *handlers: post)

    def full(path: Path, *_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    with monkeypatch.context() as disk:
        nights.sweep = lambda folder: disk.setattr(night_module, "write_text", full) or nights.copy(folder)
        done = nights("--once", *WORDS)
    (night,) = nights.all
    assert (
        done.returncode == 2 and night.verdict == "incomplete" and [json.loads(posted[0].data)["verdict"]] == ["good"]
    )
    assert re.search(rf"{night.id}: good, but .*{night.id}.json cannot be written .*--judge\.$", done.stderr.rstrip())
    assert nights("--judge", *WORDS).returncode == 0 and nights.all[-1].verdict == "good"
    with monkeypatch.context() as disk:
        disk.setattr(night_module, "write_text", full)
        assert "free the disk, or set nightly.folder to a folder that can be" in nights("--once", *WORDS).stderr
    assert (nights.folder / night.id / "gate.md").exists() and "is good" in nights("--judge", *WORDS).stderr


def test_a_webhook_that_redirects_is_a_note(monkeypatch: pytest.MonkeyPatch):
    """urllib would follow a 301 with a GET, to which the server below answers."""
    asked: list[str] = []

    class Moved(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked.append(self.command)
            self.send_response(int(self.path[1:]))
            self.send_header("Location", "/there")
            self.end_headers()

        def do_GET(self) -> None:
            asked.append(self.command)
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Moved) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        for status in (301, 302, 303, 307, 308):
            monkeypatch.setenv(WEBHOOK, f"http://127.0.0.1:{server.server_port}/{status}")
            problem = texts.notify("nightly", Path("nights"), made_up_nights(1)[0])
            assert problem and f"did not accept the verdict ({status})" in problem
        server.shutdown()
    assert asked == ["POST"] * 5


def test_a_document_that_cannot_be_read_is_refused_by_its_name(nights: PlantedNights):
    """Its id, which becomes the name of a folder, may be another's doing."""
    nights.folder.mkdir(parents=True)
    (nights.folder / "2026-11-22T02-00-00Z.json").write_text(json.dumps({"id": "../../x", "begun": 0}))
    done = nights("--once", *WORDS)
    assert done.returncode == 2 and "nights/nightly/2026-11-22T02-00-00Z.json cannot be read" in done.stderr
