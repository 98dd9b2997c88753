"""The command of nights, from the sweep's readings to the verdict. The sweeps are planted: real ones that train are in
test_night.py."""

from __future__ import annotations

import json
import os
import re
from datetime import timedelta

import pytest

from fsdp_lab.config.nightly import NotifyConfig
from fsdp_lab.nightly.attempt import run_sweep
from fsdp_lab.nightly.nights import GOOD, Night, night_id, write_night
from fsdp_lab.nightly.notify import notify
from tests import trained
from tests.folders import Store
from tests.nightly.conftest import WORDS, PlantedNights, webhook

SLOW = "precision=bf16 optimizer.lr=0.001"


def regressions(night: Night) -> set[tuple[str, str]]:
    return {(f["setting"], f["metric"]) for f in night.findings if f["regression"]}


def tags(nights: PlantedNights) -> dict[str, str]:
    (run,) = Store(nights.cwd).parents
    return dict(run.data.tags)


def test_the_same_readings_twice_pass(nights: PlantedNights):
    for _ in range(2):
        done = nights("--once", *WORDS)
        assert done.returncode == 0, done.stdout + done.stderr
    first, second = nights.all
    assert (first.verdict, first.baseline) == ("good", None)
    assert (second.verdict, second.baseline) == ("good", first.id)
    assert len(second.results) == trained.COUNT
    assert second.results[SLOW].values["perf/samples_per_s"] == [2000.0]
    assert {f["metric"] for f in second.findings} == {"peak MiB", "samples/s", "final loss"}
    assert tags(nights)["nightly.verdict"] == "good" and tags(nights)["nightly.baseline"] == first.id
    store = Store(nights.cwd)
    assert "gate.md" in store.artifacts(store.parents[0])
    page = (nights.folder / "nights.html").read_text()
    assert first.id in page and second.id in page and "peak MiB by night" in page


def test_a_slower_setting_is_reported_everywhere_until_it_is_accepted(nights: PlantedNights):
    assert nights("--once", *WORDS).returncode == 0
    before = nights.last.id
    nights.speeds["bf16"] = 500.0
    with webhook() as (address, got):
        done = nights("--once", *WORDS, f"++nightly.notify.url={address}")
    assert done.returncode == 3, done.stdout + done.stderr
    night = nights.last
    slow = {(SLOW, "samples/s"), ("precision=bf16 optimizer.lr=1e-09", "samples/s")}
    assert (night.verdict, night.baseline, regressions(night)) == ("regression", before, slow)
    gate = (nights.folder / night.id / "gate.md").read_text()
    assert f"| `{SLOW}` | samples/s |" in gate and "**regression**" in gate
    assert re.search(r"samples/s .* -75\.0 % .*regression", done.stdout) and "**" not in done.stdout
    (verdict,) = got
    assert (verdict["verdict"], verdict["night"], verdict["run_id"]) == ("regression", night.id, night.run_id)
    assert {(f["setting"], f["metric"]) for f in verdict["regressions"]} == slow
    assert (
        tags(nights)["nightly.verdict"] == "regression" and f"{SLOW}: samples/s" in tags(nights)["nightly.regressions"]
    )

    plan = nights("--check", *WORDS).stdout
    assert f"baseline: {before} (good)" in plan, "a bad night does not move it"
    assert f"last:     {night.id} (regression: precision=bf16" in plan
    chosen = nights("--check", *WORDS, f"nightly.baseline={night.id}").stdout
    assert f"baseline: {night.id} (regression)" in chosen, "one of your choice"
    assert nights("--once", *WORDS).returncode == 3 and nights.last.baseline == before, "it stays reported"
    night = nights.last
    accepted = nights("--accept", "the data grew", *WORDS)
    assert accepted.returncode == 0 and f"accepts: {SLOW}: samples/s" in accepted.stdout
    assert f"baseline: {night.id} (accepted)" in nights("--check", *WORDS).stdout
    assert tags(nights)["nightly.accepted_reason"] == "the data grew"
    assert tags(nights)["mlflow.runName"] == f"accepted {night.id} nightly"
    assert nights.last.accepted is not None and nights.last.accepted["reason"] == "the data grew"
    assert nights("--once", *WORDS).returncode == 0 and nights.last.baseline == night.id


