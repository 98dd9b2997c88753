"""A machine that others use: it is seen, and what it means for the gate."""

from __future__ import annotations

import subprocess
import sys
import time

from fsdp_lab.nightly.gate import Result, compare
from fsdp_lab.nightly.night import with_speed_of, without_speed
from fsdp_lab.nightly.nights import GOOD, Night
from fsdp_lab.nightly.others import Others
from fsdp_lab.report.data import MEMORY, SPEED

BURN = "import time\nend = time.time() + 4\nwhile time.time() < end: pass"
# a grandchild whose parent has gone is nobody's descendant
ALOOF = f"import subprocess, sys\nsubprocess.Popen([sys.executable, '-c', {BURN!r}], start_new_session=True)"


def share_while(code: str) -> float:
    with Others() as others:
        subprocess.run([sys.executable, "-c", code], check=True)
        time.sleep(3.2 if code is ALOOF else 0)
    return others.share


def test_what_others_compute_is_told_from_our_own():
    """On two cores a burning process is half of them; whatever else runs here is in both figures."""
    ours, theirs = share_while(BURN), share_while(ALOOF)
    assert theirs - ours > 0.15, (ours, theirs)


def night(number: int, speed: float, busy: bool = False) -> Night:
    result = Result(["finished"], {SPEED: [speed], MEMORY: [100.0]})
    return Night(str(number), number, number, verdict=GOOD, results={"a": result}, busy=busy)


def test_a_busy_night_keeps_its_memory_and_lends_no_speed():
    good = [night(1, 1000.0), night(2, 900.0), night(3, 50.0, busy=True)]
    reference = with_speed_of(good, good[-1])
    assert reference["a"].values == {SPEED: [900.0], MEMORY: [100.0]}
    assert with_speed_of(good[:2], good[1]) == good[1].results
    from fsdp_lab.config.schema import ToleranceConfig

    slow = {"a": Result(["finished"], {SPEED: [600.0], MEMORY: [100.0]})}
    found = compare(slow, reference, [], ToleranceConfig(), 0.005)
    assert [f.metric for f in found if f.regression] == ["samples/s"]
    assert [f.metric for f in compare(without_speed(slow), reference, [], ToleranceConfig(), 0.005)] == ["peak MiB"]
