"""A machine that others use: it is seen, and what it means for the gate."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from fsdp_lab import cpu_contention
from fsdp_lab.config.nightly import NightConfig, ToleranceConfig
from fsdp_lab.config.sweep import TrackingConfig
from fsdp_lab.cpu_contention import Window, _busy_s, _family_s
from fsdp_lab.metrics import MEMORY, SPEED
from fsdp_lab.nightly.gate import Result, compare
from fsdp_lab.nightly.nights import GOOD, Night
from fsdp_lab.nightly.study import Study
from fsdp_lab.nightly.verdict import gate_words, judge, reference, without_speed
from fsdp_lab.report.data import SweepData, TrialRow
from fsdp_lab.status import TrialStatus
from tests.conftest import run_cli
from tests.folders import TrialFolder
from tests.trained import INLINE

GONE = 7  # a process that has ended


@pytest.fixture
def readings(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the window of a machine of two cores reads: the time, the seconds that all and that our processes used."""
    values: dict[str, Any] = {"time": 100.0, "busy": 1000.0, "ours": {1: 5.0, GONE: 1.0}}
    monkeypatch.setattr(cpu_contention, "time", SimpleNamespace(monotonic=lambda: values["time"]))
    monkeypatch.setattr(cpu_contention, "_busy_s", lambda: values["busy"])
    monkeypatch.setattr(cpu_contention, "_family_s", lambda roots: dict(values["ours"]))
    monkeypatch.setattr(cpu_contention.os, "cpu_count", lambda: 2)
    return values


def test_what_others_compute_is_distinguished_from_our_own(readings: dict[str, Any]):
    window = Window()
    readings |= {"time": 110.0, "busy": 1012.0, "ours": {1: 12.0, 2: 1.0}}  # 8 s of 12 were ours, in 20 core seconds
    assert window.share() == pytest.approx((12 - 8) / 20)
    readings |= {"time": 120.0, "busy": 1022.0, "ours": {1: 22.0}}  # one of ours has ended; all of this was ours
    assert window.share() == pytest.approx((22 - 18) / 40)
    readings |= {"busy": 900.0}  # a clock of the kernel that was set back
    assert window.share() == 0.0


# Uses half a second of a core, however long that takes, and stays.
BURNS = "import sys, time\nwhile time.process_time() < 0.5: pass\nprint('burned', flush=True)\nsys.stdin.read()"
# a grandchild whose parent has gone is nobody's descendant
ALOOF = f"import subprocess, sys\nsubprocess.Popen([sys.executable, '-c', {BURNS!r}], start_new_session=True)"


@pytest.mark.parametrize(("code", "is_ours"), [(BURNS, True), (ALOOF, False)])
def test_the_seconds_of_our_descendants_are_ours(code: str, is_ours: bool):
    before = sum(_family_s((psutil.Process(),)).values()), _busy_s()
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as burning:
        assert burning.stdout is not None and burning.stdout.readline() == b"burned\n"
        after = sum(_family_s((psutil.Process(),)).values()), _busy_s()
    assert (after[0] - before[0] > 0.45) is is_ours
    assert after[1] - before[1] > 0.3, "the kernel's count of all processes is by ticks"


def night(number: int, speed: float, busy: bool = False, machine: str = "this") -> Night:
    result = Result(["finished"], {SPEED: [speed], MEMORY: [100.0]})
    return Night(str(number), number, number, verdict=GOOD, results={"a": result}, busy=busy, machine=machine)


BUSY = replace(night(3, 50.0, busy=True), others=0.6)


