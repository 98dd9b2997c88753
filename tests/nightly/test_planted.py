"""The command of nights, from a sweep's readings to the verdict. The sweeps are planted; real ones: test_night.py."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from fsdp_lab.config.code import code_digest
from fsdp_lab.nightly import night as night_module
from fsdp_lab.nightly.gate import Night, Verdict
from fsdp_lab.nightly.night import night_id, run_sweep, write_night
from fsdp_lab.nightly.texts import WEBHOOK, notify
from tests import trained
from tests.folders import Store
from tests.nightly.conftest import WORDS, PlantedNights, webhook

SLOW = "precision=bf16 optimizer.lr=0.001"
SPEED = "perf/samples_per_s"
BOTH_RATES = {(SLOW, SPEED), ("precision=bf16 optimizer.lr=1e-09", SPEED)}
ID = "2026-11-22T02-00-00Z"


def regressions(night: Night) -> set[tuple[str, str]]:
    return {(f.setting, f.metric) for f in night.regressions}


def tags(nights: PlantedNights) -> dict[str, str]:
    (run,) = Store(nights.cwd).parents
    return dict(run.data.tags)


@pytest.mark.ci
def test_the_same_readings_pass_and_a_slower_setting_is_reported(
    nights: PlantedNights, monkeypatch: pytest.MonkeyPatch
):
    assert [nights("--once", *WORDS).returncode for _ in range(2)] == [0, 0]
    first, second = nights.all
    assert (first.verdict, first.baseline, second.verdict, second.baseline) == ("good", None, "good", first.id)
    assert {f.metric for f in second.findings} == {"memory/peak_bytes", SPEED, "loss", "perf/data_wait_share"}
    assert second.changed == []
    nights.speeds["bf16"] = 500.0
    with webhook() as (address, got), monkeypatch.context() as environment:
        environment.setenv(WEBHOOK, address)
        done = nights("--once", *WORDS)
    assert done.returncode == 3, done.stdout + done.stderr
    night = nights.last
    assert (night.verdict, night.baseline, regressions(night)) == ("regression", second.id, BOTH_RATES)
    assert f"| `{SLOW}` | samples/s |" in (nights.folder / night.id / "gate.md").read_text()
    assert re.search(r"samples/s .* -75\.0 % .*regression", done.stdout)
    (verdict,) = got
    assert (verdict["verdict"], verdict["night"], verdict["run_id"]) == ("regression", night.id, night.run_id)
    assert {(f["setting"], f["metric"]) for f in verdict["regressions"]} == BOTH_RATES
    assert tags(nights)["nightly.verdict"] == "regression" and tags(nights)["nightly.baseline"] == second.id
    assert f"{SLOW}: samples/s" in tags(nights)["nightly.regressions"]
    store = Store(nights.cwd)
    assert "gate.md" in store.artifacts(store.parents[0])
    page = (nights.folder / "nights.html").read_text()
    assert all(each.id in page for each in nights.all) and "peak MiB by night" in page


@pytest.mark.ci
@pytest.mark.documents("python -m fsdp_lab.nightly --check", 'python -m fsdp_lab.nightly --accept "reason"')
def test_a_slower_setting_stays_reported_until_it_is_accepted(nights: PlantedNights):
    assert nights("--once", *WORDS).returncode == 0
    before = nights.last.id
    nights.speeds["bf16"] = 500.0
    for _ in range(2):
        assert nights("--once", *WORDS).returncode == 3 and nights.last.baseline == before
        plan = nights("--check", *WORDS).stdout
        assert f"baseline: {before} (good)" in plan, "a bad night does not move it"
        assert f"last:     {nights.last.id} (regression: precision=bf16" in plan
    night = nights.last
    accepted = nights("--accept", "the data grew", *WORDS)
    assert accepted.returncode == 0 and f"accepts: {SLOW}: samples/s" in accepted.stdout
    assert f"baseline: {night.id} (accepted)" in nights("--check", *WORDS).stdout
    assert tags(nights)["nightly.accepted_reason"] == "the data grew"
    assert tags(nights)["mlflow.runName"] == f"accepted {night.id} nightly"
    assert nights("--once", *WORDS).returncode == 0 and nights.last.baseline == night.id


def test_what_changed_in_the_users_code_is_named(nights: PlantedNights, monkeypatch: pytest.MonkeyPatch):
    """The user's file is another one in the second night, which is 30 % slower."""
    monkeypatch.syspath_prepend(nights.cwd)

    def sweep(folder: Path) -> int:
        trained.copy_sweep(folder, nights.speeds)
        record = json.loads((folder / "sweep.json").read_text())
        record |= {"user_packages": ["my_model"], "code": code_digest(["my_model"])}
        (folder / "sweep.json").write_text(json.dumps(record))
        return 0

    nights.sweep = sweep
    for speed, status in ((262.0, 0), (183.0, 3)):
        nights.speeds["fp32"] = speed
        (nights.cwd / "my_model.py").write_text(f"SPEED = {speed}")
        done = nights("--once", *WORDS)
        assert done.returncode == status, done.stdout + done.stderr
    assert {(setting.split()[0], metric) for setting, metric in regressions(nights.last)} == {("precision=fp32", SPEED)}
    assert [what for what, *_ in nights.last.changed] == ["user code my_model"]
    assert "your code (my_model)" in (nights.folder / "nights.html").read_text()


