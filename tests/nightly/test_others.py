"""A machine that others use: it is seen, and what it means for the gate."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from fsdp_lab.config.nightly import NightConfig, ToleranceConfig
from fsdp_lab.config.sweep import TrackingConfig
from fsdp_lab.cpu_contention import Others
from fsdp_lab.metrics import MEMORY, SPEED
from fsdp_lab.nightly.gate import Result, compare
from fsdp_lab.nightly.nights import GOOD, Night
from fsdp_lab.nightly.study import Study
from fsdp_lab.nightly.verdict import gate_words, judge, reference, without_speed
from fsdp_lab.report.data import Sweep, Trial
from fsdp_lab.status import TrialStatus
from tests.conftest import run_cli
from tests.sweep.test_resume import INLINE

BURN = "import time\nend = time.time() + 4\nwhile time.time() < end: pass"
# a grandchild whose parent has gone is nobody's descendant
ALOOF = f"import subprocess, sys\nsubprocess.Popen([sys.executable, '-c', {BURN!r}], start_new_session=True)"


def share_while(code: str) -> float:
    with Others() as others:
        subprocess.run([sys.executable, "-c", code], check=True)
        time.sleep(3.2 if code is ALOOF else 0)
    return others.share


def test_what_others_compute_is_told_from_our_own():
    """A burning process is one core; whatever else runs here is in both figures."""
    # what else runs here may stop or start between the two, and is then taken for one of them
    limit = 0.3 / (os.cpu_count() or 1)
    for _ in range(4):
        ours, theirs = share_while(BURN), share_while(ALOOF)
        if theirs - ours > limit:
            break
    assert theirs - ours > limit


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
    found = compare(tonight.results, reference(good, good[-1], tonight), [], ToleranceConfig(), 0.005)
    assert [f.metric for f in found if f.regression] == ["samples/s"]
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
        ([night(1, 1000.0)], BUSY, None, "Night 3 against 1: no regression in memory; speed was not judged: others "),
        ([], BUSY, None, "Night 3: good"),
    ],
)
def test_a_quiet_night_is_compared_with_the_last_quiet_one_and_its_title_says_so(
    good: list[Night], now: Night, speeds_of: str | None, title: str
):
    figures = {SPEED: now.results["a"].values[SPEED][0], MEMORY: 100.0}
    trials = [Trial(0, {"sharding": "a"}, TrialStatus.finished, figures)]
    study = Study("s", Path(), NightConfig(), TrackingConfig(), [], {}, True, "")
    named = [replace(n, results={"sharding=a": n.results["a"]}) for n in good]
    sweep = Sweep("s", "", ["sharding"], trials, 0.02, 0.03)
    found = judge(study, now, named, named[-1] if named else None, sweep, lambda: 0.0)
    assert found.speed_baseline == speeds_of
    assert gate_words(found).startswith(title)
    assert ("Not of speed: others used 60% of the cores." in gate_words(found)) == (not good)


def test_a_trial_measures_what_others_compute_while_it_is_timed(tmp_path: Path):
    """A burning process that is not the trial's: it has a core of this machine's to itself, or a share of one."""
    end_by_itself = BURN.replace("+ 4", "+ 300")
    with subprocess.Popen([sys.executable, "-c", end_by_itself]) as burning:
        try:
            done = run_cli(
                tmp_path, *INLINE, "training.epochs=1", "data.num_train=4096", "training.timing_warmup_steps=0"
            )
        finally:
            burning.kill()
    assert done.returncode == 0, done.stderr
    (epoch,) = map(json.loads, (tmp_path / "out" / "metrics.jsonl").read_text().splitlines())
    assert 0.3 / (os.cpu_count() or 1) < epoch["perf/others_cpu"] <= 1
