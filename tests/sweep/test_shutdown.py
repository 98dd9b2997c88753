"""The deadline of an interrupt, in a process of its own, which it ends."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import forked

pytestmark = pytest.mark.ci

# A store whose client hangs, whatever signal comes, as one in native code does.
_HANGS = """
import os, signal, threading, time
from contextlib import suppress
from pathlib import Path
from fsdp_lab.config.sweep import TrackingConfig
from fsdp_lab.sweep import shutdown
from fsdp_lab.tracking import Tracker

class Client:
    def create_run(self, *args, **kwargs):
        print("create_run by", threading.current_thread().name, flush=True)
        while True:
            with suppress(KeyboardInterrupt):
                if not sweep.closed:  # Python may miss a signal that comes as it begins to wait
                    os.kill(os.getpid(), signal.SIGINT)
                time.sleep(1)

class Sweep:
    closed = False
    def log(self, text):
        print(text, flush=True)
    def close(self, interrupted):
        if self.closed:
            return
        self.closed = True
        print("to resume: resume", flush=True)
        tracker.finish("handle", "interrupted")
        print("unsent", tracker.settle(0.0), flush=True)

shutdown._LIMIT_S = 3.0
tracker = Tracker(TrackingConfig())
tracker._client = Client()
sweep = Sweep()
with shutdown.interruptible(sweep):
    try:
        tracker.start_trial("t", [], Path("."), None)
    except KeyboardInterrupt:
        sweep.close(True)
"""


def test_a_deadline_in_the_middle_of_a_store_write_ends_in_time_and_sends_nothing_twice(tmp_path: Path) -> None:
    done = forked.run(tmp_path, "-c", _HANGS)  # without the deadline it would never end
    assert done.returncode == 130, done.stderr
    assert done.stdout.count("create_run by") == 1, done.stdout
    assert "to resume: resume" in done.stdout and "unsent" not in done.stdout, "the end of the run waits for its start"
    assert "still closing MLflow and Ray; this ends within 3 s" in done.stdout