@pytest.mark.ci
def test_an_interrupted_night_is_incomplete_and_the_next_starts(nights: PlantedNights):
    def interrupted(folder: Path) -> int:
        raise KeyboardInterrupt

    assert nights("--once", *WORDS).returncode == 0
    copy, nights.sweep = nights.sweep, interrupted
    done = nights("--once", *WORDS)
    assert done.returncode == 130 and "interrupted during a night, which stays incomplete" in done.stdout
    first, cut = nights.all
    assert cut.verdict == "incomplete"
    plan = nights("--check", *WORDS).stdout
    assert f"last:     {cut.id} (incomplete)" in plan and f"baseline: {first.id} (good)" in plan
    nights.sweep = copy
    assert nights("--once", *WORDS).returncode == 0
    assert [night.verdict for night in nights.all] == ["good", "incomplete", "good"]
    assert nights.last.baseline == first.id
    assert (nights.folder / "nights.html").read_text().count(f"<td>{cut.id}</td><td>incomplete</td>") == 1


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
    assert nights.last.origin["machine"] == "A CPU (96 cores), 1 worker"
    assert [f.outcome for f in nights.last.findings if f.metric == SPEED] == ["ok"] * trained.COUNT


@pytest.mark.parametrize(("exits_with", "status"), [(-9, 1), (2, 2)])
def test_a_sweep_that_dies_or_is_refused_is_a_failed_night(
    nights: PlantedNights, monkeypatch: pytest.MonkeyPatch, exits_with: int, status: int
):
    nights.sweep = lambda folder: exits_with
    with webhook() as (address, got):
        monkeypatch.setenv(WEBHOOK, address)
        done = nights("--once", *WORDS)
    assert done.returncode == status and nights.last.verdict == "failed"
    assert f"the night's sweep ended with status {exits_with}" in done.stdout
    assert [verdict["verdict"] for verdict in got] == ["failed"]


BAD_INPUT = (
    (("training.epochs=1",), "is of another study: training.epochs was 3 and is 1"),
    (("precision=fp32",), "is of another study: axis precision was fp32,bf16 and is"),
    (("nightly.cron='0 0 31 2 *'",), "never runs"),
    (("nightly.significance=1",), "nightly.significance=1.0 is outside (0, 0.5)"),
    (("nightly.cron=0 2,14 * * *",), "nightly.cron has several values, but takes one"),
    (("resume=last",), "resume=last: a night always trains anew"),
    (("repeat=0,1",), "nightly.repeats=3 sets how often a night trains each setting"),
    (("--never",), "--never is not an option here"),
    (("--accept",), "--accept takes a reason"),
    (("--accept", "x", "nightly.folder=empty"), "no night has ended in empty/nightly"),
)


@pytest.mark.ci
def test_bad_input_is_reported_before_anything_runs(nights: PlantedNights):
    nights.sweep = lambda folder: pytest.fail("it runs")
    moment = nights.now - 86400.0
    write_night(nights.folder, Night(night_id(moment), moment, Verdict.good, study=nights.study().settings))
    wrong = []
    for arguments, message in BAD_INPUT:
        option = () if arguments[0].startswith("--") else ("--once",)
        overridden = {a.partition("=")[0] for a in arguments}
        rest = [word for word in WORDS if word.partition("=")[0] not in overridden]
        # the reason of --accept would come next
        words = [*rest, *arguments] if arguments == ("--accept",) else [*option, *arguments, *rest]
        done = nights(*words)
        if done.returncode != 2 or message not in done.stderr or len(done.stderr.splitlines()) != 1:
            wrong.append((arguments, done.returncode, done.stderr))
    assert wrong == [] and len(nights.all) == 1


def test_a_killed_sweep_gives_the_signal_as_its_status(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The process of the sweep is another program: it ends itself as the kernel would."""
    program = tmp_path / "program"
    program.write_text("#!/bin/sh\nkill -9 $$\n")
    program.chmod(0o700)
    monkeypatch.setattr("sys.executable", os.fspath(program))
    assert run_sweep([], tmp_path / "sweep") == -9


def test_a_webhook_that_is_down_is_a_note_and_changes_no_verdict(
    nights: PlantedNights, monkeypatch: pytest.MonkeyPatch
):
    with webhook(status=500) as (address, got):
        monkeypatch.setenv(WEBHOOK, address)
        problem = notify("x", nights.folder, Night(ID, 0.0, Verdict.good))
    assert problem is not None and "500" in problem and "t0psecret" not in problem and len(got) == 1
    monkeypatch.setenv(WEBHOOK, "http://127.0.0.1:9/t0psecret")
    done = nights("--once", *WORDS)
    note = f"{WEBHOOK}: 127.0.0.1:9 did not accept the verdict"
    assert done.returncode == 0 and done.stdout.count(note) == 1 and nights.last.verdict == "good"
    assert nights.last.note.startswith(note) and note in (nights.folder / "nights.html").read_text()
    assert "t0psecret" not in done.stdout + done.stderr + nights.last.note
    for address in ("ftp://x/t0psecret", "http://me:t0psecret@x/"):
        monkeypatch.setenv(WEBHOOK, address)
        refused = nights("--once", *WORDS)
        assert refused.returncode == 2 and f"{WEBHOOK} is not an http or https address" in refused.stderr
        assert "t0psecret" not in refused.stderr


@pytest.mark.parametrize("content", [{"id": "../../x", "begun": 0}, {"id": ID, "begun": 0, "trials": 3}])
def test_a_document_that_cannot_be_read_is_refused_by_its_name(nights: PlantedNights, content: dict[str, object]):
    nights.folder.mkdir(parents=True)
    (nights.folder / f"{ID}.json").write_text(json.dumps({"verdict": "good", "findings": [], **content}))
    done = nights("--once", *WORDS)
    assert done.returncode == 2 and f"nights/nightly/{ID}.json cannot be read" in done.stderr