def test_a_night_goes_on_where_it_was_interrupted(nights: PlantedNights):
    def interrupted(folder: object) -> int:
        raise KeyboardInterrupt

    copy, nights.sweep = nights.sweep, interrupted
    done = nights("--once", *WORDS)
    assert done.returncode == 130 and "python -m fsdp_lab.nightly --continue" in done.stdout
    assert nights.last.verdict == "running"
    assert re.search(r"to resume it before [^:]+:\d\d \S+: .*--continue", nights("--check", *WORDS).stdout)
    nights.sweep = copy
    assert nights("--continue", *WORDS).returncode == 0
    (night,) = nights.all
    assert night.verdict == "good" and night.attempts == 1, "an interrupt costs it no attempt"
    assert nights("--continue", *WORDS).stdout == "no night was interrupted\n"


@pytest.mark.parametrize(("exits_with", "status", "attempts"), [(-9, 1, 3), (2, 2, 1)])
def test_a_sweep_that_keeps_dying_or_is_refused_is_a_failed_night(
    nights: PlantedNights, exits_with: int, status: int, attempts: int
):
    nights.sweep = lambda folder: exits_with
    with webhook() as (address, got):
        done = nights("--once", *WORDS, f"++nightly.notify.url={address}")
    assert done.returncode == status
    assert (nights.last.verdict, nights.last.attempts) == ("failed", attempts)
    assert [verdict["verdict"] for verdict in got] == ["failed"]


def test_a_schedule_runs_a_missed_night_once_and_the_next_at_its_minute(nights: PlantedNights):
    """Of the thirty that were due while nothing ran it is the last; an interrupt between nights is a clean end."""
    started = nights.clock.now()
    nights.folder.mkdir(parents=True)
    (nights.folder / "since.json").write_text(json.dumps({"since": started - timedelta(minutes=30).seconds}))
    nights.clock.interrupts = lambda: len(nights.all) == 3
    done = nights(*WORDS, "nightly.cron='* * * * *'")
    assert done.returncode == 0, done.stdout + done.stderr
    missed, *regular = nights.all
    begins = started + 60.0  # the clock when the command starts
    assert begins - 60 < missed.due <= missed.begun == begins and missed.due % 60 == 0
    assert [night.due - missed.due for night in regular] == [60.0, 120.0]
    assert all(0 <= night.begun - night.due < 30 for night in regular)
    assert {night.verdict for night in nights.all} == {"good"}
    assert done.stdout.endswith("fsdp_lab.nightly: ended\n")


BAD_INPUT = (
    (("training.epochs=1",), "is of another study: training.epochs was 3 and is 1"),
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
)


@pytest.mark.ci
def test_bad_input_is_reported_before_anything_runs(nights: PlantedNights):
    nights.sweep = lambda folder: pytest.fail("it runs")
    moment = nights.clock.now() - 86400.0
    study = nights.settings()
    write_night(nights.folder, Night(night_id(moment), moment, moment, verdict=GOOD, study=study))
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
    assert wrong == []
    assert len(nights.all) == 1


def test_a_killed_sweep_gives_the_signal_as_its_status(tmp_path, monkeypatch: pytest.MonkeyPatch):
    """The process of the sweep is another program: it ends itself as the kernel would."""
    program = tmp_path / "program"
    program.write_text("#!/bin/sh\nkill -9 $$\n")
    program.chmod(0o700)
    monkeypatch.setattr("sys.executable", os.fspath(program))
    assert run_sweep([], tmp_path / "sweep", "") == -9


def test_a_webhook_that_is_down_or_refuses_changes_nothing():
    problem = notify(NotifyConfig("http://127.0.0.1:9/t0psecret", 2.0), {"verdict": "good"})
    assert problem is not None and "127.0.0.1:9" in problem and "t0psecret" not in problem
    with webhook(status=500) as (address, got):
        problem = notify(NotifyConfig(address, 5.0), {"verdict": "good"})
    assert problem is not None and "500" in problem and "not sent again" in problem
    assert "t0psecret" not in problem and len(got) == 1
    assert notify(NotifyConfig(None), {}) is None