def test_a_busy_night_and_another_machine_keep_their_memory_and_lend_no_speed():
    tonight = night(9, 600.0)
    good = [night(1, 1000.0), night(2, 900.0), night(3, 50.0, busy=True), night(4, 70.0, machine="other")]
    for baseline in good[2:]:
        assert reference(good, baseline, tonight)["a"].values == {SPEED: [900.0], MEMORY: [100.0]}
        assert reference(good, baseline, tonight, named=True)["a"].values == {MEMORY: [100.0]}
    assert reference(good[:2], good[1], tonight) == good[1].results
    result = compare(tonight.results, reference(good, good[-1], tonight), [], ToleranceConfig(), 0.005)
    assert [f.metric for f in result if f.regression] == ["samples/s"]
    unjudged = compare(without_speed(tonight.results), good[1].results, [], ToleranceConfig(), 0.005)
    assert [(f.metric, f.regression, f.note) for f in unjudged] == [
        ("peak MiB", False, ""), ("samples/s", False, "not judged: no speeds to compare with"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("good", "now", "speeds_of", "title"),
    [
        ([night(1, 1000.0)], night(9, 600.0), "1", "Night 9 against 1: a regression"),
        ([night(1, 1000.0), BUSY], night(9, 600.0), "1", "Night 9 against 3 (speed against 1): a regression"),
        ([night(1, 1000.0), BUSY], night(9, 990.0), "1", "Night 9 against 3 (speed against 1): nothing got worse"),
        ([BUSY], night(9, 600.0), None, "Night 9 against 3: no regression in memory; speed was not judged: no good "),
        ([night(1, 1000.0)], BUSY, None, "Night 3 against 1: no regression in memory; speed was not judged: other "),
        ([], BUSY, None, "Night 3: good"),
    ],
)
def test_a_quiet_night_is_compared_with_the_last_quiet_one_and_its_title_says_so(
    good: list[Night], now: Night, speeds_of: str | None, title: str
):
    figures = {SPEED: now.results["a"].values[SPEED][0], MEMORY: 100.0}
    trials = [TrialRow(0, {"sharding": "a"}, TrialStatus.finished, figures)]
    study = Study("s", Path(), NightConfig(), TrackingConfig(), [], {}, True, "")
    named = [replace(n, results={"sharding=a": n.results["a"]}) for n in good]
    sweep = SweepData("s", "", ["sharding"], trials, 0.02, 0.03)
    judged = judge(study, now, named, named[-1] if named else None, sweep, lambda: 0.0)
    assert judged.speed_baseline == speeds_of
    assert gate_words(judged).startswith(title)
    assert ("Its speeds do not count: others used 60% of the cores." in gate_words(judged)) == (not good)


def test_a_trial_that_others_disturbed_in_a_quiet_night_is_not_judged_by_its_speed():
    """0.9 of the cores while `a` was timed, or in its second repeat alone."""
    study = Study("s", Path(), NightConfig(), TrackingConfig(), [], {}, True, "")
    before = Result(["finished"], {SPEED: [1000.0], MEMORY: [100.0]})
    baseline = replace(night(1, 0.0), results={"sharding=a": before, "sharding=b": before})

    def judged(*runs: tuple[str, float, float]) -> list[tuple[str, str, bool, str]]:
        trials = [
            TrialRow(i, {"sharding": name, "repeat": str(i)}, TrialStatus.finished,
                  {SPEED: speed, MEMORY: 100.0, "perf/others_cpu": others}, facts={"device": "cpu"})
            for i, (name, speed, others) in enumerate(runs)
        ]  # fmt: skip
        sweep = SweepData("s", "", ["sharding", "repeat"], trials, 0.02, 0.03)
        judged = judge(study, night(2, 0.0), [baseline], baseline, sweep, lambda: 0.0).findings
        return [(f["setting"], f["tonight"], f["regression"], f["note"]) for f in judged if f["metric"] == "samples/s"]

    note = "not judged: other processes used the cores while it was timed"
    assert judged(("a", 100.0, 0.9), ("b", 990.0, 0.1)) == [
        ("sharding=a", "", False, note),
        ("sharding=b", "990", False, ""),
    ]
    assert judged(("a", 100.0, 0.9), ("b", 100.0, 0.3)) == [
        ("sharding=a", "", False, note),
        ("sharding=b", "", False, note),
    ]
    assert judged(("a", 990.0, 0.0), ("a", 100.0, 0.9), ("b", 990.0, 0.1))[0] == ("sharding=a", "990", False, "")
    assert judged(("a", 100.0, 0.1), ("b", 990.0, 0.1))[0][2], "the machine was free: it is slower"


def test_a_disturbed_trial_hides_no_later_slowdown():
    """`a` has no speed in the second of three nights, by a trial that others disturbed; `b` has one in all."""
    study = Study("s", Path(), NightConfig(), TrackingConfig(), [], {}, True, "")
    nights: list[Night] = []
    for number, a, others in ((1, 1000.0, 0.0), (2, 300.0, 0.9), (3, 400.0, 0.0)):
        trials = [
            TrialRow(i, {"sharding": name}, TrialStatus.finished,
                  {SPEED: speed, MEMORY: 100.0, "perf/others_cpu": cpu}, facts={"device": "cpu"})
            for i, (name, speed, cpu) in enumerate((("a", a, others), ("b", 500.0, 0.0)))
        ]  # fmt: skip
        sweep = SweepData("s", "", ["sharding"], trials, 0.02, 0.03)
        nights.append(judge(study, night(number, 0.0), nights, nights[-1] if nights else None, sweep, lambda: 0.0))
    assert [n.verdict for n in nights] == ["good", "good", "regression"]
    assert nights[2].speed_baseline == "1 and 2"
    assert gate_words(nights[2]).startswith("Night 3 against 2 (speed against 1 and 2): a regression")
    worse = [(f["setting"], f["baseline"], f["tonight"]) for f in nights[2].findings if f["regression"]]
    assert worse == [("sharding=a", "1000", "400")]


def test_a_night_without_any_speed_does_not_blame_others():
    study = Study("s", Path(), NightConfig(), TrackingConfig(), [], {}, True, "")
    baseline = replace(BUSY, results={"sharding=a": BUSY.results["a"]})
    trials = [TrialRow(0, {"sharding": "a"}, TrialStatus.finished, {MEMORY: 100.0}, facts={"device": "cpu"})]
    judged = judge(
        study, night(9, 0.0), [], baseline, SweepData("s", "", ["sharding"], trials, 0.02, 0.03), lambda: 0.0
    )
    assert "speed was not judged: none was measured" in gate_words(judged)


@pytest.mark.ci
def test_a_trial_measures_what_others_compute_while_it_is_timed(tmp_path: Path):
    """A burning process that is not the trial's: it has a core of this machine's to itself, or a share of one."""
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as burning:
        try:
            done = run_cli(tmp_path, *INLINE, "training.epochs=1", "data.num_train=2048")
        finally:
            burning.kill()
    assert done.returncode == 0, done.stderr
    (epoch,) = TrialFolder(tmp_path / "out", tmp_path / "out").epochs
    assert 0.3 / (os.cpu_count() or 1) < epoch["perf/others_cpu"] <= 1
