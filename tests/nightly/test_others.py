"""A machine that others use: it is seen, and what it means for the gate."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

from fsdp_lab.config.nightly import ToleranceConfig
from fsdp_lab.cpu_contention import Others
from fsdp_lab.metrics import MEMORY, SPEED
from fsdp_lab.nightly.gate import Result, compare
from fsdp_lab.nightly.nights import GOOD, Night
from fsdp_lab.nightly.verdict import reference, without_speed
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
